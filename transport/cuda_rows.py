"""Short rows by a small kernel: copy engines take two microseconds a copy, far longer than such rows need.

The kernel uses few multiprocessors, so that the engine's own kernels beside it hardly notice. It reads and
writes host memory directly, so that must be registered.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import mmap
from typing import Any, Final

import numpy as np

from kvmanager.allocators.cuda_driver import call, device_handle, driver
from kvmanager.core.plans import StridedCopies
from kvmanager.errors import DeviceError
from kvmanager.geometry import Int64Array
from kvmanager.transport.pinned import PinnedMemory

BLOCKS: Final = 8
"""Of 132 multiprocessors of an H200."""
THREADS: Final = 512
MAX_COPIES: Final = 4_096
"""Offsets of one launch."""
MAX_BYTES: Final = 1 << 30
"""Of one launch: the kernel counts bytes in 32 bits."""
MAX_EXTENTS: Final = 2
_UNITS: Final = (16, 4, 1)
_SOURCE: Final = r"""
#define AT_ONCE 4
template <typename T>
__device__ void rows(const long long *offsets, unsigned n, unsigned c0, unsigned c1, long long s0, long long s1,
                     long long t0, long long t1, unsigned units, const char *source, char *target) {
    const unsigned total = n * c0 * c1 * units, step = gridDim.x * blockDim.x;
    for (unsigned first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += AT_ONCE * step) {
        T values[AT_ONCE];
        T *places[AT_ONCE];
        #pragma unroll
        for (unsigned k = 0; k < AT_ONCE; ++k) {
            const unsigned e = first + k * step;
            places[k] = 0;
            if (e < total) {
                const unsigned row = e / units, unit = e - row * units;
                const unsigned outer = row / c1, y = row - outer * c1;
                const unsigned copy = outer / c0, z = outer - copy * c0;
                values[k] = ((const T *)(source + offsets[copy] + z * s0 + y * s1))[unit];
                places[k] = (T *)(target + offsets[n + copy] + z * t0 + y * t1) + unit;
            }
        }
        #pragma unroll
        for (unsigned k = 0; k < AT_ONCE; ++k)
            if (places[k]) *places[k] = values[k];
    }
}
#define ENTRY(name, T)                                                                                            \
    extern "C" __global__ void name(const long long *offsets, unsigned n, unsigned c0, unsigned c1, long long s0, \
                                    long long s1, long long t0, long long t1, unsigned units,                     \
                                    const char *source, char *target) {                                           \
        rows<T>(offsets, n, c0, c1, s0, s1, t0, t1, units, source, target);                                       \
    }
ENTRY(rows_16, uint4)
ENTRY(rows_4, unsigned int)
ENTRY(rows_1, unsigned char)
"""


def unit_bytes(c: StridedCopies, source: int, target: int) -> int:
    """The widest access that every row of the set allows on both sides, given the regions' addresses."""
    step = math.gcd(c.row_bytes, source, target, *c.source_strides, *c.target_strides)
    step = math.gcd(step, int(np.gcd.reduce(c.source_offsets)), int(np.gcd.reduce(c.target_offsets)))
    return next(unit for unit in _UNITS if step % unit == 0)


class RowKernel:
    """The compiled kernel and room for the offsets of `slots` launches in flight. A context must be current."""

    def __init__(self, ordinal: int, slots: int) -> None:
        """Compiles. Raises DeviceError."""
        image = compile_kernels(ordinal, _SOURCE, "rows")
        self._module = call("cuModuleLoadData", image)
        self._functions = {u: call("cuModuleGetFunction", self._module, f"rows_{u}".encode()) for u in _UNITS}
        size_bytes = slots * 2 * MAX_COPIES * 8
        room = np.frombuffer(mmap.mmap(-1, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
        self._pinned = PinnedMemory(room)
        self._offsets: Int64Array = room[:size_bytes].view(np.int64).reshape(slots, 2 * MAX_COPIES)

    def launch(
        self, c: StridedCopies, source: int, target: int, slot: int, stream: int, blocks: int = BLOCKS
    ) -> None:
        """Queues a set of at most MAX_COPIES copies and MAX_BYTES; `source`, `target`: the regions' addresses.

        The slot is taken until what was queued has ended. Raises DeviceError.
        """
        n = len(c.source_offsets)
        assert n <= MAX_COPIES
        assert c.total_bytes <= MAX_BYTES
        assert len(c.counts) <= MAX_EXTENTS
        offsets = self._offsets[slot]
        offsets[:n], offsets[n : 2 * n] = c.source_offsets, c.target_offsets
        pad = (MAX_EXTENTS - len(c.counts)) * (0,)
        counts = (*(1 for _ in pad), *c.counts)
        strides = (*pad, *c.source_strides, *pad, *c.target_strides)
        unit = unit_bytes(c, source, target)
        values = (int(offsets.ctypes.data), n, *counts, *strides, c.row_bytes // unit, source, target)
        number, offset, pointer = ctypes.c_uint, ctypes.c_longlong, ctypes.c_void_p
        types = (pointer, number, number, number, offset, offset, offset, offset, number, pointer, pointer)
        call(
            "cuLaunchKernel", self._functions[unit], blocks, 1, 1, THREADS, 1, 1, 0, driver().CUstream(stream),
            (values, types), 0,
        )  # fmt: skip

    def close(self) -> None:
        """Gives all back; nothing may be in flight. Raises DeviceError."""
        self._pinned.close()
        call("cuModuleUnload", self._module)


def compile_kernels(ordinal: int, source: str, name: str) -> bytes:
    """The image of CUDA C++ for a GPU, by nvrtc. Raises DeviceError with what the compiler says."""
    try:
        nvrtc: Any = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise DeviceError(f"no CUDA compiler for Python ({error}); install kvmanager[gpu]") from error
    attributes = driver().CUdevice_attribute
    handle = device_handle(ordinal)
    major, minor = (
        call("cuDeviceGetAttribute", attribute, handle)
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    try:
        status, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
        if int(status) == 0:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    except RuntimeError as error:
        raise DeviceError(f"the CUDA compiler (nvrtc) is not there: {error}") from error
    if int(status):
        raise DeviceError(f"the CUDA compiler refuses {name}: {status.name}; {_compiler_log(nvrtc, program)}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    image = bytes(size)
    nvrtc.nvrtcGetCUBIN(program, image)
    nvrtc.nvrtcDestroyProgram(program)
    return image


def _compiler_log(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.decode(errors="replace").strip("\0\n ")[:2000]
