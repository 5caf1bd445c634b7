"""Scrubs on every executor that carries them out: zeros over the named bytes to the last one, and over nothing else."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import pytest

from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import copy_pages
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.cuda import CudaExecutor
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.fake import FakeExecutor
from tests.plans import strided

PAGE_BYTES, PAGES, POISON = 1_000_003, 30, 0xA5
REGION_BYTES = 16 * 2_097_152
CLEARED = np.array([0, 3, 4, 17, 29])
"""Their size is no multiple of anything, so a clear that rounds up shows; two lie side by side."""
POOL, HOST = 1, 2


class Memory:
    """A pool (in GPU memory with "cuda") and host memory, full of poison, and an executor over them."""

    def __init__(self, kind: str) -> None:
        self.regions = RegionMap()
        self.host = np.full(REGION_BYTES, POISON, np.uint8)
        self.regions.add(HOST, self.host)
        if kind == "cuda":
            from gpu_regions import GpuBytes, map_new

            from kvmanager.allocators.cuda_driver import DeviceContext

            self.context = DeviceContext("cuda:0")
            self.pool: Any = GpuBytes(map_new(REGION_BYTES))
            self.pool[:] = POISON
            self.regions.add_gpu(POOL, self.pool.mapping.address, REGION_BYTES)
        else:
            self.pool = np.full(REGION_BYTES, POISON, np.uint8)
            self.regions.add(POOL, self.pool)
        made = {"cpu": CpuExecutor, "fake": lambda regions: FakeExecutor(seed=3, regions=regions)}
        self.executor: Any = CudaExecutor(self.regions, "cuda:0") if kind == "cuda" else made[kind](self.regions)

    def end_all(self) -> dict[int, Completion]:
        """How all plans ended."""
        ended: dict[int, Completion] = {}
        give_up = time.monotonic() + 60
        while self.executor.outstanding():
            assert time.monotonic() < give_up, (self.executor.outstanding(), getattr(self.executor, "broken", None))
            ended |= {completion.plan_id: completion for completion in self.executor.poll()}
        said = {number: (done.outcome, done.moved_bytes, done.error) for number, done in ended.items()}
        print(f"plans {said}", file=sys.stderr)
        return ended

    def cleared(self, region: int) -> np.ndarray:
        """bool[REGION_BYTES]: zeros; all others still hold poison."""
        data = np.asarray(self.pool if region == POOL else self.host)
        found: np.ndarray = data == 0
        assert (found | (data == POISON)).all(), f"other bytes: {np.unique(data)[:8].tolist()}"
        return found

    def close(self) -> None:
        self.executor.close()
        self.end_all()
        if isinstance(self.executor, CudaExecutor):
            self.executor.release()
            self.pool.mapping.close()


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def memory(request):
    made = Memory(request.param)
    yield made
    made.close()


def scrub(plan_id: int, region: int, pages: np.ndarray) -> CopyPlan:
    return CopyPlan(plan_id, Purpose.SCRUB, copy_pages(PAGE_BYTES, region, pages, region, pages))


def of_pages(pages: np.ndarray) -> np.ndarray:
    expected = np.zeros(REGION_BYTES, bool)
    for page in pages.tolist():
        expected[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = True
    return expected


def test_whole_pages_of_both_tiers(memory: Memory) -> None:
    memory.executor.submit(scrub(1, POOL, CLEARED))
    memory.executor.submit(scrub(2, HOST, CLEARED + 1 - 2 * (CLEARED == 29)))
    ended = memory.end_all()
    assert {done.outcome for done in ended.values()} == {Outcome.DONE}
    assert [done.moved_bytes for _, done in sorted(ended.items())] == [len(CLEARED) * PAGE_BYTES] * 2
    assert np.array_equal(memory.cleared(POOL), of_pages(CLEARED))
    assert np.array_equal(memory.cleared(HOST), of_pages(CLEARED + 1 - 2 * (CLEARED == 29)))


def test_rows_within_pages(memory: Memory) -> None:
    """Strides on both sides count; what lies between the rows stays."""
    at = np.array([5, 700_001], dtype=np.int64)
    rows = strided(POOL, POOL, at, at, (3, 4), (9_000, 700), (9_000, 700), 131)
    memory.executor.submit(CopyPlan(1, Purpose.SCRUB, (rows,)))
    assert {done.outcome for done in memory.end_all().values()} == {Outcome.DONE}
    expected = np.zeros(REGION_BYTES, bool)
    for start in at.tolist():
        for slab in range(3):
            for row in range(4):
                expected[start + 9_000 * slab + 700 * row :][:131] = True
    assert np.array_equal(memory.cleared(POOL), expected)


def test_a_scrub_beyond_its_region_changes_nothing(memory: Memory) -> None:
    memory.executor.submit(scrub(1, POOL, np.array([0, REGION_BYTES // PAGE_BYTES])))
    (done,) = memory.end_all().values()
    assert done.outcome is Outcome.FAILED
    assert not memory.cleared(POOL).any()
