"""Exact top-k on the GPU: ascending positions, equal scores from the lowest position on, -1 in unused places."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_BINS: Final = 1 << 13
_SEGMENT: Final = 2_048
_MAX_SEGMENTS: Final = 2_048
MAX_LENGTH: Final = _SEGMENT * _MAX_SEGMENTS
"""Scores of one row."""
_MAX_ROWS: Final = 65_535
_HISTOGRAM_BLOCKS: Final = 528
"""Four for each multiprocessor of an H200: what the histogram of a whole call is cut into."""
_MIN_CHUNK: Final = 4_096


class TopKWorkspace:
    """Room for the intermediate results of calls of at most `rows` rows of `stride` scores (a multiple of 4).

    `bytes_used` = rows * (32,768 + 4 * stride + 4 * segments). One call at a time may use it.
    """

    def __init__(self, rows: int, stride: int, device: torch.device | str) -> None:
        assert stride % 4 == 0
        assert 0 < stride <= MAX_LENGTH
        assert 0 < rows <= _MAX_ROWS
        self.rows, self.stride = rows, stride
        self.segments = -(-stride // _SEGMENT)
        self.bins = torch.zeros((rows, _BINS), dtype=torch.int32, device=device)
        self.kept = torch.empty((rows, stride), dtype=torch.int32, device=device)
        self.kept_counts = torch.empty((rows, self.segments), dtype=torch.int32, device=device)


def top_k(scores: Tensor, lengths: Tensor, selection: Tensor, workspace: TopKWorkspace) -> None:
    """The k greatest of the first `lengths`[t] scores of each row.

    `scores` float32[T, stride] (contiguous, stride as the workspace's), `lengths` int32[T], each at most the stride.
    Writes `selection` int32[T, k], ascending, -1 at the end where fewer than k count: -inf is never chosen. -0 equals
    0; the order of NaN is not defined. Queued on torch's current stream; can be captured in a graph after a first call.
    """
    rows, k = selection.shape
    assert scores.shape == (rows, workspace.stride)
    assert rows <= workspace.rows
    assert scores.dtype == torch.float32
    assert scores.is_contiguous()
    assert lengths.shape == (rows,)
    assert lengths.dtype == selection.dtype == torch.int32
    assert selection.is_contiguous()
    assert scores.data_ptr() % 16 == 0
    assert k > 0
    if rows == 0:
        return
    kernels = _kernels()
    stride, segments = workspace.stride, workspace.segments
    chunk = max(_MIN_CHUNK, -(-rows * stride // _HISTOGRAM_BLOCKS) // 4 * 4)
    workspace.bins[:rows].zero_()
    common = (_at(scores), np.int64(stride), _at(lengths), np.int32(k))
    cut = (np.int32(_SEGMENT), np.int32(segments), _at(workspace.bins))
    kept = (_at(workspace.kept), _at(workspace.kept_counts))
    with _current_stream(scores.device):
        kernels["histogram"](
            (-(-stride // chunk), rows), (512,), (*common, np.int32(chunk), _at(workspace.bins))
        )  # fmt: skip
        kernels["collect"]((-(-segments // 8), rows), (256,), (*common, *cut, *kept))
        kernels["choose"]((rows,), (1024,), (*common, *cut, *kept, _at(selection)))


def source() -> str:
    """The CUDA C++ of the kernels."""
    return (Path(__file__).parent / "topk.cu").read_text(encoding="utf-8")


@cache
def _kernels() -> dict[str, Any]:
    import cupy

    module = cupy.RawModule(code=source(), options=("--std=c++17",))
    return {name: module.get_function(name) for name in ("histogram", "collect", "choose")}


def _at(tensor: Tensor) -> np.uint64:
    return np.uint64(tensor.data_ptr())


def _current_stream(device: torch.device) -> Any:
    import cupy

    return cupy.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream)
