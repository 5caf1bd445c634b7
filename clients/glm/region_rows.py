"""Rows of one layout component inside a region: address arithmetic, nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array
from kvmanager.layout import Component

Bytes = npt.NDArray[np.uint8]


class ComponentRows:
    """A view of a region (uint8, one dimension) as `[page, slot, row byte]`; strides are 64-bit bytes.

    The region may be read-only for readers. A page or slot outside the region fails an assertion: tables
    are made by us, and numpy would silently wrap a negative index.
    """

    def __init__(self, region: Bytes, component: Component, page_rows: int) -> None:
        """Raises InvalidArgument for a region of GPU memory: these rows are read by the CPU."""
        if not isinstance(region, np.ndarray):
            raise InvalidArgument(f"rows of {type(region).__name__}: this engine computes on the CPU; use a cpu node")
        assert region.ndim == 1
        assert region.dtype == np.uint8
        last_slot = (page_rows - 1) * component.slot_stride + component.row_bytes
        pages = max(0, (region.nbytes - component.offset - last_slot) // component.page_stride + 1)
        self.row_bytes = component.row_bytes
        self._rows = np.lib.stride_tricks.as_strided(
            region[component.offset :],
            shape=(pages, page_rows, component.row_bytes),
            strides=(component.page_stride, component.slot_stride, 1),
            writeable=region.flags.writeable,
        )

    def read(self, pages: Int64Array, slots: Int64Array) -> Bytes:
        """Copies of the rows at (pages[i], slots[i]): uint8[n, row bytes]."""
        self._check(pages, slots)
        rows: Bytes = self._rows[pages, slots]
        return rows

    def write(self, pages: Int64Array, slots: Int64Array, rows: Bytes) -> None:
        """Stores uint8[n, row bytes] at (pages[i], slots[i])."""
        self._check(pages, slots)
        self._rows[pages, slots] = rows

    def _check(self, pages: Int64Array, slots: Int64Array) -> None:
        if len(pages) == 0:
            return
        count, page_rows, _ = self._rows.shape
        assert pages.min() >= 0, f"page {pages.min()}: no page in this tier"
        assert pages.max() < count, f"page {pages.max()} of a region of {count} pages"
        assert slots.min() >= 0
        assert slots.max() < page_rows
