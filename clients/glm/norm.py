"""RMSNorm and rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x * weight / sqrt(mean(x^2) + eps)` over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


class Rope:
    """Rotary embedding of adjacent pairs: dims (2i, 2i+1) turn by `position * theta^(-2i/dim)`.

    Results stay in place, pair by pair. Angles are float32, as in the tables of inference engines; their
    sine and cosine are taken in float64, because vectorised float32 ones depend on where in an array a value lies.
    """

    def __init__(self, dim: int, theta: float, dtype: torch.dtype) -> None:
        self._inverse = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        self._dtype = dtype

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` [T, ..., dim] turned to positions int64[T]."""
        angles = (positions.float().unsqueeze(-1) * self._inverse).double()
        shape = (len(positions), *(1,) * (x.dim() - 2), -1)
        cos = angles.cos().to(self._dtype).view(shape)
        sin = angles.sin().to(self._dtype).view(shape)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
