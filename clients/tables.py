"""The daemon's packed tables as numpy arrays, and the one table a worker keeps for a request.

Pages of a request are counted over its spans in order; that count is the page's **ordinal**. On a
shard group of N ranks a span of order (M, I) has M / N ordinals, each naming the same page index on
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import NO_PAGE as WIRE_NO_PAGE
from kvmanager.wire import unpack_u32, unpack_u64

Int64Array = npt.NDArray[np.int64]

NO_PAGE: Final = -1
"""No page in that tier, in our arrays; 0xFFFFFFFF on the wire."""


def _numbers_u32(data: bytes, field: str) -> Int64Array:
    return unpack_u32(data, field).astype(np.int64)


def _numbers_u64(data: bytes, field: str) -> Int64Array:
    """Ids and positions stay below 2**63."""
    return unpack_u64(data, field).astype(np.int64)


def _pages(data: bytes, field: str) -> Int64Array:
    """u32[] page indexes, with `NO_PAGE` where there is none."""
    pages = _numbers_u32(data, field)
    pages[pages == WIRE_NO_PAGE] = NO_PAGE
    return pages


@dataclass(frozen=True)
class PageColumn:
    """Where the pages of one class lie: int64[pages] indexes by tier, `NO_PAGE` for none."""

    device: Int64Array
    host: Int64Array


@dataclass(frozen=True)
class Spans:
    """A run of spans of one chain from ordinal `first_span` on.

    `first_tokens`, `segments`, `interleave`: int64[spans]; `uids`: int64[pages]; `pages`: class -> columns.
    """

    chain: str
    first_span: int
    first_tokens: Int64Array
    segments: Int64Array
    interleave: Int64Array
    uids: Int64Array
    pages: dict[str, PageColumn]


def decode_spans(run: pb.SpanRun) -> Spans:
    """A SpanRun as arrays. Raises InvalidArgument when its arrays disagree in length."""
    first = _numbers_u64(run.first_tokens, "SpanRun.first_tokens")
    segments = _numbers_u32(run.segments, "SpanRun.segments")
    interleave = _numbers_u32(run.interleave, "SpanRun.interleave")
    uids = _numbers_u64(run.uids, "SpanRun.uids")
    if not len(first) == len(segments) == len(interleave):
        raise InvalidArgument(
            f"span run of {len(first)} first tokens, {len(segments)} segment counts, {len(interleave)} interleaves"
        )
    pages = {column.page_class: _decode_column(column, len(uids)) for column in run.pages}
    return Spans(run.chain, run.first_span, first, segments, interleave, uids, pages)


def _decode_column(column: pb.ClassPages, pages: int) -> PageColumn:
    device = _pages(column.device_pages, "ClassPages.device_pages")
    host = _pages(column.host_pages, "ClassPages.host_pages") if column.host_pages else np.full(pages, NO_PAGE)
    if len(device) != pages or len(host) != pages:
        raise InvalidArgument(
            f"class {column.page_class!r}: {len(device)} device and {len(host)} host pages for {pages} uids"
        )
    return PageColumn(device, host)


class RequestTable:
    """One request's chain as its worker sees it; changed only by what the daemon sends.

    Arrays are replaced, never edited in place, so a reader may keep what it was given for a step.
    """

    def __init__(self, ranks: int) -> None:
        """An empty chain on a shard group of `ranks` ranks."""
        self.ranks = ranks
        """N of the shard group."""
        self.first_tokens: Int64Array = np.zeros(0, np.int64)
        """int64[spans]: position of each span's first token."""
        self.segments: Int64Array = np.zeros(0, np.int64)
        """int64[spans]: M of the span's token order."""
        self.interleave: Int64Array = np.zeros(0, np.int64)
        """int64[spans]: I of the span's token order."""
        self.page_starts: Int64Array = np.zeros(1, np.int64)
        """int64[spans + 1]: ordinal of each span's first page, and the page count at the end."""
        self.uids: Int64Array = np.zeros(0, np.int64)
        """int64[pages]: content ids."""
        self.pages: dict[str, PageColumn] = {}
        """Class -> columns of int64[pages]."""
        self.hot_pages: Int64Array = np.zeros(0, np.int64)
        """int64[slabs]: the request's hot buffer."""

    @property
    def spans(self) -> int:
        """Spans of the chain."""
        return len(self.first_tokens)

    @property
    def page_count(self) -> int:
        """Page ordinals of the chain."""
        return len(self.uids)

    def append(self, run: Spans) -> None:
        """Adds a run that follows the chain. Raises InvalidArgument when it starts elsewhere or lacks pages."""
        if run.first_span != self.spans:
            raise InvalidArgument(f"span run starts at {run.first_span}, the chain has {self.spans} spans")
        uneven = run.segments % self.ranks != 0
        if uneven.any():
            raise InvalidArgument(f"{int(run.segments[uneven][0])} segments do not fill {self.ranks} ranks")
        sizes = run.segments // self.ranks
        if int(sizes.sum()) != len(run.uids):
            raise InvalidArgument(f"{len(run.uids)} pages for spans of {int(sizes.sum())}")
        if self.spans and set(run.pages) != set(self.pages):
            raise InvalidArgument(f"classes {sorted(run.pages)} follow {sorted(self.pages)}")
        self.first_tokens = np.concatenate((self.first_tokens, run.first_tokens))
        self.segments = np.concatenate((self.segments, run.segments))
        self.interleave = np.concatenate((self.interleave, run.interleave))
        self.page_starts = np.concatenate((self.page_starts, self.page_starts[-1] + np.cumsum(sizes)))
        self.uids = np.concatenate((self.uids, run.uids))
        self.pages = {name: self._joined(name, column) for name, column in run.pages.items()}

    def _joined(self, name: str, column: PageColumn) -> PageColumn:
        before = self.pages.get(name)
        if before is None:
            return column
        return PageColumn(np.concatenate((before.device, column.device)), np.concatenate((before.host, column.host)))

    def truncate(self, spans_kept: int) -> None:
        """Drops the spans from `spans_kept` on. Raises InvalidArgument when the chain is shorter."""
        if spans_kept > self.spans:
            raise InvalidArgument(f"{spans_kept} spans kept of a chain of {self.spans}")
        pages = int(self.page_starts[spans_kept])
        self.first_tokens = self.first_tokens[:spans_kept]
        self.segments = self.segments[:spans_kept]
        self.interleave = self.interleave[:spans_kept]
        self.page_starts = self.page_starts[: spans_kept + 1]
        self.uids = self.uids[:pages]
        self.pages = {
            name: PageColumn(column.device[:pages], column.host[:pages]) for name, column in self.pages.items()
        }

    def apply_growth(self, growth: pb.Growth) -> None:
        """A step reply's change of the chain: first what it kept, then what it appended."""
        self.truncate(growth.spans_kept)
        for run in growth.spans:
            self.append(decode_spans(run))

    def apply_residency(self, rows: pb.Residency) -> None:
        """New places of single pages. Raises InvalidArgument for a class or an ordinal the chain lacks."""
        ordinals = _numbers_u32(rows.page_ordinals, "Residency.page_ordinals")
        before = self.pages.get(rows.page_class)
        if before is None:
            raise InvalidArgument(f"residency of class {rows.page_class!r}; the request has {sorted(self.pages)}")
        if ordinals.size and int(ordinals.max()) >= self.page_count:
            raise InvalidArgument(f"residency of page {int(ordinals.max())} of {self.page_count}")
        device, host = before.device.copy(), before.host.copy()
        device[ordinals] = _pages(rows.device_pages, "Residency.device_pages")
        host[ordinals] = _pages(rows.host_pages, "Residency.host_pages")
        self.pages = {**self.pages, rows.page_class: PageColumn(device, host)}

    def apply_hot(self, hot: pb.HotPages) -> None:
        """The request's hot buffer, complete."""
        self.hot_pages = _numbers_u32(hot.pages, "HotPages.pages")

    def locate(self, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(page ordinal, rank, slot) of token positions; `positions` must lie in the chain."""
        span = np.searchsorted(self.first_tokens, positions, side="right") - 1
        assert positions.size == 0 or int(span.min()) >= 0
        offset = positions - self.first_tokens[span]
        segments, interleave = self.segments[span], self.interleave[span]
        runs = offset // interleave
        page = runs % segments
        slot = (runs // segments) * interleave + offset % interleave
        return self.page_starts[span] + page // self.ranks, page % self.ranks, slot


def opened_table(opened: pb.OpenReply, ranks: int) -> RequestTable:
    """The table of a request that became runnable, from the complete spans of its reply."""
    table = RequestTable(ranks)
    for run in opened.spans:
        table.append(decode_spans(run))
    for hot in opened.hot:
        table.apply_hot(hot)
    return table
