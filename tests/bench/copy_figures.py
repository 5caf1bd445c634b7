"""The cpu executor, beside a plain copy of the same bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import SpanRun, copy_pages, copy_spans
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, layer_major_layout, native_layout
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import RegionMap
from kvmanager.units import MIB
from tests.bench.figure import Figure, median_s

PAGES = 32


def _run(executor: CpuExecutor, plan: CopyPlan) -> None:
    executor.submit(plan)
    while executor.outstanding():
        executor.poll()


def figures() -> Iterator[Figure]:
    """Whole pages, and the re-layout of spans."""
    layout = native_layout(GLM53, 64)
    size = PAGES * layout.page_bytes
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, size, dtype=np.uint8)
    target = np.zeros(size, np.uint8)
    regions = RegionMap()
    regions.add(1, source)
    regions.add(2, target)
    executor = CpuExecutor(regions)
    memcpy_s = median_s(lambda: np.copyto(target, source), 7)
    pages = np.arange(PAGES, dtype=np.int64)
    copies = copy_pages(layout.page_bytes, 1, pages, 2, pages[::-1].copy())
    numbers = iter(range(1, 1_000))
    whole_s = median_s(lambda: _run(executor, CopyPlan(next(numbers), Purpose.OFFLOAD, copies)), 7)
    yield Figure(
        "cpu executor: 32 whole pages",
        size / whole_s / MIB,
        "MiB/s",
        "one plain copy of the same bytes",
        memcpy_s / whole_s,
    )
    tokens = PAGES * 64
    for name, layout_of in (("native", native_layout), ("layer-major", layer_major_layout)):
        shards = SpanRun(0, TokenOrder(8, 1), (1,), pages)
        sequential = SpanRun(0, SEQUENTIAL, (2,), pages)
        permuted = copy_spans(layout, layout_of(GLM53, 64), [shards], [sequential], tokens)
        permute_s = median_s(lambda p=permuted: _run(executor, CopyPlan(next(numbers), Purpose.PLACE, p)), 5)  # type: ignore[misc]
        yield Figure(
            f"cpu executor: DCP8 to sequential {name}, 32 pages",
            size / permute_s / MIB,
            "MiB/s",
            "one plain copy of the same bytes",
            memcpy_s / permute_s,
        )
