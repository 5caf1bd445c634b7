"""`SparseRank` on a GPU: the resolver and swap-in kernels over HBM and pinned host memory that the daemon lent.

Everything is queued into torch's current stream: table rows before the step's first kernel, as the replies tell them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvmanager.clients.glm.gpu_resolver import GpuResolver
from kvmanager.clients.glm.gpu_swapin import RowPieces, SwapIn
from kvmanager.clients.glm.page_table import PageTable
from kvmanager.clients.glm.sparse_rank import pages_of
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape, pack_request
from kvmanager.geometry import Int64Array


class GpuSparseRank:
    """Driven by one thread. The result of `swap_in` is waited for, since its caller computes on the CPU."""

    def __init__(self, shape: SparseShape, groups: list[GroupPlace], device: Tensor, host_address: int) -> None:
        """`device`: the rank's HBM, uint8; `host_address`: its pinned host region as the GPU sees it.

        Raises DeviceError, InvalidArgument for a shape whose tables do not fit on chip.
        """
        self.shape = shape
        self._groups = groups
        self._device = device  # keeps the mapping
        self._resolver = GpuResolver(shape, groups, str(device.device))
        self._swap = SwapIn(host_address, device.data_ptr())
        self._resolution = self._resolver.resolution()
        self._topk = torch.full((shape.requests, shape.rows, shape.topk), -1, dtype=torch.int32, device=device.device)

    def write_request(self, place: int, table: PageTable) -> None:
        """As the protocol says."""
        self._resolver.tables.write_request(place, *pack_request(table, self.shape.most_pages))

    def write_pages(self, place: int, table: PageTable, ordinals: Int64Array) -> None:
        """As the protocol says."""
        self._resolver.tables.write_pages(place, ordinals, pages_of(table, ordinals))

    def set_hot_pages(self, place: int, pages: Int64Array | None) -> None:
        """As the protocol says."""
        self._resolver.set_hot_pages(place, pages)

    def swap_in(self, group: int, topk: npt.NDArray[np.int32]) -> Int64Array:
        """As the protocol says."""
        self._topk.copy_(torch.from_numpy(topk))
        self._resolver.resolve(group, self._topk, self._resolution)
        self._swap.copy(self._resolution, RowPieces(1, self._groups[group].row_bytes))
        rows: Int64Array = self._resolution.rows.cpu().numpy()
        return rows

    def counters(self) -> Int64Array:
        """As the protocol says."""
        counted: Int64Array = self._resolver.counters.cpu().numpy()
        return counted
