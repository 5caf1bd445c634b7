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

import numpy as np
import numpy.typing as npt

from kvmanager.units import SECOND_NS

Float64Array = npt.NDArray[np.float64]

BIN_EDGES_S = tuple(0.5 * 2 ** (k / 2) for k in range(32))
"""Upper edges of the gap bins, half an octave each, 0.5 s to 6.4 h; one more bin is for longer gaps and no return."""
PREVIOUS_GAP_CUTS_S = (6.0, 12.0, 30.0, 90.0)
GIVEN_UP_AFTER_S = 600.0
"""A session that lost all its memory and stayed away this long counts as one that never came back."""

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
            self._table = _index_table(self._counts)
        return float(self._table[bisect_right(BIN_EDGES_S, idle_s)])


def _index_table(counts: Float64Array) -> Float64Array:
    """The index for an idle time in each bin, float64[bins + 1]; 0 once every known gap has passed."""
    widths = np.diff(np.concatenate(([0.0], BIN_EDGES_S)))
    table = np.zeros(len(counts))
    tails = np.cumsum(counts[::-1])[::-1]
    for start in range(len(widths)):
        back = np.cumsum(counts[start:-1])
        # Those still away at a bin's beginning hold their memory through it; returns come in its middle on average.
        alive = tails[start:-1] - counts[start:-1] / 2
        held = np.cumsum(alive * widths[start:])
        table[start] = float((back / held).max())
    return table


@dataclass
class SessionRecord:
    """What is known of one session.

    running: requests open now. idle_since_ns: end of its last request. previous_gap_s: the gap before that
    request, None for the first. rows, uids: the spans of its newest path, for telling a fork.
    """

    number: int
    running: int = 0
    idle_since_ns: int = 0
    key: ClassKey | None = None
    previous_gap_s: float | None = None
    ended: bool = False
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    uids: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))


class SessionBook:
    """Sessions by id, and the gap histograms of their classes."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionRecord] = {}
        self._by_number: dict[int, SessionRecord] = {}
        self._histograms: dict[ClassKey, GapHistogram] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def record(self, session_id: str) -> SessionRecord | None:
        """What is known of a session."""
        return self._sessions.get(session_id)

    def opened(self, session_id: str, now_ns: int) -> SessionRecord:
        """A request of the session begins; its gap is learned."""
        record = self._sessions.get(session_id)
        if record is None:
            record = SessionRecord(self._next)
            self._next += 1
            self._sessions[session_id] = record
            self._by_number[record.number] = record
        if record.running == 0 and record.key is not None:
            gap_s = (now_ns - record.idle_since_ns) / SECOND_NS
            self._histogram(record.key).returned(gap_s)
            record.previous_gap_s = gap_s
        record.running += 1
        record.ended = False
        return record

    def closed(self, session_id: str, stop_reason: str, now_ns: int) -> SessionRecord:
        """A request of the session ends; the idle time begins when none is running."""
        record = self._sessions[session_id]
        record.running -= 1
        assert record.running >= 0
        record.idle_since_ns = now_ns
        gap = record.previous_gap_s
        record.key = (stop_reason, -1 if gap is None else bisect_right(PREVIOUS_GAP_CUTS_S, gap))
        return record

    def forget(self, session_id: str, now_ns: int) -> None:
        """The session holds nothing any more: one that stayed away long is learned as never returned."""
        record = self._sessions[session_id]
        if record.running or (now_ns - record.idle_since_ns) / SECOND_NS < GIVEN_UP_AFTER_S:
            return
        if record.key is not None and not record.ended:
            self._histogram(record.key).never_returned()
        del self._sessions[session_id]
        del self._by_number[record.number]

    def indexes(self, numbers: npt.NDArray[np.int64], now_ns: int) -> Float64Array:
        """The index of each session number, float64; a running session's is that of zero idleness."""
        values = np.empty(len(numbers))
        for place, number in enumerate(numbers.tolist()):
            record = self._by_number.get(number)
            values[place] = 0.0 if record is None else self._index(record, now_ns)
        return values

    def _index(self, record: SessionRecord, now_ns: int) -> float:
        if record.key is None:
            return self._histogram(("", -1)).index(0.0)
        idle_s = 0.0 if record.running else (now_ns - record.idle_since_ns) / SECOND_NS
        return self._histogram(record.key).index(idle_s)

    def _histogram(self, key: ClassKey) -> GapHistogram:
        return self._histograms.setdefault(key, GapHistogram())
