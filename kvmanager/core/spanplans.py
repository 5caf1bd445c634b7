"""Copy plans for many alike spans at once: worked out for one span, then laid over all of them.

`plans.copy_rows` looks at every token. Here only the tokens of one span are looked at, and what repeats becomes an
extent of the copy: a hand-off of a million tokens into consecutive pages is some hundred copy sets of one offset each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.core.plans import (
    Box,
    Int32Array,
    Progression,
    Rows,
    StridedCopies,
    boxes,
    check_slots,
    matched_components,
    progressions,
)
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import Int64Array, TokenOrder
from kvmanager.layout import KVLayout


@dataclass(frozen=True)
class SpanPlaces:
    """Where alike spans lie.

    page, slot: int64[tokens of a span], which of the span's pages each token lies in, and where there.
    regions: int32[pages of a span]. pages: int64[spans, pages of a span], page indexes in those regions.
    """

    page: Int64Array
    slot: Int64Array
    regions: Int32Array
    pages: Int64Array

    @classmethod
    def ordered(cls, order: TokenOrder, page_rows: int, regions: Int32Array, pages: Int64Array) -> SpanPlaces:
        """Spans in one token order. `pages`: int64[spans, segments]."""
        page, slot = order.place(np.arange(order.segments * page_rows, dtype=np.int64))
        return cls(page, slot, regions, pages)

    @classmethod
    def sequential(cls, page_rows: int, region: int, pages: Int64Array) -> SpanPlaces:
        """Spans whose tokens fill one page after the other. `pages`: int64[spans, pages of a span]."""
        page, slot = np.divmod(np.arange(pages.shape[1] * page_rows, dtype=np.int64), page_rows)
        return cls(page, slot, np.full(pages.shape[1], region, np.int32), pages)

    @property
    def rows(self) -> Rows:
        """The tokens of one span, by the number of the page within the span."""
        return Rows(self.regions[self.page], self.page, self.slot)


def copy_spans(
    source_layout: KVLayout, target_layout: KVLayout, source: SpanPlaces, target: SpanPlaces
) -> tuple[StridedCopies, ...]:
    """As `copy_rows` for all tokens of all spans. Raises LayoutMismatch for spans that don't hold the same tokens."""
    if source.page.shape != target.page.shape or len(source.pages) != len(target.pages):
        raise LayoutMismatch(
            f"{len(source.pages)} spans of {len(source.page)} tokens for {len(target.pages)} of {len(target.page)}"
        )
    if len(source.pages) == 0 or len(source.page) == 0:
        return ()
    pairs = matched_components(source_layout, target_layout)
    copies: list[StridedCopies] = []
    made: dict[tuple[int, int, int], list[Box]] = {}  # ranks differ in where rows lie, not in their shape
    for pattern in progressions(source.rows, target.rows):
        shape = pattern.source_step, pattern.target_step, pattern.rows
        if shape not in made:
            made[shape] = boxes(pairs, source_layout, target_layout, pattern)
        check_slots(source_layout, pattern.source_slot, pattern.source_step, pattern.rows)
        check_slots(target_layout, pattern.target_slot, pattern.target_step, pattern.rows)
        spread = _Spread.over(pattern, source.pages, target.pages)
        copies += [spread.place(box, pattern.source_region, pattern.target_region) for box in made[shape]]
    return tuple(copies)


@dataclass(frozen=True)
class _Side:
    """Pages and slots of one side: `first` of them, int64[n], and steps for each extent that repeats."""

    page: Int64Array
    slot: Int64Array
    steps: tuple[tuple[int, int], ...]  # (pages, slots), slowest first

    def offsets(self, start: int, page_stride: int, slot_stride: int) -> Int64Array:
        return self.page * page_stride + (self.slot * slot_stride + start)

    def strides(self, page_stride: int, slot_stride: int) -> tuple[int, ...]:
        return tuple(pages * page_stride + slots * slot_stride for pages, slots in self.steps)


@dataclass(frozen=True)
class _Spread:
    """A pattern over all spans: what repeats at equal steps on both sides is an extent, the rest is offsets."""

    counts: tuple[int, ...]
    source: _Side
    target: _Side

    @classmethod
    def over(cls, pattern: Progression, source_pages: Int64Array, target_pages: Int64Array) -> _Spread:
        """Folds the pairs of the pattern, then the spans, where they step evenly."""
        pages = source_pages[:, pattern.source_page], target_pages[:, pattern.target_page]
        slots = pattern.source_slot, pattern.target_slot
        counts: list[int] = []
        steps: list[list[tuple[int, int]]] = [[], []]
        pairs = len(slots[0])
        if pairs > 1 and all(_even(p, axis=1) and _even(s[None], axis=1) for p, s in zip(pages, slots, strict=True)):
            counts.append(pairs)
            for side in (0, 1):
                steps[side].append((int(pages[side][0, 1] - pages[side][0, 0]), int(slots[side][1] - slots[side][0])))
            pages, slots = (pages[0][:, :1], pages[1][:, :1]), (slots[0][:1], slots[1][:1])
        spans = len(pages[0])
        if spans > 1 and all(_even(p, axis=0) for p in pages):
            counts.insert(0, spans)
            for side in (0, 1):
                steps[side].insert(0, (int(pages[side][1, 0] - pages[side][0, 0]), 0))
            pages = pages[0][:1], pages[1][:1]
        source, target = (
            _Side(page.reshape(-1), np.tile(slot, len(page)), tuple(step))
            for page, slot, step in zip(pages, slots, steps, strict=True)
        )
        return cls(tuple(counts), source, target)

    def place(self, box: Box, source_region: int, target_region: int) -> StridedCopies:
        """The box at every pair of pages."""
        source = self.source.offsets(box.source_offset, box.source_page_stride, box.source_slot_stride)
        target = self.target.offsets(box.target_offset, box.target_page_stride, box.target_slot_stride)
        counts = (*self.counts, *box.counts)
        strides = (
            (*self.source.strides(box.source_page_stride, box.source_slot_stride), *box.source_strides),
            (*self.target.strides(box.target_page_stride, box.target_slot_stride), *box.target_strides),
        )
        row_bytes = box.row_bytes
        while counts and strides[0][-1] == strides[1][-1] == row_bytes:
            row_bytes *= counts[-1]
            counts, strides = counts[:-1], (strides[0][:-1], strides[1][:-1])
        return StridedCopies(source_region, target_region, source, target, counts, *strides, row_bytes)


def _even(values: npt.NDArray[np.int64], axis: int) -> bool:
    """Whether neighbours along the axis are all the same step apart."""
    steps = np.diff(values, axis=axis)
    return bool((steps == steps.flat[0]).all()) if steps.size else True
