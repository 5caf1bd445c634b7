"""On a GPU: HiSparse swap-in and resolver beside their rivals, in one run, with true rows over a 48 GiB pinned pool.

    python -m tests.bench --gpu hisparse --json build/hisparse.json

Times are of the GPU, around one launch or one graph replay (`gpu_clock`); each repetition reads other rows. Medians.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from kvmanager.allocators.cuda_driver import DeviceContext, call
from kvmanager.clients.glm.gpu_resolver import GpuResolver, Resolution
from kvmanager.clients.glm.gpu_swapin import DEFAULT_LAUNCH, Gather, Launch, RowPieces, SwapIn
from kvmanager.clients.glm.resolver_reference import RankTables
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape, group_place
from kvmanager.layout import GLM53, latent_layout
from kvmanager.transport.pinned import PinnedMemory, chunk_bounds
from kvmanager.units import GIB
from tests.bench.figure import Figure
from tests.bench.gpu_clock import GpuClock
from tests.bench.hit_rates import hit_rate_figures, sparse_shape_of, tables_on_host
from tests.bench.topk_stream import ExactHits, StreamModel, TopkStream

PAGE_ROWS = 64
LAYOUT = latent_layout(GLM53, PAGE_ROWS)
SLAB = LAYOUT.page_bytes
PLACES = [group_place(LAYOUT, group) for group in GLM53.share_groups]
ROW = GLM53.latent_row_bytes
LAYERS = 4
GROUP_ROW = LAYERS * ROW
LAYER_PAGE = PAGE_ROWS * ROW
POOL_BYTES = 48 * GIB
CONTEXT_TOKENS = 142_000
CONTEXT_PAGES = -(-CONTEXT_TOKENS // PAGE_ROWS)
LAYER_POOL_PAGES = POOL_BYTES // (GLM53.layers * LAYER_PAGE)
HOST_PAGES = min(POOL_BYTES // SLAB, LAYER_POOL_PAGES)
HBM_SLABS = 15 * GIB // SLAB
TOPK = 2048
SETS = 6
ROUNDS = 12
GB = 1e9
GATHERS = [Launch(gather, blocks, 8) for gather in (Gather.LINES, Gather.WARPS) for blocks in (1, 2, 4)]
RIVAL_GATHERS = [
    Launch(gather, blocks, 8) for gather in (Gather.ROWS, Gather.WARPS, Gather.LINES) for blocks in (1, 2, 4, 8)
]
BULK_GATHERS = [Launch(Gather.BULK, blocks, warps) for blocks, warps in ((1, 4), (2, 4), (4, 2))]
GROUPED_ROW = RowPieces(1, GROUP_ROW)
LAYERED_ROW = RowPieces(LAYERS, ROW, LAYER_POOL_PAGES * LAYER_PAGE, ROW)
REQUESTS = (1, 2, 4, 8, 16, 64)


class HostPool:
    """48 GiB of faulted and registered memory. The bytes say nothing: correctness is the tests' business."""

    def __init__(self) -> None:
        DeviceContext("cuda:0")
        self.clock = GpuClock()
        fd = os.memfd_create("hisparse")
        os.ftruncate(fd, POOL_BYTES)
        self.memory = np.frombuffer(mmap.mmap(fd, POOL_BYTES), np.uint8)
        os.close(fd)
        parts = np.array_split(self.memory[::4096], 64)
        began = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda part: part.fill(1), parts))
        self.fault_s = time.perf_counter() - began
        began = time.perf_counter()
        self._pinned = PinnedMemory(self.memory, chunk_bounds(POOL_BYTES, 4096))
        self.pin_s = time.perf_counter() - began
        self.address = self._pinned.device_address()

    def close(self) -> None:
        """Ends the registration."""
        torch.cuda.synchronize()
        self._pinned.close()

    def copy_rate(self) -> float:
        """Bytes a second of one large copy to the device."""
        size = 2 * GIB
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream().cuda_stream

        def work() -> None:
            call("cuMemcpyHtoDAsync", target.data_ptr(), self.memory.ctypes.data, size, stream)

        return size / statistics.median(self.clock.seconds([work] * 5))


def figures() -> Iterator[Figure]:
    """All of it: swap-in, resolve + gather, a decode step's memory work, hit rates."""
    began = time.perf_counter()
    pool = HostPool()
    try:
        yield Figure("gpu: pin the 48 GiB pool", pool.pin_s / 48, "s/GiB", "faulting it in", pool.pin_s / pool.fault_s)
        copy_rate = pool.copy_rate()
        yield Figure("gpu: large copy to the device", copy_rate / GB, "GB/s", "itself", 1.0)
        for part in (swap_in_figures, resolve_figures, step_figures):
            yield from part(pool, copy_rate)
            print(f"  {part.__name__} done at {time.perf_counter() - began:.0f} s", flush=True)
        yield from hit_rate_figures(model_hit_rates)
        yield from bulk_figures(pool)  # last: an error in it ends this process's use of the GPU
    finally:
        pool.close()
    print(f"  hisparse done in {time.perf_counter() - began:.0f} s", flush=True)


# Swap-in alone


@dataclass(frozen=True)
class _Rows:
    """Missing rows of some requests, the same tokens in both layouts of the pool."""

    grouped: Resolution
    layered: Resolution


def _missing(requests: int, rows: int, rng: np.random.Generator) -> _Rows:
    """`rows` tokens of each request, on its own random pages; another share group each time."""
    group = int(rng.integers(2, 21))  # the groups of four layers
    first_layer, place = GLM53.share_groups[group][0], PLACES[group]
    grouped, layered = np.empty((2, requests, rows), np.int64)
    for request in range(requests):
        pages = rng.choice(HOST_PAGES, CONTEXT_PAGES, replace=False)
        page, slot = np.divmod(rng.choice(CONTEXT_PAGES * PAGE_ROWS, rows, replace=False), PAGE_ROWS)
        grouped[request] = pages[page] * SLAB + place.offset + slot * GROUP_ROW
        layered[request] = (first_layer * LAYER_POOL_PAGES + pages[page]) * LAYER_PAGE + slot * ROW
    target = torch.arange(requests * rows, device="cuda").reshape(requests, rows) * GROUP_ROW
    count = torch.full((requests,), rows, dtype=torch.int32, device="cuda")
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    first, second = (torch.from_numpy(part).cuda() for part in (grouped, layered))
    return _Rows(Resolution(none, first, target, count), Resolution(none, second, target, count))


class Swaps:
    """Kernels by launch, into one target, for rows of one kind."""

    def __init__(self, pool: HostPool, launches: list[Launch], row: RowPieces) -> None:
        self._clock, self._row = pool.clock, row
        self._target = torch.empty(max(REQUESTS) * TOPK * GROUP_ROW, dtype=torch.uint8, device="cuda")
        self._swaps = {how: SwapIn(pool.address, self._target.data_ptr(), how) for how in launches}

    def seconds(self, lists: Sequence[Resolution]) -> dict[Launch, float]:
        """The median over the lists, of each kernel."""
        return {how: self._median(swap, lists) for how, swap in self._swaps.items()}

    def _median(self, swap: SwapIn, lists: Sequence[Resolution]) -> float:
        swap.copy(lists[0], self._row)  # loads the kernel
        times = self._clock.seconds([lambda plan=plan: swap.copy(plan, self._row) for plan in lists])  # type: ignore[misc]
        return statistics.median(times)


def swap_in_figures(pool: HostPool, copy_rate: float) -> Iterator[Figure]:
    """Share-group rows against one launch over four layers of a layer-outermost pool; each side's best kernel."""
    rng = np.random.default_rng(1)
    ours, rival = Swaps(pool, GATHERS, GROUPED_ROW), Swaps(pool, RIVAL_GATHERS, LAYERED_ROW)
    for rows in (TOPK // 10, TOPK):
        for requests in REQUESTS:
            sets = [_missing(requests, rows, rng) for _ in range(SETS)]
            mine, theirs = ours.seconds([s.grouped for s in sets]), rival.seconds([s.layered for s in sets])
            rate = requests * rows * GROUP_ROW / GB
            _tell("ours", rate, mine)
            _tell("rival's", rate, theirs)
            other = min(theirs.values())
            what = f"gpu: swap-in {requests} x {rows} rows"
            rival_us = "us", "layer-outermost, its best"
            rival_rate = "GB/s", "layer-outermost, its best"
            for name, seconds in (("best", min(mine.values())), ("default", mine[DEFAULT_LAUNCH])):
                yield Figure(f"{what}, {name} kernel", seconds * 1e6, *rival_us, seconds / other)
                yield Figure(f"{what}, {name} kernel", rate / seconds, *rival_rate, other / seconds)
            default = rate / mine[DEFAULT_LAUNCH]
            yield Figure(f"{what}, default kernel", default, "GB/s", "a large copy", default * GB / copy_rate)


def bulk_figures(pool: HostPool) -> Iterator[Figure]:
    """The bulk-copy engine in place of loads, with both layouts."""
    rng = np.random.default_rng(3)
    loads = Swaps(pool, [DEFAULT_LAUNCH], GROUPED_ROW)
    bulk, rival = Swaps(pool, BULK_GATHERS, GROUPED_ROW), Swaps(pool, BULK_GATHERS, LAYERED_ROW)
    for rows in (TOPK // 10, TOPK):
        for requests in REQUESTS:
            sets = [_missing(requests, rows, rng) for _ in range(SETS)]
            grouped, layered = [s.grouped for s in sets], [s.layered for s in sets]
            base, mine, theirs = loads.seconds(grouped), bulk.seconds(grouped), rival.seconds(layered)
            rate = requests * rows * GROUP_ROW / GB
            _tell("bulk", rate, mine)
            _tell("rival's bulk", rate, theirs)
            usual, best, other = base[DEFAULT_LAUNCH], min(mine.values()), min(theirs.values())
            what = f"gpu: swap-in {requests} x {rows} rows by the bulk engine"
            yield Figure(what, best * 1e6, "us", "the default kernel", best / usual)
            yield Figure(f"{what}, layer-outermost", other * 1e6, "us", "share-group rows, default", other / usual)


def _tell(whose: str, gigabytes: float, seconds: dict[Launch, float]) -> None:
    rates = ", ".join(f"{_name(how)} {gigabytes / s:.1f}" for how, s in seconds.items())
    print(f"  {whose}, GB/s: {rates}", flush=True)


def _name(how: Launch) -> str:
    return f"{how.gather.value}/{how.blocks_per_sm}x{how.warps}"


# Resolve and gather, in a graph


class Rank:
    """Tables of some requests of 142K tokens, all pages on the host, and the hot buffers of all."""

    def __init__(self, pool: HostPool, requests: int, rows: int, groups: list[GroupPlace]) -> None:
        hot = (rows + 1) * TOPK
        slabs = -(-hot // PAGE_ROWS)
        pages = CONTEXT_PAGES + 64
        self.shape = SparseShape(requests, rows, TOPK, PAGE_ROWS, hot, pages, 1 << 20, HOST_PAGES)
        self.groups = groups
        self._clock = pool.clock
        self.resolver = GpuResolver(self.shape, groups)
        self.hot = torch.empty(requests * slabs * SLAB, dtype=torch.uint8, device="cuda")
        self.swap = SwapIn(pool.address, self.hot.data_ptr())
        self.result = self.resolver.resolution()
        self.topk = torch.zeros((requests, rows, TOPK), dtype=torch.int32, device="cuda")
        rng = np.random.default_rng(2)
        self.tables = RankTables.empty(self.shape)
        self.tables.spans["first"], self.tables.spans["segments"], self.tables.spans["interleave"] = (
            np.arange(pages), 1, 1,
        )  # fmt: skip
        self.tables.page_count[:] = pages
        for request in range(requests):
            self.tables.pages[request]["uid"] = np.arange(pages) + request * pages
            self.tables.pages[request]["host"] = rng.choice(HOST_PAGES, pages, replace=False)
            self.resolver.set_hot_pages(request, request * slabs + np.arange(slabs))

    def place_pages(self, resident_heads: int) -> None:
        """So many first pages of each request are resident, and the last two."""
        pages = self.shape.most_pages
        resident = (np.arange(pages) < resident_heads) | (np.arange(pages) >= CONTEXT_PAGES - 2)
        # Resident rows are looked up, not read: their indexes need no memory behind them.
        self.tables.pages["device"] = np.where(resident, 1 << 19, -1)
        for request in range(self.shape.requests):
            self.resolver.tables.write_request(request, self.tables.spans[request], self.tables.pages[request])

    def queue(self, group: int, gather: bool) -> None:
        """The work of one share group."""
        self.resolver.resolve(group, self.topk, self.result)
        if gather:
            self.swap.copy(self.result, RowPieces(1, self.groups[group].row_bytes))

    def graph(self, gather: bool) -> torch.cuda.CUDAGraph:
        """All groups, one after the other."""
        for group in range(len(self.groups)):
            self.queue(group, gather)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for group in range(len(self.groups)):
                self.queue(group, gather)
        return graph

    def replay(self, graph: torch.cuda.CUDAGraph, steps: torch.Tensor) -> float:
        """Median seconds of a replay over steps int32[S, R, rows, topk]."""
        times = self._clock.seconds([graph.replay] * len(steps), lambda number: self.topk.copy_(steps[number]))
        return statistics.median(times)

    def counted(self) -> np.ndarray:
        """Counters since the last call, summed over requests."""
        counted: np.ndarray = self.resolver.counters.sum(dim=0).cpu().numpy()
        self.resolver.counters.zero_()
        return counted


def resolve_figures(pool: HostPool, copy_rate: float) -> Iterator[Figure]:
    """One share group of four layers, all pages on the host."""
    for rows in (1, 4):
        for requests in (1, 2, 4, 8, 16):
            rank = Rank(pool, requests, rows, [PLACES[5]])
            rank.place_pages(0)
            both, alone = rank.graph(True), rank.graph(False)
            for hits in (0.8, 0.9, 0.95, 0.99):
                streams = [ExactHits(hits, rows, TOPK, CONTEXT_TOKENS, seed) for seed in range(requests)]
                steps = np.stack([[s.step() for s in streams] for _ in range(2 * ROUNDS + 1)])
                lists = torch.from_numpy(steps).cuda()
                rank.resolver.keys.fill_(-1)
                rank.replay(both, lists[:1])  # brings the first union in
                rank.counted()
                seconds = rank.replay(both, lists[1 : ROUNDS + 1])
                _, hot, missed, unreadable = rank.counted().tolist()
                assert unreadable == 0
                only = rank.replay(alone, lists[ROUNDS + 1 :])
                measured = hot / (hot + missed)
                assert abs(measured - hits) < 0.002, measured
                floor = missed / ROUNDS * GROUP_ROW / copy_rate
                what = f"gpu: resolve + gather, {requests} x {rows} x 2048, {hits:.0%} hits"
                yield Figure(what, seconds * 1e6, "us", "its bytes in a large copy", seconds / floor)
                yield Figure(f"{what}, resolve alone", only * 1e6, "us", "with the gather", only / seconds)
            del rank, both, alone
            torch.cuda.empty_cache()


# A decode step's memory work


def step_figures(pool: HostPool, copy_rate: float) -> Iterator[Figure]:
    """All 22 groups of a step with three drafts, 8 requests of 142K tokens, drifting top-k lists."""
    del copy_rate
    requests, warm_up, measured = 8, 40, 16
    rank = Rank(pool, requests, 4, PLACES)
    indexer = requests * CONTEXT_PAGES * GLM53.indexer_page_bytes(PAGE_ROWS)
    spare = HBM_SLABS - requests * rank.shape.hot_slabs - -(-indexer // SLAB)
    modes = {"offload-only": CONTEXT_PAGES, "hybrid": spare // requests, "always-host": 0}
    for drift in (0.02, 0.05, 0.1):
        streams = [TopkStream(StreamModel(drift), CONTEXT_TOKENS - 64, seed) for seed in range(requests)]
        steps = [np.stack([stream.step() for stream in streams]) for _ in range(warm_up + measured)]
        lists = torch.from_numpy(np.stack(steps)).cuda()
        base = 0.0
        for mode, heads in modes.items():
            rank.resolver.keys.fill_(-1)
            rank.place_pages(heads)
            graph = rank.graph(True)
            rank.replay(graph, lists[:warm_up])
            rank.counted()
            seconds = rank.replay(graph, lists[warm_up:])
            resident, hot, missed, unreadable = rank.counted().tolist()
            assert unreadable == 0
            base = base or seconds
            what = f"gpu: memory work of a step, {mode}, drift {drift}"
            yield Figure(what, seconds * 1e6, "us", "offload-only", seconds / base)
            if missed:
                wanted = hot + missed
                yield Figure(f"{what}: hit rate of hot rows", hot / wanted, "", "itself", 1.0)
            entries = measured * len(PLACES) * requests * 4 * TOPK
            yield Figure(f"{what}: resident entries", resident / entries, "", "all entries", resident / entries)
    del rank
    torch.cuda.empty_cache()


def model_hit_rates(models: Sequence[StreamModel], steps: int) -> list[float]:
    """Of each model, over the second half of its steps; the models differ in drift and returns only."""
    shape = sparse_shape_of(len(models), models[0].rows)
    resolver = GpuResolver(shape, [PLACES[5]])
    tables = tables_on_host(shape)
    streams = [TopkStream(model, CONTEXT_TOKENS, seed) for seed, model in enumerate(models)]
    for request in range(len(models)):
        resolver.tables.write_request(request, tables.spans[request], tables.pages[request])
        resolver.set_hot_pages(request, np.arange(shape.hot_slabs))
    result = resolver.resolution()
    for step in range(steps):
        if step == steps // 2:
            resolver.counters.zero_()
        resolver.resolve(0, torch.from_numpy(np.stack([stream.step() for stream in streams])).cuda(), result)
    counters = resolver.counters.cpu().numpy()
    assert (counters[:, 3] == 0).all()
    return [float(hot / (hot + missed)) for _, hot, missed, _ in counters]
