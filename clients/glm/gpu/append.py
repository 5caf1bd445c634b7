"""Quantise and append: new KV values become fp8 rows in their pages, with the bytes that the codec gives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmanager.layout import Component


@triton.jit
def _power_of_two(amax):
    """The scale as float32 bits (an exponent), as the codec finds it; the division must round as IEEE says."""
    need = tl.maximum(tl.div_rn(amax, 448.0), 1e-4)
    bits = need.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def _from_exponent(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _append_latent(
    latent, rope, pages, slots, region, latent_stride, rope_stride, page_stride, slot_stride, offset
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if page >= 0:
        groups = tl.arange(0, 4)
        within = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        values = tl.load(latent + token * latent_stride + within).to(tl.float32)
        exponent = _power_of_two(tl.max(tl.abs(values), 1))
        # A product with the inverse is exact where the quotient is: both only move the exponent.
        codes = (values * _from_exponent(254 - exponent)[:, None]).to(tl.float8e4nv)
        row = region + tl.multiple_of(page * page_stride + slot * slot_stride + offset, 16)
        tl.store(row.to(tl.pointer_type(tl.float8e4nv)) + within, codes)
        tl.store((row + 512).to(tl.pointer_type(tl.float32)) + groups, _from_exponent(exponent))
        dims = tl.arange(0, 64)
        turned = tl.load(rope + token * rope_stride + dims).to(tl.float32).to(tl.bfloat16)
        tl.store((row + 528).to(tl.pointer_type(tl.bfloat16)) + dims, turned)


@triton.jit
def _append_index(
    keys, pages, slots, region, key_stride, value_page_stride, value_slot_stride, value_offset,
    scale_page_stride, scale_slot_stride, scale_offset,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if page >= 0:
        dims = tl.arange(0, 128)
        values = tl.load(keys + token * key_stride + dims).to(tl.float32)
        exponent = _power_of_two(tl.max(tl.abs(values), 0))
        codes = (values * _from_exponent(254 - exponent)).to(tl.float8e4nv)
        at = region + tl.multiple_of(page * value_page_stride + slot * value_slot_stride + value_offset, 16)
        tl.store(at.to(tl.pointer_type(tl.float8e4nv)) + dims, codes)
        scale = region + (page * scale_page_stride + slot * scale_slot_stride + scale_offset)
        tl.store(scale.to(tl.pointer_type(tl.float32)), _from_exponent(exponent))


def append_latent(
    latent: Tensor, rope: Tensor, pages: Tensor, slots: Tensor, region: Tensor, component: Component
) -> None:
    """Writes the rows of T tokens of one layer: `latent` float[T, 512], `rope` float[T, 64].

    Token t goes to `pages`[t], `slots`[t] (integers) of `component` in `region` uint8; a negative page means that
    this shard does not keep the token. Values wider than float32 must be rounded to it before.
    """
    assert latent.shape[1:] == (512,)
    assert rope.shape == (len(latent), 64)
    assert latent.stride(1) == rope.stride(1) == 1
    _check(latent, pages, slots, region, component)
    assert rope.dtype in (torch.float32, torch.bfloat16)
    if len(latent):
        _append_latent[(len(latent),)](
            latent, rope, pages, slots, region, latent.stride(0), rope.stride(0), component.page_stride,
            component.slot_stride, component.offset, num_warps=1,
        )  # fmt: skip


def append_index(
    keys: Tensor, pages: Tensor, slots: Tensor, region: Tensor, values: Component, scales: Component
) -> None:
    """Writes the indexer rows of T tokens of one leader, `keys` float[T, 128]; otherwise as `append_latent`."""
    assert keys.shape[1:] == (128,)
    assert keys.stride(1) == 1
    _check(keys, pages, slots, region, values)
    if len(keys):
        _append_index[(len(keys),)](
            keys, pages, slots, region, keys.stride(0), values.page_stride, values.slot_stride, values.offset,
            scales.page_stride, scales.slot_stride, scales.offset, num_warps=1,
        )  # fmt: skip


def quantise_index_queries(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Float[..., 128] -> (uint8[..., 128], float32[...]): e4m3 codes and power-of-two scales, as for keys."""
    flat = queries.reshape(-1, 128)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    scales = torch.empty(len(flat), dtype=torch.float32, device=flat.device)
    slots = torch.arange(len(flat), device=flat.device)
    if len(flat):
        # A "page" that is the whole array; codes and scales are separate tensors, so scales lie at a distance.
        distance = scales.data_ptr() - codes.data_ptr()
        _append_index[(len(flat),)](
            flat, torch.zeros_like(slots), slots, codes, flat.stride(0), 0, 128, 0, 0, 4, distance, num_warps=1
        )  # fmt: skip
    return codes.view(queries.shape), scales.view(queries.shape[:-1])


def _check(values: Tensor, pages: Tensor, slots: Tensor, region: Tensor, component: Component) -> None:
    assert values.dtype in (torch.float32, torch.bfloat16)
    assert len(pages) == len(slots) == len(values)
    assert region.dtype == torch.uint8
    assert region.data_ptr() % 16 == component.page_stride % 16 == component.slot_stride % 16 == 0
    assert component.offset % 16 == 0
