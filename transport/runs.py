"""Plans as contiguous runs and as bounded slices: what executors make of a plan's pieces.

All offsets are int64 bytes from a region's start. Nothing here touches memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from kvmanager.core.plans import CopyPlan, PagedCopies, StridedCopies
from kvmanager.geometry import Int64Array


@dataclass(frozen=True)
class Runs:
    """Contiguous copies between two regions: `source`, `target`, `lengths` are int64[n], bytes."""

    source_region: int
    target_region: int
    source: Int64Array
    target: Int64Array
    lengths: Int64Array

    @property
    def total_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.lengths.sum())


def bounds(offsets: Int64Array, counts: tuple[int, ...], strides: tuple[int, ...], row_bytes: int) -> tuple[int, int]:
    """[first, last) byte that any of the copies touches on one side; (0, 0) for no copies."""
    if len(offsets) == 0:
        return 0, 0
    # Plans have many sets of few copies: below some dozens numpy's reductions cost more than a list's.
    values = offsets.tolist() if len(offsets) <= 32 else (int(offsets.min()), int(offsets.max()))
    low, high = min(values), max(values) + row_bytes
    for count, stride in zip(counts, strides, strict=True):
        if stride < 0:
            low += (count - 1) * stride
        else:
            high += (count - 1) * stride
    return low, high


def paged_bounds(copies: PagedCopies, side: int) -> tuple[int, int]:
    """[first, last) byte that the pattern may touch on one side (0: source, 1: target); (0, 0) when it is empty.

    Python integers: a plan from outside may hold strides whose sums leave 64 bits. Taken from the extreme pages
    and slots, not from their pairs: exact for pages that lie in their region whole.
    """
    if not copies.pairs:
        return 0, 0
    places = (copies.source, copies.target)[side]
    pages = places.of_columns(copies.groups)
    page_ends, slot_ends = ((int(v.min()), int(v.max())) for v in (pages, places.slots))
    found = []
    for box in copies.boxes:
        offset, page_stride, slot_stride, strides = (
            (box.source_offset, box.source_page_stride, box.source_slot_stride, box.source_strides),
            (box.target_offset, box.target_page_stride, box.target_slot_stride, box.target_strides),
        )[side]
        starts = [offset + page * page_stride + slot * slot_stride for page in page_ends for slot in slot_ends]
        reach = [(count - 1) * stride for count, stride in zip(box.counts, strides, strict=True)]
        low = min(starts) + sum(step for step in reach if step < 0)
        found.append((low, max(starts) + sum(step for step in reach if step > 0) + box.row_bytes))
    return min(low for low, _ in found), max(high for _, high in found)


def plan_runs(plan: CopyPlan) -> tuple[Runs, ...]:
    """The plan's copies as runs, one `Runs` for each pair of regions, by source offset, neighbours joined."""
    parts: dict[tuple[int, int], list[StridedCopies]] = {}
    for copies in plan.pieces():
        parts.setdefault((copies.source_region, copies.target_region), []).append(copies)
    return tuple(_joined(source, target, group) for (source, target), group in parts.items())


def runs_of(copies: PagedCopies) -> Runs:
    """All runs of one pattern, by source offset, neighbours joined."""
    pieces = [piece for box in copies.boxes for piece in copies.pieces(box)]
    return _joined(copies.source_region, copies.target_region, pieces)


def _joined(source_region: int, target_region: int, group: list[StridedCopies]) -> Runs:
    source = np.concatenate([spread(c.source_offsets, c.counts, c.source_strides) for c in group])
    target = np.concatenate([spread(c.target_offsets, c.counts, c.target_strides) for c in group])
    lengths = np.concatenate([np.full(c.runs, c.row_bytes, dtype=np.int64) for c in group])
    order = np.argsort(source, kind="stable")
    return Runs(source_region, target_region, *join_neighbours(source[order], target[order], lengths[order]))


def spread(offsets: Int64Array, counts: tuple[int, ...], strides: tuple[int, ...]) -> Int64Array:
    """The offset of every row, int64[n * prod(counts)], slowest extent first."""
    grid = offsets
    for count, stride in zip(counts, strides, strict=True):
        grid = np.add.outer(grid, np.arange(count, dtype=np.int64) * stride)
    return grid.reshape(-1)


def join_neighbours(
    source: Int64Array, target: Int64Array, lengths: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(source, target, lengths) with consecutive runs joined where they touch on both sides."""
    if len(source) == 0:
        return source, target, lengths
    touching = (source[1:] == source[:-1] + lengths[:-1]) & (target[1:] == target[:-1] + lengths[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~touching)))
    return source[heads], target[heads], np.add.reduceat(lengths, heads)


def slices(copies: StridedCopies, most_bytes: int, most_runs: int) -> Iterator[StridedCopies]:
    """The same copies in pieces of at most `most_bytes` bytes and `most_runs` runs each, in order.

    Pieces keep the shape of the whole where they can, for one strided assignment is far cheaper than
    its rows one by one. A single row longer than `most_bytes` is cut too.
    """
    each_runs = math.prod(copies.counts)
    each_bytes = each_runs * copies.row_bytes
    count = len(copies.source_offsets)
    if each_bytes <= most_bytes and each_runs <= most_runs:
        step = max(1, min(most_bytes // each_bytes, most_runs // each_runs))
        if step >= count:
            yield from (copies,) if count else ()
            return
        for first in range(0, count, step):
            part = slice(first, first + step)
            yield _at(copies, copies.source_offsets[part], copies.target_offsets[part], 0)
        return
    for source, target in zip(copies.source_offsets.tolist(), copies.target_offsets.tolist(), strict=True):
        if copies.counts:
            steps = np.arange(copies.counts[0], dtype=np.int64)
            ends = source + steps * copies.source_strides[0], target + steps * copies.target_strides[0]
            yield from slices(_at(copies, *ends, 1), most_bytes, most_runs)
        else:
            yield from _cut_row(copies, source, target, most_bytes)


def _at(copies: StridedCopies, source: Int64Array, target: Int64Array, without: int) -> StridedCopies:
    """The same at other offsets, without the slowest so many extents. Not `replace`, which takes twice as long."""
    return StridedCopies(
        copies.source_region,
        copies.target_region,
        source,
        target,
        copies.counts[without:],
        copies.source_strides[without:],
        copies.target_strides[without:],
        copies.row_bytes,
    )


def _cut_row(copies: StridedCopies, source: int, target: int, most_bytes: int) -> Iterator[StridedCopies]:
    for first in range(0, copies.row_bytes, most_bytes):
        yield replace(
            copies,
            source_offsets=np.array([source + first], dtype=np.int64),
            target_offsets=np.array([target + first], dtype=np.int64),
            row_bytes=min(most_bytes, copies.row_bytes - first),
        )
