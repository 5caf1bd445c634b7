"""Messages of engines with memory of their own as the core's events. Pure; nothing here decides."""

from __future__ import annotations

from kvmanager.core.leaseevents import AcquirePrefix, EndLease, LeaseEvent, ReserveSpans
from kvmanager.errors import InvalidArgument
from kvmanager.messages import check_token_ids, fence_values
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import unpack_u32


def acquire_event(engine: str, request: pb.AcquireRequest) -> AcquirePrefix:
    """An AcquireRequest as an event."""
    return AcquirePrefix(engine, request.epoch, request.request_id, request.keys, request.lease_ttl_ns)


def done_event(engine: str, request: pb.DoneRequest) -> EndLease:
    """A DoneRequest as an event. Raises InvalidArgument for arrays that do not fit together."""
    failed = tuple(unpack_u32(request.failed_pages, "failed_pages").tolist())
    return EndLease(engine, request.epoch, request.lease_id, fence_values(request.fence), failed_pages=failed)


def store_event(engine: str, request: pb.StoreRequest, namespace: pb.Namespace) -> LeaseEvent:
    """A StoreRequest as an event. Raises InvalidArgument for one without a step, or without token ids asked for."""
    match request.WhichOneof("step"):
        case "reserve":
            wanted = request.reserve
            check_token_ids(namespace, wanted.keys, wanted.token_ids, "token_ids")
            return ReserveSpans(
                engine, request.epoch, wanted.request_id, wanted.keys, wanted.lease_ttl_ns, wanted.session.session_id,
                wanted.token_ids if namespace.token_ids else b"",
            )  # fmt: skip
        case "commit":
            commit = request.commit
            fence = fence_values(commit.fence)
            return EndLease(
                engine, request.epoch, commit.lease_id, fence, committed=True, committed_tokens=commit.tokens
            )
        case "abort":
            return EndLease(engine, request.epoch, request.abort.lease_id, fence_values(request.abort.fence))
    raise InvalidArgument("store: no step is set; reserve, commit or abort")
