"""What copies pages side by side for a peer's read: by address, with no plan made of it.

An ask is a few pages of each rank. As a plan of pieces a region it cost two milliseconds of Python, as long as the
bytes take on the link; as one batched call it costs a tenth of one.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any, Final, Protocol

import numpy as np

from kvmanager.allocators.cuda_driver import call, driver
from kvmanager.errors import DeviceError
from kvmanager.geometry import Int64Array
from kvmanager.transport.cuda_copies import CudaCopies
from kvmanager.transport.executor import RegionMap

MARKS: Final = 64
"""Asks in flight on the GPU; more wait here."""


class Packer(Protocol):
    """Copies in the order they were asked for. One thread owns it."""

    def start(self, number: int, sources: Int64Array, target: int, page_bytes: int) -> None:
        """Pages at these addresses to `target` and on, side by side."""

    def poll(self) -> list[tuple[int, DeviceError | None]]:
        """Numbers of those that ended since the last call, and what went wrong."""

    def outstanding(self) -> int:
        """How many have not ended."""


class HostPacker:
    """Host memory of this process."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, DeviceError | None]] = []

    def start(self, number: int, sources: Int64Array, target: int, page_bytes: int) -> None:
        """See `Packer.start`."""
        for place, source in enumerate(sources.tolist()):
            ctypes.memmove(target + place * page_bytes, source, page_bytes)
        self._ended.append((number, None))

    def poll(self) -> list[tuple[int, DeviceError | None]]:
        """See `Packer.poll`."""
        ended, self._ended = self._ended, []
        return ended

    def outstanding(self) -> int:
        """See `Packer.outstanding`."""
        return len(self._ended)


class CudaPacker:
    """Memory that one GPU reaches; a stream of its own. The device's context is current in the owner's thread."""

    def __init__(self, regions: RegionMap, ordinal: int) -> None:
        """Raises DeviceError."""
        module = driver()
        self._copies = CudaCopies(regions, ordinal)
        self._stream = call("cuStreamCreate", module.CUstream_flags.CU_STREAM_NON_BLOCKING)
        flags = module.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._free: list[Any] = [call("cuEventCreate", flags) for _ in range(MARKS)]
        self._not_ready = int(module.CUresult.CUDA_ERROR_NOT_READY)
        self._waiting: deque[tuple[int, Int64Array, Int64Array, int]] = deque()
        self._running: deque[tuple[int, Any]] = deque()
        self._ended: list[tuple[int, DeviceError | None]] = []

    def start(self, number: int, sources: Int64Array, target: int, page_bytes: int) -> None:
        """See `Packer.start`."""
        targets = target + np.arange(len(sources), dtype=np.int64) * page_bytes
        self._waiting.append((number, sources, targets, page_bytes))
        self._issue()

    def _issue(self) -> None:
        while self._waiting and self._free:
            number, sources, targets, page_bytes = self._waiting.popleft()
            event = self._free.pop()
            try:
                self._copies.runs(sources, targets, np.full(len(sources), page_bytes, np.int64), int(self._stream))
                call("cuEventRecord", event, self._stream)
            except DeviceError as error:
                self._ended.append((number, error))
                self._free.append(event)
            else:
                self._running.append((number, event))

    def poll(self) -> list[tuple[int, DeviceError | None]]:
        """See `Packer.poll`."""
        while self._running:
            number, event = self._running[0]
            (status,) = driver().cuEventQuery(event)
            if int(status) == self._not_ready:
                break
            self._running.popleft()
            self._free.append(event)
            failure = DeviceError(f"cuEventQuery: {status.name}") if int(status) else None
            self._ended.append((number, failure))
        self._issue()
        ended, self._ended = self._ended, []
        return ended

    def outstanding(self) -> int:
        """See `Packer.outstanding`."""
        return len(self._waiting) + len(self._running) + len(self._ended)
