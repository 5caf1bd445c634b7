"""Which sessions come back, and how soon; the index that ranks memory by it.

A session is busy (a turn is open), then idle until its next turn. Holding its memory is a bet: it pays when the session
returns, it costs the time the memory is held, and it may be given up at any moment. The index is the most that the bet
can pay per second held: the Gittins index for "hits per token-second". No knob and no look-ahead.

- Idle: the histogram of gaps, by why the last turn stopped (a tool call returns in seconds, a user in minutes) and by
  the gap before it, scaled by what a regression expects of this session.
- Busy: nobody knows yet how long the turn will take and why it will stop. The bet goes over both stages: through the
  turn, which may drag on and be given up; then through a gap whose kind shows when the turn ends, and which may be
  given up at once. Each stage uses past events only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.core.waits import Float64Array, LogScale, WaitHistogram
from kvmanager.units import SECOND_NS

PREVIOUS_GAP_CUTS_S = (6.0, 12.0, 30.0, 90.0)
GIVEN_UP_AFTER_S = 600.0
"""A session that lost all its memory and stayed away this long counts as one that never came back."""
REASONS_MOST = 16
"""Stop reasons told apart; later ones count as one."""
OTHER_REASON = "*"
ROW_MOST = 4
"""Turns in a row that stopped alike; more make no difference to what comes next."""

_USUAL_GAP_LOG_S = 2.5
_USUAL_TURN_LOG_S = 2.0
_NEWEST = 0.3
"""Weight of the newest turn or gap in a session's means."""
_FEATURES = 8
_LOG_INDEXES = np.linspace(math.log(1e-6), math.log(10.0), 130)
_INDEXES = np.exp(_LOG_INDEXES)


def log_s(seconds: float) -> float:
    """A time's logarithm; times far under half a second are all alike."""
    return math.log(max(seconds, 0.0) + 0.5)


@dataclass
class SessionRecord:
    """What is known of one session. Logarithms are of seconds or tokens.

    open_requests: requests that hold pages now. turn_open: no word yet why the newest turn stopped; opened_ns: when it
    began. left_ns: when its last request gave its pages back. idle_since_ns: when the last turn ended. ended: nothing
    will be asked for again. silent: nobody said why its last turn ended.
    reason, row: why the last turn stopped, and how many in a row stopped so. previous_gap_s: the gap before the newest
    turn, None for the first. features, scale_s: of the turn while one is open, else of the gap.
    paths: chain -> (rows, uids) of the spans of its newest request, for telling a fork.
    """

    number: int
    open_requests: int = 0
    turn_open: bool = False
    opened_ns: int = 0
    left_ns: int = 0
    idle_since_ns: int = 0
    ended: bool = False
    silent: bool = False
    reason: str | None = None
    row: int = 0
    previous_gap_s: float | None = None
    gap_log: float = _USUAL_GAP_LOG_S
    gap_mean_log: float = _USUAL_GAP_LOG_S
    turn_log: float = _USUAL_TURN_LOG_S
    turn_mean_log: float = _USUAL_TURN_LOG_S
    prompt_tokens: int = 0
    new_tokens: int = 0
    features: Float64Array = field(default_factory=lambda: np.zeros(_FEATURES))
    scale_s: float = 1.0
    paths: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = field(default_factory=dict)

    @property
    def previous_gap_bin(self) -> int:
        """Which of the bins of PREVIOUS_GAP_CUTS_S; -1 before the first return."""
        gap_s = self.previous_gap_s
        return -1 if gap_s is None else bisect_right(PREVIOUS_GAP_CUTS_S, gap_s)

    def expects(self, turn_log: float, row: int) -> Float64Array:
        """The features after a turn of this length (logarithm) that is the `row`-th of its kind."""
        mean = self.turn_mean_log + _NEWEST * (turn_log - self.turn_mean_log)
        return self._features(turn_log, mean, row)

    def known(self) -> Float64Array:
        """The features now."""
        return self._features(self.turn_log, self.turn_mean_log, self.row)

    def _features(self, turn_log: float, turn_mean_log: float, row: int) -> Float64Array:
        """float64[8], each near 0 for a usual session but the first, which is 1."""
        return np.array([
            1.0,
            self.gap_log - _USUAL_GAP_LOG_S,
            self.gap_mean_log - _USUAL_GAP_LOG_S,
            turn_log - _USUAL_TURN_LOG_S,
            turn_mean_log - _USUAL_TURN_LOG_S,
            math.log(self.new_tokens + 64) - 7.0,
            math.log(self.prompt_tokens + 64) - 11.0,
            math.log(1 + row),
        ])  # fmt: skip


class SessionBook:
    """Sessions by id, and what was learned of turns and gaps from all of them."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionRecord] = {}
        self._by_number: dict[int, SessionRecord] = {}
        self._next = 0
        self._silent = False  # nobody said why the newest turn of all ended
        self._turns = LogScale(_FEATURES, _USUAL_TURN_LOG_S)
        self._turn_rest = WaitHistogram()
        self._gaps: dict[str, LogScale] = {}
        self._gap_rest: dict[tuple[str, int], WaitHistogram] = {}
        self._next_reason: dict[tuple[str | None, int], dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def record(self, session_id: str) -> SessionRecord | None:
        """What is known of a session."""
        return self._sessions.get(session_id)

    def opened(self, session_id: str, prompt_tokens: int, now_ns: int) -> SessionRecord:
        """A request of the session begins; the gap before it is learned.

        A turn of which nobody said why it stopped ended when its last request left.
        """
        record = self._sessions.get(session_id)
        if record is None:
            record = SessionRecord(self._next, silent=self._silent)
            self._next += 1
            self._sessions[session_id] = record
            self._by_number[record.number] = record
        if record.turn_open and record.open_requests == 0:
            self._end(record, "", record.left_ns)
        if not record.turn_open:
            if record.reason is not None:
                self._learn_gap(record, (now_ns - record.idle_since_ns) / SECOND_NS)
            record.new_tokens = max(prompt_tokens - record.prompt_tokens, 0)
            record.prompt_tokens = prompt_tokens
            record.opened_ns = now_ns
            record.turn_open = True
            record.features = record.known()
            record.scale_s = self._turns.scale_s(record.features)
        record.open_requests += 1
        record.ended = False
        return record

    def _learn_gap(self, record: SessionRecord, gap_s: float) -> None:
        assert record.reason is not None
        self._gap_scale(record.reason).learn(record.features, log_s(gap_s))
        self._rest(record.reason, record.previous_gap_bin).add(gap_s / record.scale_s)
        record.previous_gap_s = gap_s
        record.gap_log = log_s(gap_s)
        record.gap_mean_log += _NEWEST * (record.gap_log - record.gap_mean_log)

    def left(self, record: SessionRecord, now_ns: int) -> None:
        """A request of the session gave its pages back; its turn may go on elsewhere."""
        record.open_requests -= 1
        assert record.open_requests >= 0
        record.left_ns = now_ns

    def turn_ended(self, record: SessionRecord, stop_reason: str, now_ns: int) -> None:
        """The session's newest turn is over: it is idle from now on. Saying so twice changes nothing."""
        if record.turn_open:
            self._end(record, stop_reason, now_ns)

    def _end(self, record: SessionRecord, stop_reason: str, at_ns: int) -> None:
        reason = stop_reason if stop_reason in self._gaps or len(self._gaps) < REASONS_MOST else OTHER_REASON
        turn_s = (at_ns - record.opened_ns) / SECOND_NS
        self._turns.learn(record.features, log_s(turn_s))
        self._turn_rest.add(turn_s / record.scale_s)
        odds = self._next_reason.setdefault((record.reason, min(record.row, ROW_MOST)), {})
        odds[reason] = odds.get(reason, 0) + 1
        record.turn_log = log_s(turn_s)
        record.turn_mean_log += _NEWEST * (record.turn_log - record.turn_mean_log)
        record.row = record.row + 1 if reason == record.reason else 0
        record.reason = reason
        record.silent = self._silent = not stop_reason
        record.turn_open = False
        record.idle_since_ns = at_ns
        record.features = record.known()
        record.scale_s = self._gap_scale(reason).scale_s(record.features)

    def overdue(self, now_ns: int) -> bool:
        """Whether some session may be forgotten now, should it hold nothing."""
        return any(self._given_up(record, now_ns) for record in self._sessions.values())

    @staticmethod
    def _given_up(record: SessionRecord, now_ns: int) -> bool:
        away_s = (now_ns - max(record.left_ns, record.idle_since_ns)) / SECOND_NS
        return not record.open_requests and (record.ended or away_s >= GIVEN_UP_AFTER_S)

    def forget_idle(self, holding: set[int], now_ns: int) -> None:
        """Forgets sessions whose numbers are not in `holding` and that ended or stayed away for long.

        The latter are learned as never returned.
        """
        for session_id, record in list(self._sessions.items()):
            if record.number in holding or not self._given_up(record, now_ns):
                continue
            if record.reason is not None and not record.turn_open and not record.ended:
                self._rest(record.reason, record.previous_gap_bin).add_never()
            del self._sessions[session_id]
            del self._by_number[record.number]

    def indexes(self, numbers: npt.NDArray[np.signedinteger[Any]], now_ns: int) -> Float64Array:
        """The index of each session number, returns per second held, float64; 0 for numbers of no session."""
        values = np.zeros(len(numbers))
        for place, number in enumerate(numbers.tolist()):
            record = self._by_number.get(number)
            if record is not None:
                values[place] = self._index(record, now_ns)
        return values

    def _index(self, record: SessionRecord, now_ns: int) -> float:
        if record.turn_open:
            if record.silent and not record.open_requests:
                # Nobody tells when its turns end, so it has been idle since its requests left.
                turn_log = log_s((record.left_ns - record.opened_ns) / SECOND_NS)
                scale_s = self._gap_scale("").scale_s(record.expects(turn_log, 0))
                return self._idle_index("", record.previous_gap_bin, scale_s, now_ns - record.left_ns)
            return self._busy_index(record, now_ns)
        assert record.reason is not None
        return self._idle_index(record.reason, record.previous_gap_bin, record.scale_s, now_ns - record.idle_since_ns)

    def _idle_index(self, reason: str, previous_gap_bin: int, scale_s: float, idle_ns: int) -> float:
        return self._rest(reason, previous_gap_bin).best_rate(idle_ns / SECOND_NS / scale_s) / scale_s

    def _busy_index(self, record: SessionRecord, now_ns: int) -> float:
        """The highest price of memory at which the bet over both stages is still worth taking.

        Through the turn, the best rate of endings per second held buys the worth of the gap behind it.
        """
        endings = self._turn_rest.best_rate((now_ns - record.opened_ns) / SECOND_NS / record.scale_s) / record.scale_s
        worth = np.zeros(len(_INDEXES))
        for reason, odds in self._odds(record).items():
            row = record.row + 1 if reason == record.reason else 0
            scale_s = self._gap_scale(reason).scale_s(record.expects(log_s(record.scale_s), row))
            worth += odds * self._rest(reason, record.previous_gap_bin).worth(_LOG_INDEXES + math.log(scale_s))
        worthwhile = np.flatnonzero(endings * worth > _INDEXES)
        return float(_INDEXES[worthwhile[-1]]) if len(worthwhile) else 0.0

    def _odds(self, record: SessionRecord) -> dict[str, float]:
        """Why its open turn may stop, each with its probability."""
        seen = self._next_reason.get((record.reason, min(record.row, ROW_MOST)))
        if not seen:
            return {record.reason or "": 1.0}
        total = sum(seen.values())
        return {reason: count / total for reason, count in seen.items()}

    def _gap_scale(self, reason: str) -> LogScale:
        if reason not in self._gaps:
            self._gaps[reason] = LogScale(_FEATURES, _USUAL_GAP_LOG_S)
        return self._gaps[reason]

    def _rest(self, reason: str, previous_gap_bin: int) -> WaitHistogram:
        kind = reason, previous_gap_bin
        if kind not in self._gap_rest:
            self._gap_rest[kind] = WaitHistogram()
        return self._gap_rest[kind]
