"""Kills of real nodes and engines, each followed by the audit and a look at every byte that a prompt hits."""

from __future__ import annotations

import pytest

from tests.chaos.run import run_kills
from tests.chaos.schedule import WIDEST, matrix


def test_twenty_kills_at_the_widest_points() -> None:
    report = run_kills(WIDEST, seed=20)
    report.check()
    assert report.missed == []
    assert report.leased_tokens_found > 0
    assert report.by_point.keys() == {kill.name for kill in WIDEST}


@pytest.mark.long
def test_every_point_on_every_side() -> None:
    kills = matrix(seed=4)
    report = run_kills(kills, seed=4)
    report.check()
    assert report.missed == []
    assert report.by_point.keys() == {kill.name for kill in kills}
