"""Scores of the indexer, in fp8, straight from indexer pages: every key of a request against its query tokens."""

from __future__ import annotations

import functools
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
    """How a launch is cut: query tokens (a power of two) a block, tiles of 64 keys in flight, warps, tiles a block.

    Without a number of tiles, blocks get as many as give every multiprocessor the same number of blocks, of which
    `blocks` fit on one at a time. `registers`: the most a thread gets, fewer than the compiler would like where more
    blocks then hide each other's waits.
    """

    queries: int = 4
    stages: int = 2
    warps: int = 4
    tiles: int | None = None
    blocks: int = 4
    registers: int | None = 128


DEFAULT_INDEX_TILING: Final = IndexTiling()
_MOST_TILES: Final = 64
"""Beyond, blocks come in two rounds: one that starts late then costs less."""


@triton.jit
def _quotients(within, interleave, segments):
    """`within` // interleave, and that // segments, without slow integer divisions.

    `within` < 64 * segments < 2^21. The first is exact, as an interleave is a power of two. The second is off by less
    than 64 * 3 * 2^-24, and half a run away from the next whole number: more than 2^-16.
    """
    run = (within.to(tl.float32) * tl.div_rn(1.0, interleave.to(tl.float32))).to(tl.int32)
    return run, ((run.to(tl.float32) + 0.5) * tl.div_rn(1.0, segments.to(tl.float32))).to(tl.int32)


@triton.jit(do_not_specialize=["tiles"])
def _scores(
    q, weights, pages, spans, orders, page_counts, tokens, region, scores, table_stride, score_stride, page_stride,
    value_offset, scale_offset, queries, tiles, QUERIES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(2) * QUERIES
    first = tl.program_id(0) * tiles
    count = tl.load(tokens + request)
    last = tl.minimum(first + tiles, tl.minimum(tl.load(page_counts + request), tl.cdiv(count, 64)))
    heads = tl.arange(0, QUERIES * 32)
    head_row = (request * queries + first_query) * 32 + heads
    there = first_query * 32 + heads < queries * 32
    dims = tl.arange(0, 128)
    asked = tl.load(q.to(tl.pointer_type(tl.float8e4nv)) + head_row[:, None] * 128 + dims[None, :],
                    mask=there[:, None], other=0.0)  # fmt: skip
    weight = tl.load(weights + head_row, mask=there, other=0.0)
    slots = tl.arange(0, 64)
    asking = first_query + tl.arange(0, QUERIES)
    line = (request * queries + asking) * score_stride
    table = request * table_stride
    # By positions, not by pages: a page of a round-robin order would scatter its scores, a few bytes each.
    for ordinal in tl.range(first, last, num_stages=STAGES):
        span = tl.load(spans + table + ordinal)
        order = tl.load(orders + table + ordinal)
        segments = order >> 16
        interleave = order & 0xFFFF
        position = ordinal * 64 + slots
        within = position - span * 64
        run, turn = _quotients(within, interleave, segments)
        slot = turn * interleave + within - run * interleave
        page = tl.load(pages + table + span + (run - turn * segments), mask=position < count, other=0).to(tl.int64)
        base = page * page_stride
        row = tl.multiple_of(base + slot * 128 + value_offset, 16)
        key = tl.load((region + row).to(tl.pointer_type(tl.float8e4nv))[:, None] + dims[None, :])
        scale = tl.load((region + (base + slot * 4 + scale_offset)).to(tl.pointer_type(tl.float32)))
        products = tl.dot(key, tl.trans(asked))
        weighted = tl.maximum(products, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(weighted, (64, QUERIES, 32)), 2) * scale[:, None]
        target = scores + line[None, :] + position[:, None]
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
    width, query_blocks = table.pages.shape[1], triton.cdiv(queries, tiling.queries)
    if requests * queries * width:
        tiles = tiling.tiles or _tiles_for(width, requests * query_blocks, tiling.blocks * _processors(region.device))
        _scores[(triton.cdiv(width, tiles), requests, query_blocks)](
            q, weights, table.pages, table.spans, table.orders, page_counts, tokens, region, scores,
            table.pages.stride(0), scores.stride(1), values.page_stride, values.offset, scales.offset, queries, tiles,
            QUERIES=tiling.queries, STAGES=tiling.stages, num_warps=tiling.warps, maxnreg=tiling.registers,
        )  # fmt: skip


def _tiles_for(width: int, rows: int, at_once: int) -> int:
    """Tiles a block, so that `rows` rows of `width` tiles make whole rounds of `at_once` blocks, at most two."""
    rounds = 1 if width * rows <= at_once * _MOST_TILES else 2
    return -(-width // max(1, rounds * at_once // rows))


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
