"""Resolver and swap-in kernels against the reference: same rows, same victims, same bytes; also replayed in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from gpu_regions import host_array

from kvmanager.allocators.cuda_driver import DeviceContext
from kvmanager.clients.glm.gpu_resolver import GpuResolver, Resolution
from kvmanager.clients.glm.gpu_swapin import Gather, Launch, RowPieces, SwapIn
from kvmanager.clients.glm.resolver_reference import RankTables, ReferenceResolver, Resolved, copy_rows
from kvmanager.clients.glm.sparse_tables import SparseShape
from kvmanager.layout import GLM53, KVFormat
from kvmanager.transport.pinned import PinnedMemory
from tests.properties.resolver_history import POISON, ResolverHistory, places

pytestmark = pytest.mark.gpu

FORMAT = KVFormat("small", ((0,), (1, 2)), latent_row_bytes=16, index_value_bytes=8, index_scale_bytes=4)
TINY = SparseShape(3, 2, 6, page_rows=4, hot_rows=14, most_pages=14, device_pages=48, host_pages=20)
ODD = SparseShape(2, 3, 37, page_rows=8, hot_rows=130, most_pages=40, device_pages=120, host_pages=60)
TRUE = SparseShape(2, 4, 2048, page_rows=64, hot_rows=10240, most_pages=300, device_pages=1000, host_pages=500)
NO_DRAFTS = SparseShape(4, 1, 2048, page_rows=64, hot_rows=4096, most_pages=200, device_pages=1200, host_pages=600)
LAUNCHES = [Launch(Gather.LINES, 2, 8), Launch(Gather.WARPS, 1, 4), Launch(Gather.ROWS, 1, 8)]
BULK = Launch(Gather.BULK, 1, 4)
"""Tested last: an error in it would end the process's use of the GPU, and every later test with it."""
UNTOUCHED = -999


class Pair:
    """Reference and GPU over one history; `launches` take turns."""

    def __init__(self, seed: int, shape: SparseShape, launches: list[Launch]) -> None:
        print(f"seed {seed}, {shape}")
        DeviceContext("cuda:0")
        self.places = places(FORMAT, shape.page_rows)
        page_bytes = self.places[0].page_bytes
        self.history = ResolverHistory(seed, shape, page_bytes)
        memory = host_array(shape.host_pages * page_bytes)
        memory[:] = POISON
        self.history.host = memory.reshape(shape.host_pages, page_bytes)
        self.pinned = PinnedMemory(memory)
        self.device = torch.empty(shape.device_pages * page_bytes, dtype=torch.uint8, device="cuda")
        self.reference = ReferenceResolver(shape, self.places)
        self.reference.tables = self.history.tables
        self.gpu = GpuResolver(shape, self.places)
        self.swaps = [SwapIn(self.pinned.device_address(), self.device.data_ptr(), how) for how in launches]
        self.result = self.gpu.resolution()
        self.topk = torch.full((shape.requests, shape.rows, shape.topk), -1, dtype=torch.int32, device="cuda")
        for request, slabs in self.history.first_buffers():
            self.set_buffer(request, slabs)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.pinned.close()

    def set_buffer(self, request: int, slabs: np.ndarray | None) -> None:
        self.reference.set_hot_pages(request, slabs)
        self.gpu.set_hot_pages(request, slabs)

    def change(self, reach: float) -> np.ndarray:
        """Changes the tables, brings the GPU's copies up to date, poisons its results; the new top-k."""
        changed = self.history.change()
        if changed is not None:
            self.set_buffer(*changed)
        upload(self.history.tables, self.gpu)
        self.device.copy_(torch.from_numpy(self.history.device.reshape(-1)))
        poison(self.result)
        topk = self.history.topk(reach)
        self.topk.copy_(torch.from_numpy(topk))
        return topk

    def queue(self, group: int, step: int) -> None:
        """One share group's work in torch's current stream."""
        self.gpu.resolve(group, self.topk, self.result)
        place = self.places[group]
        swap = self.swaps[step % len(self.swaps)]
        layers = len(FORMAT.share_groups[group])
        pieces = [RowPieces(1, place.row_bytes), RowPieces(layers, 16, 16, 16)]
        swap.copy(self.result, pieces[step % 3 == 2])

    def check(self, group: int, topk: np.ndarray) -> Resolved:
        """What the GPU did is what the reference does."""
        resolved = self.reference.resolve(group, topk)
        torch.cuda.synchronize()
        compare(resolved, self.result)
        assert np.array_equal(self.gpu.keys.cpu().numpy(), self.reference.keys)
        assert np.array_equal(self.gpu.lru.cpu().numpy().view(np.uint16), self.reference.lru)
        assert np.array_equal(self.gpu.counters.cpu().numpy(), self.reference.counters)
        device = self.history.device.reshape(-1)
        copy_rows(self.history.host.reshape(-1), device, resolved, self.places[group].row_bytes)
        assert np.array_equal(self.device.cpu().numpy(), device)
        return resolved


def upload(tables: RankTables, gpu: GpuResolver) -> None:
    """All tables as they are, garbage included."""
    for source, target in (
        (tables.spans, gpu.tables.spans), (tables.pages, gpu.tables.pages),
        (tables.page_count, gpu.tables.page_count), (tables.hot_pages, gpu.tables.hot_pages),
    ):  # fmt: skip
        raw = torch.from_numpy(np.ascontiguousarray(source).view(np.uint8).reshape(-1))
        target.view(torch.uint8).reshape(-1).copy_(raw)


def poison(result: Resolution) -> None:
    for part in (result.rows, result.miss_source, result.miss_target, result.miss_count):
        part.fill_(UNTOUCHED)


def compare(resolved: Resolved, result: Resolution) -> None:
    assert np.array_equal(result.rows.cpu().numpy(), resolved.rows)
    counts = [len(source) for source in resolved.miss_source]
    assert result.miss_count.cpu().tolist() == counts
    for parts, found in ((resolved.miss_source, result.miss_source), (resolved.miss_target, result.miss_target)):
        for expected, row in zip(parts, found.cpu().numpy(), strict=True):
            assert np.array_equal(row[: len(expected)], expected)
            assert (row[len(expected) :] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("shape", "steps", "reach"),
    [(TINY, 200, 0.4), (ODD, 150, 0.4), (NO_DRAFTS, 25, 0.5), (TRUE, 25, 0.6)],
    ids=["tiny", "odd", "no drafts", "true"],
)
def test_kernels_do_what_the_reference_does(shape: SparseShape, steps: int, reach: float) -> None:
    pair = Pair(11, shape, LAUNCHES)
    for step in range(steps):
        group = int(pair.history.rng.integers(len(pair.places)))
        topk = pair.change(reach)
        pair.queue(group, step)
        pair.check(group, topk)
    assert pair.reference.counters.sum(axis=0).min() > 50, pair.reference.counters
    pair.close()


@pytest.mark.parametrize("how", LAUNCHES, ids=lambda how: how.gather.value)
@pytest.mark.parametrize(("shape", "steps"), [(ODD, 40), (TRUE, 6)], ids=["odd", "true"])
def test_a_graph_follows_the_tables(shape: SparseShape, steps: int, how: Launch) -> None:
    """Captured once for each group; then tables, hot buffers and top-k change under it."""
    _replay(shape, steps, how)


def _replay(shape: SparseShape, steps: int, how: Launch) -> None:
    pair = Pair(12, shape, [how])
    for group in range(len(pair.places)):
        topk = pair.change(0.5)
        pair.queue(group, 0)  # compiles and loads what a capture may not
        pair.check(group, topk)
    graphs = []
    for group in range(len(pair.places)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pair.queue(group, 0)
        graphs.append(graph)
    for _ in range(steps):
        group = int(pair.history.rng.integers(len(pair.places)))
        topk = pair.change(0.5)
        graphs[group].replay()
        pair.check(group, topk)
    pair.close()


def test_garbage_in_the_hot_map_is_only_a_miss() -> None:
    """Keys that nobody asks for match nothing, wherever they come from."""
    pair = Pair(13, ODD, LAUNCHES)
    for step in range(20):
        garbage = pair.history.rng.integers(1 << 40, 1 << 62, pair.reference.keys.shape)
        which = pair.history.rng.random(garbage.shape) < 0.3
        pair.reference.keys[which] = garbage[which]
        pair.gpu.keys.copy_(torch.from_numpy(pair.reference.keys))
        topk = pair.change(0.5)
        pair.queue(step % 2, step)
        pair.check(step % 2, topk)
    pair.close()


BIG_HOST_PAGES = 2_600
BIG_DEVICE_PAGES = 1_700
BIG = SparseShape(2, 4, 2048, 64, 10240, most_pages=300, device_pages=BIG_DEVICE_PAGES, host_pages=BIG_HOST_PAGES)


@pytest.fixture(scope="module")
def big_host() -> Iterator[tuple[np.ndarray, PinnedMemory]]:
    """8.7 GB in which every 8 bytes hold their own place."""
    memory = host_array(BIG_HOST_PAGES * GLM53.slab_bytes(64))
    words = memory.view(np.int64)

    def fill(first: int) -> None:
        part = words[first : first + (1 << 24)]
        part[:] = np.arange(first, first + len(part))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(fill, range(0, len(words), 1 << 24)))
    DeviceContext("cuda:0")
    pinned = PinnedMemory(memory)
    yield memory, pinned
    pinned.close()


def test_true_rows_beyond_four_gib(big_host: tuple[np.ndarray, PinnedMemory]) -> None:
    """Host pages, hot slabs and resident pages on both sides of 2**31 and 2**32 bytes."""
    _true_rows(big_host[1], LAUNCHES)


@pytest.mark.parametrize(("shape", "steps"), [(ODD, 40), (TRUE, 6)], ids=["odd", "true"])
def test_the_bulk_engine_in_a_graph(shape: SparseShape, steps: int) -> None:
    _replay(shape, steps, BULK)


def test_the_bulk_engine_with_true_rows(big_host: tuple[np.ndarray, PinnedMemory]) -> None:
    _true_rows(big_host[1], [BULK])


def _true_rows(pinned: PinnedMemory, launches: list[Launch]) -> None:
    seed = 14
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    groups = places(GLM53, 64)
    reference, gpu = ReferenceResolver(BIG, groups), GpuResolver(BIG, groups)
    device = torch.empty(BIG_DEVICE_PAGES * groups[0].page_bytes, dtype=torch.uint8, device="cuda")
    slabs = rng.permutation(BIG_DEVICE_PAGES)
    tables = reference.tables
    tables.spans["first"], tables.spans["segments"], tables.spans["interleave"] = np.arange(300), 1, 1
    tables.page_count[:] = 300
    for request in range(2):
        mine = slabs[request * 160 : request * 160 + 160]
        reference.set_hot_pages(request, mine)
        gpu.set_hot_pages(request, mine)
        tables.pages[request]["uid"] = (1 << 50) + rng.permutation(300) + 1_000 * request
        tables.pages[request]["host"] = rng.choice(BIG_HOST_PAGES, 300, replace=False)
        tables.pages[request]["device"] = np.where(np.arange(300) < 60, slabs[320 + np.arange(300)], -1)
    upload(tables, gpu)
    result = gpu.resolution()
    swaps = [SwapIn(pinned.device_address(), device.data_ptr(), how) for how in launches]
    for step, group in enumerate((0, 3, 21, 12, 3, 12)):
        topk = np.stack([[rng.permutation(300 * 64)[:2048] for _ in range(4)] for _ in range(2)]).astype(np.int32)
        poison(result)
        gpu.resolve(group, torch.from_numpy(topk).cuda(), result)
        swaps[step % len(swaps)].copy(result, RowPieces(1, groups[group].row_bytes))
        resolved = reference.resolve(group, topk)
        torch.cuda.synchronize()
        compare(resolved, result)
        source = np.concatenate(resolved.miss_source)
        target = np.concatenate(resolved.miss_target)
        assert source.max() > 1 << 33
        assert target.max() > 1 << 32
        words = np.arange(groups[group].row_bytes // 8)
        where = torch.from_numpy(target[:, None] // 8 + words).cuda()
        found = device.view(torch.int64)[where]
        assert torch.equal(found, torch.from_numpy(source[:, None] // 8 + words).cuda())
