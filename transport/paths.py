"""Which way a pull's chunks go, by measured rate: through staging, or straight into their final places.

What a link and its movers do best is seen in the first chunks that come over it: they take both ways in turn, a stated
number of times each, and what was faster carries the rest. A test at the start, against a process of this machine,
would say nothing of the network that the peer is on. Measured anew for each process at the other end.

Straight reads save the copy out of staging. They cost more where a peer hangs: late bytes then may land in pages, and
only this process's end is a fence. So they are chosen for a clear gain only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

SAMPLES: Final = 3
"""Chunks measured of each way."""
CLEAR_GAIN: Final = 1.1
"""Straight reads are chosen when they are so many times as fast."""
LEAST_RUN_BYTES: Final = 4_096
"""Mean length of what a straight read would be made of: each run costs some microseconds."""
PEERS: Final = 256
"""Of which it is known; the longest known is forgotten."""


class PullPath(StrEnum):
    """The ways; MEASURED: whichever is faster."""

    MEASURED = "measured"
    RING = "ring"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class PathRates:
    """What is known of one peer. `chosen`: MEASURED as long as it is not decided.

    Bytes a second of the fastest chunk, from the ask to its last byte in place; 0: none went that way.
    """

    agent_name: str
    chosen: PullPath
    ring_bytes_per_s: float
    direct_bytes_per_s: float


@dataclass
class _Known:
    samples: dict[PullPath, int] = field(default_factory=lambda: {PullPath.RING: 0, PullPath.DIRECT: 0})
    best: dict[PullPath, float] = field(default_factory=lambda: {PullPath.RING: 0.0, PullPath.DIRECT: 0.0})

    def chosen(self) -> PullPath:
        if min(self.samples.values()) < SAMPLES:
            return PullPath.MEASURED
        gain = self.best[PullPath.DIRECT] >= CLEAR_GAIN * self.best[PullPath.RING]
        return PullPath.DIRECT if gain else PullPath.RING


class PullPaths:
    """By peer: what was measured, and what follows from it."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def next(self, agent_name: str, wanted: PullPath, run_bytes: float) -> PullPath:
        """RING or DIRECT, for the next chunk of a pull that consists of runs of so many bytes on average."""
        if wanted is PullPath.RING or run_bytes < LEAST_RUN_BYTES:
            return PullPath.RING
        if wanted is PullPath.DIRECT:
            return PullPath.DIRECT
        known = self._of(agent_name)
        chosen = known.chosen()
        if chosen is not PullPath.MEASURED:
            return chosen
        return min((PullPath.RING, PullPath.DIRECT), key=lambda path: known.samples[path])

    def note(self, agent_name: str, path: PullPath, size_bytes: int, busy_ns: int) -> None:
        """A chunk is in place: bytes and nanoseconds of its reads and its placement."""
        known = self._of(agent_name)
        known.samples[path] += 1
        known.best[path] = max(known.best[path], 1e9 * size_bytes / max(busy_ns, 1))

    def rates(self, agent_name: str) -> PathRates | None:
        """What is known of a peer; None when nothing came from it yet."""
        known = self._known.get(agent_name)
        if known is None:
            return None
        return PathRates(agent_name, known.chosen(), known.best[PullPath.RING], known.best[PullPath.DIRECT])

    def _of(self, agent_name: str) -> _Known:
        if agent_name not in self._known and len(self._known) >= PEERS:
            del self._known[next(iter(self._known))]
        return self._known.setdefault(agent_name, _Known())
