"""Prompts and the bytes of their rows, worked out from pieces of text and never asked of the product.

A row's bytes follow from all tokens up to its own and from its section and layer, so bytes of another prefix, place or
section never pass for right ones. Rows are found by the layout's description and a formula of our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.clients.keys import KeyChain
from kvmanager.layout import Component, KVLayout, Section
from kvmanager.protos import kvmanager_pb2 as pb

VOCABULARY: Final = 50_000
_SECTIONS: Final = {section: number for number, section in enumerate(Section)}
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)

U64Array = npt.NDArray[np.uint64]
Pieces = tuple[tuple[int, int], ...]


def _mixed(values: U64Array) -> U64Array:
    """A bijection of 64-bit words that spreads every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Text:
    """Pieces (number, tokens) one after the other: texts that begin with the same pieces share that prefix."""

    pieces: Pieces

    @cached_property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Token ids, int64[n]. Token i of piece p depends on p and i alone."""
        parts = [np.empty(0, np.int64)]
        for piece, count in self.pieces:
            places = np.arange(count, dtype=np.uint64) + np.uint64(piece) * np.uint64(1 << 32)
            parts.append((_mixed(places * _ODD + np.uint64(1)) % np.uint64(VOCABULARY)).astype(np.int64))
        return np.concatenate(parts)

    @cached_property
    def digests(self) -> U64Array:
        """Words that name all tokens up to each position, uint64[n]."""
        places = np.arange(1, len(self.tokens) + 1, dtype=np.uint64)
        return _mixed(np.cumsum(_mixed(self.tokens.astype(np.uint64) + places * _ODD), dtype=np.uint64))

    def keys(self, namespace: pb.Namespace, tokens: int) -> bytes:
        """Keys of the whole segments of the first `tokens`."""
        return KeyChain(namespace).extend(self.tokens[:tokens])


def write_rows(
    memory: Any, layout: KVLayout, pages: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], digests: U64Array
) -> None:
    """Writes the rows of tokens: page, slot and digest of each, [n]."""
    for component in layout.components:
        memory[_places(component, pages, slots)] = _values(component, digests)


def wrong_bytes(
    memory: Any, layout: KVLayout, pages: npt.NDArray[np.int64], slots: npt.NDArray[np.int64], digests: U64Array
) -> int:
    """How many bytes of those rows are others than they should be."""
    return sum(int((memory[_places(c, pages, slots)] != _values(c, digests)).sum()) for c in layout.components)


def _places(
    component: Component, pages: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    start = component.offset + pages * component.page_stride + slots * component.slot_stride
    return start[:, None] + np.arange(component.row_bytes)


def _values(component: Component, digests: U64Array) -> npt.NDArray[np.uint8]:
    """uint8[n, row_bytes]."""
    words = -(-component.row_bytes // 8)
    salt = np.uint64(component.layer * 1_000_003 + _SECTIONS[component.section] * 7_919)
    steps = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (digests[:, None] + salt + steps[None, :]) * np.uint64(0x2545F4914F6CDD1D)
    mixed ^= mixed >> np.uint64(31)
    return mixed.view(np.uint8)[:, : component.row_bytes]
