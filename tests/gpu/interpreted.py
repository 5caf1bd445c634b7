"""Triton's interpreter, mended where it matters here: its own conversions of short floats do not round right."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TYPES = {
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.bfloat16: (torch.bfloat16, np.uint16),
    tl.float16: (torch.float16, np.uint16),
    tl.float32: (torch.float32, np.uint32),
}


def _convert(values: np.ndarray, source: Any, target: Any, rounding: object) -> np.ndarray:
    """As the GPU converts: to nearest, ties to even."""
    del rounding
    (source_type, _), (target_type, stored) = _TYPES[source], _TYPES[target]
    raw = torch.from_numpy(np.frombuffer(values.tobytes(), np.uint8).copy()).view(source_type)
    return raw.to(target_type).view(torch.uint8).numpy().view(stored).reshape(values.shape)


def mend() -> None:
    """Replaces the interpreter's conversion by torch's."""
    interpreter._convert_float = _convert
