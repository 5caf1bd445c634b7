"""What the resolver reads and keeps: shapes, the tables of a rank's requests, and where a share group's rows lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.clients.glm.page_table import PageTable
from kvmanager.errors import InvalidArgument
from kvmanager.layout import KVLayout, Section

SPAN_ROW: Final = np.dtype([("first", "<i4"), ("segments", "<i2"), ("interleave", "<i2")])
"""One a segment (page_rows positions): the first ordinal of the span that it lies in, and the span's token order."""
PAGE_ROW: Final = np.dtype([("uid", "<i8"), ("device", "<i4"), ("host", "<i4")])
"""One a page, by ordinal: what it holds, and its page index in each tier (-1 for none)."""
MOST_HOT_ROWS: Final = 1 << 15
"""Row numbers are kept in 16 bits, with room for a mark."""
MOST_ENTRIES: Final = 1 << 13
"""Rows a request times top-k: their keys must fit in a block's shared memory."""

Structured = npt.NDArray[np.void]


@dataclass(frozen=True)
class SparseShape:
    """Sizes that a captured graph fixes.

    `requests`: places for requests; `rows`: tokens that a request verifies in a step (4 with three drafts);
    `topk`: positions a row; `hot_rows`: of one request; `most_pages`: of one request; `device_pages`,
    `host_pages`: of the two regions, in pages of the latent layout.
    """

    requests: int
    rows: int
    topk: int
    page_rows: int
    hot_rows: int
    most_pages: int
    device_pages: int
    host_pages: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument for sizes that the resolver can't serve."""
        if min(self.requests, self.rows, self.topk, self.page_rows, self.most_pages) < 1:
            raise InvalidArgument(f"{self}: every size is at least 1")
        if self.entries > MOST_ENTRIES:
            raise InvalidArgument(f"{self.rows} rows x top-{self.topk}: at most {MOST_ENTRIES} entries a request")
        if not self.entries <= self.hot_rows <= MOST_HOT_ROWS:
            raise InvalidArgument(
                f"{self.hot_rows} hot rows for {self.entries} entries a step; "
                f"a hot buffer holds one step's entries, and at most {MOST_HOT_ROWS} rows"
            )
        if self.most_pages * self.page_rows >= 1 << 31:
            raise InvalidArgument(f"{self.most_pages} pages of {self.page_rows} rows; positions have 31 bits")

    @property
    def entries(self) -> int:
        """Positions that a request resolves in one call."""
        return self.rows * self.topk

    @property
    def hot_slabs(self) -> int:
        """Pages that a hot buffer takes."""
        return -(-self.hot_rows // self.page_rows)


@dataclass(frozen=True)
class GroupPlace:
    """A share group's rows inside a page of either tier, in bytes: slot s begins at `offset + s * row_bytes`."""

    page_bytes: int
    offset: int
    row_bytes: int


def group_place(layout: KVLayout, group: tuple[int, ...]) -> GroupPlace:
    """Where `group`'s latent rows lie. Raises InvalidArgument unless its layers lie side by side in each slot."""
    parts = [layout.by_key[Section.LATENT, layer] for layer in group]
    first = parts[0]
    row_bytes = first.row_bytes * len(parts)
    for number, part in enumerate(parts):
        expected = (first.offset + number * first.row_bytes, first.page_stride, row_bytes)
        if (part.offset, part.page_stride, part.slot_stride) != expected:
            raise InvalidArgument(f"layout {layout.name}: the layers {group} do not lie side by side in a slot")
    if row_bytes % 16 or first.offset % 16 or first.page_stride % 16:
        raise InvalidArgument(f"layout {layout.name}: group rows are copied in units of 16 bytes")
    return GroupPlace(first.page_stride, first.offset, row_bytes)


def pack_request(table: PageTable, most_pages: int) -> tuple[Structured, Structured]:
    """(SPAN_ROW[pages], PAGE_ROW[pages]) of one request. Raises InvalidArgument if it has more than `most_pages`."""
    pages = len(table.uid)
    if pages > most_pages:
        raise InvalidArgument(f"a request of {pages} pages; the resolver has room for {most_pages}")
    spans = np.zeros(pages, SPAN_ROW)
    for first, count, order in table.runs():
        part = spans[first : first + count * order.segments]
        part["first"] = first + np.arange(len(part)) // order.segments * order.segments
        part["segments"], part["interleave"] = order.segments, order.interleave
    return spans, pack_pages(table.uid, table.device, table.host, table.page_rows)


def pack_pages(
    uid: npt.NDArray[np.int64], device: npt.NDArray[np.int64], host: npt.NDArray[np.int64], page_rows: int
) -> Structured:
    """PAGE_ROW[pages]. Raises InvalidArgument for uids that do not fit in row keys."""
    if len(uid) and not 0 <= int(uid.min()) <= int(uid.max()) < 2**63 // page_rows:
        raise InvalidArgument(f"uids {uid.min()}..{uid.max()} do not fit in 64-bit row keys")
    rows = np.zeros(len(uid), PAGE_ROW)
    rows["uid"], rows["device"], rows["host"] = uid, device, host
    return rows
