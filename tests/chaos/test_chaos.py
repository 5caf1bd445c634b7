"""Kills of real nodes and engines, each followed by the audit and a look at every byte that a prompt hits."""

from __future__ import annotations

import itertools

import pytest

from tests.chaos.run import Report, run_kills
from tests.chaos.schedule import WIDEST, matrix, random_kills


def check(report: Report) -> None:
    assert report.passed, "\n".join([*report.leaks, *report.failures])
    print(report.summary())
    assert report.committed_pages_checked > 20 * report.kills


def test_twenty_kills_at_the_widest_points() -> None:
    report = run_kills(WIDEST, seed=20)
    check(report)
    assert report.missed == []
    assert report.by_point.keys() == {kill.name for kill in WIDEST}


@pytest.mark.long
def test_every_point_on_every_side() -> None:
    kills = matrix(seed=4)
    report = run_kills(kills, seed=4)
    check(report)
    assert report.missed == []
    assert report.by_point.keys() == {kill.name for kill in kills}


@pytest.mark.long
def test_random_kills() -> None:
    """Under two seconds a kill on a free machine; `make chaos KILLS=1000` runs more of them."""
    report = run_kills(itertools.islice(random_kills(5), 80), seed=5)
    check(report)
    assert len(report.missed) <= 10
