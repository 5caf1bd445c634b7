"""The daemon's packed tables as numpy arrays, as both engines hand them to their stores.

Pages of a request are counted over its spans in order; that count is the page's **ordinal**. On a
shard group of N ranks a span of order (M, I) has M / N ordinals, each naming the same page index on
every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument
from kvmanager.geometry import TokenOrder
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


@dataclass(frozen=True)
class OrderRun:
    """Consecutive spans of one token order: their first token, and which of the run's pages are theirs."""

    order: TokenOrder
    first_token: int
    pages: slice


def order_runs(spans: Spans, ranks: int) -> Iterator[OrderRun]:
    """Cuts a run of spans where the token order changes.

    `ranks`: N of the shard group, so that a span of order (M, I) has M / N pages. Raises InvalidArgument
    when M does not fill the ranks, or the pages are not as many as the spans need.
    """
    uneven = spans.segments % ranks != 0
    if uneven.any():
        raise InvalidArgument(f"a span of {int(spans.segments[uneven][0])} segments does not fill {ranks} ranks")
    ends = np.cumsum(spans.segments // ranks)
    if len(spans.uids) != int(ends[-1:].sum()):
        raise InvalidArgument(f"{len(spans.uids)} pages for {len(ends)} spans of {spans.segments.tolist()} segments")
    if not len(ends):
        return
    changes = (np.diff(spans.segments) != 0) | (np.diff(spans.interleave) != 0)
    heads = [0, *(np.flatnonzero(changes) + 1).tolist()]
    for head, after in zip(heads, [*heads[1:], len(ends)], strict=True):
        order = TokenOrder(int(spans.segments[head]), int(spans.interleave[head]))
        first_page = int(ends[head - 1]) if head else 0
        yield OrderRun(order, int(spans.first_tokens[head]), slice(first_page, int(ends[after - 1])))


@dataclass(frozen=True)
class ResidencyRows:
    """New places of single pages of one class: int64[n] page ordinals, device and host pages."""

    page_class: str
    ordinals: Int64Array
    column: PageColumn


def decode_residency(rows: pb.Residency) -> ResidencyRows:
    """A Residency as arrays. Raises InvalidArgument when they disagree in length."""
    ordinals = _numbers_u32(rows.page_ordinals, "Residency.page_ordinals")
    device = _pages(rows.device_pages, "Residency.device_pages")
    host = _pages(rows.host_pages, "Residency.host_pages")
    if not len(ordinals) == len(device) == len(host):
        raise InvalidArgument(f"residency of {len(ordinals)} pages: {len(device)} device and {len(host)} host entries")
    return ResidencyRows(rows.page_class, ordinals, PageColumn(device, host))


def decode_hot(hot: pb.HotPages) -> Int64Array:
    """int64[slabs] of a hot buffer."""
    return _numbers_u32(hot.pages, "HotPages.pages")
