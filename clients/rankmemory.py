"""The regions that one rank maps: numpy arrays over memfds, and GPU memory beside them on a GPU node."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvmanager.errors import InvalidArgument
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.firsttouch import FirstTouch
from kvmanager.wire import RegionInfo, RegionKind

if TYPE_CHECKING:
    # At run time it is imported where a region is GPU memory: it needs torch and CUDA.
    from kvmanager.transport.gpu_rank import GpuRank

Memory = npt.NDArray[np.uint8]


class RankMemory:
    """What one rank may read and write. `gpu` is None on a node whose device is the CPU.

    `arrays`: region id -> uint8[size_bytes], of the regions that are host memory.
    """

    def __init__(self, arrays: dict[int, Memory], timelines: Memory, gpu: GpuRank | None) -> None:
        self.arrays = arrays
        self.gpu = gpu
        self._words = timelines.view("<u8")
        # On a GPU node the memory is pinned, which does the same.
        self._first_touch = FirstTouch(list(arrays.values())) if gpu is None else None

    def close(self) -> None:
        """Ends what goes on in the background. The mappings live on until nobody holds a view of them."""
        if self._first_touch is not None:
            self._first_touch.close()

    def device_view(self, region_id: int) -> Any:
        """The bytes of a device region: a torch tensor of GPU memory, or a numpy array; never a copy."""
        if self.gpu is not None and region_id in self.gpu.tensors:
            return self.gpu.tensors[region_id]
        return self.arrays[region_id]

    def timeline_value(self, word: int) -> int:
        """What everybody reads there now."""
        return int(self._words[word])

    def raise_timeline(self, word: int, value: int) -> None:
        """Sets the word, on a GPU node behind the work of the current stream."""
        if self.gpu is None:
            self._words[word] = value
        else:
            self.gpu.raise_timeline(word, value)

    def add_to(self, regions: RegionMap) -> None:
        """Adds what is not yet in the map."""
        for region_id, array in self.arrays.items():
            if region_id not in regions:
                regions.add(region_id, array)
        if self.gpu is not None:
            for region_id, tensor in self.gpu.tensors.items():
                if region_id not in regions:
                    regions.add_gpu(region_id, tensor.data_ptr(), tensor.numel())


def map_rank(infos: Iterable[RegionInfo], fds: Sequence[int]) -> RankMemory:
    """Maps each region, in order, and closes the fds: a mapping outlives its fd.

    A child that this process forks has none of the mappings: nobody else would know that it can write to them.
    Raises InvalidArgument when fds and regions do not pair, or the timeline region is not exactly one;
    DeviceError on a GPU node whose GPU this process can't use.
    """
    described = list(infos)
    try:
        if len(described) != len(fds):
            raise InvalidArgument(f"{len(fds)} fds came for {len(described)} regions")
        pairs = list(zip(described, fds, strict=True))
        arrays = {
            info.region_id: np.frombuffer(_map(fd, info.size_bytes), dtype=np.uint8)
            for info, fd in pairs
            if not info.on_gpu
        }
        timelines = [info.region_id for info in described if info.kind is RegionKind.TIMELINE]
        if len(timelines) != 1:
            raise InvalidArgument(f"{len(timelines)} timeline regions; an attach has exactly 1")
        words = arrays[timelines[0]]
        return RankMemory(arrays, words, _gpu(pairs, arrays, words))
    finally:
        for fd in fds:
            os.close(fd)


def _map(fd: int, size_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size_bytes)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _gpu(pairs: list[tuple[RegionInfo, int]], arrays: dict[int, Memory], words: Memory) -> GpuRank | None:
    if not any(info.on_gpu for info, _ in pairs):
        return None
    from kvmanager.transport.gpu_rank import GpuRank

    pinned = [(arrays[info.region_id], info.chunk_bounds) for info, _ in pairs if info.kind is RegionKind.HOST]
    return GpuRank([(info, fd) for info, fd in pairs if info.on_gpu], pinned, words)
