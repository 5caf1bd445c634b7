"""On a GPU: what the cuda executor makes of the link, beside plain copies of the same run.

    python -m tests.bench.gpu_copies load whole|permuted|kernel-permuted

copies pages down flat out, for the figure of a loop beside it.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from kvmanager.allocators.cuda_driver import DeviceContext, call, driver
from kvmanager.allocators.device_memory import DeviceMapping, create_device_memory
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose, StridedCopies
from kvmanager.core.spanplans import SpanRun, copy_pages, copy_spans
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, native_layout
from kvmanager.transport.cuda import SMALL_COPY_BYTES, CudaExecutor
from kvmanager.transport.cuda_copies import Box, CudaCopies, as_box
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.pinned import PinnedMemory, chunk_bounds
from kvmanager.transport.runs import slices
from kvmanager.units import GIB, MIB
from tests.bench.figure import Figure

DEVICE = "cuda:0"
HBM, HOST = 1, 2
LAYOUT = native_layout(GLM53, 64)
PAGE = LAYOUT.page_bytes
PIN_BYTES = 64 * GIB
HBM_PAGES = 4_096
PLAN_PAGES = 256
PLANS = 16
PLAIN_BYTES = 4 * GIB
ROUNDS = 5
LAYERS, LAYER_RUN = 79, 64 * 656
GB = 1e9


class Memory:
    """HBM and pinned host memory of one process, and how long the host's took."""

    def __init__(self, host_bytes: int, hbm_bytes: int) -> None:
        self.context = DeviceContext(DEVICE)
        host_bytes = host_bytes // PAGE * PAGE
        fd = os.memfd_create("bench")
        os.ftruncate(fd, host_bytes)
        self.host = np.frombuffer(mmap.mmap(fd, host_bytes), np.uint8)
        os.close(fd)
        self.fault_in_s = _seconds(lambda: _fault_in(self.host))
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
        seconds = _seconds(self._pinned.close)
        self.hbm.close()
        return seconds


def _fault_in(memory: np.ndarray) -> None:
    parts = np.array_split(memory[::4096], 64)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda part: part.fill(1), parts))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _median_s(work: Callable[[], object]) -> float:
    work()
    return sorted(_seconds(work) for _ in range(ROUNDS))[ROUNDS // 2]


def _run(executor: CudaExecutor, plans: list[CopyPlan]) -> None:
    """As the mover does: polls, and sleeps about a millisecond when only the GPU has work."""
    for plan in plans:
        executor.submit(plan)
    while executor.outstanding():
        for completion in executor.poll():
            assert completion.error is None, completion
        if executor.idle():
            time.sleep(0.001)


class Plain:
    """Single copies by the driver, straight from here; each call waits for its end."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        flags = driver().CUstream_flags.CU_STREAM_NON_BLOCKING
        self.streams = [call("cuStreamCreate", flags) for _ in range(2)]

    def down(self, stream: int = 0) -> None:
        host = self._memory.host.ctypes.data
        call("cuMemcpyDtoHAsync", host, self._memory.hbm.address, PLAIN_BYTES, self.streams[stream])

    def up(self, stream: int = 0) -> None:
        host = self._memory.host.ctypes.data + 2 * PLAIN_BYTES
        hbm = self._memory.hbm.address + PLAIN_BYTES
        call("cuMemcpyHtoDAsync", hbm, host, PLAIN_BYTES, self.streams[stream])

    def wait(self) -> None:
        for stream in self.streams:
            call("cuStreamSynchronize", stream)

    def seconds(self, *copies: Callable[[], None]) -> float:
        def work() -> None:
            for copy in copies:
                copy()
            self.wait()

        return _median_s(work)


def _page_plans(memory: Memory, rng: np.random.Generator, down: bool, first_id: int) -> list[CopyPlan]:
    """Whole pages from anywhere to anywhere; the plans of one direction touch no page twice."""
    count = PLANS * PLAN_PAGES // 2
    offset = 0 if down else count  # the two directions use different pages
    hbm = rng.permutation(count) + offset
    host = rng.choice(memory.host_pages // 2, count, replace=False) + (0 if down else memory.host_pages // 2)
    source, target = ((HBM, hbm), (HOST, host)) if down else ((HOST, host), (HBM, hbm))
    plans = []
    for number in range(PLANS // 2):
        part = slice(number * PLAN_PAGES, (number + 1) * PLAN_PAGES)
        copies = copy_pages(PAGE, source[0], source[1][part], target[0], target[1][part])
        plans.append(CopyPlan(first_id + number, Purpose.OFFLOAD if down else Purpose.ONBOARD, copies))
    return plans


def _permuted(pages: int) -> CopyPlan:
    """DCP8 pages in HBM to sequential pages on the host."""
    source = SpanRun(0, TokenOrder(8, 1), (HBM,), np.arange(pages))
    target = SpanRun(0, SEQUENTIAL, (HOST,), np.arange(pages))
    return CopyPlan(1, Purpose.PLACE, copy_spans(LAYOUT, LAYOUT, [source], [target], pages * 64))


def _rows_from(plan: CopyPlan, least_bytes: int) -> tuple[PagedCopies, ...]:
    """The boxes whose rows are at least so long."""
    return tuple(replace(c, boxes=tuple(b for b in c.boxes if b.row_bytes >= least_bytes)) for c in plan.copies)


def figures() -> Iterator[Figure]:
    """The executor's figures; every ratio against a plain copy of this run."""
    memory = Memory(PIN_BYTES, HBM_PAGES * PAGE)
    gib = len(memory.host) / GIB
    yield Figure("gpu: fault in host memory, 16 threads", memory.fault_in_s / gib, "s/GiB", "itself", 1.0)
    yield Figure(
        "gpu: pin faulted memory", memory.pin_s / gib, "s/GiB", "faulting it in", memory.pin_s / memory.fault_in_s
    )
    plain = Plain(memory)
    executor = CudaExecutor(memory.regions, DEVICE)
    yield from _link_figures(memory, plain, executor)
    yield from _shape_figures(memory, plain, executor)
    executor.release()
    unpin_s = memory.close()
    yield Figure("gpu: end the registration", unpin_s / gib, "s/GiB", "pinning", unpin_s / memory.pin_s)


def _link_figures(memory: Memory, plain: Plain, executor: CudaExecutor) -> Iterator[Figure]:
    rng = np.random.default_rng(5)
    rates = {"down": PLAIN_BYTES / plain.seconds(plain.down), "up": PLAIN_BYTES / plain.seconds(plain.up)}
    two_way = 2 * PLAIN_BYTES / plain.seconds(plain.down, lambda: plain.up(1))
    for name, rate in (*rates.items(), ("both ways", two_way)):
        yield Figure(f"gpu: one large pinned copy {name}", rate / GB, "GB/s", "itself", 1.0)
    plans = {"down": _page_plans(memory, rng, True, 1), "up": _page_plans(memory, rng, False, 1_000)}
    total = sum(plan.total_bytes for plan in plans["down"])
    for name, words in (("down", "offload"), ("up", "onboard")):
        rate = total / _median_s(lambda name=name: _run(executor, plans[name]))  # type: ignore[misc]
        yield Figure(
            f"gpu: {words}, {PLANS // 2} plans of {PLAN_PAGES} pages", rate / GB, "GB/s", "one large pinned copy",
            rate / rates[name],
        )  # fmt: skip
    both = [plan for pair in zip(plans["down"], plans["up"], strict=True) for plan in pair]
    rate = 2 * total / _median_s(lambda: _run(executor, both))
    yield Figure("gpu: offload and onboard at once", rate / GB, "GB/s", "plain copies both ways", rate / two_way)


def _shape_figures(memory: Memory, plain: Plain, executor: CudaExecutor) -> Iterator[Figure]:
    bare = _bare_3d(memory, plain)
    plan = _permuted(512)
    boxes = _boxes_alone(memory, plain, plan)
    yield Figure("gpu: one 3-D copy of 172 MB", bare / GB, "GB/s", "itself", 1.0)
    yield Figure("gpu: one 3-D copy a page pair, alone", boxes / GB, "GB/s", "one 3-D copy of 172 MB", boxes / bare)
    rate = plan.total_bytes / _median_s(lambda: _run(executor, [plan]))
    yield Figure("gpu: permuted offload, whole pages", rate / GB, "GB/s", "one 3-D copy a page pair", rate / boxes)
    for what, limit in (("by copy engines alone", 0), ("by the kernel alone", MIB)):
        other = CudaExecutor(memory.regions, DEVICE, small_copy_bytes=limit)
        rate = plan.total_bytes / _median_s(lambda other=other: _run(other, [plan]))  # type: ignore[misc]
        yield Figure(f"gpu: the same {what}", rate / GB, "GB/s", "one 3-D copy a page pair", rate / boxes)
        other.release()
    for name, least in (("latent rows", 656), ("groups of four layers", 2_624)):
        part = CopyPlan(1, Purpose.PLACE, _rows_from(plan, least))
        rate = part.total_bytes / _median_s(lambda part=part: _run(executor, [part]))  # type: ignore[misc]
        yield Figure(f"gpu: permuted offload, {name}", rate / GB, "GB/s", "one 3-D copy a page pair", rate / boxes)
    pages = np.random.default_rng(6).permutation(1_024)
    run_bytes = LAYERS * LAYER_RUN
    (one,) = copy_pages(run_bytes, HBM, pages, HOST, np.arange(1_024))
    whole = one.total_bytes / _median_s(lambda: _run(executor, [CopyPlan(1, Purpose.OFFLOAD, (one,))]))
    yield Figure("gpu: pages of one run", whole / GB, "GB/s", "itself", 1.0)
    many = StridedCopies(
        HBM, HOST, pages * run_bytes, np.arange(1_024) * LAYER_RUN, (LAYERS,), (LAYER_RUN,), (1_024 * LAYER_RUN,),
        LAYER_RUN,
    )  # fmt: skip
    for name, long_row_bytes in (("one batched call", 1), ("2-D copies", MIB)):
        copies = CudaCopies(memory.regions, 0, long_row_bytes)

        def work(copies: CudaCopies = copies) -> None:
            for piece in slices(many, 32 * MIB, 16_384):
                copies.issue(piece, int(plain.streams[0]))
            plain.wait()

        rate = many.total_bytes / _median_s(work)
        yield Figure(f"gpu: pages of {LAYERS} runs, {name}", rate / GB, "GB/s", "pages of one run", rate / whole)


def _bare_3d(memory: Memory, plain: Plain) -> float:
    """Bytes a second of one 3-D copy down that spreads runs of eight rows, as the permute does."""
    row, height, depth = 4 * 656, 8, 8_192
    zero = np.zeros(1, np.int64)
    box = Box(row, height, depth, (row, 8 * row), (height, height))
    strides = ((box.heights[0] * row, row), (box.heights[1] * 8 * row, 8 * row))
    copies = StridedCopies(HBM, HOST, zero, zero, (depth, height), *strides, row)
    calls = CudaCopies(memory.regions, 0)

    def work() -> None:
        assert calls.issue(copies, int(plain.streams[0])) == 1
        plain.wait()

    return copies.total_bytes / _median_s(work)


def _boxes_alone(memory: Memory, plain: Plain, plan: CopyPlan) -> float:
    """Bytes a second of the plan's largest boxes (the groups of four layers), one driver call each, no executor."""
    largest = max(plan.pieces(), key=lambda c: c.total_bytes)
    calls = CudaCopies(memory.regions, 0)
    part, box = as_box(largest, (1 << 31) - 1, lambda _: False)
    assert box is not None

    def work() -> None:
        calls.issue_singly(part, box, int(plain.streams[0]))
        plain.wait()

    return largest.total_bytes / _median_s(work)


def beside_a_loop() -> Iterator[Figure]:
    """A decode-like loop of this process while another copies down flat out through the executor."""
    import torch

    a = torch.randn((4_096, 4_096), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((4_096, 4_096), device="cuda", dtype=torch.bfloat16)
    big = torch.empty(256 * MIB, device="cuda", dtype=torch.uint8)

    def step() -> None:
        for _ in range(20):
            torch.matmul(a, b)
            big.add_(1)
        torch.cuda.synchronize()

    def median() -> float:
        for _ in range(20):
            step()
        return sorted(_seconds(step) for _ in range(200))[100]

    for what in ("whole", "permuted", "kernel-permuted"):
        yield from _beside(what, median)


def _beside(what: str, median: Callable[[], float]) -> Iterator[Figure]:
    alone = median()
    command = [sys.executable, "-m", "tests.bench.gpu_copies", "load", what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "copying\n"
        beside = median()
        other.stdin.close()
        rate = float(other.stdout.readline())
    again = median()
    yield Figure(f"gpu: {what} pages down beside a decode-like loop", rate, "GB/s", "itself", 1.0)
    yield Figure(f"gpu: a step of that loop beside {what}", beside * 1e3, "ms", "alone, before and after",
                 2 * beside / (alone + again))  # fmt: skip


def _load(what: str) -> None:
    """Copies pages down, as they are or permuted, until stdin ends; says the rate in GB/s."""
    import select

    memory = Memory(8 * GIB, HBM_PAGES // 2 * PAGE)
    small = MIB if what == "kernel-permuted" else SMALL_COPY_BYTES
    executor = CudaExecutor(memory.regions, DEVICE, small_copy_bytes=small)
    pages = np.arange(PLAN_PAGES)
    print("copying", flush=True)
    started, moved = time.perf_counter(), 0
    number = 0
    permuted = _permuted(512).copies
    while not select.select([sys.stdin], [], [], 0)[0] and time.perf_counter() - started < 60:
        while len(executor.outstanding()) < 4:
            number += 1
            places = (pages * 7 + number) % 2_000, (pages * 3 + number) % 2_000
            whole = copy_pages(PAGE, HBM, places[0], HOST, places[1])
            copies = whole if what == "whole" else permuted
            executor.submit(CopyPlan(number, Purpose.OFFLOAD, copies))
        moved += sum(completion.moved_bytes for completion in executor.poll())
        if executor.idle():
            time.sleep(0.001)
    print(moved / (time.perf_counter() - started) / GB, flush=True)


if __name__ == "__main__":
    assert sys.argv[1] == "load"
    _load(sys.argv[2])
