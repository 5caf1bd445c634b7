"""Sparse multi-head latent attention over rows that lie anywhere in device memory, and the merge of its parts.

A *row reference* (int64) names one group row: its byte offset from the base of resident memory or, with `HOT_BIT`
set, from the base of hot memory. A negative one names nothing. Offsets are multiples of 16 bytes. What lies
between two rows is never read, so pages, hot rows and every token order come alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmanager.clients.glm.gpu.hopper_mla import attend as hopper_attend
from kvmanager.clients.glm.gpu.hopper_mla import is_hopper

HEADS: Final = 64
LATENT: Final = 512
ROPE: Final = 64
HOT_BIT: Final = 1 << 62
NO_ROW: Final = -1

_HOT_SHIFT: Final = tl.constexpr(62)
_LN2: Final = tl.constexpr(0.6931471805599453)
_LOG2E: Final = 1.4426950408889634
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter has no bfloat16 arithmetic: matrices are float32 there."""
MATRIX_TYPE: Final = tl.float32 if INTERPRETED else tl.bfloat16


class Scores(StrEnum):
    """How the halves of a block's warps come by a tile's scores: each computes all of them, or its own columns.

    Columns need more shared memory and registers: 64 rows a tile are too many for them.
    """

    ALL = "all"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch is cut: rows a tile, warps a block, tiles in flight, and who computes scores."""

    rows: int = 64
    warps: int = 8
    stages: int = 2
    scores: Scores = Scores.ALL


DEFAULT_TILING: Final = Tiling()


# Four e4m3 codes to four bfloat16: sign and the seven other bits go to their places, which leaves the exponent
# 120 too small; a product with 2^120 mends that, for subnormal codes too. The GPU's own conversion has a
# quarter-rate step that would take as long as the matrix products.
_E4M3_TO_BF16: Final = tl.constexpr(
    """
    {
    .reg .b32 a, b, c, d;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07f007f0;
    and.b32 d, d, 0x07f007f0;
    and.b32 a, a, 0x80008000;
    and.b32 b, b, 0x80008000;
    or.b32 a, a, c;
    or.b32 b, b, d;
    mov.b32 c, 0x7b807b80;
    mul.rn.bf16x2 $0, a, c;
    mul.rn.bf16x2 $1, b, c;
    }
    """
)


@triton.jit
def _latents(row, scale, used, TILE: tl.constexpr, MATRIX: tl.constexpr):
    """512 values of each row, dequantised exactly: e4m3 times a power of two fits in bfloat16."""
    values = row[:, None] + tl.arange(0, 512)[None, :]
    factor = tl.load(scale[:, None] + tl.arange(0, 4)[None, :], mask=used[:, None], other=0.0)
    if MATRIX == tl.bfloat16:  # noqa: SIM300
        codes = tl.load(values, mask=used[:, None], other=0)
        parts = tl.inline_asm_elementwise(
            _E4M3_TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )  # fmt: skip
    else:
        codes = tl.load(values.to(tl.pointer_type(tl.float8e4nv)), mask=used[:, None], other=0.0)
        parts = codes.to(MATRIX)
    groups = tl.reshape(parts, (TILE, 4, 128)) * factor.to(MATRIX)[:, :, None]
    return tl.reshape(groups, (TILE, 512))


# Not compiled anew for each number of parts, nor for where the hot buffer lies.
@triton.jit(do_not_specialize=["splits"])
def _attend(
    q, references, counts, resident, out, lse, hot_delta: tl.int64, row_offset, reference_stride, scale, splits,
    TILE: tl.constexpr, STAGES: tl.constexpr, MATRIX: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    count = tl.load(counts + query)
    share = tl.cdiv(tl.cdiv(count, TILE), splits) * TILE
    first = split * share
    last = tl.minimum(count, first + share)
    heads = tl.arange(0, 64)
    dims = tl.arange(0, 512)
    q_head = q + query * 36864 + heads[:, None] * 576
    q_latent = tl.load(q_head + dims[None, :]).to(MATRIX)
    q_rope = tl.load(q_head + (tl.arange(0, 64) + 512)[None, :]).to(MATRIX)
    acc = tl.zeros((64, 512), tl.float32)
    top = tl.full((64,), float("-inf"), tl.float32)
    total = tl.zeros((64,), tl.float32)
    for at in tl.range(first, last, TILE, num_stages=STAGES):
        n = at + tl.arange(0, TILE)
        reference = tl.load(references + query * reference_stride + n, mask=n < last, other=-1)
        used = reference >= 0
        hot = (reference >> _HOT_SHIFT) == 1
        offset = tl.where(hot, (reference ^ (hot.to(tl.int64) << _HOT_SHIFT)) + hot_delta, reference)
        offset = tl.multiple_of(offset + row_offset, 16)
        row = resident + offset
        scales = (row + 512).to(tl.pointer_type(tl.float32))
        ropes = (row + 528).to(tl.pointer_type(tl.bfloat16))
        latents = _latents(row, scales, used, TILE, MATRIX)
        turned = tl.load(ropes[:, None] + tl.arange(0, 64)[None, :], mask=used[:, None], other=0.0).to(MATRIX)
        if COLUMNS:
            # Both conditions always hold. The compiler gives all columns to every warp when it sees that a product
            # feeds another one; it does not look beyond an `if`.
            s = tl.zeros((64, TILE), tl.float32)
            if at < last:
                s = tl.dot(q_rope, tl.trans(turned), s)
            if at < count:
                s = tl.dot(q_latent, tl.trans(latents), s)
        else:
            s = tl.dot(q_rope, tl.trans(turned))
            s = tl.dot(q_latent, tl.trans(latents), s)
        s = tl.where(used[None, :], s * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # Where no row counts yet, any finite reference point will do: -inf minus -inf would be NaN.
        point = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - point[:, None])
        fade = tl.exp2(top - point)
        total = total * fade + tl.sum(p, 1)
        top = higher
        acc = tl.dot(p.to(MATRIX), latents, acc * fade[:, None])
    some = total > 0
    norm = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    part = query * splits + split
    target = out + part * 32768 + heads[:, None] * 512 + dims[None, :]
    tl.store(target, (acc * norm[:, None]).to(out.dtype.element_ty))
    sums = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * _LN2, float("-inf"))
    tl.store(lse + part * 64 + heads, sums)


@triton.jit(do_not_specialize=["parts"])
def _merge(outs, lses, out, lse, parts, out_part, out_query, lse_part, lse_query, PARTS: tl.constexpr):
    """One head of one query: weights from the parts' log-sum-exps, then their weighted sum, part by part."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    each = tl.arange(0, PARTS)
    sums = tl.load(lses + query * lse_query + each * lse_part + head, mask=each < parts, other=float("-inf"))
    top = tl.max(sums, 0)
    point = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(sums - point), 0)
    some = total > 0
    norm = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)
    dims = tl.arange(0, 512)
    acc = tl.zeros((512,), tl.float32)
    for part in range(parts):
        one = tl.load(lses + query * lse_query + part * lse_part + head)
        weight = tl.exp(one - point) * norm
        value = tl.load(outs + query * out_query + part * out_part + head * 512 + dims).to(tl.float32)
        acc += weight * value
    tl.store(out + (query * 64 + head) * 512 + dims, acc.to(out.dtype.element_ty))
    tl.store(lse + query * 64 + head, tl.where(some, point + tl.log(tl.where(some, total, 1.0)), float("-inf")))


def splits_for(queries: int, processors: int) -> int:
    """Parts a query, so that a few queries still give each of the GPU's multiprocessors a block."""
    return max(1, min(16, processors // max(1, queries)))


def attend_parts(
    q: Tensor,
    references: Tensor,
    counts: Tensor,
    resident: Tensor,
    hot: Tensor,
    row_offset: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
    tiling: Tiling | None = None,
) -> None:
    """Attention of T queries over their selected rows, each query's rows cut into S parts.

    `q` bf16[T, 64, 576] (absorbed latent part, then rope part). `references` int64[T, k], of which the first
    `counts` int32[T] are looked at. `resident`, `hot`: tensors that begin at the bases. `row_offset`: bytes from a
    group row to the layer's own row (a multiple of 16). `out` float[T, S, 64, 512] and `lse` float32[T, S, 64]
    (natural logarithm) are written whole; a part without a row gets 0 and -inf. Nothing here waits for the GPU or
    depends on values, so a launch can be captured in a graph after a first call. Hopper GPUs have a kernel of their
    own, which needs CuPy (DeviceError); elsewhere, and with a `tiling`, Triton's runs.
    """
    queries, splits = lse.shape[:2]
    assert q.shape == (queries, HEADS, LATENT + ROPE)
    assert out.shape == (queries, splits, HEADS, LATENT)
    assert lse.shape == (queries, splits, HEADS)
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert references.dtype == torch.int64
    assert references.stride(1) == 1
    assert counts.dtype == torch.int32
    assert row_offset % 16 == 0
    hot_delta = hot.data_ptr() - resident.data_ptr()
    assert resident.data_ptr() % 16 == hot_delta % 16 == 0
    if queries == 0:
        return
    if tiling is None and is_hopper(q.device):
        hopper_attend(q, references, counts, resident, hot_delta, row_offset, scale * _LOG2E, out, lse)
        return
    tiling = tiling or DEFAULT_TILING
    _attend[(queries, splits)](
        q, references, counts, resident.view(torch.uint8), out, lse, hot_delta, row_offset, references.stride(0),
        scale * _LOG2E, splits, TILE=tiling.rows, STAGES=tiling.stages, MATRIX=MATRIX_TYPE,
        COLUMNS=tiling.scores is Scores.COLUMNS, num_warps=tiling.warps,
    )  # fmt: skip


def merge_parts(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """One result from parts of a softmax: `outs` float[T, S, 64, 512], `lses` float32[T, S, 64].

    T and S may have any strides. `out` float[T, 64, 512], `lse` float32[T, 64]. Parts are splits of a query's rows or
    shards of several ranks. A part with lse -inf weighs nothing; if all do, the result is 0 and -inf.
    """
    queries, parts = lses.shape[:2]
    assert outs.shape == (queries, parts, HEADS, LATENT)
    assert outs.stride()[2:] == (LATENT, 1)
    assert lses.stride(2) == 1
    assert out.shape == (queries, HEADS, LATENT)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    if queries == 0:
        return
    _merge[(queries, HEADS)](
        outs, lses, out, lse, parts, outs.stride(1), outs.stride(0), lses.stride(1), lses.stride(0),
        PARTS=max(2, triton.next_power_of_2(parts)), num_warps=4,
    )  # fmt: skip
