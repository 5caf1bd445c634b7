"""Copy plans between spans: the pattern of a few spans, laid over all of them.

Only as many tokens are looked at as both sides' spans take to repeat. The rest of a plan is page numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvmanager.core.patterns import Progression, Rows, boxes, check_slots, matched_components, progressions
from kvmanager.core.plans import Box, PagedCopies, PlacedPages
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import Int64Array, TokenOrder
from kvmanager.layout import Component, KVLayout

_ONE_PLACE = np.zeros(1, np.int64)


@dataclass(frozen=True)
class SpanRun:
    """Spans of one token order that follow each other from position `first_token` on.

    Page k of a span lies in region `regions[k % len(regions)]` and is entry `k // len(regions)` of the span's pages:
    `pages` is int64[spans * segments // len(regions)], span after span.
    """

    first_token: int
    order: TokenOrder
    regions: tuple[int, ...]
    pages: Int64Array

    @property
    def width(self) -> int:
        """Entries of `pages` for one span."""
        return self.order.segments // len(self.regions)

    def tokens(self, page_rows: int) -> int:
        """Tokens that all spans hold."""
        return len(self.pages) // self.width * self.order.segments * page_rows

    def rows(self, page_rows: int, first: int, last: int) -> Rows:
        """Where positions [first, last) lie; `page` counts entries of `pages`."""
        spans, offset = np.divmod(
            np.arange(first - self.first_token, last - self.first_token, dtype=np.int64),
            self.order.segments * page_rows,
        )
        page, slot = self.order.place(offset)
        entry, rank = np.divmod(page, len(self.regions))
        return Rows(np.asarray(self.regions, np.int32)[rank], spans * self.width + entry, slot)


def copy_pages(
    page_bytes: int, source_region: int, source_pages: Int64Array, target_region: int, target_pages: Int64Array
) -> tuple[PagedCopies, ...]:
    """Pages of one layout as they are, `source_pages[i]` to `target_pages[i]`."""
    if len(source_pages) == 0:
        return ()
    source, target = (PlacedPages(pages, 1, _ONE_PLACE, _ONE_PLACE) for pages in (source_pages, target_pages))
    box = Box(0, 0, 0, 0, page_bytes, page_bytes, (), (), (), page_bytes)
    return (PagedCopies(source_region, target_region, len(source_pages), source, target, (box,)),)


def copy_spans(
    source_layout: KVLayout,
    target_layout: KVLayout,
    source: Sequence[SpanRun],
    target: Iterable[SpanRun],
    end: int,
) -> tuple[PagedCopies, ...]:
    """The copies that bring every component of the target's spans, for positions below `end`, from the source.

    `source`: ascending. Raises LayoutMismatch for what has no counterpart: a component that the source layout lacks
    or holds in rows of another length, an order that does not fit its pages, a position that no source span holds.
    """
    patterns = _Patterns(source_layout, target_layout)
    firsts = [run.first_token for run in source]
    copies: list[PagedCopies] = []
    for spans in target:
        first = spans.first_token
        last = min(end, first + spans.tokens(target_layout.page_rows))
        for held, a, b in _covering(source[max(0, bisect_right(firsts, first) - 1) :], source_layout, first, last):
            copies += patterns.lay(held, spans, a, b)
    return tuple(copies)


def _covering(source: Sequence[SpanRun], layout: KVLayout, first: int, last: int) -> Iterator[tuple[SpanRun, int, int]]:
    """The source's runs that hold [first, last), each with its part of it."""
    for run in source:
        end = min(last, run.first_token + run.tokens(layout.page_rows))
        if first >= last or not run.first_token <= first < end:
            break
        yield run, first, end
        first = end
    if first < last:
        raise LayoutMismatch(f"position {first} is in none of the source's spans, of layout {layout.name}")


class _Patterns:
    """What has been worked out for a pair of layouts."""

    def __init__(self, source: KVLayout, target: KVLayout) -> None:
        self._layouts = source, target
        self._pairs: list[tuple[Component, Component]] = matched_components(source, target)
        self._boxes: dict[tuple[int, int, int], tuple[Box, ...]] = {}

    def lay(self, source: SpanRun, target: SpanRun, first: int, last: int) -> Iterator[PagedCopies]:
        """Positions [first, last), which both hold: whole periods of both orders by one pattern, then the rest."""
        for side, layout in zip((source, target), self._layouts, strict=True):
            _check_order(side, layout)
        spans = [
            side.order.segments * layout.page_rows
            for side, layout in zip((source, target), self._layouts, strict=True)
        ]
        period = math.lcm(*spans)
        groups = (last - first) // period
        advances = [period // span * side.width for span, side in zip(spans, (source, target), strict=True)]
        if groups:
            yield from self._groups(source, target, (first, first + period), groups, advances)
        if first + groups * period < last:
            yield from self._groups(source, target, (first + groups * period, last), 1, [0, 0])

    def _groups(
        self, source: SpanRun, target: SpanRun, of: tuple[int, int], groups: int, advances: list[int]
    ) -> Iterator[PagedCopies]:
        """The pattern of the positions [of[0], of[1]), at each of the groups."""
        rows, pages = [], []
        for side, layout, advance in zip((source, target), self._layouts, advances, strict=True):
            found = side.rows(layout.page_rows, *of)
            low = int(found.page.min())
            rows.append(replace(found, page=found.page - low))
            pages.append(side.pages[low : int(found.page.max()) + (groups - 1) * advance + 1])
        for each in progressions(*rows):
            yield PagedCopies(
                each.source_region,
                each.target_region,
                groups,
                PlacedPages(pages[0], advances[0], each.source_page, each.source_slot),
                PlacedPages(pages[1], advances[1], each.target_page, each.target_slot),
                self._of(each),
            )

    def _of(self, each: Progression) -> tuple[Box, ...]:
        """Ranks, and tails, differ in where rows lie, seldom in their shape."""
        shape = each.source_step, each.target_step, each.rows
        if shape not in self._boxes:
            self._boxes[shape] = boxes(self._pairs, *self._layouts, each)
        check_slots(self._layouts[0], each.source_slot, each.source_step, each.rows)
        check_slots(self._layouts[1], each.target_slot, each.target_step, each.rows)
        return self._boxes[shape]


def _check_order(spans: SpanRun, layout: KVLayout) -> None:
    order, ranks = spans.order, len(spans.regions)
    if layout.page_rows % order.interleave:
        raise LayoutMismatch(
            f"token order ({order.segments}, {order.interleave}) does not fit pages of {layout.page_rows} rows "
            f"of {layout.name}: the interleave must divide them"
        )
    if order.segments % ranks:
        raise LayoutMismatch(
            f"token order ({order.segments}, {order.interleave}) does not fit {ranks} ranks of {layout.name}: "
            "every rank must hold as many pages of a span"
        )
