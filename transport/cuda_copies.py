"""Strided copies issued into a CUDA stream: long runs in one batched call, short rows as 3-D copies.

Both calls are taken from the driver by address and given numpy arrays, so that nothing is made for each run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.cuda_driver import call, check, device_handle, driver
from kvmanager.core.plans import StridedCopies
from kvmanager.errors import DeviceError
from kvmanager.geometry import Int64Array
from kvmanager.transport.cpu import clear_piece
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.runs import bounds, join_neighbours, spread
from kvmanager.units import KIB, MIB

LONG_ROW_BYTES: Final = 64 * KIB
"""Rows from here on go as runs. Rows of 42 KB move faster as 2-D copies, by a tenth (measured on an H200)."""
JOINED_BELOW_BYTES: Final = MIB
"""Longer rows are worth a copy each: looking for neighbours costs more."""
_BATCH_ABI: Final = 13_000
_COPY_3D_ABI: Final = 3_020
_HOST, _DEVICE = 1, 2  # CUmemorytype
_SOURCE_ORDER_STREAM: Final = 1  # CUmemcpySrcAccessOrder
_BESIDE_COMPUTE: Final = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE. Without it copies within a GPU take its processors: a decode loop beside
them was 14% slower, with it 7% (measured on an H200)."""
_OPERAND_POINTER: Final = 1  # CUmemcpy3DOperandType


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def _side(name: str) -> list[tuple[str, Any]]:
    """One side's fields of CUDA_MEMCPY3D."""
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    types = {
        "x": size, "y": size, "z": size, "lod": size, "type": ctypes.c_int, "host": pointer,
        "device": ctypes.c_uint64, "array": pointer, "reserved": pointer, "pitch": size, "height": size,
    }  # fmt: skip
    return [(f"{name}_{field}", kind) for field, kind in types.items()]


_OPERATION = np.dtype(
    {
        "names": [
            "source_type", "source", "source_pitch", "source_height", "target_type", "target", "target_pitch",
            "target_height", "extent", "source_order",
        ],
        "formats": ["<i4", "<u8", "<u8", "<u8", "<i4", "<u8", "<u8", "<u8", ("<u8", 3), "<i4"],
        "offsets": [0, 8, 16, 24, 40, 48, 56, 64, 80, 104],
        "itemsize": 112,
    }
)  # fmt: skip
"""CUDA_MEMCPY3D_BATCH_OP with pointers as operands."""


class _Copy3D(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        *_side("source"),
        *_side("target"),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


@dataclass(frozen=True, slots=True)
class Box:
    """How one 3-D copy carries two outer extents of a copy set: rows of `width` bytes, `height` x `depth` of them.

    Pitches in bytes from row to row, heights in rows from slice to slice, as (source, target).
    """

    width: int
    height: int
    depth: int
    pitches: tuple[int, int]
    heights: tuple[int, int]


class CudaCopies:
    """Issues copies between the regions of a map. Make one in a thread that has a context, and use it there."""

    def __init__(self, regions: RegionMap, ordinal: int, long_row_bytes: int = LONG_ROW_BYTES) -> None:
        """Rows from `long_row_bytes` on go as runs. Raises DeviceError when the driver is older than CUDA 13."""
        self._regions = regions
        self._long_row_bytes = long_row_bytes
        module = driver()
        pitch = module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PITCH
        self._max_pitch = int(call("cuDeviceGetAttribute", pitch, device_handle(ordinal)))
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self._batch_call = _function(
            "cuMemcpyBatchAsync", _BATCH_ABI, pointer, pointer, pointer, size, pointer, pointer, size, pointer
        )
        self._batch_3d_call = _function(
            "cuMemcpy3DBatchAsync", _BATCH_ABI, size, pointer, ctypes.c_ulonglong, pointer
        )
        self._copy_3d_call = _function("cuMemcpy3DAsync", _COPY_3D_ABI, pointer, pointer)
        self._copy_call = _function("cuMemcpyAsync", 4_000, ctypes.c_uint64, ctypes.c_uint64, size, pointer)
        self._clear_call = _function("cuMemsetD8Async", 3_020, ctypes.c_uint64, ctypes.c_ubyte, size, pointer)
        self._attributes = _Attributes(source_order=_SOURCE_ORDER_STREAM, flags=_BESIDE_COMPUTE)
        self._first = ctypes.c_size_t(0)
        self._copy_3d = _Copy3D()

    def issue(self, copies: StridedCopies, stream: int) -> int:
        """Queues one set whose bounds were checked, into `stream` (a CUstream's number); returns the calls made.

        Raises DeviceError when the driver refused; some of the copies may then be queued all the same.
        """
        part, box = as_box(copies, self._max_pitch, self._crosses, self._long_row_bytes)
        return self._issue_runs(part, stream) if box is None else self._issue_boxes(part, box, stream)

    def clear(self, copies: StridedCopies, stream: int) -> None:
        """Zeros over the targets of one set whose bounds were checked: host memory at once, GPU memory in `stream`.

        Raises DeviceError.
        """
        target = self._regions.find(copies.target_region)
        if target.array is not None:
            clear_piece(target.array, copies)
            return
        starts = spread(copies.target_offsets, copies.counts, copies.target_strides) + target.address
        for start in starts.tolist():
            check("cuMemsetD8Async", self._clear_call(start, 0, copies.row_bytes, stream))

    def _crosses(self, c: StridedCopies) -> bool:
        """Whether some one copy of the set lies on both sides of a chunk bound."""
        for region_id, offsets, strides in (
            (c.source_region, c.source_offsets, c.source_strides),
            (c.target_region, c.target_offsets, c.target_strides),
        ):
            limits = self._regions.find(region_id).chunk_bounds
            if limits and len(offsets):
                low, high = bounds(offsets[:1], c.counts, strides, c.row_bytes)
                first = offsets - offsets[0] + low
                if (np.searchsorted(limits, first, "right") != np.searchsorted(limits, first + (high - low))).any():
                    return True
        return False

    def _issue_runs(self, c: StridedCopies, stream: int) -> int:
        source = spread(c.source_offsets, c.counts, c.source_strides)
        target = spread(c.target_offsets, c.counts, c.target_strides)
        runs = source, target, np.full(len(source), c.row_bytes, np.int64)
        if c.row_bytes < JOINED_BELOW_BYTES:
            runs = join_neighbours(*runs)
        from_region, to_region = self._regions.find(c.source_region), self._regions.find(c.target_region)
        source, target, lengths = cut_at(*runs, from_region.chunk_bounds, to_region.chunk_bounds)
        if len(source) == 0:
            return 0
        return self.runs(source + from_region.address, target + to_region.address, lengths, stream)

    def runs(self, source: Int64Array, target: Int64Array, lengths: Int64Array, stream: int) -> int:
        """Queues copies by address: int64[runs] each, in bytes, each within one registration; the calls made."""
        if len(source) == 1 or stream == 0:  # the batched call takes no legacy default stream
            for run in zip(target.tolist(), source.tolist(), lengths.tolist(), strict=True):
                check("cuMemcpyAsync", self._copy_call(*run, stream))
            return len(source)
        status = self._batch_call(
            target.ctypes.data, source.ctypes.data, lengths.ctypes.data, len(source),
            ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1, stream,
        )  # fmt: skip
        check("cuMemcpyBatchAsync", status)
        return 1

    def _issue_boxes(self, c: StridedCopies, box: Box, stream: int) -> int:
        if len(c.source_offsets) == 1 or stream == 0:
            return self.issue_singly(c, box, stream)
        operations = np.zeros(len(c.source_offsets), _OPERATION)
        operations["extent"] = box.width, box.height, box.depth
        operations["source_order"] = _SOURCE_ORDER_STREAM
        for side, region_id, offsets in (
            (0, c.source_region, c.source_offsets),
            (1, c.target_region, c.target_offsets),
        ):
            prefix = ("source", "target")[side]
            operations[f"{prefix}_type"] = _OPERAND_POINTER
            operations[prefix] = offsets + self._regions.find(region_id).address
            operations[f"{prefix}_pitch"] = box.pitches[side]
            operations[f"{prefix}_height"] = box.heights[side]
        status = self._batch_3d_call(len(operations), operations.ctypes.data, 0, stream)
        check("cuMemcpy3DBatchAsync", status)
        return 1

    def issue_singly(self, c: StridedCopies, box: Box, stream: int) -> int:
        """Queues one driver call an offset: what `as_box` made, for a lone box or the legacy default stream."""
        command = self._copy_3d
        command.width, command.height, command.depth = box.width, box.height, box.depth
        starts = []
        for side, region_id, offsets in (
            (0, c.source_region, c.source_offsets),
            (1, c.target_region, c.target_offsets),
        ):
            mapped = self._regions.find(region_id)
            prefix = ("source", "target")[side]
            on_gpu = mapped.array is None
            setattr(command, f"{prefix}_type", _DEVICE if on_gpu else _HOST)
            setattr(command, f"{prefix}_pitch", box.pitches[side])
            setattr(command, f"{prefix}_height", box.heights[side])
            starts.append((f"{prefix}_device" if on_gpu else f"{prefix}_host", (offsets + mapped.address).tolist()))
        (source_field, sources), (target_field, targets) = starts
        address = ctypes.addressof(command)
        for source, target in zip(sources, targets, strict=True):
            setattr(command, source_field, source)
            setattr(command, target_field, target)
            check("cuMemcpy3DAsync", self._copy_3d_call(address, stream))
        return len(sources)


def _function(name: str, abi: int, *types: Any) -> Any:
    """A driver function in the shape it had in CUDA version `abi` (13000 for 13.0)."""
    module = driver()
    status, address, _ = module.cuGetProcAddress(name.encode(), abi, 0)
    if int(status) or not address:
        raise DeviceError(f"the driver has no {name} of CUDA {abi // 1000}.{abi % 1000 // 10}; CUDA 13 is needed")
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(int(address))


# ------------------------------------------------------------------------------------ shapes, no GPU


def as_box(
    c: StridedCopies,
    max_pitch: int,
    crosses: Callable[[StridedCopies], bool],
    long_row_bytes: int = LONG_ROW_BYTES,
) -> tuple[StridedCopies, Box | None]:
    """The set as one 3-D copy an offset, or, with None, to be carried out as runs.

    `crosses(copies)`: whether some copy of a set lies on both sides of a bound that no call may cross.
    """
    found = _best_box(c, max_pitch) if c.counts and c.row_bytes < long_row_bytes else None
    if found is None:
        return c, None
    box, axes = found
    part = _without(c, axes)
    inner = replace(
        part,
        counts=(box.depth, box.height),
        source_strides=(box.pitches[0] * box.heights[0], box.pitches[0]),
        target_strides=(box.pitches[1] * box.heights[1], box.pitches[1]),
    )
    return (c, None) if crosses(inner) else (part, box)


def _best_box(c: StridedCopies, max_pitch: int) -> tuple[Box, tuple[int, ...]] | None:
    """The box that carries most rows a call, and the axes it takes; None when no axis fits."""
    best: tuple[Box, tuple[int, ...]] | None = None
    for y in range(len(c.counts)):
        pitches = (c.source_strides[y], c.target_strides[y])
        if not c.row_bytes <= min(pitches) <= max(pitches) <= max_pitch:
            continue
        flat = Box(c.row_bytes, c.counts[y], 1, pitches, (c.counts[y], c.counts[y]))
        candidates: list[tuple[Box, tuple[int, ...]]] = [(flat, (y,))]
        for z in range(len(c.counts)):
            slices = (c.source_strides[z], c.target_strides[z])
            heights = (slices[0] // pitches[0], slices[1] // pitches[1])
            whole = slices[0] % pitches[0] == slices[1] % pitches[1] == 0
            if z != y and whole and min(heights) >= c.counts[y]:
                candidates.append((Box(c.row_bytes, c.counts[y], c.counts[z], pitches, heights), (y, z)))
        for box, axes in candidates:
            if best is None or box.height * box.depth > best[0].height * best[0].depth:
                best = box, axes
    return best if best is not None and best[0].height * best[0].depth > 1 else None


def _without(c: StridedCopies, axes: tuple[int, ...]) -> StridedCopies:
    """The set with every other outer extent written out as offsets, and none left."""
    rest = [axis for axis in range(len(c.counts)) if axis not in axes]
    counts = tuple(c.counts[axis] for axis in rest)
    return replace(
        c,
        source_offsets=spread(c.source_offsets, counts, tuple(c.source_strides[axis] for axis in rest)),
        target_offsets=spread(c.target_offsets, counts, tuple(c.target_strides[axis] for axis in rest)),
        counts=(),
        source_strides=(),
        target_strides=(),
    )


def cut_at(
    source: Int64Array,
    target: Int64Array,
    lengths: Int64Array,
    source_bounds: tuple[int, ...],
    target_bounds: tuple[int, ...],
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The runs with those cut that lie on both sides of a bound; bounds ascend, in bytes from the region's start."""
    for side, limits in ((0, source_bounds), (1, target_bounds)):
        for limit in limits:
            starts = source if side == 0 else target
            over = (starts < limit) & (starts + lengths > limit)
            if over.any():
                head: npt.NDArray[np.int64] = limit - starts[over]
                tails = (source[over] + head, target[over] + head, lengths[over] - head)
                lengths = lengths.copy()
                lengths[over] = head
                source, target, lengths = (
                    np.concatenate(pair) for pair in zip((source, target, lengths), tails, strict=True)
                )
    return source, target, lengths
