"""Copy plans: patterns of strided copies, laid over pairs of pages.

Everything that moves bytes (offload, onboard, spill, mirror, copy-on-write, re-layout) is the same
thing, a `CopyPlan`. It is made from two layouts and two page tables (`kvmanager.core.spanplans`) and holds what
repeats once: a plan for a million tokens is some boxes and the page numbers of both sides. Executors in
`kvmanager.transport` write it out as `StridedCopies`, a bounded number at a time; nothing here touches memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Final

import numpy as np

from kvmanager.core.checksums import PageSections
from kvmanager.geometry import Int64Array

PIECE_COPIES: Final = 16_384
"""Copies that are written out at one time: half a MiB of offsets at most."""


class Urgency(IntEnum):
    """Who waits for a plan, the most urgent first. Executors give turns by it, and let no class starve."""

    WAITED_FOR = 0  # a request can't go on without these bytes
    SPILL = 1       # a request that was refused waits for the pages that these bytes leave
    WRITE_BACK = 2  # nobody waits


class Link(StrEnum):
    """A direction between host and device whose bytes a second may be limited."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


class Purpose(StrEnum):
    """Why bytes move; also the key of the movement counters."""

    OFFLOAD = "offload"
    ONBOARD = "onboard"
    SPILL = "spill"
    MIRROR = "mirror"
    COPY_ON_WRITE = "copy_on_write"
    PLACE = "place"
    CHECK = "check"  # moves nothing; its sums are compared
    SCRUB = "scrub"  # reads nothing: zeros are written over its targets

    @property
    def urgency(self) -> Urgency:
        """Who waits."""
        return _URGENCY[self]

    @property
    def link(self) -> Link | None:
        """The link that such bytes cross; None: none that is limited."""
        return _LINKS.get(self)


_URGENCY = {
    Purpose.OFFLOAD: Urgency.WRITE_BACK,
    Purpose.MIRROR: Urgency.WRITE_BACK,
    Purpose.SPILL: Urgency.SPILL,
    Purpose.ONBOARD: Urgency.WAITED_FOR,
    Purpose.COPY_ON_WRITE: Urgency.WAITED_FOR,
    Purpose.PLACE: Urgency.WAITED_FOR,
    Purpose.CHECK: Urgency.WRITE_BACK,
    Purpose.SCRUB: Urgency.WAITED_FOR,
}
_LINKS = {
    Purpose.OFFLOAD: Link.TO_HOST,
    Purpose.MIRROR: Link.TO_HOST,
    Purpose.SPILL: Link.TO_HOST,
    Purpose.ONBOARD: Link.TO_DEVICE,
}


@dataclass(frozen=True)
class StridedCopies:
    """`n` copies of one shape between two regions, written out.

    `source_offsets`, `target_offsets`: int64[n], bytes from the region's start.
    `counts`: outer extents, slowest first; `row_bytes`: the contiguous innermost run.
    `source_strides`, `target_strides`: bytes, one for each outer extent.
    """

    source_region: int
    target_region: int
    source_offsets: Int64Array
    target_offsets: Int64Array
    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    row_bytes: int

    def __post_init__(self) -> None:
        assert len(self.source_offsets) == len(self.target_offsets)
        assert len(self.counts) == len(self.source_strides) == len(self.target_strides)
        assert self.row_bytes > 0

    @cached_property
    def runs(self) -> int:
        """Contiguous runs in all."""
        return len(self.source_offsets) * math.prod(self.counts)

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return self.runs * self.row_bytes


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of bytes for one pair of pages, in bytes; offsets are those of slot 0 of page 0.

    `counts`: outer extents, slowest first; `row_bytes`: the contiguous innermost run.
    """

    source_offset: int
    target_offset: int
    source_slot_stride: int
    target_slot_stride: int
    source_page_stride: int
    target_page_stride: int
    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    row_bytes: int

    def __post_init__(self) -> None:
        assert len(self.counts) == len(self.source_strides) == len(self.target_strides)
        assert self.row_bytes > 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the box at one pair of pages."""
        return math.prod(self.counts) * self.row_bytes

    @property
    def whole_page(self) -> bool:
        """Whether the box is a run as long as a page on both sides: such runs of neighbours are one run."""
        return not self.counts and self.row_bytes == self.source_page_stride == self.target_page_stride


@dataclass(frozen=True, slots=True)
class PlacedPages:
    """One side of a pattern: placement p of group g is page `pages[g * advance + columns[p]]`, from `slots[p]` on.

    `pages`: int64[entries]; `columns`, `slots`: int64[placements]. Groups may share entries.
    """

    pages: Int64Array
    advance: int
    columns: Int64Array
    slots: Int64Array

    def of(self, first: int, last: int) -> Int64Array:
        """Pages of the placements of groups [first, last): int64[last - first, placements]."""
        if len(self.columns) == 1:  # a view where there is nothing to gather
            start = int(self.columns[0])
            if self.advance == 1:
                return self.pages[start + first : start + last, None]
        groups = np.arange(first, last, dtype=np.int64) * self.advance
        found: Int64Array = self.pages[groups[:, None] + self.columns]
        return found

    def of_columns(self, groups: int) -> Int64Array:
        """Pages of `groups` groups, each column once: int64[groups, columns in use]."""
        distinct = np.unique(self.columns)
        return replace(self, columns=distinct, slots=distinct).of(0, groups)

    def without_rest(self, groups: int) -> PlacedPages:
        """The same without entries that no group uses, as far as they lie at the ends."""
        low, high = int(self.columns.min()), int(self.columns.max())
        end = (groups - 1) * self.advance + high + 1
        return PlacedPages(self.pages[low:end], self.advance, self.columns - low, self.slots)


@dataclass(frozen=True)
class PagedCopies:
    """A pattern laid over `groups` groups of pages, between two regions: each box at each placement of each group."""

    source_region: int
    target_region: int
    groups: int
    source: PlacedPages
    target: PlacedPages
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        places = (self.source.columns, self.source.slots, self.target.columns, self.target.slots)
        assert len({len(part) for part in places}) == 1

    @property
    def placements(self) -> int:
        """Pairs of places in one group."""
        return len(self.source.columns)

    @property
    def pairs(self) -> int:
        """Pairs of places in all."""
        return self.groups * self.placements

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return self.pairs * sum(box.total_bytes for box in self.boxes)

    @cached_property
    def run_lengths(self) -> tuple[int, int, int]:
        """(runs, bytes of the shortest, bytes of the longest), whole pages joined to their neighbours."""
        runs, shortest, longest = 0, 0, 0
        for box in self.boxes if self.pairs else ():
            count, low, high = self.pairs * math.prod(box.counts), box.row_bytes, box.row_bytes
            if self._joins(box):
                pages = self.source.of(0, self.groups).reshape(-1), self.target.of(0, self.groups).reshape(-1)
                sizes = _neighbours(*pages)[1]
                count, low, high = len(sizes), int(sizes.min()) * low, int(sizes.max()) * high
            runs += count
            shortest, longest = min(shortest or low, low), max(longest, high)
        return runs, shortest, longest

    def _joins(self, box: Box) -> bool:
        return box.whole_page and not self.source.slots.any() and not self.target.slots.any()

    def part(self, first: int, last: int) -> PagedCopies:
        """Groups [first, last) alone."""
        source, target = (
            replace(side, pages=side.pages[first * side.advance :]).without_rest(last - first)
            for side in (self.source, self.target)
        )
        return replace(self, groups=last - first, source=source, target=target)

    def parts(self, most_copies: int = PIECE_COPIES) -> Iterator[PagedCopies]:
        """The same in parts of at most `most_copies` pairs, but at least one group, each."""
        if self.pairs:
            step = max(1, most_copies // self.placements)
            for first in range(0, self.groups, step):
                yield self.part(first, min(first + step, self.groups))

    def pieces(self, box: Box, most_copies: int = PIECE_COPIES) -> Iterator[StridedCopies]:
        """One box written out, at most `most_copies` copies at a time; neighbouring whole pages are joined."""
        step = max(1, most_copies // max(1, self.placements))
        regions = self.source_region, self.target_region
        for first in range(0, self.groups if self.placements else 0, step):
            last = min(first + step, self.groups)
            pages = self.source.of(first, last), self.target.of(first, last)
            starts = (
                self.source.slots * box.source_slot_stride + box.source_offset,
                self.target.slots * box.target_slot_stride + box.target_offset,
            )
            source = (pages[0] * box.source_page_stride + starts[0]).reshape(-1)
            target = (pages[1] * box.target_page_stride + starts[1]).reshape(-1)
            if self._joins(box):
                heads, sizes = _neighbours(pages[0].reshape(-1), pages[1].reshape(-1))
                if len(heads) == len(source):  # none to join, as mostly
                    yield StridedCopies(*regions, source, target, (), (), (), box.row_bytes)
                    continue
                for size in np.unique(sizes).tolist():
                    some = heads[sizes == size]
                    yield StridedCopies(*regions, source[some], target[some], (), (), (), size * box.row_bytes)
                continue
            for at in range(0, len(source), most_copies):
                ends = source[at : at + most_copies], target[at : at + most_copies]
                strides = box.source_strides, box.target_strides
                yield StridedCopies(*regions, *ends, box.counts, *strides, box.row_bytes)

    def __str__(self) -> str:
        """Regions, pages, boxes, bytes and runs, in one line."""
        runs, shortest, longest = self.run_lengths
        lengths = f"{shortest:,} B" if shortest == longest else f"{shortest:,}..{longest:,} B"
        pages = " -> ".join(_page_range(side, self.groups) for side in (self.source, self.target))
        return (
            f"region {self.source_region} -> {self.target_region}: {self.groups:,} x {self.placements} page pairs "
            f"({pages}) x {len(self.boxes)} boxes, {self.total_bytes:,} B in {runs:,} runs of {lengths}"
        )


def _page_range(side: PlacedPages, groups: int) -> str:
    if groups == 0 or len(side.columns) == 0:
        return "none"
    pages = side.without_rest(groups).pages
    return f"{len(pages):,} pages {int(pages.min())}..{int(pages.max())}"


def _neighbours(source: Int64Array, target: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(where a row of pages begins that follow each other on both sides, how many they are)."""
    heads = np.flatnonzero(np.concatenate(([True], (np.diff(source) != 1) | (np.diff(target) != 1))))
    return heads, np.diff(np.append(heads, len(source)))


@dataclass(frozen=True)
class CopyPlan:
    """A numbered unit of work for one mover: done as a whole, or failed as a whole.

    sums: what is summed up when all bytes have moved; its completion carries the result.
    """

    plan_id: int
    purpose: Purpose
    copies: tuple[PagedCopies, ...]
    sums: PageSections | None = None

    @property
    def urgency(self) -> Urgency:
        """Who waits for it."""
        return self.purpose.urgency

    @property
    def total_bytes(self) -> int:
        """Bytes moved by the plan."""
        return sum(c.total_bytes for c in self.copies)

    @property
    def runs(self) -> int:
        """Contiguous runs of the plan, whole pages joined to their neighbours."""
        return sum(c.run_lengths[0] for c in self.copies)

    def pieces(self) -> Iterator[StridedCopies]:
        """The whole plan written out, piece by piece."""
        for copies in self.copies:
            for box in copies.boxes:
                yield from copies.pieces(box)

    def __str__(self) -> str:
        """A line for the plan and one for each pattern in it: regions, pages, bytes, and runs from short to long."""
        head = f"plan {self.plan_id} {self.purpose}: {self.total_bytes:,} B in {self.runs:,} runs"
        return "\n".join([head, *(f"  {copies}" for copies in self.copies)])
