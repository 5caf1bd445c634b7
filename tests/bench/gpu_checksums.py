"""On a GPU: checksums of pages, by the kernel alone and through the executor beside the same copies without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvmanager.core.checksums import PageSections, sections_of
from kvmanager.core.plans import CopyPlan
from kvmanager.transport.cuda import CudaExecutor
from kvmanager.transport.cuda_checksums import SUM_BLOCKS, CudaChecksums
from kvmanager.units import GIB
from tests.bench.figure import Figure
from tests.bench.gpu_figures import _median_s
from tests.bench.gpu_memory import DEVICE, GB, HBM, HOST, LAYOUT, PAGE, Memory, carry_out, median_of, page_plans

PAGES = 256
PLANS = 4
TIMES = 4
SAMPLE = 16
SECTIONS = tuple((section.start, section.size_bytes) for section in sections_of(LAYOUT))
BLOCKS = sorted({8, 132, 264, SUM_BLOCKS})


def summed(plans: Sequence[CopyPlan], one_in: int) -> list[CopyPlan]:
    """The same plans, which sum up one page in so many, in HBM."""
    return [replace(plan, sums=_in_hbm(plan, one_in)) for plan in plans]


def _in_hbm(plan: CopyPlan, one_in: int) -> PageSections:
    (copies,) = plan.copies
    side = copies.source if copies.source_region == HBM else copies.target
    pages = side.pages[::one_in]
    return PageSections(np.full(len(pages), HBM, np.int32), pages * PAGE, SECTIONS)


def figures() -> Iterator[Figure]:
    """One batch of 256 pages by the kernel alone; offload and onboard with all, some and no pages summed up."""
    memory = Memory(8 * GIB, 2 * PLANS * PAGES * PAGE)
    yield from _kernel_figures(memory)
    executor = CudaExecutor(memory.regions, DEVICE)
    for down, what in ((True, "offload"), (False, "onboard")):
        plans = page_plans(memory, down, PLANS)
        total = TIMES * sum(plan.total_bytes for plan in plans)
        plain = total / median_of(lambda plans=plans: carry_out(executor, plans, TIMES))  # type: ignore[misc]
        yield Figure(f"gpu: {what} without checksums", plain / GB, "GB/s", "itself", 1.0)
        for one_in, words in ((SAMPLE, f"of one page in {SAMPLE}"), (1, "of all pages")):
            some = summed(plans, one_in)
            rate = total / median_of(lambda some=some: carry_out(executor, some, TIMES))  # type: ignore[misc]
            yield Figure(f"gpu: {what} with checksums {words}", rate / GB, "GB/s", "without checksums", rate / plain)
    executor.release()
    memory.close()


def _kernel_figures(memory: Memory) -> Iterator[Figure]:
    size = PAGES * PAGE
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source))
    stream = torch.cuda.current_stream().cuda_stream
    offsets = np.arange(PAGES, dtype=np.int64) * PAGE
    places = [(HBM, blocks, f"in HBM, {blocks} blocks") for blocks in BLOCKS] + [(HOST, SUM_BLOCKS, "on the host")]
    for region, blocks, what in places:
        kernels = CudaChecksums(memory.context.ordinal, blocks)
        pages = PageSections(np.full(PAGES, region, np.int32), offsets, SECTIONS)
        seconds = _median_s(lambda k=kernels, p=pages: k.launch(memory.regions, p, 0, PAGES, stream))  # type: ignore[misc]
        yield Figure(
            f"gpu: checksums of pages {what}", size / seconds / GB, "GB/s", "a plain device copy (bytes read)",
            copy_s / seconds,
        )  # fmt: skip
        torch.cuda.synchronize()
        kernels.close()
