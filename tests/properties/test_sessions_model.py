"""The book of sessions against a naive one: a dictionary a session, and what happened to it."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager.core.return_rate import GIVEN_UP_AFTER_S, PREVIOUS_GAP_CUTS_S, SessionBook
from kvmanager.core.waits import SCALED_EDGES
from kvmanager.units import SECOND_NS


def best_bet(scaled: list[float | None], waited: float) -> float:
    """Over all times to give up: returns that come in time, divided by the time that memory is held; bin by bin.

    Every bin holds one gap from the start; None: never.
    """
    edges = [0.0, *SCALED_EDGES]
    counts = [1] * len(edges)
    for gap in scaled:
        counts[-1 if gap is None else bisect_right(SCALED_EDGES, gap)] += 1
    best = 0.0
    first = bisect_right(SCALED_EDGES, waited)
    for last in range(first, len(SCALED_EDGES)):
        returns = held = 0.0
        for b in range(first, last + 1):
            width = edges[b + 1] - edges[b]
            held += counts[b] * width / 2 + sum(counts[b + 1 :]) * width
            returns += counts[b]
        best = max(best, returns / held)
    return best


class BookMachine(RuleBasedStateMachine):
    """A session as a dictionary; every gap learned, by class, in plain lists. Scales are the regressions' own."""

    def __init__(self) -> None:
        super().__init__()
        self.real = SessionBook()
        self.now_s = 0
        self.sessions: dict[str, dict] = {}
        self.gaps: dict[tuple[str, int], list[float | None]] = {}

    def learn(self, session: dict, gap: float | None) -> None:
        scaled = None if gap is None else gap / session["scale"]
        self.gaps.setdefault(session["key"], []).append(scaled)

    def end(self, name: str, reason: str, at_s: int) -> None:
        session = self.sessions[name]
        gap = session["gap"]
        session["key"] = (reason, -1 if gap is None else bisect_right(PREVIOUS_GAP_CUTS_S, gap))
        session["idle_since"], session["turn"] = at_s, False

    @rule(seconds=st.sampled_from([1, 3, 20, 100, 400, 700]))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(name=st.sampled_from("abc"), tokens=st.integers(1, 1 << 20))
    def opens(self, name: str, tokens: int) -> None:
        known = self.real.record(name)
        left_open = known is not None and known.turn_open and not known.open_requests
        scales: list[float] = []
        if left_open:  # its end shows only now: the scale of the gap is what the book says between end and return
            learn = self.real._learn_gap
            self.real._learn_gap = lambda record, gap_s: (scales.append(record.scale_s), learn(record, gap_s))
        record = self.real.opened(name, tokens, self.now_s * SECOND_NS)
        if left_open:
            del self.real._learn_gap
        session = self.sessions.setdefault(
            name, {"open": 0, "turn": False, "key": None, "gap": None, "left": 0, "idle_since": 0, "ended": False,
                   "number": record.number, "scale": 1.0},
        )  # fmt: skip
        assert session["number"] == record.number
        if session["turn"] and not session["open"]:
            self.end(name, "", session["left"])
            session["scale"] = scales[0]
        if not session["turn"] and session["key"] is not None:
            gap = float(self.now_s - session["idle_since"])
            self.learn(session, gap)
            session["gap"] = gap
        session.update(open=session["open"] + 1, turn=True, ended=False)

    @precondition(lambda self: any(s["open"] for s in self.sessions.values()))
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, s in self.sessions.items() if s["open"])))
        self.real.left(self.real.record(name), self.now_s * SECOND_NS)
        self.sessions[name].update(open=self.sessions[name]["open"] - 1, left=self.now_s)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), reason=st.sampled_from(["tool_use", "end_turn"]), over=st.booleans())
    def turn_ends(self, data: st.DataObject, reason: str, over: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.sessions)))
        record = self.real.record(name)
        self.real.turn_ended(record, reason, self.now_s * SECOND_NS)
        if self.sessions[name]["turn"]:
            self.end(name, reason, self.now_s)
            self.sessions[name]["scale"] = record.scale_s
        if over and not self.sessions[name]["open"]:
            record.ended = self.sessions[name]["ended"] = True

    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        numbers = sorted(s["number"] for s in self.sessions.values())
        holding = set(data.draw(st.lists(st.sampled_from(numbers), unique=True))) if numbers else set()
        self.real.forget_idle(holding, self.now_s * SECOND_NS)
        for name, session in list(self.sessions.items()):
            away = self.now_s - max(session["left"], session["idle_since"])
            gone = session["ended"] or away >= GIVEN_UP_AFTER_S
            if gone and not session["open"] and session["number"] not in holding:
                if session["key"] is not None and not session["turn"] and not session["ended"]:
                    self.learn(session, None)
                del self.sessions[name]

    @invariant()
    def same_sessions_and_ranks(self) -> None:
        assert len(self.real) == len(self.sessions)
        assert len({s["number"] for s in self.sessions.values()}) == len(self.sessions)
        for name, session in self.sessions.items():
            record = self.real.record(name)
            assert (record.open_requests, record.turn_open, record.previous_gap_s) == (
                session["open"], session["turn"], session["gap"],
            )  # fmt: skip
            if session["turn"]:
                continue
            scale = session["scale"]
            idle_s = self.now_s - session["idle_since"]
            expected = best_bet(self.gaps.get(session["key"], []), idle_s / scale) / scale
            found = self.real.indexes(np.array([session["number"]]), self.now_s * SECOND_NS)
            assert found[0] == pytest.approx(expected)
        strangers = np.array([-1, -2, 10_000])
        assert self.real.indexes(strangers, self.now_s * SECOND_NS).tolist() == [0, 0, 0]


TestBook = BookMachine.TestCase
TestBook.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
