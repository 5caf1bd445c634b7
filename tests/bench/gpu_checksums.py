"""On a GPU: checksums of pages in HBM beside a plain device copy, and of pages in pinned host memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import torch

from kvmanager.allocators.cuda_driver import DeviceContext
from kvmanager.core.checksums import PageSections, sections_of
from kvmanager.layout import GLM53, native_layout
from kvmanager.transport import cuda_checksums
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.pinned import PinnedMemory
from tests.bench.figure import Figure
from tests.bench.gpu_figures import _median_s

PAGES = 256


def _copy_s(memory: torch.Tensor) -> float:
    target = torch.empty_like(memory)
    return _median_s(lambda: target.copy_(memory))


def figures() -> Iterator[Figure]:
    """One batch of 256 pages, with the blocks it is given in a mover and with as many as there are."""
    context = DeviceContext("cuda:0")
    layout = native_layout(GLM53, 64)
    sections = tuple((section.start, section.size_bytes) for section in sections_of(layout))
    size = PAGES * layout.page_bytes
    memory = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    copy_s = _copy_s(memory)
    room = np.frombuffer(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
    room[:] = 7
    pinned = PinnedMemory(room)
    regions = RegionMap()
    regions.add_gpu(1, memory.data_ptr(), size)
    regions.add(2, room)
    kernels = cuda_checksums.CudaChecksums(context.ordinal)
    stream = torch.cuda.current_stream().cuda_stream
    paced = cuda_checksums.BLOCKS
    offsets = np.arange(PAGES, dtype=np.int64) * layout.page_bytes
    for region, blocks, what in ((1, paced, "in HBM, paced"), (1, 264, "in HBM, flat out"), (2, paced, "on the host")):
        pages = PageSections(np.full(PAGES, region, np.int32), offsets, sections)
        cuda_checksums.BLOCKS = blocks  # type: ignore[misc]
        seconds = _median_s(lambda pages=pages: kernels.launch(regions, pages, 0, PAGES, stream))  # type: ignore[misc]
        yield Figure(
            f"gpu: checksums of pages {what}", size / seconds / 1e9, "GB/s", "a plain device copy (bytes read)",
            copy_s / seconds,
        )  # fmt: skip
    cuda_checksums.BLOCKS = paced  # type: ignore[misc]
    torch.cuda.synchronize()
    kernels.close()
    pinned.close()
