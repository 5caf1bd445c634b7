"""Virtual time: what happens when, in order, ties in the order they were asked for; and links that take time."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Seconds since the start, float; `ns` for the core."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    @property
    def ns(self) -> int:
        """The same in ns."""
        return int(self.now_s * 1e9)

    def at(self, moment_s: float, act: Callable[[], None]) -> None:
        """`act` at a moment, or now if that is over."""
        self._asked += 1
        heapq.heappush(self._due, (max(moment_s, self.now_s), self._asked, act))

    @property
    def next_s(self) -> float:
        """When something happens next; infinity for never."""
        return self._due[0][0] if self._due else float("inf")

    def advance(self) -> None:
        """The next thing happens."""
        self.now_s, _, act = heapq.heappop(self._due)
        act()


class Link:
    """One direction of a link: one transfer after the other, at `bytes_per_s`. moved_bytes: so far."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_s = 0.0
        self.moved_bytes = 0

    def send(self, now_s: float, size: int) -> float:
        """When a transfer that is asked for now ends."""
        self._free_s = max(now_s, self._free_s) + size / self._rate
        self.moved_bytes += size
        return self._free_s
