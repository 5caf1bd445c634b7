"""The return-rate index: against a brute-force definition, and the properties that ranking relies on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.core.return_rate import BIN_EDGES_S, GIVEN_UP_AFTER_S, GapHistogram, SessionBook
from kvmanager.units import SECOND_NS


def _brute_force(gaps: list[float], never: int, idle_s: float) -> float:
    """The same bet worked out bin by bin from the definition, without tables or cumulative sums."""
    counts = [1.0] * (len(BIN_EDGES_S) + 1)
    for gap in gaps:
        counts[next((i for i, edge in enumerate(BIN_EDGES_S) if gap < edge), len(BIN_EDGES_S))] += 1
    counts[-1] += never
    first = next((i for i, edge in enumerate(BIN_EDGES_S) if idle_s < edge), len(BIN_EDGES_S))
    best = 0.0
    for last in range(first, len(BIN_EDGES_S)):
        paid = cost = 0.0
        away = sum(counts[first:])
        for i in range(first, last + 1):
            low = BIN_EDGES_S[i - 1] if i else 0.0
            cost += (away - counts[i] / 2) * (BIN_EDGES_S[i] - low)
            paid += counts[i]
            away -= counts[i]
        best = max(best, paid / cost)
    return best


@given(
    st.lists(st.floats(0.0, 1e5), max_size=60),
    st.integers(0, 20),
    st.floats(0.0, 1e5),
)
def test_index_is_the_best_bet(gaps: list[float], never: int, idle_s: float) -> None:
    histogram = GapHistogram()
    for gap in gaps:
        histogram.returned(gap)
    for _ in range(never):
        histogram.never_returned()
    assert histogram.index(idle_s) == pytest.approx(_brute_force(gaps, never, idle_s))


def test_sessions_that_return_sooner_rank_higher() -> None:
    book = SessionBook()
    for turn in range(30):
        for kind, gap_s, stop in (("tool", 5, "tool_use"), ("user", 400, "end_turn")):
            session, at = f"{kind}-{turn}", (turn + 1) * 1_000 * SECOND_NS
            book.opened(session, at - 1)
            book.closed(session, stop, at)
            book.opened(session, at + gap_s * SECOND_NS)
            book.closed(session, stop, at + gap_s * SECOND_NS)
    now = 40_000 * SECOND_NS
    numbers = []
    for session, stop in (("a", "tool_use"), ("b", "end_turn")):
        book.opened(session, now)
        numbers.append(book.closed(session, stop, now).number)
    soon = book.indexes(np.array(numbers), now + SECOND_NS)
    assert soon[0] > soon[1]
    # A tool call that has not returned for minutes is no longer the better bet.
    late = book.indexes(np.array(numbers), now + 200 * SECOND_NS)
    assert late[0] < late[1]


def test_a_session_that_stays_away_is_learned_and_forgotten() -> None:
    book = SessionBook()
    book.opened("s", 0)
    number = book.closed("s", "end_turn", SECOND_NS).number
    book.forget("s", 2 * SECOND_NS)
    assert book.record("s") is not None
    before = book.indexes(np.array([number]), 2 * SECOND_NS)[0]
    book.forget("s", int((GIVEN_UP_AFTER_S + 2) * SECOND_NS))
    assert book.record("s") is None
    book.opened("t", 0)
    after = book.closed("t", "end_turn", SECOND_NS).number
    assert book.indexes(np.array([after]), 2 * SECOND_NS)[0] < before


def test_parallel_requests_of_one_session_are_one_busy_time() -> None:
    book = SessionBook()
    book.opened("s", 0)
    book.opened("s", 1)
    book.closed("s", "tool_use", 10 * SECOND_NS)
    record = book.record("s")
    assert record is not None
    assert record.running == 1
    book.closed("s", "tool_use", 20 * SECOND_NS)
    assert record.previous_gap_s is None
    book.opened("s", 27 * SECOND_NS)
    assert record.previous_gap_s == pytest.approx(7.0)
