"""Between the wire's messages and the program's values: packed arrays, layouts, regions, errors.

Whatever arrives is checked here, so that the code behind sees only values that make sense.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from kvmanager import errors
from kvmanager.errors import InvalidArgument, KVError, LayoutMismatch
from kvmanager.layout import Component, KVLayout, Section
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import MIB

if TYPE_CHECKING:
    # At run time grpc is imported where it is used: movers need this module and run without gRPC.
    import grpc

U32Array = npt.NDArray[np.uint32]
U64Array = npt.NDArray[np.uint64]
I64Array = npt.NDArray[np.int64]

NO_PAGE: Final = 0xFFFFFFFF
"""In u32 page arrays: no page in that tier."""
ERROR_METADATA_KEY: Final = "kvmanager-error-bin"
TOKEN_METADATA_KEY: Final = "kvmanager-token"
"""gRPC metadata that carries the session token."""
WIRE_VERSION: Final = 1
"""Number of the contract in kvmanager.proto; a client that tells none is older. It rises with what others misread."""
TEXT_CHARS: Final = 256
"""Most characters of a name or a reason that is for people."""
MESSAGE_MAX_BYTES: Final = 64 * MIB
"""Largest gRPC message either way."""
_STRUCT_CODES: Final = {"<u4": "I", "<u8": "Q", "<i8": "q"}
_WIDTHS: Final = {"<u4": 4, "<u8": 8, "<i8": 8}
_FEW: Final = 64
"""Up to so many numbers numpy's set-up costs more than the work on each."""
_MESSAGE_CHARS: Final = 2000
"""Of an error's text in gRPC metadata, which peers limit to 8 KiB in all."""

# ------------------------------------------------------------------------------------------ arrays


def pack_u32(values: npt.ArrayLike) -> bytes:
    """Packed little-endian u32[n]. Raises InvalidArgument for a value outside 0..2**32-1."""
    return _pack(values, "<u4")


def pack_u64(values: npt.ArrayLike) -> bytes:
    """Packed little-endian u64[n]. Raises InvalidArgument for a value outside 0..2**64-1."""
    return _pack(values, "<u8")


def pack_i64(values: npt.ArrayLike) -> bytes:
    """Packed little-endian i64[n]. Raises InvalidArgument for a value outside the type."""
    return _pack(values, "<i8")


def unpack_u32(data: bytes, field: str) -> U32Array:
    """uint32[n], read-only. Raises InvalidArgument naming `field` for a length that is no multiple of 4."""
    return _unpack(data, "<u4", field)


def unpack_u64(data: bytes, field: str) -> U64Array:
    """uint64[n], read-only. Raises InvalidArgument naming `field` for a length that is no multiple of 8."""
    return _unpack(data, "<u8", field)


def unpack_i64(data: bytes, field: str) -> I64Array:
    """int64[n], read-only. Raises InvalidArgument naming `field` for a length that is no multiple of 8."""
    return _unpack(data, "<i8", field)


def _pack(values: npt.ArrayLike, kind: str) -> bytes:
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype == np.dtype(kind):
        return values.tobytes()
    if isinstance(values, list | tuple):
        return _pack_sequence(values, kind)
    array = np.asarray(values)
    if array.size == 0:
        return b""
    if array.ndim == 1 and array.size <= _FEW and array.dtype.kind in "iu":
        return _pack_sequence(array.tolist(), kind)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"can't pack {array.dtype} of shape {array.shape} as {kind}: whole numbers in one row")
    limits = np.iinfo(kind)
    if int(array.min()) < limits.min or int(array.max()) > limits.max:
        raise InvalidArgument(f"values {array.min()}..{array.max()} don't fit {kind} ({limits.min}..{limits.max})")
    return array.astype(kind).tobytes()


def _pack_sequence(values: list[Any] | tuple[Any, ...], kind: str) -> bytes:
    # Not through numpy: it makes floats of a list that mixes small numbers with some beyond 2**63, as ids are.
    try:
        return struct.pack(f"<{len(values)}{_STRUCT_CODES[kind]}", *values)
    except struct.error as error:
        raise InvalidArgument(f"can't pack {values[:8]}... as {kind}: {error}") from error


def _unpack(data: bytes, kind: str, field: str) -> npt.NDArray[Any]:
    _check_whole(data, _WIDTHS[kind], field)
    return np.frombuffer(data, dtype=kind)


def _check_whole(data: bytes, width: int, field: str) -> None:
    if len(data) % width:
        raise InvalidArgument(f"{field}: {len(data)} bytes are no whole number of {width}-byte values")


def listed_u32(data: bytes, field: str) -> list[int]:
    """As `unpack_u32`, as a list: for what is looked at one by one."""
    return _listed(data, "<u4", field)


def listed_u64(data: bytes, field: str) -> list[int]:
    """As `unpack_u64`, as a list."""
    return _listed(data, "<u8", field)


def _listed(data: bytes, kind: str, field: str) -> list[int]:
    width = _WIDTHS[kind]
    _check_whole(data, width, field)
    count = len(data) // width
    if count > _FEW:
        return np.frombuffer(data, dtype=kind).tolist()  # type: ignore[no-any-return]
    return list(struct.unpack(f"<{count}{_STRUCT_CODES[kind]}", data))

# ------------------------------------------------------------------------------ layouts and regions


def layout_to_proto(layout: KVLayout) -> pb.Layout:
    """The layout as a message, with its fingerprint."""
    components = [
        pb.Component(
            section=c.section.value,
            layer=c.layer,
            offset=c.offset,
            page_stride=c.page_stride,
            slot_stride=c.slot_stride,
            row_bytes=c.row_bytes,
        )
        for c in layout.components
    ]
    return pb.Layout(
        name=layout.name, page_rows=layout.page_rows, components=components, fingerprint=layout.fingerprint
    )


def layout_from_proto(message: pb.Layout) -> KVLayout:
    """The layout of a message.

    Raises InvalidArgument for an unknown section, LayoutMismatch when the fingerprint is not that of
    what the message describes (the two sides would place bytes differently).
    """
    components = []
    for c in message.components:
        try:
            section = Section(c.section)
        except ValueError:
            raise InvalidArgument(f"layout {message.name}: unknown section {c.section!r}") from None
        components.append(Component(section, c.layer, c.offset, c.page_stride, c.slot_stride, c.row_bytes))
    layout = KVLayout(message.name, message.page_rows, tuple(components))
    if layout.fingerprint != message.fingerprint:
        raise LayoutMismatch(
            f"layout {message.name} says fingerprint {message.fingerprint or '(none)'}, "
            f"its components give {layout.fingerprint}"
        )
    return layout


class RegionKind(IntEnum):
    """What a region is for; the numbers are the wire's."""

    DEVICE = 1
    HOST = 2
    TIMELINE = 3
    STAGING = 4


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """One region of memory as processes tell each other of it.

    `page_bytes`: bytes from page to page. `chunk_bounds`: bytes from the start that no copy may cross.
    `rdma_capable`: whether a NIC may reach it directly.
    """

    region_id: int
    kind: RegionKind
    size_bytes: int
    page_bytes: int = 0
    rank: int = 0
    pool: str = ""
    device: str = "cpu"
    chunk_bounds: tuple[int, ...] = ()
    rdma_capable: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the bytes are GPU memory; all other regions are memfds."""
        return self.kind is RegionKind.DEVICE and self.device.startswith("cuda:")


def region_to_proto(region: RegionInfo) -> pb.Region:
    """The region as a message."""
    return pb.Region(
        region_id=region.region_id,
        kind=pb.RegionKind.ValueType(region.kind.value),
        size_bytes=region.size_bytes,
        page_bytes=region.page_bytes,
        rank=region.rank,
        pool=region.pool,
        chunk_bounds=pack_u64(region.chunk_bounds),
        device=region.device,
        rdma_capable=region.rdma_capable,
    )


def region_from_proto(message: pb.Region) -> RegionInfo:
    """The region of a message. Raises InvalidArgument for an unknown kind or an empty region."""
    try:
        kind = RegionKind(message.kind)
    except ValueError:
        raise InvalidArgument(f"region {message.region_id}: unknown kind {message.kind}") from None
    if message.size_bytes == 0:
        raise InvalidArgument(f"region {message.region_id} has no bytes")
    bounds = tuple(unpack_u64(message.chunk_bounds, "Region.chunk_bounds").tolist())
    return RegionInfo(
        message.region_id,
        kind,
        message.size_bytes,
        message.page_bytes,
        message.rank,
        message.pool,
        message.device,
        bounds,
        message.rdma_capable,
    )


# ------------------------------------------------------------------------------------------ errors

# Where several classes share a reason, the one that a receiver can tell apart: ConfigError arrives as
# InvalidArgument, CapacityError as PoolExhausted, TransferError as TransferFailed, DaemonError and DeviceError as
# NotReady.
_CLASSES: Final[dict[str, type[KVError]]] = {
    cls.reason: cls
    for cls in (
        errors.KVError,
        errors.InvalidArgument,
        errors.LayoutMismatch,
        errors.UnknownRequest,
        errors.UnknownLease,
        errors.LeaseExpired,
        errors.StalePage,
        errors.StaleBoot,
        errors.StaleEpoch,
        errors.LimitExceeded,
        errors.Unauthorized,
        errors.PoolExhausted,
        errors.QuotaExceeded,
        errors.QueueFull,
        errors.PeerUnreachable,
        errors.TransferFailed,
        errors.TransferTimeout,
        errors.ChecksumMismatch,
        errors.VersionMismatch,
        errors.Draining,
        errors.NotReady,
        errors.Suspect,
    )
}

# reason -> name of the gRPC status.
_STATUS: Final = {
    "REASON_UNSPECIFIED": "UNKNOWN",
    "INVALID_ARGUMENT": "INVALID_ARGUMENT",
    "LAYOUT_MISMATCH": "FAILED_PRECONDITION",
    "UNKNOWN_REQUEST": "NOT_FOUND",
    "UNKNOWN_LEASE": "NOT_FOUND",
    "LEASE_EXPIRED": "FAILED_PRECONDITION",
    "STALE_GENERATION": "ABORTED",
    "STALE_BOOT": "FAILED_PRECONDITION",
    "STALE_EPOCH": "FAILED_PRECONDITION",
    "LIMIT_EXCEEDED": "OUT_OF_RANGE",
    "UNAUTHORIZED": "PERMISSION_DENIED",
    "EXHAUSTED": "RESOURCE_EXHAUSTED",
    "QUOTA": "RESOURCE_EXHAUSTED",
    "QUEUE_FULL": "RESOURCE_EXHAUSTED",
    "SUSPECT": "FAILED_PRECONDITION",
    "DRAINING": "UNAVAILABLE",
    "NOT_READY": "UNAVAILABLE",
    "PEER_UNREACHABLE": "UNAVAILABLE",
    "TRANSFER_FAILED": "ABORTED",
    "TRANSFER_TIMEOUT": "DEADLINE_EXCEEDED",
    "CHECKSUM_MISMATCH": "DATA_LOSS",
    "VERSION_MISMATCH": "FAILED_PRECONDITION",
    "NOT_IMPLEMENTED": "UNIMPLEMENTED",
}

# What a gRPC status without our details means: gRPC itself, or something between, answered.
_BARE_STATUS: Final[dict[str, type[KVError]]] = {
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "UNIMPLEMENTED": errors.RequestError,
    "RESOURCE_EXHAUSTED": errors.LimitExceeded,
    "UNAUTHENTICATED": errors.Unauthorized,
    "PERMISSION_DENIED": errors.Unauthorized,
}


def error_to_proto(error: KVError) -> pb.Error:
    """The error as a message."""
    message = pb.Error(reason=pb.ErrorReason.Value(error.reason), message=str(error))
    if isinstance(error, errors.CapacityError):
        message.pool = error.pool
        message.needed = error.needed
        message.free = error.free
        message.holder = error.holder
        message.retry_after_ns = error.retry_after_ns
    return message


def error_from_proto(message: pb.Error) -> KVError:
    """The error of a message, in the class of its reason. A reason of a later version becomes DaemonError."""
    if message.reason == pb.NOT_IMPLEMENTED:
        return errors.RequestError(message.message)
    known = message.reason in pb.ErrorReason.values()
    cls = _CLASSES[pb.ErrorReason.Name(message.reason)] if known else errors.DaemonError
    if issubclass(cls, errors.CapacityError):
        return cls(
            message.message,
            pool=message.pool,
            needed=message.needed,
            free=message.free,
            holder=message.holder,
            retry_after_ns=message.retry_after_ns,
        )
    return cls(message.message)


def abort_with(context: grpc.ServicerContext, error: KVError) -> NoReturn:
    """Ends a call with the error's status and its details in trailing metadata; always raises."""
    import grpc

    details = error_to_proto(error)
    details.message = details.message[:_MESSAGE_CHARS]
    context.set_trailing_metadata(((ERROR_METADATA_KEY, details.SerializeToString()),))
    context.abort(getattr(grpc.StatusCode, _STATUS[error.reason]), details.message)
    raise AssertionError("abort raises")


def error_from_rpc(error: grpc.RpcError) -> KVError:
    """The typed error behind a failed call; without our details, the closest to its status (else DaemonError)."""
    import grpc

    if not isinstance(error, grpc.Call):
        return errors.DaemonError(str(error))
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return error_from_proto(pb.Error.FromString(value if isinstance(value, bytes) else value.encode()))
    code = error.code().name
    return _BARE_STATUS.get(code, errors.DaemonError)(f"{code}: {error.details()}")
