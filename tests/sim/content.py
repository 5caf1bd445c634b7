"""What KV bytes should be: sessions of tokens, their chained keys, and the pattern of every row.

The content of a row follows from everything up to its token, the namespace and the component, so bytes of
another prefix, another namespace, another position or another section never pass for right ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

import numpy as np

from kvmanager.core.patterns import Rows
from kvmanager.layout import KVLayout, Section
from kvmanager.transport.executor import RegionMap

PAGE_ROWS = 4
POISON = 0xA5
_MASK = 2**64 - 1
_SECTIONS = {section: number for number, section in enumerate(Section)}


def _chain(digest: int, token: int) -> int:
    digest = ((digest ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
    return digest ^ (digest >> 29)


@dataclass
class Text:
    """Tokens by their running digests: `digests[p]` names all tokens up to position p."""

    digests: list[int] = field(default_factory=list)

    def extend(self, count: int, draw: random.Random) -> None:
        for _ in range(count):
            self.digests.append(_chain(self.digests[-1] if self.digests else 1, draw.randrange(1 << 16)))

    def fork(self, tokens: int) -> Text:
        return Text(self.digests[:tokens])

    def keys(self, first: int, last: int) -> bytes:
        """Keys of segments first .. last - 1, 16 bytes each; the same in every namespace."""
        ends = self.digests[PAGE_ROWS - 1 :: PAGE_ROWS][first:last]
        return b"".join(key_of(end) for end in ends)

    def content(self, positions: np.ndarray, namespace: int) -> np.ndarray:
        """uint64, one entry a position. `namespace`: the first byte of its digest."""
        return contents(np.asarray(self.digests, np.uint64)[positions], np.array([namespace]))


def next_text(texts: list[Text], draw: random.Random) -> Text:
    """A prompt: some session's next turn, a fork of one, an old one again, or a new one. `texts` remembers a few."""
    if len(texts) > 8 and draw.random() < 0.3:
        old = draw.choice(texts[:4])  # perhaps only the host still has it
        return old.fork(len(old.digests))
    kind = draw.random()
    if texts and kind < 0.75:
        old = draw.choice(texts)
        text = old.fork(len(old.digests) if kind < 0.45 else draw.randint(1, len(old.digests)))
        if kind < 0.6:
            text.extend(draw.randint(1, 40), draw)
    else:
        text = Text()
        text.extend(draw.choice((1, 3, 31, 32, 33, 64, draw.randint(1, 90))), draw)
    if len(text.digests) > 150:
        text = text.fork(draw.randint(1, 60))
    texts.append(text)
    if len(texts) > 16:
        texts.pop(draw.randrange(len(texts)))
    return text.fork(len(text.digests))


def contents(digests: np.ndarray, namespace: np.ndarray) -> np.ndarray:
    """What the rows of tokens with these digests hold in a namespace, uint64."""
    return digests ^ (namespace.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(0x55))


def key_of(digest: int) -> bytes:
    return blake2b(digest.to_bytes(8, "little"), digest_size=16).digest()


@dataclass(frozen=True)
class _Alike:
    """Components of a layout whose rows have one size. columns: salt, offset, page stride, slot stride, [:, 1] each.

    unit: bytes looked at together, 4 where all rows begin and end at a multiple of that, else 1.
    """

    row_bytes: int
    unit: int
    columns: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@cache
def _by_row_bytes(layout: KVLayout) -> list[_Alike]:
    found = []
    for size in sorted({c.row_bytes for c in layout.components}):
        alike = [c for c in layout.components if c.row_bytes == size]
        salts = np.array([[c.layer * 1_000_003 + _SECTIONS[c.section] * 7_919] for c in alike], np.uint64)
        places = [np.array([[getattr(c, n)] for c in alike]) for n in ("offset", "page_stride", "slot_stride")]
        unit = 1 if size % 4 or any((place % 4).any() for place in places) else 4
        found.append(_Alike(size, unit, (salts, *places)))
    return found


class Memory:
    """Regions in one array, and rows written and compared by the layout alone (never by a copy plan)."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.base = np.zeros(max(sizes) + 1, np.int64)
        at = 0
        for region, size in sizes.items():
            self.base[region] = at
            at += -(-size // 8) * 8
        self.sizes = sizes
        self.bytes = np.full(at, POISON, np.uint8)
        self._units = {1: self.bytes, 4: self.bytes.view(np.uint32)}
        self.regions = RegionMap()
        for region, size in sizes.items():
            self.regions.add(region, self.bytes[self.base[region] : self.base[region] + size])

    def fill(self, layout: KVLayout, rows: Rows, content: np.ndarray) -> None:
        for units, index, values in self._components(layout, rows, content):
            units[index] = values

    def wrong(self, layout: KVLayout, rows: Rows, content: np.ndarray) -> np.ndarray:
        """Entries whose bytes differ in some component."""
        bad = np.zeros(len(rows), bool)
        for units, index, values in self._components(layout, rows, content):
            bad |= (units[index] != values).any(axis=(0, 2))
        return bad

    def _components(
        self, layout: KVLayout, rows: Rows, content: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """All memory as units of 1 or 4 bytes, and places and values in it, [component, row, unit].

        For components with rows of one size at a time.
        """
        for alike in _by_row_bytes(layout):
            salts, offsets, page_strides, slot_strides = alike.columns
            mixed = (content + salts) * np.uint64(0x2545F4914F6CDD1D)
            values = mixed.view(np.uint8).reshape(*mixed.shape, 8)[:, :, : alike.row_bytes]
            unit, units = alike.unit, self._units[alike.unit]
            start = self.base[rows.region] + offsets + rows.page * page_strides + rows.slot * slot_strides
            within = np.arange(alike.row_bytes // unit)
            yield units, (start // unit)[:, :, None] + within, np.ascontiguousarray(values).view(units.dtype)

    def poison(self, region: int, offset: int, size: int) -> None:
        start = int(self.base[region]) + offset
        self.bytes[start : start + size] = POISON
