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


def _turn(book: SessionBook, session: str, start_ns: int, end_ns: int, stop_reason: str) -> int:
    """One whole turn; the session's number."""
    record = book.opened(session, start_ns)
    book.left(record, end_ns)
    book.turn_ended(record, stop_reason, end_ns)
    return record.number


def _index(book: SessionBook, number: int, now_ns: int) -> float:
    return float(book.indexes(np.array([number]), now_ns)[0])


def test_sessions_that_return_sooner_rank_higher() -> None:
    book = SessionBook()
    for turn in range(30):
        for kind, gap_s, stop in (("tool", 5, "tool_use"), ("user", 400, "end_turn")):
            session, at = f"{kind}-{turn}", (turn + 1) * 1_000 * SECOND_NS
            _turn(book, session, at - 1, at, stop)
            _turn(book, session, at + gap_s * SECOND_NS, at + gap_s * SECOND_NS, stop)
    now = 40_000 * SECOND_NS
    tool, user = (_turn(book, name, now, now, stop) for name, stop in (("a", "tool_use"), ("b", "end_turn")))
    assert _index(book, tool, now + SECOND_NS) > _index(book, user, now + SECOND_NS)
    # A tool call that has not returned for minutes is no longer the better bet.
    late = now + 200 * SECOND_NS
    assert _index(book, tool, late) < _index(book, user, late)


def test_a_session_that_stays_away_is_learned_and_forgotten() -> None:
    book = SessionBook()
    number = _turn(book, "s", 0, SECOND_NS, "end_turn")
    book.forget_idle(set(), 2 * SECOND_NS)
    assert book.record("s") is not None
    before = _index(book, number, 2 * SECOND_NS)
    late = int((GIVEN_UP_AFTER_S + 2) * SECOND_NS)
    book.forget_idle({number}, late)
    assert book.record("s") is not None
    book.forget_idle(set(), late)
    assert book.record("s") is None
    assert _index(book, number, late) == 0.0
    after = _turn(book, "t", 0, SECOND_NS, "end_turn")
    assert _index(book, after, 2 * SECOND_NS) < before


def test_parallel_requests_of_one_session_are_one_turn() -> None:
    book = SessionBook()
    record = book.opened("s", 0)
    book.opened("s", 1)
    book.left(record, 10 * SECOND_NS)
    book.left(record, 20 * SECOND_NS)
    book.turn_ended(record, "tool_use", 20 * SECOND_NS)
    assert record.previous_gap_s is None
    book.opened("s", 27 * SECOND_NS)
    assert record.previous_gap_s == pytest.approx(7.0)


def test_a_turn_of_unknown_end_ended_when_its_last_request_left() -> None:
    book = SessionBook()
    record = book.opened("s", 0)
    book.left(record, 5 * SECOND_NS)
    book.opened("s", 8 * SECOND_NS)
    assert record.key == ("", -1)
    assert record.previous_gap_s == pytest.approx(3.0)


def test_an_ended_session_is_forgotten_without_being_learned() -> None:
    book = SessionBook()
    number = _turn(book, "s", 0, 0, "end_turn")
    before = _index(book, number, SECOND_NS)
    record = book.record("s")
    assert record is not None
    record.ended = True
    book.forget_idle(set(), SECOND_NS)
    assert book.record("s") is None
    other = _turn(book, "t", 0, 0, "end_turn")
    assert _index(book, other, SECOND_NS) == pytest.approx(before)
