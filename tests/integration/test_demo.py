"""The demo itself: real nodes, real engines; right answers pass, one wrong bit does not."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kvmanager.demo.nodes import PoolSizes
from kvmanager.demo.report import LEAST_COUNT, MECHANISMS
from kvmanager.demo.run import DemoOptions, DemoReport, DemoScale, run_demo

SEED = 1
SMALL = DemoScale(lanes=2, turns_per_lane=2, prefill_limit_tokens=4_000, sizes=PoolSizes(decode_device_slabs=60))
"""Two sessions with two turns, one a decode rank; parts of every prompt arrive in host memory."""


def run(options: DemoOptions, scale: DemoScale) -> tuple[DemoReport, str]:
    shown = io.StringIO()
    report = run_demo(options, scale, Console(file=shown, width=200))
    print(f"seed {options.seed}: {json.dumps(report.to_json())}\n{shown.getvalue()}")
    return report, shown.getvalue()


@pytest.fixture
def directory() -> Iterator[Path]:
    """Two nodes' sockets lie below it: pytest's own directories have names that are too long for those."""
    with tempfile.TemporaryDirectory(prefix="kvm-demo-") as name:
        yield Path(name)


def test_small_replay_gives_the_reference_runs_tokens(directory: Path) -> None:
    report, shown = run(DemoOptions(seed=SEED, runtime_dir=directory), SMALL)
    assert report.tokens_equal
    assert report.ledger_ok
    # Four turns are too few to show everything; nothing else may have failed.
    assert [failure for failure in report.failures if "times, at least" not in failure] == []
    assert (report.turns, report.sessions, report.decoded_tokens) == (4, 2, 48)
    for mechanism in ("swap_in_miss", "draft_truncation", "handoff", "prefix_hit"):
        assert report.counters[mechanism] > 0, mechanism
    assert report.cached_tokens > 0
    assert shown.count(" drafts accepted") == 4, "progress says each turn"
    assert (directory / "prefill-0.log").exists()


@pytest.mark.long
def test_one_wrong_bit_fails_the_demo(directory: Path) -> None:
    report, shown = run(DemoOptions(seed=SEED, inject_fault=True, runtime_dir=directory), SMALL)
    assert "flipped one bit" in shown
    assert not report.tokens_equal
    assert not report.passed
    assert report.ledger_ok, "only the answer is wrong"
    assert any("the reference run has" in failure for failure in report.failures)


@pytest.mark.long
def test_whole_demo_shows_every_mechanism() -> None:
    report, _ = run(DemoOptions(seed=SEED), DemoScale())
    assert report.failures == ()
    assert report.passed
    assert {name for name in MECHANISMS if report.counters[name] < LEAST_COUNT} == set()
    assert report.prefilled_tokens <= 12_000
    assert report.decoded_tokens <= 150
