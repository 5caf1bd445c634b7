"""Top-k positions to device rows on the GPU: tables, hot-row maps and the resolver kernel.

What it computes is defined by `ReferenceResolver`. Memory is allocated once; `resolve` only launches a kernel, so
a CUDA graph can hold it and be replayed after the tables changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.gpu_kernels import compiled, launch, most_shared_bytes
from kvmanager.clients.glm.sparse_tables import PAGE_ROW, SPAN_ROW, GroupPlace, SparseShape, Structured
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array

MOST_THREADS: Final = 1024
COUNTERS: Final = 4


class GpuTables:
    """The tables of a rank's requests in device memory; writes are queued into torch's current stream.

    `spans` uint8[R, P, 8], `pages` uint8[R, P, 16], `page_count` int32[R], `hot_pages` int32[R, hot slabs].
    """

    def __init__(self, shape: SparseShape, device: str) -> None:
        self._shape = shape
        size = (shape.requests, shape.most_pages)
        self.spans = torch.full((*size, SPAN_ROW.itemsize), 0xFF, dtype=torch.uint8, device=device)
        self.pages = torch.full((*size, PAGE_ROW.itemsize), 0xFF, dtype=torch.uint8, device=device)
        self.page_count = torch.zeros(shape.requests, dtype=torch.int32, device=device)
        self.hot_pages = torch.full((shape.requests, shape.hot_slabs), -1, dtype=torch.int32, device=device)

    def write_request(self, request: int, spans: Structured, pages: Structured) -> None:
        """All of a request's table; both of one length, its pages. Raises InvalidArgument if they are too many."""
        if len(spans) != len(pages) or len(pages) > self._shape.most_pages:
            raise InvalidArgument(f"{len(spans)} spans and {len(pages)} pages; at most {self._shape.most_pages}")
        self.page_count[request] = len(pages)
        self.spans[request, : len(spans)] = _bytes(spans, SPAN_ROW).to(self.spans.device)
        self.pages[request, : len(pages)] = _bytes(pages, PAGE_ROW).to(self.pages.device)

    def write_pages(self, request: int, ordinals: Int64Array, pages: Structured) -> None:
        """New rows of some pages."""
        where = torch.from_numpy(ordinals).to(self.pages.device)
        self.pages[request].index_copy_(0, where, _bytes(pages, PAGE_ROW).to(self.pages.device))


def _bytes(rows: Structured, kind: np.dtype[np.void]) -> Tensor:
    assert rows.dtype == kind
    return torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), kind.itemsize))


@dataclass(frozen=True)
class Resolution:
    """What one call gives, in device memory, until the next call with the same buffers.

    `rows` int64[R, rows, topk]: byte offset in the device region of each entry's group row, or -1; a follower layer
    adds its place in the row. `miss_source`, `miss_target` int64[R, entries]: group rows to copy, as byte offsets in
    the host and the device region; `miss_count` int32[R]: how many of them count.
    """

    rows: Tensor
    miss_source: Tensor
    miss_target: Tensor
    miss_count: Tensor


class GpuResolver:
    """Hot rows of a rank's requests for each share group, on one GPU; one thread uses it.

    `keys` int64[G, R, hot rows], `lru` int16[G, R, hot rows], `counters` int64[R, 4] (resident entries, hot rows,
    missed rows, unreadable entries, over all calls) are as in `ReferenceResolver`.
    """

    def __init__(self, shape: SparseShape, groups: list[GroupPlace], device: str = "cuda:0") -> None:
        """Compiles the kernel. Raises DeviceError, InvalidArgument for a shape whose tables do not fit on chip."""
        self.shape = shape
        self.groups = groups
        self.tables = GpuTables(shape, device)
        size = (len(groups), shape.requests, shape.hot_rows)
        self._by_number = torch.arange(shape.hot_rows, dtype=torch.int16, device=device)
        self.keys = torch.full(size, -1, dtype=torch.int64, device=device)
        self.lru = self._by_number.expand(size).contiguous()
        self.counters = torch.zeros((shape.requests, COUNTERS), dtype=torch.int64, device=device)
        self._threads = min(MOST_THREADS, -(-shape.hot_rows // 32) * 32)
        slots = 1 << (2 * shape.entries - 1).bit_length()
        constants = {"ENTRIES": shape.entries, "HOT_ROWS": shape.hot_rows, "PAGE_ROWS": shape.page_rows}
        constants |= {"THREADS": self._threads, "SLOTS": slots}
        module = compiled("resolver.cu", tuple(constants.items()))
        self._kernel = module.get_function("resolve")
        self._shared_bytes = self._reserve_shared(module)

    def _reserve_shared(self, module: object) -> int:
        """Bytes of shared memory that the kernel asks for at each launch; the default limit is 48 KiB."""
        answer = torch.zeros(1, dtype=torch.int32, device=self.keys.device)
        launch(module.get_function("shared_bytes"), 1, 1, (answer,))  # type: ignore[attr-defined]
        size = int(answer.item())
        limit = most_shared_bytes(self.keys.device.index or 0)
        if size > limit:
            raise InvalidArgument(
                f"{self.shape.hot_rows} hot rows and {self.shape.entries} entries need {size} bytes of shared memory; "
                f"this GPU has {limit}"
            )
        self._kernel.max_dynamic_shared_size_bytes = size
        return size

    def resolution(self) -> Resolution:
        """Buffers for the result of `resolve`."""
        shape, device = self.shape, self.keys.device
        lists = (shape.requests, shape.entries)
        return Resolution(
            torch.full((shape.requests, shape.rows, shape.topk), -1, dtype=torch.int64, device=device),
            torch.full(lists, -1, dtype=torch.int64, device=device),
            torch.full(lists, -1, dtype=torch.int64, device=device),
            torch.zeros(shape.requests, dtype=torch.int32, device=device),
        )

    def set_hot_pages(self, request: int, pages: Int64Array | None) -> None:
        """Gives a request another hot buffer, or none; what the old one held is forgotten in all groups."""
        if pages is None:
            self.tables.hot_pages[request] = -1
        else:
            if len(pages) != self.shape.hot_slabs:
                raise InvalidArgument(f"{len(pages)} hot slabs; a buffer of this shape has {self.shape.hot_slabs}")
            self.tables.hot_pages[request] = torch.from_numpy(pages.astype(np.int32)).to(self.keys.device)
        self.keys[:, request] = -1
        self.lru[:, request] = self._by_number

    def resolve(self, group: int, topk: Tensor, into: Resolution) -> None:
        """Queues the resolution of `topk` int32[R, rows, topk] for one share group into torch's current stream."""
        shape, place, tables = self.shape, self.groups[group], self.tables
        assert topk.shape == into.rows.shape
        assert topk.dtype == torch.int32
        assert topk.is_contiguous()
        launch(
            self._kernel,
            shape.requests,
            self._threads,
            (
                topk, tables.spans, tables.pages, tables.page_count, tables.hot_pages, self.keys[group],
                self.lru[group], into.rows, into.miss_source, into.miss_target, into.miss_count, self.counters,
                np.int32(shape.most_pages), np.int32(shape.device_pages), np.int32(shape.host_pages),
                np.int32(place.row_bytes), np.int64(place.page_bytes), np.int64(place.offset),
            ),
            self._shared_bytes,
        )  # fmt: skip
