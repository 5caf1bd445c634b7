"""A request: its spans, its promise, and how far its content is written, committed and fenced."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.core.events import SpanRunTable
from kvmanager.core.group import Chain
from kvmanager.core.plans import CopyPlan
from kvmanager.core.rows import BoolArray, RowArray, RowList, all_true, as_range
from kvmanager.core.spans import ABSENT, DEVICE, HOST, NO_OWNER, NO_PAGE, NO_SPAN, READY
from kvmanager.geometry import Int64Array


class Phase(Enum):
    """Life of a request after admission."""

    WAITING = "waiting"  # bytes are on their way into its pages
    RUNNING = "running"
    CLOSING = "closing"  # closed by its engine; work issued before may still touch its pages
    RETRACTING = "retracting"  # taken off by its engine; work issued before may still touch its pages
    RETRACTED = "retracted"  # its pages are on the host or on their way there, until it is resumed


@dataclass
class RequestChain:
    """The request's spans in one chain.

    rows: spans in token order, one pin each. shared: leading rows that came from the index.
    anchors: canonical rows that stand for private duplicates, one pin each.
    anchor: canonical predecessor of the next span to publish. settled: leading rows that are full and dealt with.
    end_token: positions [0, end) have pages. `rows` change by `extend`, `append` and `pop` only, which keep it true.
    """

    chain: Chain
    rows: RowList = field(default_factory=RowList)
    shared: int = 0
    anchors: RowList = field(default_factory=RowList)
    anchor: int = NO_SPAN
    settled: int = 0
    end_token: int = field(init=False)

    def __post_init__(self) -> None:
        self.end_token = self.measured()

    def measured(self) -> int:
        """What `end_token` is by the spans."""
        if len(self.rows) == 0:
            return 0
        last, table = self.rows.last, self.chain.table
        return table.first_token.item(last) + table.segments.item(last) * self.chain.spec.page_rows

    def extend(self, rows: RowArray) -> None:
        """More spans at the end."""
        self.rows.extend(rows)
        self.end_token = self.measured()

    def append(self, row: int) -> None:
        """One more."""
        self.rows.append(row)
        self.end_token = self.measured()

    def pop(self) -> int:
        """Takes the last span away."""
        row = self.rows.pop()
        self.end_token = self.measured()
        return row

    def ordinal(self, row: int) -> int | None:
        """The span's place in the chain; None when the request does not hold it."""
        table = self.chain.table
        first = table.first_token[row]
        at = bisect_left(self.rows, first, key=lambda r: table.first_token[r])
        return at if at < len(self.rows) and self.rows[at] == row else None

    def first_page(self, ordinal: int) -> int:
        """Page ordinal, within the request, of the first page of its `ordinal`-th span."""
        return int(self.chain.widths(self.rows.array[:ordinal]).sum())

    def table_from(self, first: int) -> SpanRunTable:
        """The spans from ordinal `first` on, as the worker needs them; host pages where only they can be read."""
        spec, table = self.chain.spec, self.chain.table
        rows = self.rows.array[first:]
        index = as_range(rows)
        keep = self._held(rows)
        pages: dict[str, tuple[Int64Array, Int64Array]] = {}
        for c, page_class in enumerate(spec.classes):
            device = _own(table.pages[c, DEVICE], index)[keep].reshape(-1)
            if self.chain.has_host(c):
                # A mirror of a resident page may be taken away at any time, so nobody is told of it.
                read = (table.copies[c, HOST, index] == READY) & (table.copies[c, DEVICE, index] == ABSENT)
                host = np.where(read[:, None], table.pages[c, HOST, index], NO_PAGE)[keep].reshape(-1)
            else:
                host = _nowhere(len(device))
            pages[page_class.name] = device, host
        return SpanRunTable(
            spec.name,
            first,
            _own(table.first_token, index),
            _own(table.segments, index),
            _own(table.interleave, index),
            _own(table.uids, index)[keep].reshape(-1),
            pages,
        )

    def _held(self, rows: RowArray) -> BoolArray | slice:
        """Which entries of the table's page lists the spans use, bool[rows, widest]; a slice where they use all."""
        widest = self.chain.table.widest
        if widest == 1:
            return slice(None)
        widths = self.chain.widths(rows)
        return slice(None) if all_true(widths == widest) else np.arange(widest) < widths[:, None]


_NOWHERE = np.full(1 << 14, NO_PAGE, np.int64)
_NOWHERE.flags.writeable = False


def _nowhere(count: int) -> Int64Array:
    """NO_PAGE for so many pages; read only."""
    return _NOWHERE[:count] if count <= len(_NOWHERE) else np.full(count, NO_PAGE, np.int64)


def _own(column: npt.NDArray[Any], index: RowArray | slice) -> npt.NDArray[Any]:
    """Entries of a column that nobody else has."""
    entries = column[index]
    return entries.copy() if isinstance(index, slice) else entries


@dataclass
class Request:
    """An admitted request of one engine.

    capacity_tokens: positions with pages as asked. committed_tokens: said to be final by the engine.
    fenced_tokens: committed and known to be written. cached_tokens: found, not computed.
    promised: pool -> slabs promised and not taken. waiting_on: plan ids. dirty: (chain, ordinal) of spans
    whose residency the worker has not been told. hot: hot-buffer pages. worker_plans: copies the worker runs before
    its first write. donors: (chain, row) that they read, one pin each until the first commit's fence.
    ranks_lost: how many ranks its engine had lost when it was opened. owner: number of its session, NO_OWNER
    without one. stop_reason, session_ends: as its close said. truncated: (chain, row) of spans it gave up that still
    drain. unbacked_slabs: device slabs of its window that no page stands behind now (sparse groups). homed_pages:
    latent pages of it that HBM is promised for, not the host (`core.homes`). since: when it was admitted, ns.
    expires_ns: when its lease ends, 0 for a request that is none. token_ids: u32, those of `keys`, or none.
    anchored: what it found is to stay findable, and no copy of it is used (one anchor each). known_segments: of which
    fenced tokens and keys were there when it was last published.
    """

    engine: str
    epoch: int
    group: str
    namespace: int
    request_id: int
    prompt_tokens: int
    growth_tokens: int
    session_id: str
    keys: bytearray
    chains: list[RequestChain]
    phase: Phase = Phase.RUNNING
    capacity_tokens: int = 0
    committed_tokens: int = 0
    fenced_tokens: int = 0
    cached_tokens: int = 0
    promised: dict[str, int] = field(default_factory=dict)
    waiting_on: set[int] = field(default_factory=set)
    dirty: set[tuple[int, int]] = field(default_factory=set)
    hot: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    worker_plans: tuple[CopyPlan, ...] = ()
    donors: list[tuple[int, int]] = field(default_factory=list)
    ranks_lost: int = 0
    owner: int = NO_OWNER
    stop_reason: str = ""
    session_ends: bool = False
    truncated: list[tuple[int, int]] = field(default_factory=list)
    unbacked_slabs: int = 0
    homed_pages: int = 0
    since: int = 0
    expires_ns: int = 0
    anchored: bool = False
    token_ids: bytearray = field(default_factory=bytearray)
    known_segments: int = 0

    @property
    def end_token(self) -> int:
        """Positions [0, end) have pages in all chains."""
        chains = self.chains
        return chains[0].end_token if len(chains) == 1 else min(part.end_token for part in chains)

    @property
    def retracted(self) -> bool:
        """Whether it gave up its device pages, or will when its work is done."""
        return self.phase in (Phase.RETRACTING, Phase.RETRACTED)

    @property
    def most_tokens(self) -> int:
        """Prompt and declared growth."""
        return self.prompt_tokens + self.growth_tokens

    def tables(self) -> tuple[SpanRunTable, ...]:
        """Complete tables of all chains."""
        return tuple(chain.table_from(0) for chain in self.chains)
