"""Scrubbing on a GPU: a worker's zeros in its stream, and pages of HBM between two real tenants.

The mover's zeros alone: tests/conformance/test_zeros.py. The same on the CPU: tests/integration/test_node_scrub.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_regions import GpuBytes, map_new
from nodes_support import node
from other_user import needs_two_users
from scrub_support import THEIRS, one_after_the_other, scrub_config

from kvmanager.allocators.cuda_driver import DeviceContext, call, driver
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import copy_pages
from kvmanager.transport.cuda_copies import CudaCopies
from kvmanager.transport.executor import RegionMap
from kvmanager.units import MIB

pytestmark = pytest.mark.gpu
PAGE_BYTES, PAGES, POISON = 1_000_003, 8, 0xA5
EARLIER, LATER = 0x77, 0x55


def test_a_workers_zeros_are_in_order_with_its_stream() -> None:
    """Behind a write that was queued before, ahead of one that is queued after; as `GpuRank.run_plans` queues them."""
    context = DeviceContext("cuda:0")
    memory = GpuBytes(map_new(8 * MIB))
    memory[:] = POISON
    regions = RegionMap()
    regions.add_gpu(1, memory.mapping.address, memory.mapping.size_bytes)
    pages = np.array([0, 2, 3])
    plan = CopyPlan(7, Purpose.SCRUB, copy_pages(PAGE_BYTES, 1, pages, 1, pages))
    big = torch.randn((4_096, 4_096), device="cuda:0")
    torch.cuda.synchronize()
    context.make_current()
    copies, stream = CudaCopies(regions, context.ordinal), torch.cuda.Stream()
    queue = driver().CUstream(stream.cuda_stream)
    with torch.cuda.stream(stream):
        for _ in range(20):
            big = big @ big  # some milliseconds: who clears at once, on another stream, clears too early
        call("cuMemsetD8Async", memory.mapping.address, EARLIER, PAGE_BYTES, queue)
        for piece in plan.pieces():
            copies.clear(piece, stream.cuda_stream)
        call("cuMemsetD8Async", memory.mapping.address + 3 * PAGE_BYTES, LATER, 16, queue)
    stream.synchronize()
    data = memory.read()[: PAGES * PAGE_BYTES].reshape(PAGES, PAGE_BYTES)
    found = {value: (data == value).sum(axis=1).tolist() for value in (0, POISON, EARLIER, LATER)}
    print(f"bytes by value and page, of {PAGE_BYTES}: {found}", file=sys.stderr)
    assert found[EARLIER] == [0] * PAGES, "zeros came before the write that they follow"
    assert found[LATER] == [0, 0, 0, 16, 0, 0, 0, 0], "zeros came after the write that they precede"
    assert found[0] == [PAGE_BYTES, 0, PAGE_BYTES, PAGE_BYTES - 16, 0, 0, 0, 0]
    assert found[POISON] == [0, PAGE_BYTES, 0, 0, *[PAGE_BYTES] * 4]
    memory.mapping.close()


@needs_two_users
def test_what_another_tenant_wrote_in_hbm_is_gone(tmp_path: Path) -> None:
    """Pages that a request opens with by the mover's zeros, pages that it grows into by its worker's."""
    with node(tmp_path, "prefill", scrub_config(scrub=True, device="cuda:0")) as running:
        theirs, ours = one_after_the_other(running)
        counters = running.counters()
        print(f"they saw {theirs}, we saw {ours}, {counters}", file=sys.stderr)
        assert theirs == {"opened": {0}, "grown": {0}}
        assert THEIRS not in ours
        assert counters["scrubbed_page"] >= 6
        assert counters["failed_plan"] == 0
