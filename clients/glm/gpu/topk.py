"""Exact top-k on the GPU: ascending positions, equal scores from the lowest position on, -1 in unused places."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.gpu_kernels import compiled, launch

_ROW_BINS: Final = (1 << 13) + 4
_SEGMENT: Final = 2_048
_MAX_SEGMENTS: Final = 2_048
MAX_LENGTH: Final = _SEGMENT * _MAX_SEGMENTS
"""Scores of one row."""
_WARPS: Final = 8
_HISTOGRAM_BLOCKS: Final = 528
"""Four for each multiprocessor of an H200: what the histogram of a whole call is cut into."""
_MIN_CHUNK: Final = 4_096


class TopKWorkspace:
    """Room for the intermediate results of calls of at most `rows` rows of `stride` scores (a multiple of 4).

    `bytes_used` = rows * (32,784 + 4 * stride + 4 * segments). One call at a time may use it.
    """

    def __init__(self, rows: int, stride: int, device: torch.device | str) -> None:
        assert stride % 4 == 0
        assert 0 < stride <= MAX_LENGTH
        assert rows > 0
        self.rows, self.stride = rows, stride
        self.segments = -(-stride // _SEGMENT)
        self.bins = torch.zeros((rows, _ROW_BINS), dtype=torch.int32, device=device)
        self.kept = torch.empty((rows, stride), dtype=torch.int32, device=device)
        self.kept_counts = torch.empty((rows, self.segments), dtype=torch.int32, device=device)


def top_k(scores: Tensor, lengths: Tensor, selection: Tensor, workspace: TopKWorkspace) -> None:
    """The k greatest of the first `lengths`[t] scores of each row.

    `scores` float32[T, stride] (contiguous, stride as the workspace's), `lengths` int32[T], each at most the stride.
    Writes `selection` int32[T, k], ascending, -1 at the end where fewer than k count: -inf is never chosen. -0 equals
    0; the order of NaN is not defined. Queued on torch's current stream; can be captured in a graph after a first
    call. Raises DeviceError without CuPy.
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
    stride, segments = workspace.stride, workspace.segments
    chunk = max(_MIN_CHUNK, -(-rows * stride // _HISTOGRAM_BLOCKS) // 4 * 4)
    workspace.bins[:rows].zero_()
    chunks = -(-stride // chunk)
    common = (scores, np.int64(stride), lengths, np.int32(k))
    cut = (np.int32(_SEGMENT), np.int32(segments), workspace.bins, workspace.kept, workspace.kept_counts)
    module = compiled("topk.cu")
    launch(
        module.get_function("histogram"), rows * chunks, 512,
        (*common, np.int32(chunks), np.int32(chunk), workspace.bins),
    )  # fmt: skip
    launch(module.get_function("collect"), rows * -(-segments // _WARPS), 32 * _WARPS, (*common, *cut))
    launch(module.get_function("choose"), rows, 1024, (*common, *cut, selection))
