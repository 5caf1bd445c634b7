"""Page tables on the GPU, and from token positions to row references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmanager.geometry import TokenOrder
from kvmanager.layout import Component

PAGE_ROWS: Final = 64
_ORDER_SHIFT: Final = 16


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Pages of R requests, counted by ordinal; a page of 64 tokens more a request is an entry more.

    `pages` int32[R, P]: page index, -1 where there is none. `spans` int32[R, P]: ordinal of the first page of the
    span that the page belongs to. `orders` int32[R, P]: the span's token order, `segments << 16 | interleave`. Since
    a span of M pages holds 64 M tokens, the span of position p is that of page ordinal p // 64 too.
    """

    pages: Tensor
    spans: Tensor
    orders: Tensor


def device_pages(
    requests: Sequence[Sequence[tuple[TokenOrder, np.ndarray]]], device: torch.device | str
) -> DevicePages:
    """From the spans of each request, in order: (token order, page indexes int[M]) each."""
    width = max((sum(len(pages) for _, pages in spans) for spans in requests), default=0)
    # Rows of whole 64 bytes: Triton compiles a kernel again for pointers and strides of another alignment.
    tables = np.full((3, len(requests), -(-max(1, width) // 16) * 16), -1, dtype=np.int32)
    tables[2] = 1 << _ORDER_SHIFT | PAGE_ROWS
    for number, spans in enumerate(requests):
        at = 0
        for order, pages in spans:
            end = at + order.segments
            assert len(pages) == order.segments
            tables[0, number, at:end] = pages
            tables[1, number, at:end] = at
            tables[2, number, at:end] = order.segments << _ORDER_SHIFT | order.interleave
            at = end
    return DevicePages(*torch.from_numpy(tables).to(device))


@triton.jit
def _references(
    selection, requests, pages, spans, orders, references, counts, selection_stride, table_stride, page_stride,
    slot_stride, offset, k, rank, interleave_of_shard, RANKS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + query).to(tl.int64)
    n = tl.arange(0, K)
    position = tl.load(selection + query * selection_stride + n, mask=n < k, other=-1).to(tl.int32)
    some = position >= 0
    position = tl.where(some, position, 0)
    if RANKS == 1:
        at = request * table_stride + position // 64
        first = tl.load(spans + at, mask=some, other=0)
        order = tl.load(orders + at, mask=some, other=0x10001)
        segments = order >> 16
        interleave = order & 0xFFFF
        within = position - first * 64
        ordinal = first + (within // interleave) % segments
    else:
        segments = RANKS
        interleave = interleave_of_shard
        within = position % (64 * RANKS)
        ordinal = position // (64 * RANKS)
        some = some & ((within // interleave) % segments == rank)
    slot = (within // (interleave * segments)) * interleave + within % interleave
    page = tl.load(pages + request * table_stride + ordinal, mask=some, other=-1).to(tl.int64)
    used = page >= 0
    reference = page * page_stride + slot.to(tl.int64) * slot_stride + offset
    place = tl.cumsum(used.to(tl.int32), 0) - 1
    count = tl.sum(used.to(tl.int32), 0)
    row = references + query * k
    tl.store(row + place, reference, mask=used)
    tl.store(row + n, tl.full((K,), -1, tl.int64), mask=(n >= count) & (n < k))
    tl.store(counts + query, count)


def row_references(
    selection: Tensor,
    requests: Tensor,
    table: DevicePages,
    component: Component,
    references: Tensor,
    counts: Tensor,
    shard: tuple[int, int, int] = (0, 1, 1),
) -> None:
    """Where the selected rows lie: byte offsets in the region, those that exist first, -1 after them.

    `selection` int[T, k] of positions (-1: none), `requests` int[T]: each query's row of `table`. `component`: the
    leader's latent component. Writes `references` int64[T, k] and `counts` int32[T]; the order of the rows is that of
    the selection. `shard`: (rank, ranks, interleave) of a pool that keeps one page a span on each of its ranks;
    positions of other ranks are left out.
    """
    queries, k = selection.shape
    rank, ranks, interleave = shard
    assert references.shape == selection.shape
    assert references.is_contiguous()
    assert references.dtype == torch.int64
    assert counts.shape == requests.shape == (queries,)
    assert counts.dtype == torch.int32
    assert table.pages.stride(1) == 1
    if queries:
        _references[(queries,)](
            selection, requests, table.pages, table.spans, table.orders, references, counts, selection.stride(0),
            table.pages.stride(0), component.page_stride, component.slot_stride, component.offset, k, rank, interleave,
            RANKS=ranks, K=triton.next_power_of_2(k), num_warps=4,
        )  # fmt: skip
