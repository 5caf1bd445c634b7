"""Made-up sessions have the distributions that were measured on recorded ones, and replay like them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from kvmanager.errors import InvalidArgument
from kvmanager.replay.cli import Asked, recorded_sessions, replay_file
from kvmanager.replay.generator import generate
from kvmanager.replay.stream import BLOCK_TOKENS, Session, number_nodes

COUNT = 400


def lengths(session: Session) -> list[int]:
    return [sum(count for _, count in step.runs) * BLOCK_TOKENS for step in session.steps]


def share(values: list[float], part: float) -> float:
    return sorted(values)[int(len(values) * part)]


def test_the_measured_distributions_come_out() -> None:
    """Measured medians: 45 requests a session, 24K first prompts, 216 to 262 output tokens, gaps of 9 s and 127 s.

    New tokens a turn: 704 at the median, 4,032 at nine tenths. Parameters are rounded, so figures are near, not equal.
    """
    sessions = generate(COUNT, 1)
    assert statistics.median(len(s.steps) for s in sessions) == pytest.approx(45, rel=0.15)
    firsts = [float(lengths(s)[0]) for s in sessions]
    assert share(firsts, 0.1) == pytest.approx(15_000, rel=0.15)
    assert share(firsts, 0.5) == pytest.approx(24_000, rel=0.25)
    assert share(firsts, 0.9) == pytest.approx(259_000, rel=0.25)
    growth = [float(b - a) for s in sessions for a, b in zip(lengths(s), lengths(s)[1:], strict=False)]
    grown = [value for value in growth if value >= 0]
    assert share(grown, 0.5) == pytest.approx(740, rel=0.1)
    assert share(grown, 0.9) == pytest.approx(4_032, rel=0.25)
    assert (len(growth) - len(grown)) / len(growth) == pytest.approx(0.0188, abs=0.004)
    outputs = [float(step.output_tokens) for s in sessions for step in s.steps]
    assert share(outputs, 0.5) == pytest.approx(262, rel=0.1)
    gaps: dict[str, list[float]] = {"tool_use": [], "end_turn": []}
    for s in sessions:
        for before, step in zip(s.steps, s.steps[1:], strict=False):
            gaps[before.stop_reason].append(step.gap_s)
    assert share(gaps["tool_use"], 0.5) == pytest.approx(12.7, rel=0.1)
    assert share(gaps["end_turn"], 0.5) == pytest.approx(136, rel=0.15)
    assert len(gaps["end_turn"]) / len(growth) == pytest.approx(0.13, abs=0.01)


def test_a_prompt_goes_on_or_starts_again_behind_tools_and_system() -> None:
    for session in generate(60, 2):
        number_nodes(session)
        for before, nodes in zip(session.nodes, session.nodes[1:], strict=False):
            shorter = min(len(before), len(nodes))
            same = int((before[:shorter] == nodes[:shorter]).sum())
            assert same == len(before) or same <= 14_300 // BLOCK_TOKENS, "all of it, or tools and system"
            assert len(nodes) * BLOCK_TOKENS <= 850_000


def test_the_seed_alone_decides() -> None:
    assert generate(20, 3) == generate(20, 3) != generate(20, 4)


def test_they_replay_like_recorded_ones() -> None:
    asked = Asked(Path("generate:40"), lanes=8, requests=120, seed=1)
    report = replay_file(asked, pool_tokens=4_000_000, policy="lru", ranks=8)
    assert 0.9 < report.prefix_hit_rate <= report.ceiling < 1, "nearly all of a prompt was there before"
    assert report.prompt_tokens > 0


@pytest.mark.parametrize("name", ["generate:", "generate:0", "generate:-1", "generate:many"])
def test_a_wrong_count_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        recorded_sessions(Path(name), 0)
