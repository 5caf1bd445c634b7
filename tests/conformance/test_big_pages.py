"""Pages beyond 2 and 4 GiB on every executor that works without a GPU: offsets have 64 bits everywhere."""

import os
import secrets
import time

import numpy as np
import pytest

from kvmanager.allocators.backing import map_fd
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import SpanRun, copy_pages, copy_spans
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, native_layout
from kvmanager.planwire import plan_from_proto, plan_to_proto
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.fake import FakeExecutor
from kvmanager.transport.nixl import NixlReader
from kvmanager.transport.nixl_executor import NixlExecutor

BIG_SOURCE, BIG_TARGET = 21, 31
BIG_BYTES = 5 << 30


@pytest.fixture(scope="module")
def sparse_memory():
    """Two regions of 5 GiB, of which only what is touched takes memory."""
    regions = RegionMap()
    for region in (BIG_SOURCE, BIG_TARGET):
        fd = os.memfd_create(f"sparse-{region}", os.MFD_CLOEXEC)
        os.ftruncate(fd, BIG_BYTES)
        regions.add(region, map_fd(fd, BIG_BYTES))
        os.close(fd)
    return regions


def _outcomes(executor) -> set[Outcome]:
    """How everything ended, once nothing is outstanding."""
    ended, give_up = set(), time.monotonic() + 30
    while executor.outstanding():
        assert time.monotonic() < give_up
        ended |= {completion.outcome for completion in executor.poll()}
    return ended


@pytest.fixture(params=["cpu", "fake", "nixl"])
def big(request, sparse_memory, monkeypatch):
    """An executor over the sparse regions."""
    if request.param == "cpu":
        return CpuExecutor(sparse_memory)
    if request.param == "fake":
        return FakeExecutor(seed=3, regions=sparse_memory)
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):  # the reader sets them: for the time of the test
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "WARN")
    reader = NixlReader("sparse", secrets.randbits(64), sparse_memory)
    for region in (BIG_SOURCE, BIG_TARGET):
        reader.register(region)
    addresses = {BIG_SOURCE: (sparse_memory.address(BIG_SOURCE), BIG_BYTES)}
    return NixlExecutor(reader, sparse_memory, reader.name, addresses)


def test_pages_beyond_two_and_four_gib_arrive_whole_and_as_rows(big, sparse_memory):
    """Page 613 is the first across 2**31 bytes, 1226 across 2**32: whole, and dealt out to another page's rows."""
    layout = native_layout(GLM53, 64)
    pages, rng = np.array([612, 613, 1225, 1226, 1300]), np.random.default_rng(8)
    source, target = sparse_memory[BIG_SOURCE], sparse_memory[BIG_TARGET]
    for page in pages.tolist():
        source[page * layout.page_bytes :][: layout.page_bytes] = rng.integers(0, 256, layout.page_bytes, np.uint8)
    whole = copy_pages(layout.page_bytes, BIG_SOURCE, pages[:2], BIG_TARGET, pages[1::-1])
    dealt = copy_spans(
        layout, layout, [SpanRun(0, TokenOrder(3, 1), (BIG_SOURCE,), pages[2:])],
        [SpanRun(0, SEQUENTIAL, (BIG_TARGET,), pages[:1:-1])], 3 * 64,
    )  # fmt: skip
    for plan_id, copies in ((1, whole), (2, dealt)):
        big.submit(plan_from_proto(plan_to_proto(CopyPlan(plan_id, Purpose.PLACE, copies))))
    assert _outcomes(big) == {Outcome.DONE}
    for there, here in zip(pages[:2].tolist(), pages[1::-1].tolist(), strict=True):
        begin, end = (page * layout.page_bytes for page in (there, here))
        assert np.array_equal(target[end:][: layout.page_bytes], source[begin:][: layout.page_bytes])
    for position in range(3 * 64):
        places = (pages[2:][position % 3], position // 3), (pages[:1:-1][position // 64], position % 64)
        for c in layout.components:
            begin, end = (
                c.offset + int(page) * layout.page_bytes + slot * c.slot_stride for page, slot in places
            )
            assert np.array_equal(target[end : end + c.row_bytes], source[begin : begin + c.row_bytes]), position
