"""Turning: pages of spans whose tokens are dealt out over several pages become pages of consecutive tokens.

The pages keep their layout and their number; only which token lies where changes. Whoever packs pages for a peer can
turn them on the way, so that the peer places whole sections instead of single rows: its GPU runs no kernel for it,
and its link carries runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from kvmanager.core.plans import StridedCopies
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.errors import InvalidArgument, LayoutMismatch
from kvmanager.geometry import SEQUENTIAL, Int64Array, TokenOrder
from kvmanager.layout import Component, KVLayout, Section

MOST_PIECES: Final = 4_096
MOST_SEGMENTS: Final = 256
APART: Final = 2
_HEAD: Final = struct.Struct("<IIII")


@dataclass(frozen=True)
class Turn:
    """Spans of `order`, one page after the other, are to hold their tokens in sequence.

    `pieces`: what a slot of a page consists of, as (offset of slot 0, bytes from slot to slot, bytes).
    """

    order: TokenOrder
    page_rows: int
    pieces: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, layout: KVLayout, order: TokenOrder) -> Turn:
        """What it takes for pages of a layout."""
        pieces: list[tuple[int, int, int]] = []
        for c in sorted(layout.components, key=lambda each: each.offset):
            if pieces and pieces[-1][1] == c.slot_stride and pieces[-1][0] + pieces[-1][2] == c.offset:
                offset, stride, size = pieces.pop()
                # Not beyond a slot: what follows a slot's last byte is the next slot.
                if size + c.row_bytes <= stride:
                    pieces.append((offset, stride, size + c.row_bytes))
                    continue
                pieces.append((offset, stride, size))
            pieces.append((c.offset, c.slot_stride, c.row_bytes))
        return cls(order, layout.page_rows, tuple(pieces))

    def encode(self) -> bytes:
        """As bytes of a message."""
        numbers = (self.order.segments, self.order.interleave, self.page_rows, len(self.pieces))
        return _HEAD.pack(*numbers) + np.asarray(self.pieces, "<u4").tobytes()

    @classmethod
    def decode(cls, data: bytes) -> Turn:
        """From these bytes. Raises InvalidArgument."""
        if len(data) < _HEAD.size:
            raise InvalidArgument(f"a description of turned pages of {len(data)} bytes")
        segments, interleave, rows, count = _HEAD.unpack_from(data)
        if len(data) != _HEAD.size + 12 * count or not 0 < count <= MOST_PIECES:
            raise InvalidArgument(f"a description of turned pages of {len(data)} bytes that names {count} pieces")
        pieces = np.frombuffer(data, "<u4", 3 * count, _HEAD.size).reshape(count, 3).tolist()
        return cls(TokenOrder(segments, interleave), rows, tuple(map(tuple, pieces)))

    def check(self, pages: int, page_bytes: int) -> None:
        """Raises InvalidArgument unless so many pages are whole spans and no slot leaves its page."""
        segments, interleave, rows = self.order.segments, self.order.interleave, self.page_rows
        if not 0 < segments <= MOST_SEGMENTS or pages % segments:
            raise InvalidArgument(f"{pages} pages are no whole spans of {segments}, of {MOST_SEGMENTS} at most")
        if not 0 < interleave <= rows or rows % interleave:
            raise InvalidArgument(f"{interleave} tokens in a row do not divide pages of {rows}")
        for offset, stride, size in self.pieces:
            if size == 0 or stride < size or offset + (rows - 1) * stride + size > page_bytes:
                raise InvalidArgument(f"{rows} slots of {size} B from {offset} on, {stride} apart, in {page_bytes} B")

    def copies(self, addresses: Int64Array, target: int, page_bytes: int) -> Iterator[StridedCopies]:
        """From pages at these addresses, span after span, to the turned pages side by side at `target`.

        Offsets are addresses; the regions' numbers mean nothing. Raises InvalidArgument.
        """
        spans = addresses.reshape(-1, self.order.segments)
        begins = target + np.arange(len(spans), dtype=np.int64) * self.order.segments * page_bytes
        for pattern in _pattern(self, page_bytes):
            page, inside = np.divmod(pattern.source_offsets, APART * page_bytes)
            yield replace(
                pattern,
                source_offsets=(spans[:, page] + inside).reshape(-1),
                target_offsets=(begins[:, None] + pattern.target_offsets).reshape(-1),
            )


@lru_cache(maxsize=64)
def _pattern(turn: Turn, page_bytes: int) -> tuple[StridedCopies, ...]:
    """The copies of one span, its pages `APART` so that no copy takes in two of them. Raises InvalidArgument."""
    components = tuple(
        Component(Section.LATENT, number, offset, page_bytes, stride, size)
        for number, (offset, stride, size) in enumerate(turn.pieces)
    )
    layout = KVLayout("turned", turn.page_rows, components)
    pages = np.arange(turn.order.segments, dtype=np.int64)
    source, target = SpanRun(0, turn.order, (0,), APART * pages), SpanRun(0, SEQUENTIAL, (1,), pages)
    try:
        copies = copy_spans(layout, layout, [source], [target], turn.order.segments * turn.page_rows)
    except LayoutMismatch as error:
        raise InvalidArgument(str(error)) from error
    return tuple(piece for c in copies for box in c.boxes for piece in c.pieces(box))
