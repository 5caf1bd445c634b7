"""What copies pages side by side for a peer's read: by address, with no plan made of it.

An ask is a few pages of each rank. As a plan of pieces a region it cost two milliseconds of Python, as long as the
bytes take on the link; as one batched call it costs a tenth of one. Pages that are turned go by a kernel, one launch a
shape of copies.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from kvmanager.allocators.cuda_driver import call, driver
from kvmanager.errors import DeviceError, InvalidArgument
from kvmanager.geometry import Int64Array
from kvmanager.transport.cuda_copies import CudaCopies
from kvmanager.transport.cuda_rows import MAX_BYTES, MAX_COPIES, RowKernel
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.runs import slices, spread
from kvmanager.transport.turned_pages import Turn

MARKS: Final = 64
"""Asks in flight on the GPU, and launches of kernels that turn pages; more wait here."""
TURN_BLOCKS: Final = 132
"""Of a launch: the sooner it is over, the less another process's kernels wait for it."""


class Packer(Protocol):
    """Copies in the order they were asked for. One thread owns it."""

    def start(self, number: int, sources: Int64Array, target: int, page_bytes: int, turn: Turn | None = None) -> None:
        """Pages at these addresses to `target` and on, side by side; `turn`, which was checked: turned."""

    def poll(self) -> list[tuple[int, DeviceError | None]]:
        """Numbers of those that ended since the last call, and what went wrong."""

    def outstanding(self) -> int:
        """How many have not ended."""


class HostPacker:
    """Host memory of this process."""

    def __init__(self) -> None:
        self._ended: list[tuple[int, DeviceError | None]] = []

    def start(self, number: int, sources: Int64Array, target: int, page_bytes: int, turn: Turn | None = None) -> None:
        """See `Packer.start`."""
        if turn is not None:
            for c in turn.copies(sources, target, page_bytes):
                rows = (spread(c.source_offsets, c.counts, c.source_strides).tolist(),
                        spread(c.target_offsets, c.counts, c.target_strides).tolist())  # fmt: skip
                for source, at in zip(*rows, strict=True):
                    ctypes.memmove(at, source, c.row_bytes)
            self._ended.append((number, None))
            return
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


@dataclass(frozen=True, slots=True)
class _Asked:
    number: int
    sources: Int64Array
    target: int
    page_bytes: int
    turn: Turn | None


@dataclass(frozen=True, slots=True)
class _Running:
    """`event`: behind its last copy. `slots`: of the launches that it took."""

    number: int
    event: Any
    slots: list[int] = field(default_factory=list)


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
        self._ordinal = ordinal
        self._kernel: RowKernel | None = None  # made when pages are first turned
        self._slots = list(range(MARKS))  # of the kernel's launches
        self._waiting: deque[_Asked] = deque()
        self._running: deque[_Running] = deque()
        self._ended: list[tuple[int, DeviceError | None]] = []

    def start(self, number: int, sources: Int64Array, target: int, page_bytes: int, turn: Turn | None = None) -> None:
        """See `Packer.start`."""
        self._waiting.append(_Asked(number, sources, target, page_bytes, turn))
        self._issue()

    def _issue(self) -> None:
        while self._waiting and self._free:
            asked, event = self._waiting[0], self._free[-1]
            running = _Running(asked.number, event)
            try:
                if asked.turn is None:
                    self._copy(asked)
                elif not self._turn(asked, asked.turn, running):
                    return  # until slots are free
                call("cuEventRecord", event, self._stream)
            except (DeviceError, InvalidArgument) as error:
                # Launches before it may run: their slots are not used again.
                failure = error if isinstance(error, DeviceError) else DeviceError(str(error))
                self._ended.append((asked.number, failure))
                self._waiting.popleft()
            else:
                self._running.append(running)
                self._waiting.popleft()
                self._free.pop()

    def _copy(self, asked: _Asked) -> None:
        count, size = len(asked.sources), asked.page_bytes
        targets = asked.target + np.arange(count, dtype=np.int64) * size
        self._copies.runs(asked.sources, targets, np.full(count, size, np.int64), int(self._stream))

    def _turn(self, asked: _Asked, turn: Turn, running: _Running) -> bool:
        """Launches all that it takes; False, and nothing launched, where too many launches are in flight."""
        launches = [
            part
            for c in turn.copies(asked.sources, asked.target, asked.page_bytes)
            for part in slices(c, MAX_BYTES, MAX_COPIES * math.prod(c.counts))
        ]
        if len(launches) > MARKS:
            raise DeviceError(f"{len(launches)} launches to turn {len(asked.sources)} pages; {MARKS} are possible")
        if len(launches) > len(self._slots):
            return False
        if self._kernel is None:
            self._kernel = RowKernel(self._ordinal, MARKS)
        for c in launches:
            running.slots.append(self._slots.pop())
            self._kernel.launch(c, 0, 0, running.slots[-1], int(self._stream), TURN_BLOCKS)
        return True

    def poll(self) -> list[tuple[int, DeviceError | None]]:
        """See `Packer.poll`."""
        while self._running:
            running = self._running[0]
            (status,) = driver().cuEventQuery(running.event)
            if int(status) == self._not_ready:
                break
            self._running.popleft()
            self._free.append(running.event)
            self._slots += running.slots
            failure = DeviceError(f"cuEventQuery: {status.name}") if int(status) else None
            self._ended.append((running.number, failure))
        self._issue()
        ended, self._ended = self._ended, []
        return ended

    def outstanding(self) -> int:
        """See `Packer.outstanding`."""
        return len(self._waiting) + len(self._running) + len(self._ended)
