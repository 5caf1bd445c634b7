"""The comparison with other servers: ratios say which side is faster, and only where both were measured."""

from __future__ import annotations

from tests.bench.peers.__main__ import ratios
from tests.bench.peers.clock import summary, times_us


def _took(us: float) -> dict[str, float]:
    return summary([us] * 3)


def test_above_one_we_are_faster():
    ours = {"noop": _took(100), "lookup hit 4096": _took(50), "lookup hit 4096 from ids": _took(200),
            "lookups a second, 1 clients": 900.0, "kill s": 2.0, "kill after": 80, "step": _took(9)}  # fmt: skip
    theirs = {"noop": _took(50), "lookup hit 4096": _took(400), "lookups a second, 1 clients": 300.0, "kill s": 8.0,
              "kill after": 0}  # fmt: skip
    assert ratios(ours, theirs) == {
        "noop": 0.5, "lookup hit 4096": 8.0, "lookup hit 4096 from ids": 2.0, "lookups a second, 1 clients": 3.0,
        "kill s": 4.0,
    }  # fmt: skip
    assert ratios(ours, {}) == {}
    quick, slow = {"noop": summary([10, 500, 500])}, {"noop": summary([20, 50, 50])}
    assert ratios(quick, slow) == {"noop": 0.1}
    assert ratios(quick, slow, "best_us") == {"noop": 2.0}


def test_a_summary_is_of_all_calls():
    told = summary([float(n) for n in range(1000)])
    assert told == {"best_us": 0.0, "p50_us": 500.0, "p99_us": 990.0, "calls": 1000}
    assert len(times_us([lambda: None] * 7)) == 7
