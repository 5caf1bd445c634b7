"""Every error a caller can meet.

    KVError
      RequestError     the call is wrong as it stands; retrying it unchanged can't help
        InvalidArgument, LayoutMismatch, UnknownRequest, UnknownLease, StalePage, StaleBoot,
        StaleEpoch, LimitExceeded, Unauthorized, LeaseExpired, VersionMismatch
      CapacityError    no room now; a retry may succeed
        PoolExhausted, QuotaExceeded, QueueFull
      TransferError    bytes did not arrive
        PeerUnreachable, TransferFailed, TransferTimeout, ChecksumMismatch
      DaemonError      the node can't serve now
        Draining, NotReady, Suspect, DeviceError
      ConfigError      the configuration can't be used; raised before anything is made

InvariantViolation stands outside the tree on purpose: no handler may catch it by habit.
`reason` is the wire's `ErrorReason` name; one table at the edge maps it to a gRPC status.
"""

from __future__ import annotations

from typing import ClassVar


class KVError(Exception):
    """Base of all errors that a caller can act on."""

    reason: ClassVar[str] = "REASON_UNSPECIFIED"


class RequestError(KVError):
    """The call is wrong as it stands."""

    reason = "INVALID_ARGUMENT"


class InvalidArgument(RequestError):
    """A field has a value that can't be served."""

    reason = "INVALID_ARGUMENT"


class LayoutMismatch(RequestError):
    """Two sides describe the same bytes differently."""

    reason = "LAYOUT_MISMATCH"


class UnknownRequest(RequestError):
    """No such request in this engine's epoch."""

    reason = "UNKNOWN_REQUEST"


class UnknownLease(RequestError):
    """No such ticket or lease."""

    reason = "UNKNOWN_LEASE"


class LeaseExpired(RequestError):
    """The lease ran out, so the memory behind it may be somebody else's."""

    reason = "LEASE_EXPIRED"


class StalePage(RequestError):
    """A page was reused since it was described to the caller."""

    reason = "STALE_GENERATION"


class StaleBoot(RequestError):
    """The daemon restarted since the caller attached."""

    reason = "STALE_BOOT"


class StaleEpoch(RequestError):
    """Another process of the same engine registered since."""

    reason = "STALE_EPOCH"


class LimitExceeded(RequestError):
    """The message or one of its vectors is larger than a stated limit."""

    reason = "LIMIT_EXCEEDED"


class Unauthorized(RequestError):
    """No session token, or one whose role may not make this call."""

    reason = "UNAUTHORIZED"


class VersionMismatch(RequestError):
    """Client and daemon speak different versions of the wire contract."""

    reason = "VERSION_MISMATCH"


class CapacityError(KVError):
    """No room now, or not ever.

    needed, free: slabs of `pool` (in a pool of one page class a slab is a page) that were asked for, and that could
    be given now. holder: who holds the most of the pool, as `name (n pages), ...`, most first; names are
    `engine/request` or `ticket id`. retry_after_ns: when room is to be expected, from what is known of drains, copies,
    leases and requests; 0 when asking again unchanged can't help.
    """

    reason = "EXHAUSTED"

    def __init__(
        self,
        message: str,
        *,
        pool: str = "",
        needed: int = 0,
        free: int = 0,
        holder: str = "",
        retry_after_ns: int = 0,
    ) -> None:
        super().__init__(message)
        self.pool = pool
        self.needed = needed
        self.free = free
        self.holder = holder
        self.retry_after_ns = retry_after_ns


class PoolExhausted(CapacityError):
    """A pool can't hold what was asked, now or (when `needed` exceeds its size) ever."""

    reason = "EXHAUSTED"


class QuotaExceeded(CapacityError):
    """The tenant's ceiling is reached."""

    reason = "QUOTA"


class QueueFull(CapacityError):
    """A bounded queue is full."""

    reason = "QUEUE_FULL"


class TransferError(KVError):
    """Bytes did not arrive."""

    reason = "TRANSFER_FAILED"


class PeerUnreachable(TransferError):
    """The other node does not answer."""

    reason = "PEER_UNREACHABLE"


class TransferFailed(TransferError):
    """A copy ended without all its bytes."""

    reason = "TRANSFER_FAILED"


class TransferTimeout(TransferError):
    """Our own deadline passed; the pages stay quarantined until the copy is known to have ended."""

    reason = "TRANSFER_TIMEOUT"


class ChecksumMismatch(TransferError):
    """Bytes are not those that were written. The copy is out of use for good; what it held is a miss."""

    reason = "CHECKSUM_MISMATCH"


class DaemonError(KVError):
    """The node can't serve now."""

    reason = "NOT_READY"


class Draining(DaemonError):
    """The node takes no new work."""

    reason = "DRAINING"


class NotReady(DaemonError):
    """The node is starting."""

    reason = "NOT_READY"


class Suspect(DaemonError):
    """The engine's stream broke; it must open a new one before it is given anything."""

    reason = "SUSPECT"


class DeviceError(DaemonError):
    """The GPU or its driver refused."""

    reason = "NOT_READY"


class ConfigError(KVError):
    """The configuration names something unknown or impossible."""

    reason = "INVALID_ARGUMENT"


class InvariantViolation(Exception):
    """Our own mistake. The daemon prints the story and stops: a crash costs cache, wrong KV costs answers."""
