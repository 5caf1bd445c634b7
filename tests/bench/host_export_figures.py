"""A prefix that lies in the source's host pool, handed over: by way of its device pages, or from the host itself.

    device       pages are on the device already
    onboarded    host -> device by the source's mover, then read there
    beside       read on the host while the mover onboards the same pages for its own request
    host         read on the host, and nothing onboarded

Time runs from the moment at which the request is opened. Here "device" is shared memory too: that the bytes cross a
link once less is counted, not seen. Onboards at a stated rate stand for a link that is slower than this memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import copy_pages
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.pacing import LinkRates
from kvmanager.units import MIB
from kvmanager.wire import RegionKind
from tests.bench.figure import Figure
from tests.bench.pull_figures import PULL_BYTES, RANKS, SOURCE, SPANS, Bench
from tests.integration.mover_process import running

ROUNDS = 17
HOST = 20
"""The first of the host regions."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


_Took = tuple[float, float, float, int]
"""Seconds to the end of the hand-off and to the end of all, CPU seconds, bytes onboarded."""


class _Bench(Bench):
    """Every shard on both tiers of the source's mover."""

    def __init__(self, path: Path, mover_pid: int) -> None:
        self.mover_pid = mover_pid
        self.onboarded_bytes = 0
        self.plans = 0
        super().__init__(path)
        self.on_device, self.on_host = self.bases, [self.client.addresses[HOST + rank] for rank in range(RANKS)]

    def add_regions(self) -> None:
        """Host shares that hold what the device shards do."""
        super().add_regions()
        for rank in range(RANKS):
            memory = self.client.add(HOST + rank, SPANS * SOURCE.page_bytes, RegionKind.HOST)
            memory[:] = self.client.memory[1 + rank]

    def begin_onboard(self) -> None:
        """Has the mover bring all pages to the device."""
        self.plans += 1
        copies = [
            part
            for rank in range(RANKS)
            for part in copy_pages(SOURCE.page_bytes, HOST + rank, self.pages, 1 + rank, self.pages)
        ]
        plan = CopyPlan(self.plans, Purpose.ONBOARD, tuple(copies))
        self.onboarded_bytes += plan.total_bytes
        self.client.link.submit(plan)

    def end_onboard(self) -> None:
        """Waits for it."""
        done = self.client.next_of("completion").completion
        assert done.outcome == pb.Completion.DONE, done

    def device(self, order: TokenOrder) -> None:
        """What is there is read."""
        self.bases = self.on_device
        self.hand_off(order)

    def onboarded(self, order: TokenOrder) -> None:
        """One after the other."""
        self.begin_onboard()
        self.end_onboard()
        self.device(order)

    def host(self, order: TokenOrder) -> None:
        """Without the device."""
        self.bases = self.on_host
        self.hand_off(order)

    def beside(self, order: TokenOrder) -> None:
        """At the same time; the caller waits for the onboard."""
        self.begin_onboard()
        self.host(order)

    def cpu_s(self) -> float:
        """CPU time of both processes so far."""
        fields = Path(f"/proc/{self.mover_pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) * _TICK_S


WAYS: dict[str, Callable[[_Bench, TokenOrder], None]] = {
    "device": _Bench.device, "onboarded": _Bench.onboarded, "beside": _Bench.beside, "host": _Bench.host,
}  # fmt: skip


def _measure(bench: _Bench, order: TokenOrder) -> dict[str, list[_Took]]:
    """Ways in turn, round by round."""
    took: dict[str, list[_Took]] = {name: [] for name in WAYS}
    for number in range(ROUNDS + 1):
        for name, work in WAYS.items():
            cpu, moved, started = bench.cpu_s(), bench.onboarded_bytes, time.perf_counter()
            work(bench, order)
            handed_over = time.perf_counter() - started
            if name == "beside":
                bench.end_onboard()
            whole = time.perf_counter() - started
            if number:  # the first touches memory for the first time
                took[name].append((handed_over, whole, bench.cpu_s() - cpu, bench.onboarded_bytes - moved))
    return took


def figures() -> Iterator[Figure]:
    """Medians, and medians of the ratios of a round: to the way over the device pages."""
    against = "onboarded, then read"
    with TemporaryDirectory() as directory, running(Path(directory)) as (process, path):
        bench = _Bench(path, process.pid)
        for name, order, rate in (
            ("kept order", TokenOrder(RANKS, 1), 0),
            ("permuted", SEQUENTIAL, 0),
            ("permuted, onboards at 1 GB/s", SEQUENTIAL, 10**9),
        ):
            bench.client.link.pace(LinkRates(to_device=rate))
            bench.check_bytes(order, lambda o=order: bench.host(o))  # type: ignore[misc]
            found = {way: np.array(rows) for way, rows in _measure(bench, order).items()}
            for way, rows in found.items():
                handed_over, whole, cpu, moved = np.median(rows, axis=0).tolist()
                ratios = np.median(rows[:, :3] / found["onboarded"][:, :3], axis=0).tolist()
                label = f"hand-off of {PULL_BYTES // MIB} MiB, {name}, {way}"
                yield Figure(label, handed_over * 1e3, "ms", against, ratios[0])
                if moved:
                    yield Figure("... until the source has its pages too", whole * 1e3, "ms", against, ratios[1])
                yield Figure("... CPU of both movers", cpu * 1e3, "ms CPU", against, ratios[2])
                yield Figure("... over the source's link to its device", moved / MIB, "MiB", "the bytes handed over",
                             moved / PULL_BYTES)  # fmt: skip
        bench.close()
