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

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.core.checksums import SUM_WORDS, PageSections, SumArray
from kvmanager.transport.executor import RegionMap

LINE_WORDS: Final = 1024
AT_ONCE_BYTES: Final = 256 << 10
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


def page_sums(rows: npt.NDArray[np.uint8], pages: Sequence[int]) -> SumArray:
    """`section_sum` of whole pages, uint64[pages, SUM_WORDS]. `rows`: uint8[all pages, page bytes].

    Some hundred KiB at a time, so that small pages do not pay for a dozen calls each.
    """
    sums = np.empty((len(pages), SUM_WORDS), np.uint64)
    at_once = max(1, AT_ONCE_BYTES // max(rows.shape[1], 1))
    for first in range(0, len(pages), at_once):
        some = np.asarray(pages[first : first + at_once], np.int64)
        sums[first : first + len(some)] = _sums_of(rows[some])
    return sums


def _sums_of(pages: npt.NDArray[np.uint8]) -> SumArray:
    """uint64[pages, SUM_WORDS] of pages that lie together, uint8[pages, bytes]."""
    count, size = pages.shape
    line_bytes = LINE_WORDS * 8
    lines, whole = -(-size // line_bytes), size // line_bytes
    line_sums = np.zeros((count, lines), np.uint64)
    column_sums = np.zeros((count, LINE_WORDS), np.uint64)
    if whole:
        words = np.ascontiguousarray(pages[:, : whole * line_bytes]).view("<u8").reshape(count, whole, LINE_WORDS)
        np.add.reduce(words, axis=2, out=line_sums[:, :whole])
        np.add.reduce(words, axis=1, out=column_sums)
    if size % line_bytes:
        rest = np.zeros((count, -(-(size % line_bytes) // 8) * 8), np.uint8)
        rest[:, : size % line_bytes] = pages[:, whole * line_bytes :]
        last = rest.view("<u8")
        line_sums[:, whole] = last.sum(axis=1, dtype=np.uint64)
        column_sums[:, : last.shape[1]] += last
    tags = mix(np.arange(lines, dtype=np.uint64))
    sums = np.empty((count, SUM_WORDS), np.uint64)
    sums[:, 0] = mix(line_sums + tags).sum(axis=1, dtype=np.uint64) + mix(np.array([size], np.uint64))
    sums[:, 1] = mix(column_sums + _COLUMN_TAGS).sum(axis=1, dtype=np.uint64)
    return sums


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
