"""When a mover's kernels may be launched: together, and with pauses between.

A GPU runs the kernels of one process at a time: to run a kernel of the mover it leaves the engine's, waits for what
runs to end, and comes back. On an H200 that costs the engine about 0.4 ms whatever the kernel does, so 250 small
launches a second took 10 % of a decode loop's time and 500 took 22 %. Launched one behind the other they cost that
once. Copies by the copy engines cost nothing of the kind. With a window every 16 ms the loop took 1.8 % longer beside
offload at full speed with checksums of all pages (5.8 % without windows), 5.2 % beside permuted offload (22 %).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmanager.units import MILLISECOND_NS, SECOND_NS

PAUSE_NS: Final = 16 * MILLISECOND_NS
"""From one window's first launch to the next one's: 60 windows a second."""
_LINK_BYTES_PER_S: Final = 55_000_000_000


def pause_bridged_by(buffer_bytes: int) -> int:
    """The longest pause for kernels that half a buffer bridges at a PCIe gen5 link's speed, in ns; `PAUSE_NS` at most.

    Chunks that wait in a staging ring for their kernel stop the reads behind them.
    """
    return min(PAUSE_NS, buffer_bytes // 2 * SECOND_NS // _LINK_BYTES_PER_S)


class KernelWindows:
    """A window is one pass of the owner's poll. Its owner is one thread."""

    def __init__(self, pause_ns: int, clock_ns: Callable[[], int]) -> None:
        """`pause_ns` 0: always open."""
        self._pause_ns = pause_ns
        self._clock_ns = clock_ns
        self._next_ns = 0
        self._inside = False

    def begin_pass(self) -> None:
        """What may be launched now may be launched until `end_pass`."""
        self._inside = self._clock_ns() >= self._next_ns

    def end_pass(self) -> None:
        """From here on only where the pause is over."""
        self._inside = False

    @property
    def open(self) -> bool:
        """Whether a kernel may be launched now."""
        return self._inside or self._clock_ns() >= self._next_ns

    def launched(self) -> None:
        """A kernel was; the first of a window begins the pause."""
        now_ns = self._clock_ns()
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + self._pause_ns
