"""Where an attention kernel keeps the rows of a block, where that is not row by row.

vLLM's attention on a CPU stores keys the other way round (and packed for AMX), so a block's bytes say nothing by
themselves. Its own kernel is asked: rows of numbers go in, and the numbers tell where each element of a row lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.errors import LayoutMismatch

DIGIT = 64
"""Numbers below are exact in every element type that is served."""
Places = npt.NDArray[np.int64]


def places_of(write: Callable[[Any, Any], Any], rows: int, width: int, dtype: Any) -> Places | None:
    """For element e of row r of one head, at [r * width + e], where it lies in the head's part of a block.

    write(keys, values): a block's elements after the kernel has stored keys and values [rows, 1, width / 2] in it.
    None: row by row, as they are. Raises LayoutMismatch for a kernel that keeps something else than the elements.
    """
    import torch

    count = rows * width
    found, scale = np.zeros(count, np.int64), 1
    numbers = np.arange(count).reshape(rows, width)
    while scale < count:
        digits = torch.from_numpy(numbers // scale % DIGIT).to(dtype).reshape(rows, 1, width)
        stored = write(digits[..., : width // 2].contiguous(), digits[..., width // 2 :].contiguous())
        found += np.rint(stored.float().numpy()).astype(np.int64).reshape(-1) * scale
        scale *= DIGIT
    if not np.array_equal(np.sort(found), np.arange(count)):
        raise LayoutMismatch(f"the attention kernel does not keep the {count} elements of a block as they are")
    places = np.empty(count, np.int64)
    places[found] = np.arange(count)
    return None if np.array_equal(places, np.arange(count)) else places


def cpu_attention_places(rows: int, width: int, dtype: Any) -> Places | None:
    """Of vLLM's attention on this CPU, whose row is a head's key and value; see `places_of`."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, rows, width // 2)

    def write(keys: Any, values: Any) -> Any:
        block = torch.zeros(1, 1, rows * 2, width // 2, dtype=dtype)
        key_cache, value_cache = block.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(rows), isa)
        return block

    return places_of(write, rows, width, dtype)
