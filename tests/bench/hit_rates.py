"""What a hot buffer catches of drifting top-k lists, beside what others publish of real ones.

Nobody publishes a hit rate of a HiSparse buffer: vLLM and SGLang export counters of hits and misses, and tell
throughput. What is published is how much the lists of two consecutive tokens have in common:

- NVIDIA, TensorRT-LLM technical blog 21, "Temporal Correlation Meets Sparse Attention" (2026; also arXiv 2604.22312):
  DeepSeek-V3.2, one SWE-bench prompt of 68,665 tokens and 2,025 decode steps, exact intersection of the top 2,048: 35
  to 50 % on average in layers 20 to 60, and about 1.5 % in layers 0 and 1.
- GDzhu01/vllm-ascend-deepseekv4, pull request 134 (2026): 95 % or more for DeepSeek-V4, whose lists name blocks of
  compressed tokens; no method is given.

No measurement of GLM-5.3 is known to us. Nothing here is fitted: the drift is swept over all of that, and the published
value stands beside the overlap that a drift gives. Counts depend on model and seed alone, not on the machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvmanager.clients.glm.resolver_reference import HOT, MISS, UNREADABLE, RankTables, ReferenceResolver
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape
from tests.bench.figure import Figure
from tests.bench.topk_stream import StreamModel, TopkStream

CONTEXT_TOKENS = 142_000
PAGE_ROWS = 64
TOPK = 2_048
STEPS = 120
DRIFTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.65, 1.0)
RETURNS = (0.2, 0.8)


@dataclass(frozen=True)
class Published:
    """Overlap of consecutive lists, from `least` to `most`, and of whom."""

    least: float
    most: float
    of: str


# The last one is below what the model can give: the recent rows alone are 3 % of a list.
PUBLISHED = (
    Published(0.95, 1.0, "DeepSeek-V4 (vllm-ascend)"),
    Published(0.35, 0.5, "DeepSeek-V3.2, layers 20-60 (TensorRT-LLM)"),
    Published(0.0, 0.1, "DeepSeek-V3.2, layers 0-1, 1.5 % (TensorRT-LLM)"),
)


@dataclass(frozen=True)
class Rate:
    """Of one model: overlap of a token's list with the one before, and hot rows' share of what is not resident."""

    overlap: float
    hits: float


def published_beside(overlap: float) -> str:
    """Whose published overlap this is; "none published" between them."""
    return next((p.of for p in PUBLISHED if p.least <= overlap <= p.most), "none published")


HitRates = Callable[[Sequence[StreamModel], int], list[float]]


def hit_rate_figures(hit_rates: HitRates) -> Iterator[Figure]:
    """The sweep: a buffer of its configured size, with three drafts and with none, all pages on the host.

    A figure's value is the hit rate, its ratio that to the overlap of the lists: what the buffer adds to a memory of
    one list.
    """
    for rows, name in ((4, "three drafts, 10,240 hot rows"), (1, "no drafts, 4,096 hot rows")):
        for returns in RETURNS:
            base = StreamModel(0.0, returns, topk=TOPK, rows=rows, accepted=3 if rows == 4 else 1)
            models = [replace(base, drift=drift) for drift in DRIFTS]
            for model, hits in zip(models, hit_rates(models, STEPS), strict=True):
                overlap = overlap_of(model)
                what = f"hot hit rate, {name}, drift {model.drift}, returns {returns}"
                beside = f"the lists' overlap {overlap:.3f}; published: {published_beside(overlap)}"
                yield Figure(what, hits, "", beside, hits / overlap)


def overlap_of(model: StreamModel, steps: int = 8) -> float:
    """Mean share of a token's list that the list of the token before has too; needs a single accepted row a step."""
    stream = TopkStream(replace(model, rows=1, accepted=1), CONTEXT_TOKENS, seed=0)
    lists = [stream.step()[0] for _ in range(steps + 1)]
    shared = [len(np.intersect1d(before, after)) for before, after in itertools.pairwise(lists)]
    return float(np.mean(shared) / model.topk)


def reference_hit_rates(models: Sequence[StreamModel], steps: int) -> list[float]:
    """Of each model, over the second half of its steps, by the reference resolver."""
    return [_hit_rate(model, seed, steps) for seed, model in enumerate(models)]


def sparse_shape_of(requests: int, rows: int) -> SparseShape:
    """Of requests with `rows` verified tokens at 142K tokens, and a hot buffer of one list more than that."""
    pages = -(-CONTEXT_TOKENS // PAGE_ROWS) + 64
    return SparseShape(requests, rows, TOPK, PAGE_ROWS, (rows + 1) * TOPK, pages, 1 << 20, pages)


def tables_on_host(shape: SparseShape) -> RankTables:
    """All pages of each request on the host, in order; hot buffers are not set."""
    pages = shape.most_pages
    tables = RankTables.empty(shape)
    tables.spans["first"], tables.spans["segments"], tables.spans["interleave"] = np.arange(pages), 1, 1
    tables.pages["uid"] = tables.pages["host"] = np.arange(pages)
    tables.page_count[:] = pages
    return tables


def _hit_rate(model: StreamModel, seed: int, steps: int) -> float:
    shape = sparse_shape_of(1, model.rows)
    resolver = ReferenceResolver(shape, [GroupPlace(PAGE_ROWS * 16, 0, 16)])
    resolver.tables = tables_on_host(shape)
    resolver.set_hot_pages(0, np.arange(shape.hot_slabs))
    stream = TopkStream(model, CONTEXT_TOKENS, seed)
    for step in range(steps):
        if step == steps // 2:
            resolver.counters[:] = 0
        resolver.resolve(0, stream.step()[None])
    hot, missed = resolver.counters[0, [HOT, MISS]]
    assert resolver.counters[0, UNREADABLE] == 0
    return float(hot / (hot + missed))


def figures() -> Iterator[Figure]:
    """Without a GPU."""
    yield from hit_rate_figures(reference_hit_rates)
