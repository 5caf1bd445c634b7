"""Plans and the cpu executor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvmanager.core.plans import CopyPlan, Purpose, Rows, copy_rows, copy_whole_pages
from kvmanager.core.spanplans import SpanPlaces, copy_spans
from kvmanager.geometry import ShardGeometry, TokenOrder
from kvmanager.layout import GLM53, native_layout
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
    """Whole pages, the re-layout of spans, and building a plan."""
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
    copies = copy_whole_pages(layout.page_bytes, [1], pages, [2], pages[::-1].copy())
    numbers = iter(range(1, 1_000))
    whole_s = median_s(lambda: _run(executor, CopyPlan(next(numbers), Purpose.OFFLOAD, copies)), 7)
    yield Figure(
        "cpu executor: 32 whole pages",
        size / whole_s / MIB,
        "MiB/s",
        "one plain copy of the same bytes",
        memcpy_s / whole_s,
    )
    tokens = np.arange(PAGES * 64, dtype=np.int64)
    span, rank, slot = ShardGeometry(8, 64, 1).place(tokens)
    shards = Rows(np.ones(len(tokens), np.int32), span * 8 + rank, slot)
    permuted = copy_rows(
        layout, layout, shards, Rows(np.full(len(tokens), 2, np.int32), tokens // 64, tokens % 64)
    )
    permute_s = median_s(lambda: _run(executor, CopyPlan(next(numbers), Purpose.PLACE, permuted)), 5)
    yield Figure(
        "cpu executor: DCP8 to sequential, 32 pages",
        size / permute_s / MIB,
        "MiB/s",
        "one plain copy of the same bytes",
        memcpy_s / permute_s,
    )
    plan_s = median_s(
        lambda: copy_rows(layout, layout, shards, Rows(np.full(len(tokens), 2, np.int32), tokens // 64, tokens % 64)), 5
    )
    yield Figure("plan: DCP8 to sequential, 2,048 tokens", plan_s * 1e3, "ms", "carrying it out", plan_s / permute_s)
    yield from _span_plan_figures()


def _span_plan_figures() -> Iterator[Figure]:
    """A hand-off of 1,048,576 tokens from eight ranks into one: the plan alone, span by span and token by token."""
    layout, spans = native_layout(GLM53, 64), 2_048
    shards = np.arange(1, 9, dtype=np.int32)
    source = SpanPlaces.ordered(TokenOrder(8, 1), 64, shards, np.repeat(np.arange(spans)[:, None], 8, axis=1))
    pages = np.arange(8 * spans).reshape(spans, 8)
    scattered = np.random.default_rng(0).permutation(8 * spans).reshape(spans, 8)
    tokens = np.arange(512 * spans, dtype=np.int64)
    span, rank, slot = ShardGeometry(8, 64, 1).place(tokens)
    rows = Rows(shards[rank], span, slot), Rows(np.full(len(tokens), 9, np.int32), tokens // 64, tokens % 64)
    by_token_s = median_s(lambda: copy_rows(layout, layout, *rows), 3)
    for name, target_pages in (("consecutive", pages), ("scattered", scattered)):
        target = SpanPlaces.sequential(64, 9, target_pages)
        seconds = median_s(lambda target=target: copy_spans(layout, layout, source, target), 9)
        offsets = 16 * sum(len(c.source_offsets) for c in copy_spans(layout, layout, source, target))
        yield Figure(
            f"plan: 1,048,576 tokens, {name} pages", seconds * 1e3, "ms", "the plan made token by token",
            seconds / by_token_s,
        )
        yield Figure(
            "... its offsets", offsets / MIB, "MiB", "the bytes it moves", offsets / (spans * 8 * layout.page_bytes)
        )
