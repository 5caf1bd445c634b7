"""Checksums of page sections: which sections a page has, and the record of them beside the host copies.

What is computed, and how, is `kvmanager.transport.checksums`'; here sums are values that are kept and compared.
A sum belongs to the bytes of one page on one rank as they lie: a page keeps its sums wherever it is copied whole
(offload, onboard, mirror, a hand-off's way into staging), and has none once its rows were dealt out anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.geometry import Int64Array
from kvmanager.layout import KVLayout, Section

Int32Array = npt.NDArray[np.int32]
SumArray = npt.NDArray[np.uint64]

SUM_WORDS: Final = 2
"""Words of 64 bits that make up one checksum."""
_NAMES: Final = {
    Section.LATENT: "latent", Section.KEY_VALUE: "key_value",
    Section.INDEX_VALUE: "indexer", Section.INDEX_SCALE: "indexer",
}  # fmt: skip


@dataclass(frozen=True)
class PageSection:
    """Bytes [start, start + size_bytes) of a page that have a checksum of their own."""

    name: str
    start: int
    size_bytes: int


def sections_of(layout: KVLayout) -> tuple[PageSection, ...]:
    """The sections of a page, ascending; bytes in none of them (a slab's unused end) have no sum.

    Raises InvalidArgument for a layout without a single page.
    """
    assert layout.page_bytes > 0
    ends: dict[str, tuple[int, int]] = {}
    for c in layout.components:
        name = _NAMES[c.section]
        first, last = ends.get(name, (c.offset, c.offset))
        end = c.offset + (layout.page_rows - 1) * c.slot_stride + c.row_bytes
        ends[name] = min(first, c.offset), max(last, end)
    found = sorted((start, end, name) for name, (start, end) in ends.items())
    assert all(a[1] <= b[0] for a, b in pairwise(found)), "sections of a page overlap"
    return tuple(PageSection(name, start, end - start) for start, end, name in found)


@dataclass(frozen=True)
class PageSections:
    """Sections of pages that a mover sums up: all `sections` of each page.

    regions: int32[pages]. offsets: int64[pages], bytes from the region's start. sections: (start, bytes) in a page.
    """

    regions: Int32Array
    offsets: Int64Array
    sections: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def total_bytes(self) -> int:
        """Bytes summed up."""
        return len(self) * sum(size for _, size in self.sections)


@dataclass(frozen=True)
class ExpectedSums:
    """What pages that are read from a peer must add up to, as far as it is known.

    pages: int64[pages], ascending: places in the order of reading. sums: uint64[pages, sections * SUM_WORDS].
    sections: (start, bytes) in a page.
    """

    pages: Int64Array
    sums: SumArray
    sections: tuple[tuple[int, int], ...]


@dataclass
class SumStore:
    """Sums of the pages of one class in one pool, with the generation of the content that each belongs to.

    sums: uint64[pages, ranks, sections * SUM_WORDS]. generations: uint32[pages], 0: none.
    """

    pages: int
    ranks: int
    sections: int
    sums: SumArray = field(init=False)
    generations: npt.NDArray[np.uint32] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = np.zeros((self.pages, self.ranks, self.sections * SUM_WORDS), np.uint64)
        self.generations = np.zeros(self.pages, np.uint32)

    def note(self, pages: Int64Array, generations: npt.NDArray[np.uint32], sums: SumArray) -> None:
        """Keeps the sums of distinct pages. `sums`: uint64[ranks, pages, sections * SUM_WORDS]."""
        self.sums[pages] = sums.swapaxes(0, 1)
        self.generations[pages] = generations

    def known(self, pages: Int64Array, generations: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Which pages have sums of the content that has these generations (bool[pages])."""
        known: npt.NDArray[np.bool_] = self.generations[pages] == generations
        return known

    def of(self, pages: Int64Array) -> SumArray:
        """The sums of pages, uint64[ranks, pages, sections * SUM_WORDS]."""
        return self.sums[pages].swapaxes(0, 1)
