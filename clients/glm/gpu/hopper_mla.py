"""The launch of `kernels/sparse_mla.cu`: sparse MLA with the matrix instructions that only Hopper GPUs have."""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.gpu_kernels import compiled_for, launch

_THREADS: Final = 384
_SHARED_BYTES: Final = 224_800
"""As the kernel says, and what it takes to begin at a multiple of 1,024."""
_KERNELS: Final = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the kernel runs on this device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def attend(
    q: Tensor,
    references: Tensor,
    counts: Tensor,
    resident: Tensor,
    hot_delta: int,
    row_offset: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """As `attend_parts`, which has checked everything; `scale` is of powers of two. Raises DeviceError without CuPy."""
    assert q.dtype == torch.bfloat16
    assert q.data_ptr() % 16 == 0
    queries, splits = lse.shape[:2]
    kernel = compiled_for("sm_90a", "sparse_mla.cu", _KERNELS[out.dtype], _SHARED_BYTES, q.device.index or 0)
    arguments = (
        q, references, counts, resident, out, lse, np.int64(hot_delta), np.int64(row_offset),
        np.int64(references.stride(0)), np.float32(scale), np.int32(splits),
    )  # fmt: skip
    launch(kernel, queries * splits, _THREADS, arguments, _SHARED_BYTES)
