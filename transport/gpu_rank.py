"""A rank on a GPU: its HBM regions as torch tensors, and what it queues into torch's current stream.

Importing this loads torch; making a `GpuRank` loads CUDA, after which this process may no longer fork
(`kvmanager.allocators.cuda_driver`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvmanager.allocators.cuda_driver import DeviceContext, call
from kvmanager.allocators.device_memory import DeviceMapping
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.transport.cuda_copies import CudaCopies
from kvmanager.transport.executor import ByteArray, RegionMap
from kvmanager.transport.gpu_timeline import GpuTimeline
from kvmanager.transport.pinned import PinnedMemory
from kvmanager.wire import RegionInfo


class GpuRank:
    """The GPU side of one rank's memory. All its regions lie on one GPU.

    `tensors`: region id -> uint8[size_bytes]; the mapping ends when nobody holds the tensor or a view of it.
    """

    def __init__(
        self,
        regions: Sequence[tuple[RegionInfo, int]],
        host: Iterable[tuple[ByteArray, tuple[int, ...]]],
        timelines: ByteArray,
    ) -> None:
        """`regions`: HBM with descriptors, which stay the caller's; `host`: (memory, chunk bounds) to register.

        Raises DeviceError, InvalidArgument for a descriptor that is no GPU memory.
        """
        self.device = regions[0][0].device
        self._context = DeviceContext(self.device)
        self.tensors = {info.region_id: self._tensor(info, fd) for info, fd in regions}
        self._pinned = [PinnedMemory(memory, bounds) for memory, bounds in host]
        self._timeline = GpuTimeline(timelines)

    def _tensor(self, info: RegionInfo, fd: int) -> torch.Tensor:
        mapping = DeviceMapping(fd, info.device, info.size_bytes)
        holder = _CudaArray(mapping.address, info.size_bytes)
        # Not at exit: the process's end unmaps, and the driver may be gone by then.
        weakref.finalize(holder, _unmap, self._context, mapping).atexit = False
        tensor: torch.Tensor = torch.as_tensor(holder, device=info.device)
        assert tensor.data_ptr() == mapping.address, "torch made a copy"
        return tensor

    def raise_timeline(self, word: int, value: int) -> None:
        """Queues the write of a timeline word behind the work of torch's current stream."""
        self._context.make_current()
        self._timeline.raise_in_stream(word, value, self._stream())

    def run_plans(self, plans: Iterable[CopyPlan], regions: RegionMap) -> None:
        """Queues plans into torch's current stream. Raises InvalidArgument for one that leaves its regions."""
        self._context.make_current()
        copies = CudaCopies(regions, self._context.ordinal)
        for plan in plans:
            regions.check(plan)
            issue = copies.clear if plan.purpose is Purpose.SCRUB else copies.issue
            for piece in plan.pieces():
                issue(piece, self._stream())

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def wait(self) -> None:
        """Returns when all work of this process on the GPU has ended. Raises DeviceError."""
        self._context.make_current()
        call("cuCtxSynchronize")

    def close(self) -> None:
        """Waits for the GPU and ends the registrations; the tensors live on. Raises DeviceError."""
        self.wait()
        for pinned in self._pinned:
            pinned.close()
        self._timeline.close()


class _CudaArray:
    """GPU memory as torch takes it over without a copy; torch keeps this object as long as the tensor."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _unmap(context: DeviceContext, mapping: DeviceMapping) -> None:
    context.make_current()
    call("cuCtxSynchronize")
    mapping.close()
