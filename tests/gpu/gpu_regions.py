"""Regions half on the host (registered, with chunk bounds) and half on a GPU, read and written like arrays."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvmanager.allocators.cuda_driver import DeviceContext, call
from kvmanager.allocators.device_memory import DeviceMapping, create_device_memory
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.pinned import PinnedMemory

BOUNDS = (257 * 4096, 513 * 4096)
"""Chunk bounds of the host regions: at pages of the OS, not at powers of two."""


class GpuBytes:
    """GPU memory that reads as numpy copies; only whole-slice stores of one value or an array."""

    def __init__(self, mapping: DeviceMapping) -> None:
        self.mapping = mapping

    def read(self) -> np.ndarray:
        """All bytes, once everything queued on the GPU has ended."""
        call("cuCtxSynchronize")
        data = np.empty(self.mapping.size_bytes, np.uint8)
        call("cuMemcpyDtoH", data.ctypes.data, self.mapping.address, data.nbytes)
        return data

    def write(self, data: np.ndarray) -> None:
        """Replaces all bytes."""
        data = np.ascontiguousarray(data)
        call("cuMemcpyHtoD", self.mapping.address, data.ctypes.data, data.nbytes)

    def __setitem__(self, key: slice, value: Any) -> None:
        data = self.read()
        data[key] = value
        self.write(data)

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __eq__(self, other: object) -> Any:
        return self.read() == other

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read() if dtype is None else self.read().astype(dtype)

    def copy(self) -> np.ndarray:
        return self.read()

    def reshape(self, *shape: int) -> np.ndarray:
        return self.read().reshape(*shape)


def map_new(size_bytes: int) -> DeviceMapping:
    """New GPU memory, mapped here only."""
    fd = create_device_memory("test", "cuda:0", size_bytes)
    try:
        return DeviceMapping(fd, "cuda:0", size_bytes)
    finally:
        os.close(fd)


def host_array(size_bytes: int) -> np.ndarray:
    """Host memory that begins on a page of the OS."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


class GpuRegions:
    """Regions by id: numpy arrays, or `GpuBytes`. `regions` is the map for an executor."""

    def __init__(
        self, host: Iterable[int], gpu: Iterable[int], size_bytes: int, first_bytes: Callable[[int], np.ndarray]
    ) -> None:
        self.regions = RegionMap()
        self._context = DeviceContext("cuda:0")
        self._views: dict[int, Any] = {}
        self._pinned = []
        for region in host:
            memory = host_array(size_bytes)
            memory[:] = first_bytes(region)
            bounds = tuple(b for b in BOUNDS if b < size_bytes)
            self._pinned.append(PinnedMemory(memory, bounds))
            self.regions.add(region, memory, bounds)
            self._views[region] = memory
        for region in gpu:
            view = GpuBytes(map_new(size_bytes))
            view.write(first_bytes(region))
            self.regions.add_gpu(region, view.mapping.address, size_bytes)
            self._views[region] = view

    def __getitem__(self, region: int) -> Any:
        return self._views[region]

    def close(self) -> None:
        """Ends the registrations of host memory: the next regions may lie at the same addresses."""
        for pinned in self._pinned:
            pinned.close()
