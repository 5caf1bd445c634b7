"""Faulting memory in before the node serves: with several threads, with progress, and stoppable.

One thread alone zeroes pages far below the speed of the memory, and memory that is faulted in can be pinned ten
times faster. Pieces of all regions are interleaved, so no thread waits for another at one file's end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvmanager.allocators.backing import place, populate
from kvmanager.allocators.numa import NO_NODE
from kvmanager.units import MIB

PIECE_BYTES: Final = 64 * MIB
THREADS_MAX: Final = 32
_log = logging.getLogger("kvmanager.memory")


class FaultIn:
    """Faults memfds in. `run` once; `progress` from any thread."""

    def __init__(self, memory: Sequence[tuple[int, int]], node: int = NO_NODE) -> None:
        """`memory`: (fd, bytes) of each; the fds stay the caller's. `node`: the NUMA node that it is for."""
        self._memory = tuple(memory)
        self._node = node
        self.total_bytes: Final = sum(size for _, size in memory)
        pieces = [(offset, fd, size) for fd, size in memory for offset in range(0, size, PIECE_BYTES)]
        self._pieces = [(fd, offset, min(PIECE_BYTES, size - offset)) for offset, fd, size in sorted(pieces)]
        self._lock = threading.Lock()
        self._done_bytes = 0

    @property
    def done_bytes(self) -> int:
        """Bytes faulted in so far."""
        with self._lock:
            return self._done_bytes

    def run(self, stopped: Callable[[], bool]) -> bool:
        """Returns when all is faulted in: True; or soon after `stopped()` says so: False. Raises ConfigError."""
        self._place()
        threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads, thread_name_prefix="fault-in") as pool:
            try:
                for done in pool.map(lambda piece: self._fault(piece, stopped), self._pieces):
                    if not done:
                        return False
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return True

    def _place(self) -> None:
        """Before the first page is taken. Memory on another node is slower, not wrong: then it says so and goes on."""
        if self._node == NO_NODE:
            return
        try:
            for fd, size_bytes in self._memory:
                place(fd, size_bytes, self._node)
        except OSError as error:
            _log.warning("host memory is not placed on NUMA node %d of its GPU: %s", self._node, error)
        else:
            _log.info("host memory goes to NUMA node %d of its GPU", self._node)

    def _fault(self, piece: tuple[int, int, int], stopped: Callable[[], bool]) -> bool:
        if stopped():
            return False
        populate(*piece)
        with self._lock:
            self._done_bytes += piece[2]
        return True
