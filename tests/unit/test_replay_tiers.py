"""The replay with a host pool: what is found where, what is moved, and what that is worth."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvmanager.command.cli import app
from kvmanager.core.audit import audit
from kvmanager.core.eviction import POLICIES
from kvmanager.core.spec import Inclusion, Limits
from kvmanager.errors import InvalidArgument
from kvmanager.replay.stream import Request
from kvmanager.replay.tierreport import Rates, published_rates
from kvmanager.replay.tiers import TierEngine, replay_tiers, two_tier_spec

SPAN = 512
BLOCKS = 8
TOKEN_BYTES = 54_728


def _request(play: int, first: int, spans: int, start_s: float, last: bool = False) -> Request:
    nodes = np.arange(first, first + spans * BLOCKS)
    return Request(start_s, start_s + 1, play, nodes, "tool_use", last)


def _engine(device_spans: int, host_spans: int, policy: str = "return-cost") -> TierEngine:
    return TierEngine(two_tier_spec(device_spans * SPAN, host_spans * SPAN, 8), Limits(growth_cap_tokens=1), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_device_lost_is_loaded_from_the_host(policy: str) -> None:
    engine = _engine(6, 20, policy)
    assert engine.request(1, _request(1, 1, 4, 0)).cached_tokens == 0
    assert engine.request(2, _request(2, 1, 4, 1)).cached_tokens == 0
    back = engine.request(3, _request(1, 1, 4, 2))
    assert back.cached_tokens == 4 * SPAN
    assert 2 * SPAN <= back.loaded_tokens <= 4 * SPAN
    again = engine.request(4, _request(1, 1, 4, 3))
    assert (again.cached_tokens, again.loaded_tokens) == (4 * SPAN, 0)
    audit(engine.node.state)


def test_a_prompt_that_the_device_cannot_hold_is_refused_and_leaves_all_as_it_was() -> None:
    engine = _engine(6, 20)
    engine.request(1, _request(1, 1, 4, 0))
    assert engine.request(2, _request(2, 1, 7, 1)).refused
    assert engine.request(3, _request(1, 1, 4, 2)).cached_tokens == 4 * SPAN
    audit(engine.node.state)


class Listed:
    """Requests in the order of their start, whoever answers."""

    def __init__(self, requests: list[Request]) -> None:
        self._left = list(reversed(requests))
        self.ends: list[float] = []

    @property
    def next_s(self) -> float:
        return self._left[-1].start_s if self._left else float("inf")

    def take(self) -> Request:
        return self._left.pop()

    def ended(self, request: Request, end_s: float) -> None:
        assert end_s == request.end_s
        self.ends.append(end_s)

    def idle(self, now_s: float) -> None:
        pass


def _stream() -> list[Request]:
    """Three sessions take turns; each has 4 spans, and half a span more in every round."""
    told = []
    for round_ in range(6):
        for play in range(3):
            nodes = np.arange(1, 1 + 4 * BLOCKS + round_ * BLOCKS // 2)
            told.append(Request(10.0 * len(told), 10.0 * len(told) + 1, play, nodes, "tool_use", round_ == 5))
    return told


def test_the_report_adds_up() -> None:
    rates = Rates(1_000.0, 1e9, 1e9)
    report = replay_tiers(Listed(_stream()), 18, 8 * SPAN, 64 * SPAN, 8, "lru", rates=rates)
    found = round(report.prefix_hit_rate * report.prompt_tokens)
    assert report.prefilled_tokens == report.prompt_tokens - found
    assert report.device_hit_rate + report.host_hit_rate == pytest.approx(report.prefix_hit_rate)
    assert report.host_hit_rate > 0
    assert report.host_to_device_link_bytes * 8 == report.onboarded_tokens * TOKEN_BYTES
    assert report.prefill_seconds_avoided == pytest.approx(found / 1_000)
    assert report.reload_seconds == pytest.approx(report.host_to_device_link_bytes / 1e9)
    assert report.seconds_saved == pytest.approx(report.prefill_seconds_avoided - report.reload_seconds)
    assert report.partial_span_tokens > 0, "every second prompt goes on inside a span"
    assert report.evictions_for_host == 0


def test_exclusive_holds_more_than_inclusive() -> None:
    """Live sessions fit into both tiers together, and into neither alone."""
    found = {
        inclusion: replay_tiers(Listed(_stream()), 18, 10 * SPAN, 16 * SPAN, 8, "lru", inclusion).prefix_hit_rate
        for inclusion in (Inclusion.EXCLUSIVE, Inclusion.INCLUSIVE)
    }
    assert found[Inclusion.EXCLUSIVE] > found[Inclusion.INCLUSIVE], found


def test_what_it_refuses() -> None:
    with pytest.raises(InvalidArgument, match="no policy"):
        replay_tiers(Listed([]), 0, SPAN, SPAN, 8, "lfu")
    with pytest.raises(InvalidArgument, match="each must hold a span"):
        two_tier_spec(SPAN, SPAN - 1, 8)


def test_the_published_rates_are_those_of_the_core() -> None:
    costs = published_rates().miss_costs(TOKEN_BYTES, 8)
    assert costs == Limits().miss_costs


def test_the_command(tmp_path: Path) -> None:
    timing = {"type": "s", "think_time": 1, "api_time": 2, "stop": "tool_use"}
    steps = [{**timing, "hash_runs": [[1, 8 * n]]} for n in (1, 2, 3)]
    path = tmp_path / "sessions.jsonl"
    path.write_text(2 * (json.dumps({"block_size": 64, "requests": steps}) + "\n"))
    asked = ["replay", str(path), "--lanes", "2", "--requests", "12"]
    asked += ["--pool-tokens", "2048", "--host-tokens", "100000"]
    result = CliRunner().invoke(app, [*asked, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["host_hit_rate"] > 0
    assert report["onboarded_tokens"] * TOKEN_BYTES == 8 * report["host_to_device_link_bytes"]
    assert "seconds saved" in CliRunner().invoke(app, asked).stdout
    assert CliRunner().invoke(app, [*asked, "--inclusion", "maybe"]).exit_code == 1
