"""On a GPU: the GLM kernels at true dimensions beside rooflines measured in the same run.

    python -m tests.bench --gpu kernels --json build/kernels.json

Times are of the GPU, around one replay of a graph, with nothing of use in the L2 cache before it (`gpu_clock`);
medians.
A roofline is the longer of two times: bytes that must be read and written over the measured read bandwidth, and
multiplications over the measured rate of a bf16 matrix product. A figure's ratio is roofline / time.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.gpu.indexer import DEFAULT_INDEX_TILING, IndexTiling, index_scores
from kvmanager.clients.glm.gpu.pages import DevicePages, device_pages, row_references
from kvmanager.clients.glm.gpu.sparse_mla import Scores, Tiling, attend_parts, merge_parts, splits_for
from kvmanager.clients.glm.gpu.topk import TopKWorkspace, top_k
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, Component, KVLayout, Section, indexer_layout, layer_major_layout, native_layout
from tests.bench.figure import Figure
from tests.bench.gpu_clock import GpuClock

SEED = 20261130
ROUNDS = 11
K = 2_048
REQUESTS, QUERIES = 8, 4
PREFILL_QUERIES = 2_048
CONTEXT = 142_000
LONG_CONTEXT = 1_048_576
POOL_PAGES = 4_592
"""Of 15 GiB, in whole spans of eight pages."""
LEADER, LAYER = 6, 8
SCALE = 256**-0.5
SEQUENTIAL, KEPT = TokenOrder(1, 64), TokenOrder(8, 1)
TILINGS: tuple[Tiling | None, ...] = (
    None, Tiling(64, 8, 2), Tiling(64, 8, 3), Tiling(32, 8, 2, Scores.COLUMNS), Tiling(32, 8, 3, Scores.COLUMNS),
)  # fmt: skip
INDEX_TILINGS = (
    IndexTiling(stages=4, blocks=3, registers=None), IndexTiling(stages=3, blocks=3, registers=None),
    IndexTiling(stages=4), IndexTiling(stages=3), IndexTiling(stages=1),
)  # fmt: skip
SHARDS = 8


def _say(text: str) -> None:
    print(f"# {time.strftime('%H:%M:%S')} {text}", flush=True)


class Clock:
    """Medians of graph replays."""

    def __init__(self) -> None:
        self._clock = GpuClock()

    def seconds(self, work: Callable[[], object]) -> float:
        """`work` runs once outside of a graph first, which compiles what it needs."""
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        return statistics.median(self._clock.seconds([graph.replay] * ROUNDS))


@dataclass(frozen=True)
class Rooflines:
    """Bytes read a second, and bf16 operations a second, of this GPU in this run."""

    bytes_per_s: float
    operations_per_s: float

    def seconds(self, moved_bytes: float, operations: float) -> float:
        """The least time for both."""
        return max(moved_bytes / self.bytes_per_s, operations / self.operations_per_s)


def _rooflines(clock: Clock) -> Rooflines:
    n = 8_192
    a = torch.randn((n, n), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((n, n), device="cuda", dtype=torch.bfloat16)
    c = torch.empty_like(a)
    product_s = clock.seconds(lambda: torch.mm(a, b, out=c))
    words = torch.randn(1 << 31, device="cuda")
    total = torch.empty((), device="cuda")
    read_s = clock.seconds(lambda: torch.sum(words, dim=0, out=total))
    target = torch.empty_like(words)
    copy_s = clock.seconds(lambda: target.copy_(words))
    nbytes = words.numel() * 4
    return Rooflines(max(nbytes / read_s, 2 * nbytes / copy_s), 2 * n**3 / product_s)


class Pool:
    """One layer's rows in a region of 15 GiB, and eight requests of 142K tokens on random pages of it."""

    def __init__(self, layout: KVLayout, order: TokenOrder) -> None:
        self.region = torch.zeros(POOL_PAGES * layout.page_bytes, dtype=torch.uint8, device="cuda")
        self.leader = layout.by_key[Section.LATENT, LEADER]
        self.layer = layout.by_key[Section.LATENT, LAYER]
        rows = self.region.as_strided(
            (POOL_PAGES, 64, self.layer.row_bytes), (self.layer.page_stride, self.layer.slot_stride, 1),
            self.layer.offset,
        )  # fmt: skip
        random = torch.Generator("cuda").manual_seed(SEED)
        for at in range(0, POOL_PAGES, 512):
            shape = rows[at : at + 512].shape[:2]
            latents = torch.randn((*shape, 512), device="cuda", generator=random)
            rope = torch.randn((*shape, 64), device="cuda", generator=random)
            rows[at : at + 512] = Fp8Codec().encode_latent(latents, rope)
        self.table = _random_pages(REQUESTS, CONTEXT, POOL_PAGES, order)


def _random_pages(requests: int, tokens: int, pool_pages: int, order: TokenOrder) -> DevicePages:
    """Pages of requests, those of a request all different."""
    random = np.random.default_rng(SEED)
    count = -(-tokens // 512) * 8
    picks = [random.permutation(pool_pages)[:count].reshape(-1, order.segments) for _ in range(requests)]
    return device_pages([[(order, pages) for pages in spans] for spans in picks], "cuda")


def _selection(queries: int, tokens: int) -> Tensor:
    """int32[queries, K] of random positions, ascending: each query its own, as the worst case is."""
    random = torch.Generator("cuda").manual_seed(SEED)
    rows = [torch.randperm(tokens, device="cuda", generator=random)[:K].sort().values.int() for _ in range(queries)]
    return torch.stack(rows)


class Attention:
    """Buffers of one call."""

    def __init__(self, pool: Pool, of_request: Tensor, splits: int, tiling: Tiling | None = None) -> None:
        queries = len(of_request)
        self._pool, self._of_request, self._tiling = pool, of_request, tiling
        random = torch.Generator("cuda").manual_seed(SEED)
        self._q = torch.randn((queries, 64, 576), device="cuda", generator=random).to(torch.bfloat16)
        self.selection = _selection(queries, CONTEXT)
        self.references = torch.empty((queries, K), dtype=torch.int64, device="cuda")
        self.counts = torch.empty(queries, dtype=torch.int32, device="cuda")
        part_type = torch.float32 if splits > 1 else torch.bfloat16
        self._parts = torch.empty((queries, splits, 64, 512), dtype=part_type, device="cuda")
        self._lses = torch.empty((queries, splits, 64), device="cuda")
        self._out = torch.empty((queries, 64, 512), dtype=torch.bfloat16, device="cuda")
        self._lse = torch.empty((queries, 64), device="cuda")
        self.refer()

    def refer(self) -> None:
        row_references(
            self.selection, self._of_request, self._pool.table, self._pool.leader, self.references, self.counts
        )

    def run(self) -> None:
        """Attention, and the merge where there are several parts."""
        pool = self._pool
        offset = pool.layer.offset - pool.leader.offset
        attend_parts(
            self._q, self.references, self.counts, pool.region, pool.region, offset, SCALE, self._parts, self._lses,
            self._tiling,
        )  # fmt: skip
        if self._lses.shape[1] > 1:
            merge_parts(self._parts, self._lses, self._out, self._lse)


def _attention_floor(rooflines: Rooflines, queries: int) -> float:
    """Rows and their references, queries and bf16 outputs; two products."""
    moved = queries * (K * (656 + 8) + 64 * (576 + 512) * 2)
    return rooflines.seconds(moved, queries * 2.0 * 64 * (576 + 512) * K)


def _of_request() -> Tensor:
    return torch.arange(REQUESTS, dtype=torch.int32, device="cuda").repeat_interleave(QUERIES)


def _roofline_figure(name: str, seconds: float, floor: float) -> Figure:
    return Figure(name, seconds * 1e6, "us", "its roofline's time / time", floor / seconds)


def _attention_figures(clock: Clock, rooflines: Rooflines) -> Iterator[Figure]:
    """Decode and prefill, tilings, layouts, orders."""
    native = Pool(native_layout(GLM53, 64), SEQUENTIAL)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    queries = REQUESTS * QUERIES
    splits = splits_for(queries, processors)
    floor = _attention_floor(rooflines, queries)
    for tiling in TILINGS:
        seconds = clock.seconds(Attention(native, _of_request(), splits, tiling).run)
        yield _roofline_figure(f"mla decode 8x4, {_name(tiling)}, {splits} parts", seconds, floor)
    for parts in (2, 8):
        seconds = clock.seconds(Attention(native, _of_request(), parts).run)
        yield _roofline_figure(f"mla decode 8x4, {_name(None)}, {parts} parts", seconds, floor)
    one = Attention(native, _of_request(), splits)
    native_s = clock.seconds(one.run)
    refer_s = clock.seconds(one.refer)
    yield Figure("row references, 32 queries", refer_s * 1e6, "us", "attention over them", refer_s / native_s)
    yield from _prefill_figures(clock, rooflines, native)
    _say("attention: layer-major pages")
    del one, native
    major_s = clock.seconds(
        Attention(Pool(layer_major_layout(GLM53, 64), SEQUENTIAL), _of_request(), splits).run
    )
    yield Figure("mla decode, share-group rows", native_s * 1e6, "us", "layer-major pages", native_s / major_s)
    _say("attention: kept order")
    kept_s = clock.seconds(Attention(Pool(native_layout(GLM53, 64), KEPT), _of_request(), splits).run)
    yield Figure("mla decode, kept token order (8, 1)", kept_s * 1e6, "us", "sequential order", kept_s / native_s)


def _prefill_figures(clock: Clock, rooflines: Rooflines, pool: Pool) -> Iterator[Figure]:
    of_request = torch.zeros(PREFILL_QUERIES, dtype=torch.int32, device="cuda")
    floor = _attention_floor(rooflines, PREFILL_QUERIES)
    for tiling in TILINGS:
        seconds = clock.seconds(Attention(pool, of_request, 1, tiling).run)
        yield _roofline_figure(f"mla prefill 2,048, {_name(tiling)}", seconds, floor)


def _name(tiling: Tiling | None) -> str:
    if tiling is None:
        return "default kernel"
    return f"{tiling.rows} rows x {tiling.warps} warps x {tiling.stages}, {tiling.scores} scores"


class Indexing:
    """Scores and top-k of `requests` x `queries` over `tokens` indexer rows each."""

    def __init__(self, region: Tensor, layout: KVLayout, order: TokenOrder, tokens: int, queries: int, requests: int):
        pages = region.numel() // layout.page_bytes
        self._values = layout.by_key[Section.INDEX_VALUE, LEADER]
        self._scales = layout.by_key[Section.INDEX_SCALE, LEADER]
        self._region = region
        self._table = _random_pages(requests, tokens, pages, order)
        self._page_counts = (self._table.pages >= 0).sum(dim=1, dtype=torch.int32)
        self._tokens = torch.full((requests,), tokens, dtype=torch.int32, device="cuda")
        random = torch.Generator("cuda").manual_seed(SEED)
        shape = (requests, queries, 32, 128)
        self._q, scales = Fp8Codec().encode_index(torch.randn(shape, device="cuda", generator=random))
        self._weights = torch.randn(shape[:3], device="cuda", generator=random) * scales
        stride = -(-tokens // 4) * 4
        self._scores = torch.zeros((requests, queries, stride), device="cuda")
        rows = requests * queries
        self._lengths = torch.full((rows,), tokens, dtype=torch.int32, device="cuda")
        self.selection = torch.empty((rows, K), dtype=torch.int32, device="cuda")
        self._workspace = TopKWorkspace(rows, stride, "cuda")

    def score(self, tiling: IndexTiling = DEFAULT_INDEX_TILING) -> None:
        index_scores(
            self._q, self._weights, self._table, self._page_counts, self._tokens, self._region, self._values,
            self._scales, self._scores, tiling,
        )  # fmt: skip

    def choose(self) -> None:
        top_k(self._scores.view(len(self.selection), -1), self._lengths, self.selection, self._workspace)

    def run(self) -> None:
        self.score()
        self.choose()


def _tiling_name(tiling: IndexTiling) -> str:
    most = tiling.registers or "any number of"
    return f"{tiling.stages} stages, {tiling.blocks} blocks at once, {most} registers"


def _indexer_region(layout: KVLayout, pages: int) -> Tensor:
    """Finite codes everywhere, and scales around 2^-6 for the leader that is measured."""
    region = torch.empty(pages * layout.page_bytes, dtype=torch.uint8, device="cuda")
    random = torch.Generator("cuda").manual_seed(SEED)
    for at in range(0, region.numel(), 1 << 30):
        region[at : at + (1 << 30)].random_(0, 256, generator=random).bitwise_and_(0xF7)
    c: Component = layout.by_key[Section.INDEX_SCALE, LEADER]
    scales = region.view(torch.float32).as_strided((pages, 64), (c.page_stride // 4, 1), c.offset // 4)
    exponents = torch.randint(-8, -4, (pages, 64), generator=random, device="cuda")
    scales.copy_(torch.exp2(exponents.float()))
    return region


def _indexer_figures(clock: Clock, rooflines: Rooflines) -> Iterator[Figure]:
    layout = indexer_layout(GLM53, 64)
    for tokens in (CONTEXT, LONG_CONTEXT):
        _say(f"indexer at {tokens} tokens")
        region = _indexer_region(layout, REQUESTS * (-(-tokens // 512) * 8))
        work = Indexing(region, layout, SEQUENTIAL, tokens, QUERIES, REQUESTS)
        floor = rooflines.seconds(REQUESTS * tokens * 132.0, 0)
        run_s, score_s, choose_s = (clock.seconds(one) for one in (work.run, work.score, work.choose))
        yield _roofline_figure(f"indexer + top-k 8x4, {tokens:,} tokens", run_s, floor)
        yield _roofline_figure(f"  of it scores, {tokens:,} tokens", score_s, floor)
        yield Figure(f"  of it top-k, {tokens:,} tokens", choose_s * 1e6, "us", "scores", choose_s / score_s)
        for tiling in INDEX_TILINGS:
            seconds = clock.seconds(partial(work.score, tiling))
            yield _roofline_figure(f"  of it scores, {tokens:,} tokens, {_tiling_name(tiling)}", seconds, floor)
        if tokens == CONTEXT:
            kept = Indexing(region, layout, KEPT, tokens, QUERIES, REQUESTS)
            kept_s = clock.seconds(kept.run)
            yield Figure("indexer + top-k, kept order (8, 1)", kept_s * 1e6, "us", "sequential", kept_s / run_s)
        del region, work


def _sharded_prefill_figures(clock: Clock, rooflines: Rooflines) -> Iterator[Figure]:
    """One layer of a 2,048-token chunk at 142K tokens, PCP8 x DCP8: one rank's part, its eight shards on this GPU.

    The gather is plain copies on this GPU, from the shards' pages into a full copy in token order; then the rank's
    256 queries are scored, chosen and attended. The link between GPUs is not in it.
    """
    layout = native_layout(GLM53, 64)
    leader, layer = layout.by_key[Section.LATENT, LEADER], layout.by_key[Section.LATENT, LAYER]
    spans = CONTEXT // (64 * SHARDS)
    tokens = spans * 64 * SHARDS
    region = torch.zeros(SHARDS * spans * layout.page_bytes, dtype=torch.uint8, device="cuda")
    shards = region.view(SHARDS, spans, layout.page_bytes)
    rows = shards.as_strided(
        (SHARDS, spans, 64, 656), (spans * layout.page_bytes, layout.page_bytes, layer.slot_stride, 1), layer.offset
    )
    latents = torch.randn((*rows.shape[:3], 512), device="cuda")
    rows.copy_(Fp8Codec().encode_latent(latents, latents[..., :64]))
    whole = torch.empty((spans, 64, SHARDS, 656), dtype=torch.uint8, device="cuda")
    queries = PREFILL_QUERIES // SHARDS

    def gather() -> None:
        whole.copy_(rows.permute(1, 2, 0, 3))

    indexed = indexer_layout(GLM53, 64)
    work = Indexing(_indexer_region(indexed, spans * SHARDS), indexed, SEQUENTIAL, tokens, queries, 1)
    q = torch.randn((queries, 64, 576), device="cuda").to(torch.bfloat16)
    copied = Component(Section.LATENT, LEADER, 0, 64 * 656, 656, 656)
    table = device_pages([[(SEQUENTIAL, np.array([page])) for page in range(spans * SHARDS)]], "cuda")
    references = torch.empty((queries, K), dtype=torch.int64, device="cuda")
    counts = torch.empty(queries, dtype=torch.int32, device="cuda")
    of_request = torch.zeros(queries, dtype=torch.int32, device="cuda")
    out = torch.empty((queries, 1, 64, 512), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty((queries, 1, 64), device="cuda")
    assert leader.slot_stride == layer.slot_stride

    def attend() -> None:
        row_references(work.selection, of_request, table, copied, references, counts)
        attend_parts(q, references, counts, whole.view(-1), whole.view(-1), 0, SCALE, out, lse)

    work.run()
    index_s, attend_s, gather_s = clock.seconds(work.run), clock.seconds(attend), clock.seconds(gather)
    total_s = index_s + attend_s + gather_s
    for name, seconds in (("gather", gather_s), ("indexer + top-k", index_s), ("attention", attend_s)):
        yield Figure(f"PCP8xDCP8 layer, one rank: {name}", seconds * 1e6, "us", "the three together", seconds / total_s)
    moved = 2.0 * tokens * 656
    yield _roofline_figure("PCP8xDCP8 layer, one rank: gather", gather_s, rooflines.seconds(moved, 0))


def figures() -> Iterator[Figure]:
    """All of them, part by part."""
    clock = Clock()
    _say("rooflines")
    rooflines = _rooflines(clock)
    torch.cuda.empty_cache()
    yield Figure(
        "HBM read", rooflines.bytes_per_s / 1e12, "TB/s", "4.8 TB/s, as published", rooflines.bytes_per_s / 4.8e12
    )
    rate = rooflines.operations_per_s
    yield Figure("bf16 matrix product, 8,192 cubed", rate / 1e12, "TFLOP/s", "989 TFLOP/s, as published", rate / 989e12)
    failed = []
    for part in (_attention_figures, _indexer_figures, _sharded_prefill_figures):
        _say(part.__name__)
        try:
            yield from part(clock, rooflines)
        except Exception:
            # GPU time is dear: what the other parts have to say is printed first.
            traceback.print_exc()
            failed.append(part.__name__)
        torch.cuda.empty_cache()
    if failed:
        raise RuntimeError(f"no figures of {', '.join(failed)}; what went wrong is printed above")
    _say("done")
