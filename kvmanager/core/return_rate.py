"""Which sessions come back, and how soon: gap histograms learned online, and the index that ranks memory by them.

For a session that has been idle for a while, every waiting time w gives a bet: keep its memory for at most w
more. The bet pays when the session returns in time and costs the time the memory is held. The index is the best
ratio of the two over all w: the Gittins index for "hits per token-second". No knob and no look-ahead.

Gaps differ by why the last turn stopped (a tool call returns in seconds, a user in minutes) and by the session's
previous gap; each pair is a class with a histogram of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.units import SECOND_NS

Float64Array = npt.NDArray[np.float64]

BIN_EDGES_S = tuple(0.5 * 2 ** (k / 2) for k in range(32))
"""Upper edges of the gap bins, half an octave each, 0.5 s to 6.4 h; one more bin is for longer gaps and no return."""
PREVIOUS_GAP_CUTS_S = (6.0, 12.0, 30.0, 90.0)
TURN_WEIGHT = 0.02
"""Weight of the newest turn in the mean length of turns."""
GIVEN_UP_AFTER_S = 600.0
"""A session that lost all its memory and stayed away this long counts as one that never came back."""

_WIDTHS_S = np.diff(np.concatenate(([0.0], BIN_EDGES_S)))
ANY_REASON = "*"
"""Stands for all stop reasons together: what is known of a turn that is still open."""

ClassKey = tuple[str, int]
"""(stop reason of the last turn, bin of the gap before it; -1: it was the first)."""


class GapHistogram:
    """Counts of idle gaps in one class. Starts flat: one of each, so that an unseen gap is possible."""

    def __init__(self) -> None:
        self._counts = np.ones(len(BIN_EDGES_S) + 1)
        self._table: Float64Array | None = None

    def returned(self, gap_s: float) -> None:
        """A session of this class came back after `gap_s`."""
        self._counts[bisect_right(BIN_EDGES_S, gap_s)] += 1
        self._table = None

    def never_returned(self) -> None:
        """A session of this class did not come back."""
        self._counts[-1] += 1
        self._table = None

    def index(self, idle_s: float) -> float:
        """Returns per second of memory held, under the best waiting time, after `idle_s` of idleness."""
        if self._table is None:
            self._table = np.array([_best_bet(self._counts, start, 0.0) for start in range(len(self._counts))])
        return float(self._table[bisect_right(BIN_EDGES_S, idle_s)])

    def index_ahead(self, busy_s: float) -> float:
        """The same for a session that will be busy for `busy_s` more: its memory is held through that too."""
        return _best_bet(self._counts, 0, busy_s)


def _best_bet(counts: Float64Array, start: int, lead_s: float) -> float:
    """The index for an idle time in bin `start`, with `lead_s` held in any case; 0 once every known gap has passed."""
    if start == len(_WIDTHS_S):
        return 0.0
    away = counts[start:].sum() - np.concatenate(([0.0], np.cumsum(counts[start:-2])))
    # Those still away at a bin's beginning hold their memory through it; returns come in its middle on average.
    held = counts[start:].sum() * lead_s + np.cumsum((away - counts[start:-1] / 2) * _WIDTHS_S[start:])
    return float((np.cumsum(counts[start:-1]) / held).max())


@dataclass
class SessionRecord:
    """What is known of one session.

    open_requests: requests that hold pages now. turn_open: no word yet why the newest turn stopped.
    opened_ns: when that turn began. left_ns: when its last request gave its pages back.
    idle_since_ns, key: end and class of the last turn that ended.
    previous_gap_s: the gap before the newest turn, None for the first. paths: chain -> (rows, uids) of the spans of
    its newest request, for telling a fork.
    """

    number: int
    open_requests: int = 0
    turn_open: bool = False
    opened_ns: int = 0
    left_ns: int = 0
    idle_since_ns: int = 0
    key: ClassKey | None = None
    previous_gap_s: float | None = None
    ended: bool = False
    paths: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = field(default_factory=dict)

    def class_of(self, stop_reason: str) -> ClassKey:
        """The class of a turn that stopped for this reason."""
        gap = self.previous_gap_s
        return stop_reason, -1 if gap is None else bisect_right(PREVIOUS_GAP_CUTS_S, gap)


class SessionBook:
    """Sessions by id, and the gap histograms of their classes."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionRecord] = {}
        self._by_number: dict[int, SessionRecord] = {}
        self._histograms: dict[ClassKey, GapHistogram] = {}
        self._next = 0
        self._turn_s = 0.0  # mean length of a turn, of late

    def __len__(self) -> int:
        return len(self._sessions)

    def record(self, session_id: str) -> SessionRecord | None:
        """What is known of a session."""
        return self._sessions.get(session_id)

    def opened(self, session_id: str, now_ns: int) -> SessionRecord:
        """A request of the session begins; the gap before it is learned.

        A turn of which nobody said why it stopped ended when its last request left.
        """
        record = self._sessions.get(session_id)
        if record is None:
            record = SessionRecord(self._next)
            self._next += 1
            self._sessions[session_id] = record
            self._by_number[record.number] = record
        if record.turn_open and record.open_requests == 0:
            self._end(record, "", record.left_ns)
        if not record.turn_open and record.key is not None:
            gap_s = (now_ns - record.idle_since_ns) / SECOND_NS
            for key in (record.key, (ANY_REASON, record.key[1])):
                self._histogram(key).returned(gap_s)
            record.previous_gap_s = gap_s
        if not record.turn_open:
            record.opened_ns = now_ns
        record.open_requests += 1
        record.turn_open = True
        record.ended = False
        return record

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
        self._turn_s += TURN_WEIGHT * ((at_ns - record.opened_ns) / SECOND_NS - self._turn_s)
        record.turn_open = False
        record.idle_since_ns = at_ns
        record.key = record.class_of(stop_reason)

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
            if record.key is not None and not record.ended:
                for key in (record.key, (ANY_REASON, record.key[1])):
                    self._histogram(key).never_returned()
            del self._sessions[session_id]
            del self._by_number[record.number]

    def indexes(self, numbers: npt.NDArray[np.signedinteger[Any]], now_ns: int) -> Float64Array:
        """The index of each session number, float64; 0 for numbers of no session."""
        values = np.zeros(len(numbers))
        for place, number in enumerate(numbers.tolist()):
            record = self._by_number.get(number)
            if record is not None:
                values[place] = self._index(record, now_ns)
        return values

    def _index(self, record: SessionRecord, now_ns: int) -> float:
        if record.turn_open:
            # Why it will stop is not known yet. Past the usual length it counts as idle: perhaps nobody says.
            left_s = self._turn_s - (now_ns - record.opened_ns) / SECOND_NS
            histogram = self._histogram(record.class_of(ANY_REASON))
            if left_s > 0 or record.open_requests:
                return histogram.index_ahead(max(left_s, 0.0))
            return histogram.index(-left_s)
        assert record.key is not None
        return self._histogram(record.key).index((now_ns - record.idle_since_ns) / SECOND_NS)

    def _histogram(self, key: ClassKey) -> GapHistogram:
        return self._histograms.setdefault(key, GapHistogram())
