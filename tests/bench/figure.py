"""One measured figure, and what it is compared with in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Figure:
    """`ratio` = value / the compared value in the same unit, both measured in this run."""

    name: str
    value: float
    unit: str
    compared_with: str
    ratio: float

    def line(self) -> str:
        """One line for people."""
        return f"{self.name:<44} {self.value:>12.3f} {self.unit:<8} {self.ratio:>8.3f} x {self.compared_with}"

    def as_dict(self) -> dict[str, object]:
        """For the JSON file."""
        return asdict(self)


def median_s(work: Callable[[], object], rounds: int) -> float:
    """Median seconds of `work` over `rounds` calls, after one that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def best_cpu_s(work: Callable[[], object], rounds: int) -> float:
    """Least CPU seconds of this thread for `work` over `rounds` calls, after one that is not counted.

    What other processes do to caches and clocks only adds to it.
    """
    work()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
