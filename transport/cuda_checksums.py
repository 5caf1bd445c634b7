"""Checksums of page sections by a GPU: bit by bit those of `kvmanager.transport.checksums`.

Three launches a batch, however many pages it has. The first fetches what the batch is and makes its columns zero. The
second adds up lines and columns: a warp takes a line of 8 KiB at a time, keeps the sums of its 32 columns a thread in
registers over many lines, and adds them to the section's columns with atomics; whole numbers, so the order does not
count. The third mixes the columns and writes the sums where the host reads them.

Nothing of a batch goes by a copy engine: there it would wait behind the copies that keep the link busy, and while it
waits the GPU is kept from other processes' kernels.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.cuda_driver import call, driver
from kvmanager.core.checksums import SUM_WORDS, PageSections, SumArray
from kvmanager.errors import DeviceError
from kvmanager.transport.checksums import LINE_WORDS
from kvmanager.transport.cuda_rows import compile_kernels
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.kernel_windows import KernelWindows
from kvmanager.transport.pinned import PinnedMemory

Owner = TypeVar("Owner")
SUM_BLOCKS: Final = 264
"""Of a launch: 2.5 TB/s on an H200, 32 read 1.2 TB/s. A decode-like loop of another process is slowed alike by either:
what counts is how often its kernels are left (see `KernelWindows`)."""
THREADS: Final = 256
MAX_SECTIONS: Final = 512
"""Of one batch: their columns take 4 MiB of GPU memory, made once."""
BATCHES: Final = 8
"""In flight at one time, one behind the other."""
TILE_LINES: Final = 32
"""Lines that one warp takes before it gives its columns up."""
_SOURCE: Final = r"""
typedef unsigned long long u64;
// The column that a lane keeps as its k-th: pairs of neighbours, 16 bytes.
#define COLUMN(k, lane) (((k) >> 1) * 64 + (lane) * 2 + ((k) & 1))
__device__ __forceinline__ u64 mix(u64 v) {
    u64 z = v + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
// Word `i` of `bytes` bytes at `base`; what lies beyond the end is zero.
__device__ __forceinline__ u64 word(const unsigned char *base, u64 bytes, u64 i) {
    const u64 at = i * 8;
    if (at + 8 <= bytes && (((u64)(base + at)) & 7) == 0) return *(const u64 *)(base + at);
    u64 value = 0;
    for (unsigned k = 0; k < 8 && at + k < bytes; ++k) value |= ((u64)base[at + k]) << (8 * k);
    return value;
}
// `described` is on the host: sections[2 * n] and first_tile[n + 1]. Here they get room for `most` sections.
extern "C" __global__ void begin(const u64 *described, unsigned n, unsigned most, u64 *here, u64 *columns, u64 *sums) {
    const u64 threads = (u64)gridDim.x * blockDim.x, me = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (u64 i = me; i < 2 * (u64)n; i += threads) here[i] = described[i];
    for (u64 i = me; i <= n; i += threads) here[2 * (u64)most + i] = described[2 * (u64)most + i];
    for (u64 i = me; i < (u64)n * 1024; i += threads) columns[i] = 0;
    for (u64 i = me; i < 2 * (u64)n; i += threads) sums[i] = 0;
}
// sections[2 * s], [2 * s + 1]: address and bytes. first_tile[s]: tiles of the sections before; first_tile[n]: all.
extern "C" __global__ void __launch_bounds__(256, 2)
add_up(const u64 *sections, const u64 *first_tile, unsigned n, unsigned tile_lines, u64 *columns, u64 *sums) {
    const unsigned lane = threadIdx.x & 31;
    const u64 warps = (u64)gridDim.x * (blockDim.x >> 5);
    const u64 tiles = first_tile[n];
    for (u64 tile = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); tile < tiles; tile += warps) {
        unsigned low = 0, high = n;  // the section that has the tile
        while (high - low > 1) {
            const unsigned middle = (low + high) >> 1;
            if (first_tile[middle] <= tile) low = middle; else high = middle;
        }
        const unsigned char *base = (const unsigned char *)sections[2 * low];
        const u64 bytes = sections[2 * low + 1];
        const u64 lines = (bytes + 8191) / 8192;
        const u64 begin = (tile - first_tile[low]) * tile_lines;
        const u64 end = begin + tile_lines < lines ? begin + tile_lines : lines;
        u64 column[32];
        #pragma unroll
        for (int k = 0; k < 32; ++k) column[k] = 0;
        u64 mixed = 0;
        const bool wide = (((u64)base) & 15) == 0;
        for (u64 line = begin; line < end; ++line) {
            u64 total = 0;
            if (wide && (line + 1) * 8192 <= bytes) {  // all there, and in place for loads of 16 bytes
                const ulonglong2 *from = (const ulonglong2 *)(base + line * 8192) + lane;
                #pragma unroll
                for (int part = 0; part < 16; part += 4) {
                    ulonglong2 pairs[4];
                    #pragma unroll
                    for (int k = 0; k < 4; ++k) pairs[k] = from[(part + k) * 32];
                    #pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        column[2 * (part + k)] += pairs[k].x;
                        column[2 * (part + k) + 1] += pairs[k].y;
                        total += pairs[k].x + pairs[k].y;
                    }
                }
            } else {  // seldom: registers are for the others
                #pragma unroll 1
                for (unsigned c = lane; c < 1024; c += 32) {
                    const u64 value = word(base, bytes, line * 1024 + c);
                    atomicAdd(&columns[(u64)low * 1024 + c], value);
                    total += value;
                }
            }
            #pragma unroll
            for (int offset = 16; offset; offset >>= 1) total += __shfl_down_sync(0xffffffffu, total, offset);
            if (lane == 0) mixed += mix(total + mix(line));
        }
        if (lane == 0) atomicAdd(&sums[2 * low], mixed);
        #pragma unroll
        for (int k = 0; k < 32; ++k) atomicAdd(&columns[(u64)low * 1024 + COLUMN(k, lane)], column[k]);
    }
}
// A warp a section.
extern "C" __global__ void mix_columns(const u64 *sections, unsigned n, const u64 *columns, const u64 *sums,
                                       u64 *result) {
    const unsigned lane = threadIdx.x & 31;
    const unsigned warps = gridDim.x * (blockDim.x >> 5);
    for (unsigned s = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); s < n; s += warps) {
        u64 total = 0;
        for (unsigned c = lane; c < 1024; c += 32) total += mix(columns[(u64)s * 1024 + c] + mix(c));
        for (int offset = 16; offset; offset >>= 1) total += __shfl_down_sync(0xffffffffu, total, offset);
        if (lane == 0) {
            result[2 * s + 1] = total;
            result[2 * s] = sums[2 * s] + mix(sections[2 * s + 1]);
        }
    }
}
"""


@dataclass(frozen=True, slots=True)
class _Room:
    """A batch's part of pinned memory, uint64: sections as (address, bytes) [2n], tiles before each [n + 1], sums."""

    sections: npt.NDArray[np.uint64]
    first_tile: npt.NDArray[np.uint64]
    result: npt.NDArray[np.uint64]


class CudaChecksums:
    """The kernels, and room for batches in flight on one stream. A context must be current; no batch allocates."""

    def __init__(self, ordinal: int, blocks: int = SUM_BLOCKS) -> None:
        """Compiles; launches have `blocks` blocks. Raises DeviceError."""
        assert LINE_WORDS == 1024, "the kernels have it in them"
        self._module = call("cuModuleLoadData", compile_kernels(ordinal, _SOURCE, "checksums"))
        self._begin = call("cuModuleGetFunction", self._module, b"begin")
        self._add_up = call("cuModuleGetFunction", self._module, b"add_up")
        self._mix_columns = call("cuModuleGetFunction", self._module, b"mix_columns")
        self._blocks = blocks
        self._columns = int(call("cuMemAlloc", MAX_SECTIONS * LINE_WORDS * 8))
        self._sums = int(call("cuMemAlloc", MAX_SECTIONS * SUM_WORDS * 8))
        self._described = int(call("cuMemAlloc", (MAX_SECTIONS * 3 + 1) * 8))
        words = MAX_SECTIONS * 2 + (MAX_SECTIONS + 1) + MAX_SECTIONS * SUM_WORDS
        size_bytes = BATCHES * words * 8
        room = np.frombuffer(mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
        self._pinned = PinnedMemory(room)
        bounds = (MAX_SECTIONS * 2, MAX_SECTIONS * 3 + 1)
        self._rooms = [
            _Room(*np.split(memory, bounds)) for memory in room[:size_bytes].view(np.uint64).reshape(BATCHES, words)
        ]

    @staticmethod
    def batch_pages(pages: PageSections) -> int:
        """Pages that fit one batch."""
        return max(1, MAX_SECTIONS // len(pages.sections))

    def launch(
        self, regions: RegionMap, pages: PageSections, first: int, count: int, stream: int, batch: int = 0
    ) -> None:
        """Queues the sums of `count` pages from `first` on. Room `batch` is taken until what was queued has ended.

        All that is in flight must be on one stream: batches follow each other through the same memory of the GPU.
        """
        room = self._rooms[batch]
        sections = len(pages.sections)
        n = count * sections
        assert 0 < n <= MAX_SECTIONS
        part = slice(first, first + count)
        bases = np.array([regions.address(region) for region in pages.regions[part].tolist()], np.uint64)
        starts = bases + pages.offsets[part].astype(np.uint64)
        shape = np.array(pages.sections, np.uint64)
        described = room.sections[: 2 * n].reshape(count, sections, 2)
        described[:, :, 0] = starts[:, None] + shape[:, 0]
        described[:, :, 1] = shape[:, 1]
        lines = -(-described[:, :, 1].reshape(-1).astype(np.int64) // (LINE_WORDS * 8))
        room.first_tile[0] = 0
        room.first_tile[1 : n + 1] = np.cumsum(-(-lines // TILE_LINES))
        grid = (self._blocks, 1, 1, THREADS, 1, 1, 0, driver().CUstream(stream))
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        sections_at, tiles_at = self._described, self._described + MAX_SECTIONS * 2 * 8
        described_at, result_at = int(room.sections.ctypes.data), int(room.result.ctypes.data)
        beginning = (described_at, n, MAX_SECTIONS, sections_at, self._columns, self._sums)
        beginning_types = (pointer, number, number, pointer, pointer, pointer)
        call("cuLaunchKernel", self._begin, *grid, (beginning, beginning_types), 0)
        adding = (sections_at, tiles_at, n, TILE_LINES, self._columns, self._sums)
        adding_types = (pointer, pointer, number, number, pointer, pointer)
        call("cuLaunchKernel", self._add_up, *grid, (adding, adding_types), 0)
        mixing = (sections_at, n, self._columns, self._sums, result_at)
        mixing_types = (pointer, number, pointer, pointer, pointer)
        call("cuLaunchKernel", self._mix_columns, *grid, (mixing, mixing_types), 0)

    def result(self, pages: PageSections, count: int, batch: int = 0) -> SumArray:
        """Of a batch that has ended, uint64[count, sections * SUM_WORDS]."""
        words = len(pages.sections) * SUM_WORDS
        return self._rooms[batch].result[: count * words].reshape(count, words).copy()

    def close(self) -> None:
        """Gives all back; nothing may be in flight. Raises DeviceError."""
        call("cuMemFree", self._described)
        call("cuMemFree", self._columns)
        call("cuMemFree", self._sums)
        self._pinned.close()
        call("cuModuleUnload", self._module)


@dataclass
class _Summing(Generic[Owner]):
    """Pages of one owner: those before `first` are launched, and what the batches that ended gave."""

    owner: Owner
    pages: PageSections
    first: int = 0
    summed: int = 0
    parts: list[SumArray] = field(default_factory=list)
    failed: DeviceError | None = None


@dataclass(frozen=True, slots=True)
class _Batch(Generic[Owner]):
    """`room`: its number in `CudaChecksums`, and of its event."""

    work: _Summing[Owner]
    count: int
    room: int


class SumLane(Generic[Owner]):
    """One stream that sums pages up, owner by owner, in batches. A context must be current."""

    def __init__(
        self, regions: RegionMap, ordinal: int, blocks: int, windows: KernelWindows
    ) -> None:
        """Launches only while one of `windows` is open. Raises DeviceError."""
        module = driver()
        self._regions = regions
        self._windows = windows
        self._not_ready = int(module.CUresult.CUDA_ERROR_NOT_READY)
        self._kernels = CudaChecksums(ordinal, blocks)
        self._stream = call("cuStreamCreate", module.CUstream_flags.CU_STREAM_NON_BLOCKING)
        flags = module.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._events = [call("cuEventCreate", flags) for _ in range(BATCHES)]
        self._free = deque(range(BATCHES))
        self._waiting: deque[_Summing[Owner]] = deque()
        self._flying: deque[_Batch[Owner]] = deque()

    def put(self, owner: Owner, pages: PageSections) -> None:
        """Pages whose bytes are all there; at least one."""
        self._waiting.append(_Summing(owner, pages))

    @property
    def busy(self) -> bool:
        """Whether somebody's sums are still to come."""
        return bool(self._flying or self._waiting)

    @property
    def may_launch(self) -> bool:
        """Whether `poll` would launch something now."""
        return bool(self._waiting and self._free) and self._windows.open

    def poll(self) -> list[tuple[Owner, SumArray | DeviceError]]:
        """Owners that have all their sums now, or none for a broken context. Waits for nothing."""
        ended: list[tuple[Owner, SumArray | DeviceError]] = []
        while self._flying:
            batch = self._flying[0]
            (status,) = driver().cuEventQuery(self._events[batch.room])
            if int(status) == self._not_ready:
                break
            self._flying.popleft()
            self._free.append(batch.room)
            ended += self._landed(batch, int(status))
        while self.may_launch:
            work = self._waiting[0]
            failure = self._launch(work)
            if failure is not None:
                work.failed, work.first = failure, len(work.pages)
            if work.first == len(work.pages):
                self._waiting.popleft()
            if failure is not None and not any(batch.work is work for batch in self._flying):
                ended.append((work.owner, failure))
        return ended

    def _launch(self, work: _Summing[Owner]) -> DeviceError | None:
        count = min(self._kernels.batch_pages(work.pages), len(work.pages) - work.first)
        room = self._free[0]
        self._windows.launched()
        try:
            self._kernels.launch(self._regions, work.pages, work.first, count, int(self._stream), room)
            call("cuEventRecord", self._events[room], self._stream)
        except DeviceError as error:
            return error
        self._flying.append(_Batch(work, count, self._free.popleft()))
        work.first += count
        return None

    def _landed(self, batch: _Batch[Owner], status: int) -> list[tuple[Owner, SumArray | DeviceError]]:
        """The owner, once nothing of its pages is in flight or to be launched."""
        work = batch.work
        if status and work.failed is None:
            work.failed = DeviceError(f"cuEventQuery behind checksums: {status}")
        elif work.failed is None:
            work.parts.append(self._kernels.result(work.pages, batch.count, batch.room))
            work.summed += batch.count
        if work.failed is not None:
            if self._waiting and self._waiting[0] is work:
                self._waiting.popleft()
            return [] if any(other.work is work for other in self._flying) else [(work.owner, work.failed)]
        return [(work.owner, np.concatenate(work.parts))] if work.summed == len(work.pages) else []

    def close(self) -> None:
        """Gives all back; nothing may be in flight. Raises DeviceError."""
        assert not self.busy
        for event in self._events:
            call("cuEventDestroy", event)
        call("cuStreamDestroy", self._stream)
        self._kernels.close()
