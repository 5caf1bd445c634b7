"""Host memory registered with the CUDA driver, so that copy engines and kernels reach it."""

from __future__ import annotations

import math
import mmap
from typing import Final

from kvmanager.allocators.cuda_driver import call, driver
from kvmanager.errors import InvalidArgument
from kvmanager.transport.executor import ByteArray
from kvmanager.units import GIB

CHUNK_MAX_BYTES: Final = 64 * GIB
"""Bytes of one registration: one of 512 GiB fails on current drivers."""


def chunk_bounds(size_bytes: int, page_bytes: int, most_bytes: int = CHUNK_MAX_BYTES) -> tuple[int, ...]:
    """Where a region of pages is cut into registrations, in bytes from its start; empty when one will do.

    Each bound is the start of a page of the pool and of an OS page: registrations may not share an OS page.
    Raises InvalidArgument when no such bound lies within `most_bytes`.
    """
    if size_bytes <= most_bytes:
        return ()
    unit = math.lcm(page_bytes, mmap.PAGESIZE)
    if unit > most_bytes:
        raise InvalidArgument(f"pages of {page_bytes} bytes: no bound of both page kinds within {most_bytes} bytes")
    step = most_bytes // unit * unit
    return tuple(range(step, size_bytes, step))


def device_address(memory: ByteArray) -> int:
    """Where the GPU sees registered memory. A context must be current. Raises DeviceError if it is not registered."""
    return int(call("cuMemHostGetDevicePointer", int(memory.ctypes.data), 0))


class PinnedMemory:
    """One region's mapping, registered chunk by chunk. A context must be current."""

    def __init__(self, memory: ByteArray, bounds: tuple[int, ...] = ()) -> None:
        """Registers all of `memory`, which begins on an OS page. Raises DeviceError; then nothing is registered."""
        self._starts: list[int] = []
        self.address = int(memory.ctypes.data)
        """Of the mapping; on current GPUs kernels use it as it is."""
        module = driver()
        flags = module.CU_MEMHOSTREGISTER_PORTABLE | module.CU_MEMHOSTREGISTER_DEVICEMAP
        ends = (*bounds, len(memory))
        try:
            for start, end in zip((0, *bounds), ends, strict=True):
                call("cuMemHostRegister", self.address + start, end - start, flags)
                self._starts.append(self.address + start)
        except BaseException:
            self.close()
            raise

    def device_address(self) -> int:
        """The first chunk's address on the GPU. Raises DeviceError."""
        return int(call("cuMemHostGetDevicePointer", self.address, 0))

    def close(self) -> None:
        """Ends the registrations once; copies that use them must have ended. Raises DeviceError."""
        while self._starts:
            call("cuMemHostUnregister", self._starts.pop())
