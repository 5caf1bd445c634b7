"""Rows of one layout component inside a region of either device, as torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array
from kvmanager.layout import Component

WORD_BYTES = 8


class TensorRows:
    """A view of a region (uint8, one dimension) as `[page, slot, row byte]`; strides are 64-bit bytes.

    Rows come and go as CPU tensors; on a GPU they pass through torch's current stream. A page or slot outside the
    region fails an assertion: tables are made by us, and torch would wrap a negative index.
    """

    def __init__(self, region: Tensor, component: Component, page_rows: int) -> None:
        last_slot = (page_rows - 1) * component.slot_stride + component.row_bytes
        pages = max(0, (region.numel() - component.offset - last_slot) // component.page_stride + 1)
        self.row_bytes = component.row_bytes
        self._rows = region[component.offset :].as_strided(
            (pages, page_rows, component.row_bytes), (component.page_stride, component.slot_stride, 1)
        )

    def read(self, pages: Int64Array, slots: Int64Array) -> Tensor:
        """Copies of the rows at (pages[i], slots[i]): uint8[n, row bytes] on the CPU."""
        return self._rows[self._index(pages, slots)].cpu()

    def write(self, pages: Int64Array, slots: Int64Array, rows: Tensor) -> None:
        """Stores uint8[n, row bytes] at (pages[i], slots[i])."""
        self._rows[self._index(pages, slots)] = rows.to(self._rows.device)

    def _index(self, pages: Int64Array, slots: Int64Array) -> tuple[Tensor, Tensor]:
        count, page_rows, _ = self._rows.shape
        if len(pages):
            assert pages.min() >= 0, f"page {pages.min()}: no page in this tier"
            assert pages.max() < count, f"page {pages.max()} of a region of {count} pages"
            assert slots.min() >= 0
            assert slots.max() < page_rows
        device = self._rows.device
        return torch.from_numpy(pages).to(device), torch.from_numpy(slots).to(device)


class RowsByOffset:
    """Rows of a region (uint8, one dimension) by the byte they begin at, in whole words of eight bytes."""

    def __init__(self, region: Tensor) -> None:
        self._words = region[: region.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)

    def read(self, offsets: Int64Array, row_bytes: int) -> Tensor:
        """uint8[n, row_bytes] on the CPU. Raises InvalidArgument for rows that are not whole words."""
        if row_bytes % WORD_BYTES or (len(offsets) and int((offsets % WORD_BYTES).max())):
            raise InvalidArgument(f"rows of {row_bytes} bytes by offset: both in units of {WORD_BYTES}")
        device = self._words.device
        lanes = torch.arange(row_bytes // WORD_BYTES, device=device)
        words = self._words[torch.from_numpy(offsets // WORD_BYTES).to(device)[:, None] + lanes]
        return words.cpu().view(torch.uint8).view(len(offsets), row_bytes)
