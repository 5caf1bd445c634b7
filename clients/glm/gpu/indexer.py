"""Scores of the indexer, in fp8, straight from indexer pages: every key of a request against its query tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmanager.clients.glm.gpu.pages import DevicePages
from kvmanager.layout import Component

INDEX_HEADS: Final = 32


@dataclass(frozen=True, slots=True)
class IndexTiling:
    """How a launch is cut: pages and query tokens (a power of two) a block, pages in flight, warps."""

    pages: int = 16
    queries: int = 4
    stages: int = 4
    warps: int = 4


DEFAULT_INDEX_TILING: Final = IndexTiling()


@triton.jit
def _scores(
    q, weights, pages, spans, orders, page_counts, tokens, region, scores, table_stride, score_stride, page_stride,
    value_offset, scale_offset, queries, PAGES: tl.constexpr, QUERIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(2) * QUERIES
    first = tl.program_id(0) * PAGES
    last = tl.minimum(first + PAGES, tl.load(page_counts + request))
    count = tl.load(tokens + request)
    heads = tl.arange(0, QUERIES * 32)
    head_row = (request * queries + first_query) * 32 + heads
    there = first_query * 32 + heads < queries * 32
    dims = tl.arange(0, 128)
    asked = tl.load(q.to(tl.pointer_type(tl.float8e4nv)) + head_row[:, None] * 128 + dims[None, :],
                    mask=there[:, None], other=0.0)  # fmt: skip
    weight = tl.load(weights + head_row, mask=there, other=0.0)
    slots = tl.arange(0, 64)
    asking = first_query + tl.arange(0, QUERIES)
    row = (request * queries + asking) * score_stride
    for ordinal in tl.range(first, last, num_stages=STAGES):
        at = request * table_stride + ordinal
        page = tl.load(pages + at).to(tl.int64)
        span = tl.load(spans + at)
        order = tl.load(orders + at)
        segments = order >> 16
        interleave = order & 0xFFFF
        position = span * 64 + (slots // interleave) * (interleave * segments)
        position += (ordinal - span) * interleave + slots % interleave
        base = tl.multiple_of(page * page_stride, 16)
        values = (region + (base + value_offset)).to(tl.pointer_type(tl.float8e4nv))
        key = tl.load(values + slots[:, None] * 128 + dims[None, :])
        scale = tl.load((region + (base + scale_offset)).to(tl.pointer_type(tl.float32)) + slots)
        products = tl.dot(key, tl.trans(asked))
        weighted = tl.maximum(products, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(weighted, (64, QUERIES, 32)), 2) * scale[:, None]
        target = scores + row[None, :] + position[:, None]
        tl.store(target, score, mask=(position[:, None] < count) & (asking[None, :] < queries))


def index_scores(
    q: Tensor,
    weights: Tensor,
    table: DevicePages,
    page_counts: Tensor,
    tokens: Tensor,
    region: Tensor,
    values: Component,
    scales: Component,
    scores: Tensor,
    tiling: IndexTiling = DEFAULT_INDEX_TILING,
) -> None:
    """`scores[r, t, j] = scale_j * sum_h weights[r, t, h] * relu(q[r, t, h] . key_j)` for positions j < `tokens`[r].

    `q` uint8[R, Q, 32, 128] (e4m3 codes), `weights` float32[R, Q, 32] with all factors but the key's folded in.
    `page_counts` int32[R]: pages to look at (the first of `table`'s row, all of them present), `tokens` int32[R]:
    positions that have a key. `values`, `scales`: the leader's components in `region`. `scores` float32[R, Q, n],
    n >= the most tokens; later positions are not written. Causality is the reader's: position j of query t counts only
    up to the query's own.
    """
    requests, queries = q.shape[:2]
    assert q.shape[2:] == (INDEX_HEADS, 128)
    assert q.dtype == torch.uint8
    assert q.is_contiguous()
    assert weights.shape == q.shape[:3]
    assert weights.is_contiguous()
    assert scores.shape[:2] == (requests, queries)
    assert scores.stride(2) == 1
    assert scores.stride(0) == queries * scores.stride(1)
    assert values.page_stride == scales.page_stride
    assert (values.slot_stride, scales.slot_stride) == (128, 4)
    assert region.data_ptr() % 16 == values.page_stride % 16 == values.offset % 16 == 0
    blocks = triton.cdiv(table.pages.shape[1], tiling.pages)
    if requests * queries * blocks:
        _scores[(blocks, requests, triton.cdiv(queries, tiling.queries))](
            q, weights, table.pages, table.spans, table.orders, page_counts, tokens, region, scores,
            table.pages.stride(0), scores.stride(1), values.page_stride, values.offset, scales.offset, queries,
            PAGES=tiling.pages, QUERIES=tiling.queries, STAGES=tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
