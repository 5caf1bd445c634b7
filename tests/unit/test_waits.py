"""Waits: histograms against the definition, worked out bin by bin; a regression that finds what it is shown."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.core.waits import DAMPING, LOG_PRICES, MEMORY, SCALED_EDGES, LogScale, WaitHistogram

TIMES = st.lists(st.one_of(st.floats(0, 4), st.floats(0, 1000), st.none()), max_size=40)


def _bets(times: list[float | None], first: int) -> list[tuple[float, float, int]]:
    """(events, time held, waits begun) for every bin to give up after, from bin `first` on."""
    edges = [0.0, *SCALED_EDGES]
    counts = [1] * len(edges)
    for time in times:
        counts[-1 if time is None else bisect_right(SCALED_EDGES, time)] += 1
    bets, events, held = [], 0.0, 0.0
    for b in range(first, len(SCALED_EDGES)):
        width = edges[b + 1] - edges[b]
        held += counts[b] * width / 2 + sum(counts[b + 1 :]) * width
        events += counts[b]
        bets.append((events, held, sum(counts[first:])))
    return bets


def _histogram(times: list[float | None]) -> WaitHistogram:
    histogram = WaitHistogram()
    for time in times:
        histogram.add_never() if time is None else histogram.add(time)
    return histogram


@settings(deadline=None)
@given(TIMES, st.floats(0, 400))
def test_best_rate_is_the_best_bet(times: list[float | None], waited: float) -> None:
    bets = _bets(times, bisect_right(SCALED_EDGES, waited))
    expected = max((events / held for events, held, _ in bets), default=0.0)
    assert _histogram(times).best_rate(waited) == pytest.approx(expected)


@settings(deadline=None)
@given(TIMES, st.integers(0, len(LOG_PRICES) - 1))
def test_worth_is_the_best_bet_at_a_price(times: list[float | None], place: int) -> None:
    price = np.exp(LOG_PRICES[place])
    expected = max(0.0, *((events - price * held) / begun for events, held, begun in _bets(times, 0)))
    assert _histogram(times).worth(LOG_PRICES[place : place + 1])[0] == pytest.approx(expected, abs=1e-12)


@given(TIMES)
def test_worth_falls_with_the_price(times: list[float | None]) -> None:
    worth = _histogram(times).worth(np.linspace(-20, 20, 400))
    assert (np.diff(worth) <= 1e-12).all()
    assert 0 <= worth[-1] <= worth[0] <= 1


def test_old_events_fade() -> None:
    histogram = WaitHistogram()
    for _ in range(2 * MEMORY):
        histogram.add(0.1)
    early = histogram.best_rate(0.0)
    for _ in range(4 * MEMORY):
        histogram.add(100.0)
    assert histogram.counts.sum() <= MEMORY
    assert histogram.best_rate(0.0) < early / 10


def test_a_regression_finds_the_scale() -> None:
    rng = np.random.default_rng(5)
    model = LogScale(3, prior_log_s=2.0)
    for _ in range(2000):
        x = np.array([1.0, rng.normal(), rng.normal()])
        model.learn(x, 3.0 + 0.5 * x[1] + rng.normal(0, 0.3))
    for x1 in (-2.0, 0.0, 2.0):
        expected = 2.0 + DAMPING * (1.0 + 0.5 * x1)
        assert np.log(model.scale_s(np.array([1.0, x1, 9.0]))) == pytest.approx(expected, abs=0.3)
    assert LogScale(3, 2.0).scale_s(np.array([1.0, 5.0, 5.0])) == pytest.approx(np.exp(2.0))


def test_a_regression_stays_sound_for_long() -> None:
    """Alike features for ever must not blow up what was learned of others."""
    model = LogScale(2, prior_log_s=2.0)
    for n in range(20 * MEMORY):
        model.learn(np.array([1.0, 0.0 if n > MEMORY else n % 2]), 2.0 + (n % 2 if n <= MEMORY else 0))
    assert np.isfinite(model.scale_s(np.array([1.0, 1.0])))
    assert model.scale_s(np.array([1.0, 0.0])) == pytest.approx(np.exp(2.0), rel=0.01)
