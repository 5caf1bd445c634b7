"""On a GPU: what the cuda executor makes of the link, beside plain copies of the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kvmanager.allocators.cuda_driver import call, driver
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose, StridedCopies
from kvmanager.core.spanplans import copy_pages
from kvmanager.transport.cuda import CudaExecutor, Tuning
from kvmanager.transport.cuda_copies import Box, CudaCopies, as_box
from kvmanager.transport.runs import slices
from kvmanager.units import GIB, MIB
from tests.bench.figure import Figure
from tests.bench.gpu_memory import (
    DEVICE,
    GB,
    HBM,
    HOST,
    PAGE,
    PLAN_PAGES,
    QUEUED,
    Memory,
    carry_out,
    median_of,
    page_plans,
    permuted_plan,
)

PIN_BYTES = 64 * GIB
HOST_BYTES = 8 * GIB
PLANS = 4
TIMES = 3
"""Each plan so often in one measurement, so that start and end do not count for much."""
PLAIN_BYTES = 2 * GIB
LAYERS, LAYER_RUN = 79, 64 * 656


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

        return median_of(work)


def _rows_from(plan: CopyPlan, least_bytes: int) -> tuple[PagedCopies, ...]:
    """The boxes whose rows are at least so long."""
    return tuple(replace(c, boxes=tuple(b for b in c.boxes if b.row_bytes >= least_bytes)) for c in plan.copies)


def pinning() -> Iterator[Figure]:
    """What 64 GiB of host memory cost before they are of use, and after."""
    memory = Memory(PIN_BYTES, 64 * PAGE)
    gib = len(memory.host) / GIB
    yield Figure("gpu: fault in host memory, 16 threads", memory.fault_in_s / gib, "s/GiB", "itself", 1.0)
    yield Figure(
        "gpu: pin faulted memory", memory.pin_s / gib, "s/GiB", "faulting it in", memory.pin_s / memory.fault_in_s
    )
    unpin_s = memory.close()
    yield Figure("gpu: end the registration", unpin_s / gib, "s/GiB", "pinning", unpin_s / memory.pin_s)


def figures() -> Iterator[Figure]:
    """The executor's figures; every ratio against a plain copy of this run."""
    memory = Memory(HOST_BYTES, 2 * PLANS * PLAN_PAGES * PAGE)
    plain = Plain(memory)
    executor = CudaExecutor(memory.regions, DEVICE)
    yield from _link_figures(memory, plain, executor)
    yield from _shape_figures(memory, plain, executor)
    executor.release()
    memory.close()


def _link_figures(memory: Memory, plain: Plain, executor: CudaExecutor) -> Iterator[Figure]:
    rates = {"down": PLAIN_BYTES / plain.seconds(plain.down), "up": PLAIN_BYTES / plain.seconds(plain.up)}
    two_way = 2 * PLAIN_BYTES / plain.seconds(plain.down, lambda: plain.up(1))
    for name, rate in (*rates.items(), ("both ways", two_way)):
        yield Figure(f"gpu: one large pinned copy {name}", rate / GB, "GB/s", "itself", 1.0)
    plans = {"down": page_plans(memory, True, PLANS), "up": page_plans(memory, False, PLANS)}
    total = TIMES * sum(plan.total_bytes for plan in plans["down"])
    for name, words in (("down", "offload"), ("up", "onboard")):
        rate = total / median_of(lambda name=name: carry_out(executor, plans[name], TIMES))  # type: ignore[misc]
        yield Figure(
            f"gpu: {words}, {QUEUED} plans of {PLAN_PAGES} pages queued", rate / GB, "GB/s", "one large pinned copy",
            rate / rates[name],
        )  # fmt: skip
    both = [plan for pair in zip(plans["down"], plans["up"], strict=True) for plan in pair]
    rate = 2 * total / median_of(lambda: carry_out(executor, both, TIMES, 2 * QUEUED))
    yield Figure("gpu: offload and onboard at once", rate / GB, "GB/s", "plain copies both ways", rate / two_way)


def _shape_figures(memory: Memory, plain: Plain, executor: CudaExecutor) -> Iterator[Figure]:
    bare = _bare_3d(memory, plain)
    plan = permuted_plan(512)
    boxes = _boxes_alone(memory, plain, plan)
    yield Figure("gpu: one 3-D copy of 172 MB", bare / GB, "GB/s", "itself", 1.0)
    yield Figure("gpu: one 3-D copy a page pair, alone", boxes / GB, "GB/s", "one 3-D copy of 172 MB", boxes / bare)
    rate = TIMES * plan.total_bytes / median_of(lambda: carry_out(executor, [plan], TIMES))
    yield Figure("gpu: permuted offload, whole pages", rate / GB, "GB/s", "one 3-D copy a page pair", rate / boxes)
    for what, limit in (("by copy engines alone", 0), ("by the kernel alone", MIB)):
        other = CudaExecutor(memory.regions, DEVICE, tuning=Tuning(small_copy_bytes=limit))
        rate = TIMES * plan.total_bytes / median_of(lambda other=other: carry_out(other, [plan], TIMES))  # type: ignore[misc]
        yield Figure(f"gpu: the same {what}", rate / GB, "GB/s", "one 3-D copy a page pair", rate / boxes)
        other.release()
    for name, least in (("latent rows", 656), ("groups of four layers", 2_624)):
        part = CopyPlan(1, Purpose.PLACE, _rows_from(plan, least))
        rate = TIMES * part.total_bytes / median_of(lambda part=part: carry_out(executor, [part], TIMES))  # type: ignore[misc]
        yield Figure(f"gpu: permuted offload, {name}", rate / GB, "GB/s", "one 3-D copy a page pair", rate / boxes)
    pages = np.random.default_rng(6).permutation(1_024)
    run_bytes = LAYERS * LAYER_RUN
    (one,) = copy_pages(run_bytes, HBM, pages, HOST, np.arange(1_024))
    whole = one.total_bytes / median_of(lambda: carry_out(executor, [CopyPlan(1, Purpose.OFFLOAD, (one,))], 1))
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

        rate = many.total_bytes / median_of(work)
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

    return copies.total_bytes / median_of(work)


def _boxes_alone(memory: Memory, plain: Plain, plan: CopyPlan) -> float:
    """Bytes a second of the plan's largest boxes (the groups of four layers), one driver call each, no executor."""
    largest = max(plan.pieces(), key=lambda c: c.total_bytes)
    calls = CudaCopies(memory.regions, 0)
    part, box = as_box(largest, (1 << 31) - 1, lambda _: False)
    assert box is not None

    def work() -> None:
        calls.issue_singly(part, box, int(plain.streams[0]))
        plain.wait()

    return largest.total_bytes / median_of(work)
