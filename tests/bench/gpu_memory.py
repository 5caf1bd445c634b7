"""On a GPU: memory of one process, plans over it, and how fast an executor carries them out when some are queued."""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from kvmanager.allocators.cuda_driver import DeviceContext
from kvmanager.allocators.device_memory import DeviceMapping, create_device_memory
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import SpanRun, copy_pages, copy_spans
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, native_layout
from kvmanager.transport.cuda import CudaExecutor
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.pinned import PinnedMemory, chunk_bounds

DEVICE = "cuda:0"
HBM, HOST = 1, 2
LAYOUT = native_layout(GLM53, 64)
PAGE = LAYOUT.page_bytes
PLAN_PAGES = 256
QUEUED = 4
"""Plans of one direction that are outstanding at one time."""
ROUNDS = 3
GB = 1e9


class Memory:
    """HBM and pinned host memory of one process, and how long the host's took."""

    def __init__(self, host_bytes: int, hbm_bytes: int, host_fd: int | None = None) -> None:
        """`host_fd`: memory of another process that this one uses too."""
        self.context = DeviceContext(DEVICE)
        host_bytes = host_bytes // PAGE * PAGE
        fd = os.memfd_create("bench") if host_fd is None else host_fd
        if host_fd is None:
            os.ftruncate(fd, host_bytes)
        self.host = np.frombuffer(mmap.mmap(fd, host_bytes), np.uint8)
        self.host_fd = fd
        self.fault_in_s = seconds_of(lambda: _fault_in(self.host))
        bounds = chunk_bounds(host_bytes, PAGE)
        started = time.perf_counter()
        self._pinned = PinnedMemory(self.host, bounds)
        self.pin_s = time.perf_counter() - started
        fd = create_device_memory("bench", DEVICE, hbm_bytes)
        self.hbm = DeviceMapping(fd, DEVICE, hbm_bytes)
        os.close(fd)
        self.regions = RegionMap()
        self.regions.add_gpu(HBM, self.hbm.address, hbm_bytes)
        self.regions.add(HOST, self.host, bounds)
        self.host_pages = host_bytes // PAGE

    def close(self) -> float:
        """Gives all back; seconds that the end of the registration took."""
        seconds = seconds_of(self._pinned.close)
        self.hbm.close()
        os.close(self.host_fd)
        return seconds


def _fault_in(memory: np.ndarray) -> None:
    parts = np.array_split(memory[::4096], 64)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda part: part.fill(1), parts))


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median_of(work: Callable[[], object]) -> float:
    work()
    return sorted(seconds_of(work) for _ in range(ROUNDS))[ROUNDS // 2]


def carry_out(executor: CudaExecutor, plans: Sequence[CopyPlan], times: int = 1, queued: int = QUEUED) -> None:
    """All plans, so many times over, with `queued` of them outstanding, as the mover polls.

    It sleeps about a millisecond when only the GPU has work.
    """
    waiting = deque(replace(plan, plan_id=number) for number, plan in enumerate([*plans] * times, 1))
    while waiting or executor.outstanding():
        while waiting and len(executor.outstanding()) < queued:
            executor.submit(waiting.popleft())
        for completion in executor.poll():
            assert completion.error is None, completion
        if executor.idle():
            time.sleep(0.001)


def page_plans(memory: Memory, down: bool, plans: int, each: int = PLAN_PAGES) -> list[CopyPlan]:
    """`each` whole pages a plan, from anywhere to anywhere; plans of either direction touch no page twice.

    Needs 2 * `plans` * `each` pages of HBM, and as many on the host.
    """
    count, rng = plans * each, np.random.default_rng(5 + down)
    hbm = rng.permutation(count) + (0 if down else count)
    half = memory.host_pages // 2
    host = rng.choice(half, count, replace=False) + (0 if down else half)
    source, target = ((HBM, hbm), (HOST, host)) if down else ((HOST, host), (HBM, hbm))
    made = []
    for number in range(plans):
        part = slice(number * each, (number + 1) * each)
        copies = copy_pages(PAGE, source[0], source[1][part], target[0], target[1][part])
        made.append(CopyPlan(number, Purpose.OFFLOAD if down else Purpose.ONBOARD, copies))
    return made


def permuted_plan(pages: int) -> CopyPlan:
    """DCP8 pages in HBM to sequential pages on the host."""
    source = SpanRun(0, TokenOrder(8, 1), (HBM,), np.arange(pages))
    target = SpanRun(0, SEQUENTIAL, (HOST,), np.arange(pages))
    return CopyPlan(1, Purpose.PLACE, copy_spans(LAYOUT, LAYOUT, [source], [target], pages * 64))
