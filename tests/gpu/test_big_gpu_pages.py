"""Pages beyond 2 and 4 GiB on both sides of a GPU's link, whole and as rows: offsets have 64 bits everywhere."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from gpu_regions import map_new

from kvmanager.allocators.backing import map_fd
from kvmanager.allocators.cuda_driver import DeviceContext, call
from kvmanager.core.checksums import PageSections, sections_of
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import SpanRun, copy_pages, copy_spans
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, native_layout
from kvmanager.transport.checksums import sum_pages
from kvmanager.transport.cuda import CudaExecutor
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.pinned import PinnedMemory
from kvmanager.units import GIB, MIB

pytestmark = pytest.mark.gpu

HBM, HOST = 1, 2
BIG_BYTES = 5 * GIB // (2 * MIB) * (2 * MIB)
LAYOUT = native_layout(GLM53, 64)
PAGE = LAYOUT.page_bytes
PAGES = np.array([612, 613, 1225, 1226, 1300])
"""613 is the first across 2**31 bytes, 1226 across 2**32."""
SPARE = PAGES + 7
"""Where things are copied to: other pages beyond the same bounds."""


class Big:
    """5 GiB of HBM and 5 GiB of host memory, of which only what is touched is there and registered."""

    def __init__(self) -> None:
        self._context = DeviceContext("cuda:0")
        fd = os.memfd_create("big", os.MFD_CLOEXEC)
        os.ftruncate(fd, BIG_BYTES)
        self.host = map_fd(fd, BIG_BYTES)
        os.close(fd)
        self.hbm = map_new(BIG_BYTES)
        self.regions = RegionMap()
        self.regions.add_gpu(HBM, self.hbm.address, BIG_BYTES)
        self.regions.add(HOST, self.host)
        whole = [(612, 614), (619, 621), (1225, 1227), (1232, 1234), (1300, 1301), (1307, 1308)]
        self._pinned = [self._register(first, last) for first, last in whole]

    def _register(self, first: int, last: int) -> PinnedMemory:
        begin = first * PAGE // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-last * PAGE // mmap.PAGESIZE) * mmap.PAGESIZE
        return PinnedMemory(self.host[begin:end])

    def on_gpu(self, page: int) -> np.ndarray:
        """A page of HBM."""
        call("cuCtxSynchronize")
        found = np.empty(PAGE, np.uint8)
        call("cuMemcpyDtoH", found.ctypes.data, self.hbm.address + page * PAGE, PAGE)
        return found

    def on_host(self, page: int) -> np.ndarray:
        """A page of host memory."""
        return self.host[page * PAGE :][:PAGE]

    def put(self, region: int, page: int, data: np.ndarray) -> None:
        """Replaces a page."""
        if region == HOST:
            self.host[page * PAGE :][:PAGE] = data
        else:
            call("cuMemcpyHtoD", self.hbm.address + page * PAGE, data.ctypes.data, PAGE)

    def close(self) -> None:
        """Gives all back."""
        for pinned in self._pinned:
            pinned.close()
        self.hbm.close()


@pytest.fixture(scope="module")
def big() -> Iterator[Big]:
    memory = Big()
    yield memory
    memory.close()


def _all_of(executor: CudaExecutor) -> dict[int, Completion]:
    ended: dict[int, Completion] = {}
    give_up = time.monotonic() + 30
    while executor.outstanding():
        assert time.monotonic() < give_up
        ended |= {completion.plan_id: completion for completion in executor.poll()}
    assert {completion.outcome for completion in ended.values()} == {Outcome.DONE}, ended
    return ended


@pytest.mark.parametrize(("source", "target"), [(HBM, HOST), (HOST, HBM), (HBM, HBM)])
def test_big_pages_arrive_whole_as_rows_and_with_their_sums(big: Big, source: int, target: int) -> None:
    rng = np.random.default_rng(source * 10 + target)
    was = {page: rng.integers(0, 256, PAGE, np.uint8) for page in PAGES.tolist()}
    for page, data in was.items():
        big.put(source, page, data)
        big.put(target, page + 7, np.zeros(PAGE, np.uint8))
    read = big.on_host if target == HOST else big.on_gpu
    executor = CudaExecutor(big.regions, "cuda:0")
    sections = tuple((section.start, section.size_bytes) for section in sections_of(LAYOUT))
    summed = PageSections(np.full(2, target, np.int32), SPARE[1::-1] * PAGE, sections)
    whole = copy_pages(PAGE, source, PAGES[:2], target, SPARE[1::-1])
    dealt = copy_spans(
        LAYOUT, LAYOUT, [SpanRun(0, TokenOrder(3, 1), (source,), PAGES[2:])],
        [SpanRun(0, SEQUENTIAL, (target,), SPARE[:1:-1])], 3 * 64,
    )  # fmt: skip
    executor.submit(CopyPlan(1, Purpose.PLACE, whole, summed))
    executor.submit(CopyPlan(2, Purpose.PLACE, dealt))
    sums = _all_of(executor)[1].sums
    executor.close()
    executor.release()
    for there, here in zip(PAGES[:2].tolist(), SPARE[1::-1].tolist(), strict=True):
        assert np.array_equal(read(here), was[there]), (there, here)
    here_pages = {int(page): read(int(page)) for page in SPARE[2:]}
    for position in range(3 * 64):
        there, here = int(PAGES[2:][position % 3]), int(SPARE[:1:-1][position // 64])
        for c in LAYOUT.components:
            begin, end = c.offset + position // 3 * c.slot_stride, c.offset + position % 64 * c.slot_stride
            found, asked = here_pages[here][end : end + c.row_bytes], was[there][begin : begin + c.row_bytes]
            assert np.array_equal(found, asked), position
    regions = RegionMap()
    regions.add(target, np.concatenate([was[int(page)] for page in PAGES[:2]]))
    expected = sum_pages(regions, PageSections(np.full(2, target, np.int32), np.array([0, PAGE]), sections))
    assert np.array_equal(sums, expected)
