"""GPU time of short pieces of work, one by one, with a cold cache and without the CPU's launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

DELAY_CYCLES = 6_000_000
"""Some milliseconds, in which the CPU queues what is measured."""
SCRATCH_BYTES = 128 << 20
"""More than the L2 cache of a GPU holds."""


class GpuClock:
    """Times work by events around it. The L2 cache holds nothing of use before each piece."""

    def __init__(self) -> None:
        self._scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")

    def seconds(
        self, works: Sequence[Callable[[], object]], before: Callable[[int], object] | None = None
    ) -> list[float]:
        """Of each work, in order. `before(i)` is queued ahead of work i and does not count."""
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY_CYCLES)
        marks = []
        for number, work in enumerate(works):
            if before is not None:
                before(number)
            self._scratch.fill_(number)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in marks]
