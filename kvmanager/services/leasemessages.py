"""Messages of engines with memory of their own as the core's events. Pure; nothing here decides."""

from __future__ import annotations

from kvmanager.core.events import Opened
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, LeaseEvent, ReserveSpans
from kvmanager.core.leasesums import Acquired
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.messages import check_text, check_token_ids, fence_values, span_run
from kvmanager.wire import listed_u32, pack_u32, pack_u64


def acquire_event(engine: str, request: pb.AcquireRequest) -> AcquirePrefix:
    """An AcquireRequest as an event."""
    check_text(request.name, "name")
    return AcquirePrefix(engine, request.epoch, request.request_id, request.keys, request.lease_ttl_ns, request.name)


def acquire_reply(answer: Opened) -> pb.AcquireReply:
    """What an acquire found."""
    reply = pb.AcquireReply(tokens=answer.cached_tokens, spans=[span_run(table) for table in answer.spans])
    if isinstance(answer, Acquired) and answer.summed_pages is not None and answer.sums is not None:
        reply.summed_pages, reply.sums = pack_u32(answer.summed_pages), pack_u64(answer.sums.reshape(-1))
    return reply


def done_event(engine: str, request: pb.DoneRequest) -> EndLease:
    """A DoneRequest as an event. Raises InvalidArgument for arrays that do not fit together."""
    failed = tuple(listed_u32(request.failed_pages, "failed_pages"))
    check_text(request.failure, "failure")
    fence = fence_values(request.fence)
    return EndLease(engine, request.epoch, request.lease_id, fence, failed_pages=failed, failure=request.failure)


def store_event(engine: str, request: pb.StoreRequest, namespace: pb.Namespace) -> LeaseEvent:
    """A StoreRequest as an event. Raises InvalidArgument for one without a step, or without token ids asked for."""
    match request.WhichOneof("step"):
        case "reserve":
            wanted = request.reserve
            check_token_ids(namespace, wanted.keys, wanted.token_ids, "token_ids")
            check_text(wanted.name, "name")
            return ReserveSpans(
                engine, request.epoch, wanted.request_id, wanted.keys, wanted.lease_ttl_ns, wanted.session.session_id,
                wanted.token_ids if namespace.token_ids else b"", wanted.name,
            )  # fmt: skip
        case "commit":
            commit = request.commit
            fence = fence_values(commit.fence)
            summed = tuple(listed_u32(commit.summed_pages, "summed_pages"))
            return EndLease(
                engine, request.epoch, commit.lease_id, fence, committed=True, committed_tokens=commit.tokens,
                summed_pages=summed, sums=commit.sums,
            )  # fmt: skip
        case "abort":
            return EndLease(engine, request.epoch, request.abort.lease_id, fence_values(request.abort.fence))
    raise InvalidArgument("store: no step is set; reserve, commit or abort")
