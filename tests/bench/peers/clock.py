"""Times of calls, as every side of the comparison takes them. Standard library only: it also runs in a peer's venv."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


def times_us(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Microseconds of each call, in order."""
    found = []
    for call in calls:
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return found


def summary(us: list[float]) -> dict[str, float]:
    """Least, median, 99th percentile and count. The least is what a busy machine disturbs the least."""
    ordered = sorted(us)
    return {
        "best_us": round(ordered[0], 1),
        "p50_us": round(ordered[len(ordered) // 2], 1),
        "p99_us": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1),
        "calls": len(ordered),
    }


def count_for(seconds: float, call: Callable[[], object]) -> float:
    """Calls a second over so many seconds."""
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        calls += 1
    return calls / (time.perf_counter() - start)
