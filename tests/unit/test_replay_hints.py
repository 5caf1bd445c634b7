"""A replay without hints: what an engine that says nothing of sessions gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager.replay.cli import recorded_sessions
from kvmanager.replay.lanes import stream
from kvmanager.replay.run import replay
from kvmanager.replay.stream import Request

REQUESTS = 100


@pytest.fixture(scope="module")
def told() -> list[Request]:
    return list(stream(recorded_sessions(None, 0), 16, REQUESTS, seed=7))


def test_without_hints_return_rate_is_leaf_first_lru(told: list[Request]) -> None:
    unnamed = [replace(request, hints=False) for request in told]
    ours, lru = (replay(unnamed, REQUESTS, 400_000, 8, policy) for policy in ("return-rate", "lru"))
    assert ours.evictions > 0
    assert (ours.prefix_hit_rate, ours.evictions) == (lru.prefix_hit_rate, lru.evictions)


def test_hints_are_what_makes_the_difference(told: list[Request]) -> None:
    ours, lru = (replay(told, REQUESTS, 400_000, 8, policy) for policy in ("return-rate", "lru"))
    assert ours.prefix_hit_rate > lru.prefix_hit_rate
