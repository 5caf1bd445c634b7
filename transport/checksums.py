"""Checksums of page sections: the rule, and how the CPU computes it.

`kvmanager.transport.cuda_checksums` has the GPU's way, equal bit by bit. A section's bytes are little-endian 64-bit
words, zero words at the end, in lines of `LINE_WORDS`. Line r has the sum L[r] of its words, column c the sum C[c],
modulo 2**64. The checksum is two words:

    lines   = sum over r of mix(L[r] + mix(r)) + mix(bytes)        columns = sum over c of mix(C[c] + mix(c))

`mix` is a bijection of 64 bits. Sums without order make it fast: a wide machine adds lines and columns as they come,
and only one value in some hundred is mixed. What it finds:

* always: any change within one word (so any flipped bit, any wrong byte), and any within one line or one column that
  changes its sum;
* all else (bytes shifted, rows, lines or pages exchanged, runs zeroed, stale or foreign content): but for about one
  case in 2**64. What is never found needs four words at the corners of a rectangle of lines and columns, changed by
  the same amount up, down, down and up; or lines or columns exchanged whose sums are equal, in both ways.

It is no defence against somebody who wants equal sums.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.core.checksums import SUM_WORDS, PageSections, SumArray
from kvmanager.transport.executor import RegionMap

LINE_WORDS: Final = 1024
_BLOCK_LINES: Final = 32
"""Lines looked at twice in a row, for the two sums: 256 KiB stay in a core's cache."""
_M1, _M2, _M3 = (np.uint64(m) for m in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S1, _S2, _S3 = (np.uint64(s) for s in (30, 27, 31))


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64 bits in which every bit in moves about half of the bits out; uint64 in, uint64 out."""
    z = values + _M1
    z = (z ^ (z >> _S1)) * _M2
    z = (z ^ (z >> _S2)) * _M3
    return z ^ (z >> _S3)


_COLUMN_TAGS: Final = mix(np.arange(LINE_WORDS, dtype=np.uint64))


def section_sum(section: npt.NDArray[Any]) -> SumArray:
    """The checksum of a section's bytes in C order, uint64[SUM_WORDS]. `section`: uint8, of any shape and strides."""
    flat = np.ascontiguousarray(section).reshape(-1).view(np.uint8)
    line_bytes = LINE_WORDS * 8
    whole = len(flat) // line_bytes
    lines = -(-len(flat) // line_bytes)
    line_sums = np.zeros(lines, np.uint64)
    column_sums = np.zeros(LINE_WORDS, np.uint64)
    words = _words(flat[: whole * line_bytes]).reshape(whole, LINE_WORDS)
    for first in range(0, whole, _BLOCK_LINES):
        block = words[first : first + _BLOCK_LINES]
        np.add.reduce(block, axis=1, out=line_sums[first : first + len(block)])
        column_sums += np.add.reduce(block, axis=0)
    rest = flat[whole * line_bytes :]
    if len(rest):
        last = np.zeros(-(-len(rest) // 8), np.uint64)
        last.view(np.uint8)[: len(rest)] = rest
        line_sums[whole] = last.sum(dtype=np.uint64)
        column_sums[: len(last)] += last
    tags = mix(np.arange(lines, dtype=np.uint64))
    size = mix(np.array([len(flat)], np.uint64))
    mixed = np.concatenate((mix(line_sums + tags), size)).sum(dtype=np.uint64)
    return np.array([mixed, mix(column_sums + _COLUMN_TAGS).sum(dtype=np.uint64)], np.uint64)


def _words(flat: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The bytes as words; where they start between two of them, numpy reads them a little slower."""
    return np.ndarray(len(flat) // 8, "<u8", flat)


def sum_one(regions: RegionMap, pages: PageSections, number: int) -> SumArray:
    """Checksums of the sections of one page, uint64[sections * SUM_WORDS]. The region must be host memory."""
    region = regions[int(pages.regions[number])]
    at = int(pages.offsets[number])
    return np.concatenate([section_sum(region[at + start : at + start + size]) for start, size in pages.sections])


def sum_pages(regions: RegionMap, pages: PageSections) -> SumArray:
    """Checksums of all sections of all pages, uint64[pages, sections * SUM_WORDS]."""
    sums = np.empty((len(pages), len(pages.sections) * SUM_WORDS), np.uint64)
    for number in range(len(pages)):
        sums[number] = sum_one(regions, pages, number)
    return sums
