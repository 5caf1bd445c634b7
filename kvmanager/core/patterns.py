"""Patterns: what repeats from one pair of pages to the next when two layouts and two token orders meet.

Tokens of one group are looked at one by one, here alone: those that step evenly through a pair of pages are a
progression, and a progression is a few boxes of bytes, whatever the layouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.core.plans import Box
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import Int64Array
from kvmanager.layout import Component, KVLayout

Int32Array = npt.NDArray[np.int32]


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
) -> tuple[Box, ...]:
    """One box a component, then neighbours joined: side by side in a row, row after row, group after group."""
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
        return _stacked(found)  # parts of pages don't touch those of the next group of layers
    whole: list[Box] = []
    for box in found:
        if whole and (joined := _end_to_end(whole[-1], box)) is not None:
            whole[-1] = joined
        else:
            whole.append(box)
    return _stacked(whole)


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


def _stacked(found: list[Box]) -> tuple[Box, ...]:
    """The same bytes, where boxes of one shape lie a constant distance apart as one box; in another order.

    The rows of one group of layers after another are such boxes: stacked, one 3-D copy carries many groups.
    """
    by_shape: dict[Box, list[Box]] = {}
    for box in found:
        by_shape.setdefault(replace(box, source_offset=0, target_offset=0), []).append(box)
    result: list[Box] = []
    for alike in by_shape.values():
        while alike:
            first, count = alike[0], _evenly_apart(alike)
            if count > 1:
                steps = _distance(alike[0], alike[1])
                first = replace(
                    first,
                    counts=(count, *first.counts),
                    source_strides=(steps[0], *first.source_strides),
                    target_strides=(steps[1], *first.target_strides),
                )
            result.append(first)
            alike = alike[count:]
    return tuple(result)


def _distance(a: Box, b: Box) -> tuple[int, int]:
    return b.source_offset - a.source_offset, b.target_offset - a.target_offset


def _evenly_apart(alike: list[Box]) -> int:
    """How many of the first boxes lie the same distance apart on each side."""
    count = min(2, len(alike))
    while count < len(alike) and _distance(*alike[count - 2 : count]) == _distance(*alike[count - 1 : count + 1]):
        count += 1
    return count
