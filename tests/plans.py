"""Plans as tests want to write them: offsets in bytes instead of pages, and pages of several regions at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmanager.core.plans import Box, PagedCopies, PlacedPages
from kvmanager.core.spanplans import copy_pages

NO_STRIDE = (0, 0)


def strided(
    source_region: int,
    target_region: int,
    source_offsets: np.ndarray,
    target_offsets: np.ndarray,
    counts: tuple[int, ...],
    source_strides: tuple[int, ...],
    target_strides: tuple[int, ...],
    row_bytes: int,
) -> PagedCopies:
    """Copies at any offsets: slots of one byte on one page."""
    page, columns = np.zeros(1, np.int64), np.zeros(len(source_offsets), np.int64)
    source, target = (
        PlacedPages(page, 0, columns, np.asarray(offsets, np.int64)) for offsets in (source_offsets, target_offsets)
    )
    box = Box(0, 0, 1, 1, *NO_STRIDE, counts, source_strides, target_strides, row_bytes)
    return PagedCopies(source_region, target_region, 1, source, target, (box,))


def copy_whole_pages(
    page_bytes: int,
    source_regions: Sequence[int],
    source_pages: np.ndarray,
    target_regions: Sequence[int],
    target_pages: np.ndarray,
) -> tuple[PagedCopies, ...]:
    """Pages copied as they are, from each region to the one that is named at the same place."""
    return tuple(
        copies
        for source, target in zip(source_regions, target_regions, strict=True)
        for copies in copy_pages(page_bytes, source, source_pages, target, target_pages)
    )
