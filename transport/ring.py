"""A pull through a ring of staging: which pages a chunk reads, where they lie meanwhile, and which copies follow. Pure.

The placement's source pages are the numbers of the pages in reading order. A chunk takes `chunk_pages` of them into
the next slot of the ring; the copies out of it are the pairs of the placement whose source page it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvmanager.core.checksums import SUM_WORDS, ExpectedSums, PageSections, SumArray
from kvmanager.core.plans import CopyPlan, PagedCopies, PlacedPages
from kvmanager.errors import ChecksumMismatch, InvalidArgument
from kvmanager.geometry import Int64Array
from kvmanager.transport.checksums import section_sum
from kvmanager.transport.executor import ByteArray, RegionMap
from kvmanager.transport.runs import paged_bounds
from kvmanager.transport.turned_pages import Turn

U64Array = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class RingPull:
    """`addresses`: uint64[pages], of the peer. `offset`: of the ring of `slots` chunks, in bytes of staging.

    `expected`: sums of some of the pages, compared when they lie in staging. `turn`: the peer turns the pages when it
    packs them, and `placement` takes them as turned; there are no sums then, which are of pages as they were.
    """

    addresses: U64Array
    page_bytes: int
    offset: int
    slots: int
    chunk_pages: int
    first_slot: int
    placement: CopyPlan
    expected: ExpectedSums | None = None
    turn: Turn | None = None

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-len(self.addresses) // self.chunk_pages)

    def check(self, staging: int, regions: RegionMap) -> None:
        """Raises InvalidArgument when anything would leave its place, be placed unread, or go back to staging."""
        if not (self.page_bytes and self.slots and self.chunk_pages):
            raise InvalidArgument(
                f"a ring of {self.slots} slots x {self.chunk_pages} pages x {self.page_bytes} B: each is at least 1"
            )
        if self.first_slot >= self.slots:
            raise InvalidArgument(f"the first chunk goes to slot {self.first_slot} of a ring of {self.slots}")
        end = self.offset + self.slots * self.chunk_pages * self.page_bytes
        if end > regions.size(staging):
            raise InvalidArgument(
                f"a ring of bytes [{self.offset}, {end}) leaves region {staging} of {regions.size(staging)} bytes"
            )
        if self.turn is not None:
            self.turn.check(len(self.addresses), self.page_bytes)
            self.turn.check(self.chunk_pages, self.page_bytes)
            if self.expected is not None:
                raise InvalidArgument("checksums of pages that the peer turns: they are of pages as they were")
        if self.expected is not None:
            self._check_sums(self.expected)
        for c in self.placement.copies:
            self._check_source(staging, c)
        regions.check(self.placement, {staging: len(self.addresses) * self.page_bytes})

    def _check_sums(self, expected: ExpectedSums) -> None:
        pages = expected.pages
        if len(pages) and (int(pages[-1]) >= len(self.addresses) or (np.diff(pages) <= 0).any()):
            raise InvalidArgument(f"checksums of pages {pages[:4]}... of {len(self.addresses)}, which must ascend")
        if any(start + size > self.page_bytes or size <= 0 for start, size in expected.sections):
            raise InvalidArgument(f"checksums of {expected.sections} (start, bytes) in a page of {self.page_bytes} B")

    def verify(self, chunk: int, staging: ByteArray) -> None:
        """Raises ChecksumMismatch unless the chunk's bytes in staging are those that were summed up at the source."""
        if self.expected is None:
            return
        first, _ = self._pages(chunk)
        start, _ = self.staging_range(chunk)
        low, high = self._known(chunk)
        for place in range(low, high):
            page = int(self.expected.pages[place])
            at = start + (page - first) * self.page_bytes
            for number, (begin, size) in enumerate(self.expected.sections):
                found = section_sum(staging[at + begin : at + begin + size])
                if not np.array_equal(found, self.expected.sums[place, number * SUM_WORDS : (number + 1) * SUM_WORDS]):
                    raise ChecksumMismatch(
                        f"pull {self.placement.plan_id}: page {page} of {len(self.addresses)}, at "
                        f"{int(self.addresses[page]):#x} of the peer: bytes [{begin}, {begin + size}) are not those "
                        "that were written there; nothing of the pull is used"
                    )

    def sums_asked(self, chunk: int, staging: int) -> PageSections | None:
        """What is to be summed up in staging to `compare` the chunk; None where nothing is known of it."""
        low, high = self._known(chunk)
        if self.expected is None or low == high:
            return None
        first, _ = self._pages(chunk)
        start, _ = self.staging_range(chunk)
        offsets = start + (self.expected.pages[low:high] - first) * self.page_bytes
        return PageSections(np.full(high - low, staging, np.int32), offsets, self.expected.sections)

    def compare(self, chunk: int, sums: SumArray) -> None:
        """Raises ChecksumMismatch unless these sums, of what `sums_asked` named, are those of the source."""
        assert self.expected is not None
        low, high = self._known(chunk)
        wrong = np.flatnonzero((sums != self.expected.sums[low:high]).any(axis=1))
        if len(wrong):
            page = int(self.expected.pages[low + int(wrong[0])])
            raise ChecksumMismatch(
                f"pull {self.placement.plan_id}: page {page} of {len(self.addresses)}, at "
                f"{int(self.addresses[page]):#x} of the peer, does not hold what was written there; "
                "nothing of the pull is used"
            )

    def _known(self, chunk: int) -> tuple[int, int]:
        """Which of the expected sums are of the chunk's pages: [low, high)."""
        if self.expected is None:
            return 0, 0
        low, high = np.searchsorted(self.expected.pages, self._pages(chunk)).tolist()
        return low, high

    def _check_source(self, staging: int, c: PagedCopies) -> None:
        if c.source_region != staging or c.target_region == staging:
            raise InvalidArgument(
                f"a pattern places from region {c.source_region} to {c.target_region}; "
                f"placement goes from staging (region {staging}) to another region"
            )
        if not c.pairs:
            return
        last = int(c.source.of_columns(c.groups).max())
        if last >= len(self.addresses):
            raise InvalidArgument(f"page {last} is placed, which the pull does not read: it has {len(self.addresses)}")
        strides = {box.source_page_stride for box in c.boxes}
        low, high = paged_bounds(_on_first_page(c), 0)
        if strides - {self.page_bytes} or low < 0 or high > self.page_bytes:
            raise InvalidArgument(
                f"bytes [{low}, {high}) of a page, pages {sorted(strides)} B apart; a page has {self.page_bytes} B"
            )

    def staging_range(self, chunk: int) -> tuple[int, int]:
        """Bytes of staging that the chunk holds while its turn lasts."""
        slot = (self.first_slot + chunk) % self.slots
        start = self.offset + slot * self.chunk_pages * self.page_bytes
        first, last = self._pages(chunk)
        return start, start + (last - first) * self.page_bytes

    def reads(self, chunk: int) -> tuple[U64Array, U64Array, U64Array]:
        """(addresses of the peer, offsets in staging, lengths): uint64[pages of the chunk] each."""
        first, last = self._pages(chunk)
        start, end = self.staging_range(chunk)
        offsets = np.arange(start, end, self.page_bytes, dtype=np.uint64)
        return self.addresses[first:last], offsets, np.full(last - first, self.page_bytes, np.uint64)

    def chunk_addresses(self, chunk: int) -> Int64Array:
        """Where the chunk's pages are at the peer: int64[pages of the chunk]."""
        first, last = self._pages(chunk)
        return self.addresses[first:last].astype(np.int64)

    @cached_property
    def run_bytes(self) -> float:
        """Mean length of the runs that the placement consists of; 0 without any."""
        return self.placement.total_bytes / max(self.placement.runs, 1)

    def placed(self, chunk: int) -> CopyPlan:
        """The copies out of the chunk's place in staging."""
        first, last = self._pages(chunk)
        start, _ = self.staging_range(chunk)
        parts = (
            _moved(part, first, start)
            for copies, ends in zip(self.placement.copies, self._ends, strict=True)
            for part in _within(copies, *ends, first, last)
        )
        return CopyPlan(self.placement.plan_id, self.placement.purpose, tuple(parts))

    def _pages(self, chunk: int) -> tuple[int, int]:
        first = chunk * self.chunk_pages
        return first, min(first + self.chunk_pages, len(self.addresses))

    @cached_property
    def _ends(self) -> list[tuple[Int64Array, Int64Array]]:
        """First and last source page of every group, int64[groups] each, by pattern."""
        found = []
        for c in self.placement.copies:
            pages = c.source.of_columns(c.groups) if c.pairs else np.empty((0, 1), np.int64)
            found.append((pages.min(axis=1), pages.max(axis=1)))
        return found


def _on_first_page(c: PagedCopies) -> PagedCopies:
    """The pattern with all source pages taken for page 0."""
    return replace(c, source=replace(c.source, pages=np.zeros_like(c.source.pages)))


def _within(
    c: PagedCopies, lows: Int64Array, highs: Int64Array, first: int, last: int
) -> Iterator[PagedCopies]:
    """The pairs whose source page is one of [first, last)."""
    touched = np.flatnonzero((highs >= first) & (lows < last))
    whole = (lows[touched] >= first) & (highs[touched] < last)
    if whole.any():
        yield _of_groups(c, touched[whole])
    for group in touched[~whole].tolist():
        pages = c.source.of(group, group + 1)[0]
        mine = (pages >= first) & (pages < last)
        if mine.any():
            yield _of_places(c, group, mine)


def _of_groups(c: PagedCopies, groups: Int64Array) -> PagedCopies:
    """Some of the groups alone."""
    start, count = int(groups[0]), len(groups)
    if int(groups[-1]) - start + 1 == count:
        return c.part(start, start + count)
    source, target = (_gathered(side, groups) for side in (c.source, c.target))
    return replace(c, groups=count, source=source, target=target)


def _gathered(side: PlacedPages, groups: Int64Array) -> PlacedPages:
    distinct, columns = np.unique(side.columns, return_inverse=True)
    pages = side.pages[groups[:, None] * side.advance + distinct].reshape(-1)
    return PlacedPages(pages, len(distinct), columns.reshape(-1), side.slots)


def _of_places(c: PagedCopies, group: int, mine: npt.NDArray[np.bool_]) -> PagedCopies:
    """Some placements of one group."""
    source, target = (
        PlacedPages(side.of(group, group + 1)[0, mine], 0, np.arange(mine.sum()), side.slots[mine])
        for side in (c.source, c.target)
    )
    return replace(c, groups=1, source=source, target=target)


def _moved(c: PagedCopies, first: int, start: int) -> PagedCopies:
    """The pattern with source page `first` at byte `start` of staging."""
    boxes = tuple(replace(box, source_offset=box.source_offset + start) for box in c.boxes)
    return replace(c, source=replace(c.source, pages=c.source.pages - first), boxes=boxes)
