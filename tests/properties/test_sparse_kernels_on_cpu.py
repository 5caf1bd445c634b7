"""The resolver and swap-in kernels, run on the CPU thread by thread in random order, against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvmanager.clients.glm.resolver_reference import ReferenceResolver, copy_rows
from kvmanager.clients.glm.sparse_tables import SparseShape
from kvmanager.layout import KVFormat
from tests.properties.cuda_on_cpu import CpuKernels, compiler
from tests.properties.resolver_history import ResolverHistory, places

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler to build the kernels for the CPU")

FORMAT = KVFormat("small", ((0,), (1, 2)), latent_row_bytes=16, index_value_bytes=8, index_scale_bytes=4)
TINY = SparseShape(3, 2, 6, page_rows=4, hot_rows=14, most_pages=14, device_pages=48, host_pages=20)
ODD = SparseShape(2, 3, 37, page_rows=8, hot_rows=130, most_pages=40, device_pages=120, host_pages=60)
UNTOUCHED = -999


class CpuRank:
    """What `GpuResolver` and `SwapIn` keep and launch, with numpy arrays."""

    def __init__(self, folder: Path, swapin: CpuKernels, shape: SparseShape, threads: int) -> None:
        self.shape, self.places, self.threads = shape, places(FORMAT, shape.page_rows), threads
        constants = {"ENTRIES": shape.entries, "HOT_ROWS": shape.hot_rows, "PAGE_ROWS": shape.page_rows}
        constants |= {"THREADS": threads, "SLOTS": 1 << (2 * shape.entries - 1).bit_length()}
        self.resolver = CpuKernels(folder, "resolver.cu", constants)
        self.swapin = swapin
        size = (len(self.places), shape.requests, shape.hot_rows)
        self.keys = np.full(size, -1, np.int64)
        self.lru = np.broadcast_to(np.arange(shape.hot_rows, dtype=np.uint16), size).copy()
        self.counters = np.zeros((shape.requests, 4), np.int64)
        lists = (shape.requests, shape.entries)
        self.rows, self.source, self.target = (np.empty(lists, np.int64) for _ in range(3))
        self.count = np.empty(shape.requests, np.int32)

    def forget(self, request: int) -> None:
        self.keys[:, request] = -1
        self.lru[:, request] = np.arange(self.shape.hot_rows)

    def resolve(self, history: ResolverHistory, group: int, topk: np.ndarray, seed: int) -> None:
        shape, place, tables = self.shape, self.places[group], history.tables
        for part in (self.rows, self.source, self.target, self.count):
            part[:] = UNTOUCHED
        self.resolver.run(
            "resolve", shape.requests, self.threads, seed,
            topk, tables.spans, tables.pages, tables.page_count, tables.hot_pages, self.keys[group], self.lru[group],
            self.rows, self.source, self.target, self.count, self.counters,
            np.int32(shape.most_pages), np.int32(shape.device_pages), np.int32(shape.host_pages),
            np.int32(place.row_bytes), np.int64(place.page_bytes), np.int64(place.offset),
        )  # fmt: skip

    def copy(self, kernel: str, host: np.ndarray, device: np.ndarray, pieces: int, row_bytes: int, last: int) -> None:
        piece = row_bytes // pieces
        self.swapin.run(
            kernel, 3, 64, 1, host, device, self.source, self.target, self.count, np.int32(self.shape.requests),
            np.int32(self.shape.entries), np.int32(pieces), np.int32(piece), np.int64(piece), np.int64(piece),
            np.int32(last),
        )  # fmt: skip


@pytest.fixture(scope="module")
def swapin(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    return CpuKernels(tmp_path_factory.mktemp("swapin"), "swapin.cu", {})


@pytest.mark.parametrize(("shape", "threads", "steps"), [(TINY, 32, 60), (ODD, 64, 12)], ids=["tiny", "odd"])
def test_kernels_do_what_the_reference_does(
    tmp_path: Path, swapin: CpuKernels, shape: SparseShape, threads: int, steps: int
) -> None:
    seed = 21
    print(f"seed {seed}")
    rank = CpuRank(tmp_path, swapin, shape, threads)
    history = ResolverHistory(seed, shape, rank.places[0].page_bytes)
    reference = ReferenceResolver(shape, rank.places)
    reference.tables = history.tables
    changed = history.first_buffers()
    for step in range(steps):
        for request, slabs in changed:
            reference.set_hot_pages(request, slabs)
            rank.forget(request)
        group = step % 2
        topk = history.topk(reach=0.4)
        rank.resolve(history, group, topk, seed=step)
        resolved = reference.resolve(group, topk)
        assert np.array_equal(rank.rows, resolved.rows.reshape(shape.requests, -1))
        for request, (source, target) in enumerate(zip(resolved.miss_source, resolved.miss_target, strict=True)):
            assert rank.count[request] == len(source)
            assert np.array_equal(rank.source[request, : len(source)], source)
            assert np.array_equal(rank.target[request, : len(target)], target)
            assert (rank.source[request, len(source) :] == UNTOUCHED).all()
        assert np.array_equal(rank.keys, reference.keys)
        assert np.array_equal(rank.lru, reference.lru)
        assert np.array_equal(rank.counters, reference.counters)
        row_bytes, host, device = rank.places[group].row_bytes, history.host.reshape(-1), history.device.reshape(-1)
        copies = [device.copy() for _ in range(3)]
        rank.copy("gather_warp", host, copies[0], 1, row_bytes, 128)
        rank.copy("gather_warp", host, copies[1], row_bytes // 16, row_bytes, 16)
        rank.copy("gather_row", host, copies[2], row_bytes // 16, row_bytes, 16)
        copy_rows(host, device, resolved, row_bytes)
        assert all(np.array_equal(copied, device) for copied in copies)
        change = history.change()
        changed = [change] if change is not None else []
    assert reference.counters.sum(axis=0).min() > 50, reference.counters
