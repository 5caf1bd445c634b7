"""Swap-in on the GPU: kernels that copy group rows from pinned host memory into hot rows, over PCIe."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import torch

from kvmanager.clients.glm.gpu_kernels import compiled, launch, most_shared_bytes
from kvmanager.clients.glm.gpu_resolver import Resolution
from kvmanager.errors import InvalidArgument

LINE_BYTES: Final = 128
BULK_LANES: Final = 8
MOST_REQUESTS: Final = 1024


class Gather(StrEnum):
    """How bytes are read.

    `LINES`: a warp a piece, each load of whole 128-byte lines; `WARPS`: the same, from the piece's first byte;
    `ROWS`: a warp a row over all its pieces; `BULK`: the bulk-copy engine, through shared memory (sm_90 or later).
    """

    LINES = "lines"
    WARPS = "warps"
    ROWS = "rows"
    BULK = "bulk"


@dataclass(frozen=True)
class Launch:
    """Which kernel, and how wide: blocks for each multiprocessor of the GPU, and warps a block."""

    gather: Gather
    blocks_per_sm: int
    warps: int


DEFAULT_LAUNCH: Final = Launch(Gather.LINES, 2, 8)


@dataclass(frozen=True)
class RowPieces:
    """A row as runs of bytes: `count` pieces of `piece_bytes`, a step apart at either end (bytes)."""

    count: int
    piece_bytes: int
    source_step: int = 0
    target_step: int = 0


class SwapIn:
    """Copies missed rows between two regions at fixed addresses. Queues into torch's current stream."""

    def __init__(self, host_address: int, device_address: int, how: Launch = DEFAULT_LAUNCH) -> None:
        """`host_address`: of registered host memory, as the GPU sees it. Raises DeviceError."""
        self._host, self._device = host_address, device_address
        self._how = how
        module = compiled("swapin.cu")
        names = {Gather.LINES: "gather_warp", Gather.WARPS: "gather_warp", Gather.ROWS: "gather_row"}
        self._kernel = module.get_function(names.get(how.gather, "gather_bulk"))
        self._blocks = how.blocks_per_sm * torch.cuda.get_device_properties(0).multi_processor_count
        if how.gather is Gather.BULK:
            # All that there is: the limit belongs to the kernel, and others may launch it with more bytes than we.
            self._kernel.max_dynamic_shared_size_bytes = most_shared_bytes() - self._kernel.shared_size_bytes

    def copy(self, plan: Resolution, row: RowPieces) -> None:
        """Queues the copies that `plan` lists. All offsets and lengths are multiples of 16 bytes."""
        requests, entries = plan.miss_source.shape
        if requests > MOST_REQUESTS or row.piece_bytes % 16 or row.source_step % 16 or row.target_step % 16:
            raise InvalidArgument(f"{requests} requests of {row}; at most {MOST_REQUESTS}, bytes in units of 16")
        launch(
            self._kernel,
            self._blocks,
            self._how.warps * 32,
            (
                np.uint64(self._host), np.uint64(self._device), plan.miss_source, plan.miss_target, plan.miss_count,
                np.int32(requests), np.int32(entries), np.int32(row.count), np.int32(row.piece_bytes),
                np.int64(row.source_step), np.int64(row.target_step), np.int32(self._last_argument()),
            ),
            self._shared_bytes(row),
        )  # fmt: skip

    def _last_argument(self) -> int:
        return {Gather.LINES: LINE_BYTES, Gather.BULK: BULK_LANES}.get(self._how.gather, 16)

    def _shared_bytes(self, row: RowPieces) -> int:
        """Buffers of the bulk engine: one a lane."""
        if self._how.gather is not Gather.BULK:
            return 0
        return self._how.warps * BULK_LANES * -(-row.piece_bytes // LINE_BYTES) * LINE_BYTES
