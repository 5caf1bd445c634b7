"""Copy plans: strided copies between regions, derived from two layouts and two placements.

Everything that moves bytes (offload, onboard, spill, mirror, copy-on-write, re-layout) is the same
thing, a `CopyPlan`. Executors in `kvmanager.transport` carry plans out; nothing here touches memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.core.checksums import PageSections
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import Int64Array
from kvmanager.layout import Component, KVLayout

Int32Array = npt.NDArray[np.int32]


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
}
_LINKS = {
    Purpose.OFFLOAD: Link.TO_HOST,
    Purpose.MIRROR: Link.TO_HOST,
    Purpose.SPILL: Link.TO_HOST,
    Purpose.ONBOARD: Link.TO_DEVICE,
}


@dataclass(frozen=True)
class StridedCopies:
    """`n` copies of one shape between two regions.

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
        total = len(self.source_offsets)
        for count in self.counts:
            total *= count
        return total

    @property
    def total_bytes(self) -> int:
        """Bytes moved."""
        return self.runs * self.row_bytes


@dataclass(frozen=True)
class CopyPlan:
    """A numbered unit of work for one mover: done as a whole, or failed as a whole.

    sums: what is summed up when all bytes have moved; its completion carries the result.
    """

    plan_id: int
    purpose: Purpose
    copies: tuple[StridedCopies, ...]
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
        """Contiguous runs of the plan."""
        return sum(c.runs for c in self.copies)

    def __str__(self) -> str:
        """A line for the plan and one for each kind of copy in it: regions, sets, shape, runs and bytes."""
        head = f"plan {self.plan_id} {self.purpose}: {self.total_bytes:,} B in {self.runs:,} runs"
        alike: dict[tuple[int, int, int, tuple[int, ...], int], int] = {}
        for c in self.copies:
            shape = c.source_region, c.target_region, len(c.source_offsets), c.counts, c.row_bytes
            alike[shape] = alike.get(shape, 0) + 1
        lines = []
        for (source, target, offsets, counts, row_bytes), sets in alike.items():
            runs = sets * offsets * math.prod(counts)
            shape_text = " x ".join(map(str, (offsets, *counts)))
            lines.append(
                f"  region {source} -> {target}: {sets} x ({shape_text}) runs of {row_bytes:,} B, "
                f"{runs * row_bytes:,} B in {runs:,} runs"
            )
        return "\n".join([head, *lines])


@dataclass(frozen=True)
class Rows:
    """Where tokens lie: one entry a token, in token order (`region`, `page`, `slot` of equal length)."""

    region: Int32Array
    page: Int64Array
    slot: Int64Array

    def __len__(self) -> int:
        return len(self.page)

    def __getitem__(self, keep: slice | npt.NDArray[np.bool_]) -> Rows:
        return Rows(self.region[keep], self.page[keep], self.slot[keep])


@dataclass(frozen=True)
class Box:
    """A rectangle of bytes for one (page, page) pair, offsets relative to the pages' starts and to slot 0."""

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


def copy_whole_pages(
    page_bytes: int,
    source_regions: Sequence[int],
    source_pages: Int64Array,
    target_regions: Sequence[int],
    target_pages: Int64Array,
) -> tuple[StridedCopies, ...]:
    """Pages of one layout, copied as they are, on every rank alike (region r to region r)."""
    assert len(source_regions) == len(target_regions)
    source, target = _merge_runs(source_pages * page_bytes, target_pages * page_bytes, page_bytes)
    copies = []
    for source_region, target_region in zip(source_regions, target_regions, strict=True):
        for length in np.unique(source[1]):
            pick = source[1] == length
            copies.append(
                StridedCopies(
                    source_region, target_region, source[0][pick], target[pick], (), (), (), int(length)
                )
            )
    return tuple(copies)


def _merge_runs(
    source: Int64Array, target: Int64Array, length: int
) -> tuple[tuple[Int64Array, Int64Array], Int64Array]:
    """Joins neighbours that are adjacent on both sides: ((source starts, run bytes), target starts)."""
    if len(source) == 0:
        return (source, source), target
    joined = (np.diff(source) == length) & (np.diff(target) == length)
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    sizes = np.diff(np.concatenate((starts, [len(source)]))) * length
    return (source[starts], sizes), target[starts]


def copy_rows(
    source_layout: KVLayout,
    target_layout: KVLayout,
    source: Rows,
    target: Rows,
) -> tuple[StridedCopies, ...]:
    """The copies that bring every component of the target layout from the source, token by token.

    `source[i]` and `target[i]` are the places of the same token. The target layout's components must
    all exist in the source with equal row bytes: a section left behind would be wrong KV, so it is
    refused (LayoutMismatch) when the plan is made.
    """
    if len(source) != len(target):
        raise LayoutMismatch(f"{len(source)} source rows for {len(target)} target rows")
    if len(source) == 0:
        return ()
    pairs = matched_components(source_layout, target_layout)
    copies: list[StridedCopies] = []
    for group in progressions(source, target):
        for box in boxes(pairs, source_layout, target_layout, group):
            copies.extend(_place_box(box, group))
    return tuple(copies)


@dataclass(frozen=True)
class Progression:
    """Page pairs between two regions whose common tokens step through both pages alike.

    `rows` tokens, `source_step`/`target_step` slots apart; the first ones' slots differ from pair to pair (int64).
    """

    source_step: int
    target_step: int
    rows: int
    source_region: int
    target_region: int
    source_slot: Int64Array
    target_slot: Int64Array
    source_page: Int64Array
    target_page: Int64Array


def progressions(source: Rows, target: Rows) -> Iterable[Progression]:
    """Splits token pairs into arithmetic progressions within a page pair, grouped by their pattern."""
    order = np.lexsort(
        (source.slot, target.page, target.region, source.page, source.region)
    )
    source, target = (
        Rows(rows.region[order], rows.page[order], rows.slot[order]) for rows in (source, target)
    )
    new_pair = np.ones(len(order), dtype=bool)
    new_pair[1:] = (
        (np.diff(source.region) != 0)
        | (np.diff(source.page) != 0)
        | (np.diff(target.region) != 0)
        | (np.diff(target.page) != 0)
    )
    step_source = np.diff(source.slot, append=0)
    step_target = np.diff(target.slot, append=0)
    # A token starts a new progression when its pair is new, or when the step into it differs from
    # the step before it, unless that step was itself the first of a progression.
    starts = new_pair.copy()
    change = np.ones(len(order), dtype=bool)
    change[1:] = (step_source[1:] != step_source[:-1]) | (step_target[1:] != step_target[:-1])
    starts |= _step_breaks(new_pair, change)
    heads = np.flatnonzero(starts)
    rows = np.diff(np.append(heads, len(order)))
    single = rows == 1
    stride_source = np.where(single, 1, step_source[heads])
    stride_target = np.where(single, 1, step_target[heads])
    for alike in _alike(stride_source, stride_target, rows, source.region[heads], target.region[heads]):
        first, pick = alike[0], heads[alike]
        yield Progression(
            int(stride_source[first]),
            int(stride_target[first]),
            int(rows[first]),
            int(source.region[pick[0]]),
            int(target.region[pick[0]]),
            source.slot[pick],
            target.slot[pick],
            source.page[pick],
            target.page[pick],
        )


def _alike(*columns: npt.NDArray[np.signedinteger[Any]]) -> Iterable[Int64Array]:
    """Groups of row numbers in which all columns agree, rows ascending."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, which = np.unique(column, return_inverse=True)
        # Numbered anew after each column, so that the key stays small.
        key = np.unique(key * len(values) + which.reshape(-1), return_inverse=True)[1].reshape(-1)
    order = np.argsort(key, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


def _step_breaks(new_pair: npt.NDArray[np.bool_], change: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Where a progression must end inside a page pair.

    `change[i]`: the step out of token i differs from the step into it. Token i is then the last of its
    progression, so i + 1 starts another, except when i itself is a first token (it has no step into it).
    Walking is needed only where changes touch, which is rare, so it runs over the changes alone.
    """
    breaks = np.zeros(len(new_pair), dtype=bool)
    last_start = -1
    for i in np.flatnonzero(change | new_pair).tolist():
        if new_pair[i]:
            last_start = i
        elif i != last_start and i + 1 < len(new_pair) and not new_pair[i + 1]:
            breaks[i + 1] = True
            last_start = i + 1
    return breaks


def matched_components(source: KVLayout, target: KVLayout) -> list[tuple[Component, Component]]:
    """Pairs of components in the target's byte order."""
    pairs = []
    for component in sorted(target.components, key=lambda c: c.offset):
        partner = source.by_key.get((component.section, component.layer))
        if partner is None:
            raise LayoutMismatch(
                f"{source.name} has no {component.section} of layer {component.layer}, which {target.name} needs"
            )
        if partner.row_bytes != component.row_bytes:
            raise LayoutMismatch(
                f"{component.section} rows of layer {component.layer}: {partner.row_bytes} B in {source.name}, "
                f"{component.row_bytes} B in {target.name}"
            )
        pairs.append((partner, component))
    return pairs


def boxes(
    pairs: list[tuple[Component, Component]],
    source_layout: KVLayout,
    target_layout: KVLayout,
    step: Progression,
) -> list[Box]:
    """One box a component, then neighbours joined: first side by side in a row, then row after row."""
    check_slots(source_layout, step.source_slot, step.source_step, step.rows)
    check_slots(target_layout, step.target_slot, step.target_step, step.rows)
    found: list[Box] = []
    for source, target in pairs:
        box = Box(
            source.offset,
            target.offset,
            source.slot_stride,
            target.slot_stride,
            source.page_stride,
            target.page_stride,
            (step.rows,),
            (step.source_step * source.slot_stride,),
            (step.target_step * target.slot_stride,),
            source.row_bytes,
        )
        if found and (joined := _side_by_side(found[-1], box)) is not None:
            found[-1] = joined
        else:
            found.append(box)
    found = [_flatten(box) for box in found]
    if not step.rows == source_layout.page_rows == target_layout.page_rows:
        return found  # parts of pages don't touch those of the next group of layers
    whole: list[Box] = []
    for box in found:
        if whole and (joined := _end_to_end(whole[-1], box)) is not None:
            whole[-1] = joined
        else:
            whole.append(box)
    return whole


def check_slots(layout: KVLayout, first: Int64Array, step: int, rows: int) -> None:
    """Raises LayoutMismatch when a token lies outside its page."""
    last = first + step * (rows - 1)
    low, high = int(min(first.min(), last.min())), int(max(first.max(), last.max()))
    if not 0 <= low <= high < layout.page_rows:
        raise LayoutMismatch(f"slots {low}..{high} outside a page of {layout.page_rows} rows of {layout.name}")


def _same_grid(a: Box, b: Box) -> bool:
    return (
        a.source_page_stride == b.source_page_stride
        and a.target_page_stride == b.target_page_stride
        and a.counts == b.counts
        and a.source_strides == b.source_strides
        and a.target_strides == b.target_strides
    )


def _side_by_side(a: Box, b: Box) -> Box | None:
    """`a` and `b` as one box of longer rows, where they touch on both sides."""
    touching = (
        a.source_offset + a.row_bytes == b.source_offset and a.target_offset + a.row_bytes == b.target_offset
    )
    if not (touching and _same_grid(a, b)):
        return None
    return Box(
        a.source_offset,
        a.target_offset,
        a.source_slot_stride,
        a.target_slot_stride,
        a.source_page_stride,
        a.target_page_stride,
        a.counts,
        a.source_strides,
        a.target_strides,
        a.row_bytes + b.row_bytes,
    )


def _flatten(box: Box) -> Box:
    """A box whose rows touch on both sides (or that has one row) as a single run."""
    (rows,) = box.counts
    contiguous = box.source_strides == box.target_strides == (box.row_bytes,)
    if rows > 1 and not contiguous:
        return box
    return Box(
        box.source_offset,
        box.target_offset,
        box.source_slot_stride,
        box.target_slot_stride,
        box.source_page_stride,
        box.target_page_stride,
        (),
        (),
        (),
        rows * box.row_bytes,
    )


def _end_to_end(a: Box, b: Box) -> Box | None:
    """Two single runs that follow one another on both sides."""
    return _side_by_side(a, b) if not a.counts and not b.counts else None


def _place_box(box: Box, group: Progression) -> Iterable[StridedCopies]:
    """The box at every page pair of the progression."""
    source = group.source_page * box.source_page_stride + group.source_slot * box.source_slot_stride
    target = group.target_page * box.target_page_stride + group.target_slot * box.target_slot_stride
    source += box.source_offset
    target += box.target_offset
    regions = (group.source_region, group.target_region)
    if box.counts:
        strides = (box.source_strides, box.target_strides)
        yield StridedCopies(*regions, source, target, box.counts, *strides, box.row_bytes)
        return
    if len(source) == 1:
        yield StridedCopies(*regions, source, target, (), (), (), box.row_bytes)
        return
    order = np.argsort(source, kind="stable")
    (starts, sizes), targets = _merge_runs(source[order], target[order], box.row_bytes)
    for size in np.unique(sizes):
        run = sizes == size
        yield StridedCopies(*regions, starts[run], targets[run], (), (), (), int(size))
