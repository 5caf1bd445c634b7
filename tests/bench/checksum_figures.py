"""What checksums cost on the CPU: the rule beside its rivals, and in offload and onboard. CPU seconds of one thread."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from kvmanager.core.checksums import PageSections, sections_of
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import copy_pages
from kvmanager.layout import GLM53, native_layout
from kvmanager.transport.checksums import section_sum
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import RegionMap
from tests.bench.figure import Figure, best_cpu_s

PAGES = 32


def figures() -> Iterator[Figure]:
    """Bytes a second of one core, then plans of 32 pages with sums of none, of one page in 16, and of all."""
    layout = native_layout(GLM53, 64)
    size = PAGES * layout.page_bytes
    regions = RegionMap()
    memory = {1: np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8), 2: np.zeros(size, np.uint8)}
    for region, array in memory.items():
        regions.add(region, array)
    pages = memory[1].reshape(PAGES, layout.page_bytes)
    copy_s = best_cpu_s(lambda: np.copyto(memory[2], memory[1]), 5)
    sum_s = best_cpu_s(lambda: [section_sum(page) for page in pages], 5)
    crc_s = best_cpu_s(lambda: [zlib.crc32(page) for page in pages], 5)
    plain_s = best_cpu_s(lambda: [page.view(np.uint64).sum() for page in pages], 5)
    yield Figure("checksums: one core", size / sum_s / 1e9, "GB/s", "a plain copy of the same bytes", copy_s / sum_s)
    yield Figure("checksums: zlib.crc32, for comparison", size / crc_s / 1e9, "GB/s", "ours", sum_s / crc_s)
    yield Figure("checksums: one plain sum (finds less)", size / plain_s / 1e9, "GB/s", "ours", sum_s / plain_s)
    executor = CpuExecutor(regions)
    sections = tuple((section.start, section.size_bytes) for section in sections_of(layout))
    numbers = np.arange(PAGES, dtype=np.int64)
    plan_ids = iter(range(1, 1_000))
    for purpose, source, target in ((Purpose.OFFLOAD, 1, 2), (Purpose.ONBOARD, 2, 1)):
        copies = copy_pages(layout.page_bytes, source, numbers, target, numbers[::-1].copy())
        seconds = {}
        for what, some in (("off", numbers[:0]), ("1/16", numbers[::16]), ("all", numbers)):
            # The device's side is summed up, on the way out and on the way back.
            asked = None
            if len(some):
                asked = PageSections(np.ones(len(some), np.int32), some * layout.page_bytes, sections)

            def run(asked: PageSections | None = asked) -> None:
                executor.submit(CopyPlan(next(plan_ids), purpose, copies, asked))  # noqa: B023
                while executor.outstanding():
                    executor.poll()

            seconds[what] = best_cpu_s(run, 5)
        for what in ("1/16", "all"):
            took = seconds[what]
            yield Figure(
                f"checksums: {purpose} of 32 pages, {what}", size / took / 1e9, "GB/s", "without checksums",
                seconds["off"] / took,
            )  # fmt: skip
