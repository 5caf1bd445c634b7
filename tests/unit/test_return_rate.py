"""The return-rate index and the book of sessions: what ranking relies on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.core.return_rate import GIVEN_UP_AFTER_S, OTHER_REASON, REASONS_MOST, SessionBook
from kvmanager.units import SECOND_NS

PROMPT_TOKENS = 50_000


def _s(seconds: float) -> int:
    return int(seconds * SECOND_NS)


def _turn(book: SessionBook, session: str, start_s: float, end_s: float, stop_reason: str) -> int:
    """One whole turn; the session's number."""
    record = book.opened(session, PROMPT_TOKENS, _s(start_s))
    book.left(record, _s(end_s))
    book.turn_ended(record, stop_reason, _s(end_s))
    return record.number


def _index(book: SessionBook, number: int, now_s: float) -> float:
    return float(book.indexes(np.array([number]), _s(now_s))[0])


def _taught(turns: int = 60) -> SessionBook:
    """Tool calls return after about 5 s, users after about 400 s; turns last 4 s."""
    book = SessionBook()
    for turn in range(turns):
        at_s = (turn + 1) * 1_000.0
        for kind, gap_s, stop in (("tool", 5.0, "tool_use"), ("user", 400.0, "end_turn")):
            _turn(book, f"{kind}-{turn}", at_s - 4, at_s, stop)
            _turn(book, f"{kind}-{turn}", at_s + gap_s, at_s + gap_s + 4, stop)
    return book


def test_sessions_that_return_sooner_rank_higher() -> None:
    book = _taught()
    now = 100_000.0
    tool, user = (_turn(book, name, now - 4, now, stop) for name, stop in (("a", "tool_use"), ("b", "end_turn")))
    assert _index(book, tool, now + 1) > 2 * _index(book, user, now + 1)
    # A tool call that has not returned for minutes is no longer the better bet.
    assert _index(book, tool, now + 350) < _index(book, user, now + 350)


def test_a_busy_session_ranks_between_what_its_turn_may_become() -> None:
    book = _taught()
    now = 100_000.0
    tool, user = (_turn(book, name, now - 4, now, stop) for name, stop in (("a", "tool_use"), ("b", "end_turn")))
    busy = book.opened("c", PROMPT_TOKENS, _s(now - 4)).number
    assert _index(book, user, now) < _index(book, busy, now) < _index(book, tool, now)


def test_a_turn_that_drags_on_is_given_up() -> None:
    book = _taught()
    now = 100_000.0
    busy = book.opened("c", PROMPT_TOKENS, _s(now)).number
    assert _index(book, busy, now + 60) < _index(book, busy, now) / 2


def test_the_kind_of_gap_can_be_awaited_and_then_refused() -> None:
    """Half the turns end in a quick return, half in a hopeless wait: a busy session is worth more than a bet on the
    mixture, since the hopeless half is given up as soon as it shows."""
    book = SessionBook()
    for turn in range(80):
        at_s = (turn + 1) * 10_000.0
        _turn(book, f"t-{turn}", at_s - 2, at_s, "tool_use" if turn % 2 else "end_turn")
        _turn(book, f"t-{turn}", at_s + (4.0 if turn % 2 else 5_000.0), at_s + 5_002.0, "tool_use")
    now = 1_000_000.0
    busy = book.opened("c", PROMPT_TOKENS, _s(now)).number
    # At best half the turns return, each after 2 s of turn and 4 s of gap; of the other half only the turn is held.
    assert 0.5 / (2 + 0.5 * 4) * 0.3 < _index(book, busy, now) < 0.5 / (2 + 0.5 * 4) * 1.5


def test_a_session_that_stays_away_is_learned_and_forgotten() -> None:
    book = SessionBook()
    number = _turn(book, "s", 0, 1, "end_turn")
    book.forget_idle(set(), _s(2))
    assert book.record("s") is not None
    before = _index(book, number, 2)
    late = GIVEN_UP_AFTER_S + 2
    book.forget_idle({number}, _s(late))
    assert book.record("s") is not None
    book.forget_idle(set(), _s(late))
    assert book.record("s") is None
    assert _index(book, number, late) == 0.0
    after = _turn(book, "t", 0, 1, "end_turn")
    assert _index(book, after, 2) < before


def test_parallel_requests_of_one_session_are_one_turn() -> None:
    book = SessionBook()
    record = book.opened("s", PROMPT_TOKENS, 0)
    book.opened("s", PROMPT_TOKENS, 1)
    book.left(record, _s(10))
    book.left(record, _s(20))
    book.turn_ended(record, "tool_use", _s(20))
    assert record.previous_gap_s is None
    book.opened("s", PROMPT_TOKENS, _s(27))
    assert record.previous_gap_s == pytest.approx(7.0)


def test_a_turn_of_unknown_end_ended_when_its_last_request_left() -> None:
    book = SessionBook()
    record = book.opened("s", PROMPT_TOKENS, 0)
    book.left(record, _s(5))
    book.opened("s", PROMPT_TOKENS, _s(8))
    assert record.reason == ""
    assert record.previous_gap_s == pytest.approx(3.0)


def test_sessions_of_which_nobody_tells_why_turns_end_are_idle_once_their_requests_left() -> None:
    book = SessionBook()
    for turn in range(40):
        for at_s in (0.0, 20.0):
            record = book.opened(f"s-{turn}", PROMPT_TOKENS, _s(turn * 1000 + at_s))
            book.left(record, _s(turn * 1000 + at_s + 3))
    now = 50_000.0
    record = book.opened("new", PROMPT_TOKENS, _s(now))
    book.left(record, _s(now + 3))
    # Gaps of 17 s are what it knows: a bet just before one pays more than one long after it.
    assert _index(book, record.number, now + 3 + 12) > 5 * _index(book, record.number, now + 3 + 120)


def test_an_ended_session_is_forgotten_without_being_learned() -> None:
    book = SessionBook()
    number = _turn(book, "s", 0, 1, "end_turn")
    before = _index(book, number, 2)
    record = book.record("s")
    assert record is not None
    record.ended = True
    book.forget_idle(set(), _s(2))
    assert book.record("s") is None
    other = _turn(book, "t", 0, 1, "end_turn")
    assert _index(book, other, 2) == pytest.approx(before, rel=0.2)


def test_a_client_can_not_make_it_learn_ever_more_reasons() -> None:
    book = SessionBook()
    for turn in range(50):
        _turn(book, f"s-{turn}", turn * 10, turn * 10 + 1, f"reason-{turn}")
    assert book.record("s-49").reason == OTHER_REASON
    assert sum(book.record(f"s-{turn}").reason != OTHER_REASON for turn in range(50)) == REASONS_MOST


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6), st.sampled_from(["x", "y", ""])), max_size=30))
def test_indexes_are_sound_whatever_happens(turns: list[tuple[str, float, str]]) -> None:
    book, now = SessionBook(), 0.0
    for session, wait_s, reason in turns:
        now += wait_s
        record = book.opened(session, int(wait_s), _s(now))
        book.left(record, _s(now))
        if wait_s % 2 < 1:
            book.turn_ended(record, reason, _s(now))
        indexes = book.indexes(np.arange(len(book)), _s(now))
        assert np.isfinite(indexes).all()
        assert (indexes >= 0).all()
