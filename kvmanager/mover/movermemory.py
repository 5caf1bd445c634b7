"""The memory that a mover maps: memfds, and GPU memory with the host memory beside it registered.

The staging region of a GPU's mover is not the memfd behind its descriptor, which stays unused, but memory of the
mover's own on that GPU: peers read and fill nothing else at the link's rate.
"""

from __future__ import annotations

import os

from kvmanager.allocators.backing import check_sealed, map_fd
from kvmanager.allocators.cuda_driver import call
from kvmanager.allocators.device_memory import DeviceMapping, same_memory
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.pinned import PinnedMemory
from kvmanager.wire import RegionInfo, RegionKind


class MoverMemory:
    """Maps regions into a `RegionMap`, and knows memory that it has when it comes again."""

    def __init__(self, regions: RegionMap) -> None:
        self._regions = regions
        self.infos: dict[int, RegionInfo] = {}
        """By region id, in the order of their coming."""
        self._fds: dict[int, int] = {}
        self._mappings: list[DeviceMapping] = []
        self._pinned: list[PinnedMemory] = []

    def add(self, info: RegionInfo, fd: int) -> None:
        """Maps the region behind `fd`, which stays the caller's.

        Raises InvalidArgument when the memory is not what `info` says, DeviceError.
        """
        if info.on_gpu:
            mapping = DeviceMapping(fd, info.device, info.size_bytes)
            self._mappings.append(mapping)
            self._regions.add_gpu(info.region_id, mapping.address, info.size_bytes)
        elif info.kind is RegionKind.STAGING and info.device != "cpu":
            check_sealed(fd, info.size_bytes)
            self._regions.add_gpu(info.region_id, int(call("cuMemAlloc", info.size_bytes)), info.size_bytes)
        else:
            check_sealed(fd, info.size_bytes)
            memory = map_fd(fd, info.size_bytes)
            if info.kind is RegionKind.HOST and info.device != "cpu":
                self._pinned.append(PinnedMemory(memory, info.chunk_bounds))
            self._regions.add(info.region_id, memory, info.chunk_bounds)
        self.infos[info.region_id] = info
        self._fds[info.region_id] = os.dup(fd)

    def pageable(self) -> list[int]:
        """Regions of pages, which peers may be given."""
        return [i for i, info in self.infos.items() if info.kind in (RegionKind.DEVICE, RegionKind.HOST)]

    def holds(self, info: RegionInfo, fd: int) -> bool:
        """Whether this is the memory that was added under its id."""
        known = self.infos[info.region_id]
        if (known.kind, known.on_gpu) != (info.kind, info.on_gpu):
            return False
        if known.on_gpu:
            return known.size_bytes == info.size_bytes and same_memory(self._fds[info.region_id], fd)
        check_sealed(fd, info.size_bytes)
        ours, theirs = os.fstat(self._fds[info.region_id]), os.fstat(fd)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
