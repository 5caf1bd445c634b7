"""KV rows as bytes: the fp8_ds_mla format, and an exact one to compare a model without quantisation.

fp8_ds_mla latent row, 656 bytes: 512 e4m3 values, 4 float32 scales (one per 128 values, powers of two),
64 bfloat16 rope values with the two members of a rotated pair side by side. Indexer key: 128 e4m3 values
and one float32 scale (a power of two), kept in different sections of a page.

Encoding starts from float32: wider input is rounded to it first, so that one rule gives the bytes.
All functions work row by row: a row's bytes never depend on the other rows of the call.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Protocol

import torch
from torch import Tensor

from kvmanager.layout import INDEX_VALUE_BYTES, LATENT_ROW_BYTES

LATENT_VALUES: Final = 512
ROPE_VALUES: Final = 64
GROUP_VALUES: Final = 128
"""Values that share one scale."""
E4M3_MAX: Final = 448.0
SCALE_FLOOR: Final = 1e-4

_SCALES_AT: Final = LATENT_VALUES
_ROPE_AT: Final = LATENT_VALUES + LATENT_VALUES // GROUP_VALUES * 4


class Codec(Protocol):
    """Turns KV values into row bytes and back. Shapes: `...` is any batch shape."""

    latent_bytes: int
    index_bytes: int

    def encode_latent(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        """Float[..., 512], float[..., 64] -> uint8[..., latent_bytes]."""

    def decode_latent(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """uint8[..., latent_bytes] -> (dtype[..., 512], dtype[..., 64])."""

    def encode_index(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Float[..., 128] -> (uint8[..., index_bytes], float32[...] scales)."""

    def decode_index(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8[..., index_bytes], float32[...] -> dtype[..., 128]."""


def power_of_two_scale(values: Tensor) -> Tensor:
    """The least power of two s with amax / s <= 448, over the last dimension (float32 in and out).

    Groups of tiny values get the scale of `SCALE_FLOOR`.
    """
    need = (values.abs().amax(dim=-1) / E4M3_MAX).clamp(min=SCALE_FLOOR)
    mantissa, exponent = torch.frexp(need)  # need = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(need), exponent)


@cache
def _e4m3_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The value of each of the 256 codes. On a CPU a lookup is about ten times as fast as torch's own conversion."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(dtype)


def _decode_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return _e4m3_values(dtype, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _encode_e4m3(values: Tensor, scales: Tensor) -> Tensor:
    """float32[..., n], float32[...] -> uint8[..., n]."""
    return (values / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)


class Fp8Codec:
    """fp8_ds_mla rows and fp8 indexer keys, bit-exact."""

    latent_bytes = LATENT_ROW_BYTES
    index_bytes = INDEX_VALUE_BYTES

    def encode_latent(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        """Float[..., 512], float[..., 64] -> uint8[..., 656]."""
        assert c_kv.shape[-1] == LATENT_VALUES
        assert k_pe.shape[-1] == ROPE_VALUES
        groups = c_kv.float().reshape(*c_kv.shape[:-1], -1, GROUP_VALUES)
        scales = power_of_two_scale(groups)
        codes = _encode_e4m3(groups, scales).flatten(-2)
        rope = k_pe.float().to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat((codes, scales.contiguous().view(torch.uint8), rope), dim=-1)

    def decode_latent(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """uint8[..., 656] -> (dtype[..., 512], dtype[..., 64])."""
        assert rows.dtype == torch.uint8
        assert rows.shape[-1] == LATENT_ROW_BYTES
        codes = _decode_e4m3(rows[..., :_SCALES_AT], dtype).view(*rows.shape[:-1], -1, GROUP_VALUES)
        scales = rows[..., _SCALES_AT:_ROPE_AT].contiguous().view(torch.float32).to(dtype)
        rope = rows[..., _ROPE_AT:].contiguous().view(torch.bfloat16).to(dtype)
        return (codes * scales.unsqueeze(-1)).flatten(-2), rope

    def encode_index(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Float[..., 128] -> (uint8[..., 128], float32[...])."""
        assert keys.shape[-1] == INDEX_VALUE_BYTES
        values = keys.float()
        scales = power_of_two_scale(values)
        return _encode_e4m3(values, scales), scales

    def decode_index(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8[..., 128], float32[...] -> dtype[..., 128]."""
        return _decode_e4m3(values, dtype) * scales.to(dtype).unsqueeze(-1)


class ExactCodec:
    """Rows that hold the values as they are, in `dtype`: for comparing with a model that does not quantise.

    Its rows are wider than the KV format's, so they fit in a `ContiguousStore` only.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.latent_bytes = (LATENT_VALUES + ROPE_VALUES) * dtype.itemsize
        self.index_bytes = INDEX_VALUE_BYTES * dtype.itemsize

    def encode_latent(self, c_kv: Tensor, k_pe: Tensor) -> Tensor:
        """Float[..., 512], float[..., 64] -> uint8[..., latent_bytes]."""
        return torch.cat((c_kv, k_pe), dim=-1).to(self.dtype).contiguous().view(torch.uint8)

    def decode_latent(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """uint8[..., latent_bytes] -> (dtype[..., 512], dtype[..., 64])."""
        values = rows.contiguous().view(self.dtype).to(dtype)
        return values[..., :LATENT_VALUES], values[..., LATENT_VALUES:]

    def encode_index(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Float[..., 128] -> (uint8[..., index_bytes], ones)."""
        values = keys.to(self.dtype).contiguous()
        return values.view(torch.uint8), torch.ones(keys.shape[:-1], dtype=torch.float32)

    def decode_index(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """uint8[..., index_bytes] -> dtype[..., 128]; scales are ones."""
        del scales
        return values.contiguous().view(self.dtype).to(dtype)
