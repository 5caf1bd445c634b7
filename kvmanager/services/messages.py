"""Core events and effects as messages of the wire, and back. Pure; nothing here decides."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.core.events import (
    Close,
    Closing,
    Grown,
    HotGrant,
    Notice,
    Open,
    Opened,
    Progress,
    RegisterEngine,
    RequestFailed,
    ResidencyRows,
    SpanRunTable,
    Step,
    StepDone,
    TicketInfo,
    TurnEnded,
)
from kvmanager.core.rows import any_true
from kvmanager.daemon.probe import check_probe
from kvmanager.errors import InvalidArgument
from kvmanager.planwire import plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import NO_PAGE, TEXT_CHARS, error_to_proto, listed_u64, pack_u32, pack_u64, unpack_u32, unpack_u64

_STATES = {
    "runnable": pb.OpenReply.RUNNABLE,
    "waiting": pb.OpenReply.WAITING,
    "refused": pb.OpenReply.REFUSED,
}
FEW_PAGES = 16
"""Up to so many numpy's set-up costs more than the work on each."""
KEY_HASHES = ("sha256", "sha256_cbor", "vllm_sha256")
CBOR_KEY_BYTES = 32
_CLOSINGS = {pb.FINISHED: Closing.FINISHED, pb.ABORTED: Closing.ABORTED, pb.RETRACTED: Closing.RETRACTED}


# ------------------------------------------------------------------------------------- requests


def namespace_digest(tenant: str, namespace: pb.Namespace) -> bytes:
    """What all keys of a namespace are prefixed with: tagged, length-prefixed parts, so that no two spell alike."""
    parts = (
        ("tenant", tenant),
        ("model", namespace.model),
        ("weights_revision", namespace.weights_revision),
        ("kv_format", namespace.kv_format),
        ("key_hash", namespace.key_hash),
        ("key_bytes", str(namespace.key_bytes)),
        ("key_tokens", str(namespace.key_tokens)),
        *([("hash_seed", namespace.hash_seed)] if namespace.hash_seed else []),
        *([("token_ids", "told")] if namespace.token_ids else []),
    )
    digest = hashlib.sha256(b"kvmanager.namespace/1")
    for tag, value in parts:
        data = value.encode()
        digest.update(f"{tag}:{len(data)}:".encode() + data)
    return digest.digest()


def register_event(request: pb.RegisterRequest, tenant: str) -> RegisterEngine:
    """A RegisterRequest as the core's event. Raises InvalidArgument; LayoutMismatch when its keys are not ours."""
    if not request.engine:
        raise InvalidArgument("engine has no name; give it one that stays the same over restarts")
    if request.namespace.key_hash not in KEY_HASHES:
        raise InvalidArgument(
            f"namespace.key_hash {request.namespace.key_hash!r} is not known here; use one of {', '.join(KEY_HASHES)}"
        )
    if request.namespace.hash_seed and request.namespace.key_hash == "sha256":
        raise InvalidArgument('namespace.hash_seed: "sha256" begins with the namespace itself; leave it empty')
    if request.namespace.key_hash == "sha256_cbor" and request.namespace.key_bytes != CBOR_KEY_BYTES:
        raise InvalidArgument(
            f"namespace.key_bytes {request.namespace.key_bytes}: keys of \"sha256_cbor\" are chained and told whole, "
            f"{CBOR_KEY_BYTES} bytes each"
        )
    check_probe(request.namespace, request.probe_key)
    return RegisterEngine(
        request.engine,
        request.group,
        namespace_digest(tenant, request.namespace),
        request.namespace.key_bytes,
        request.namespace.key_tokens,
        tuple(request.layout_fingerprints),
        request.ranks,
        tenant=tenant,
    )


def fence_values(fence: pb.Fence) -> dict[int, int]:
    """Attach id -> timeline value. Raises InvalidArgument for arrays that do not fit together."""
    ids = listed_u64(fence.attach_ids, "fence.attach_ids")
    values = listed_u64(fence.values, "fence.values")
    if len(ids) != len(values):
        raise InvalidArgument(f"fence: {len(ids)} attach_ids, {len(values)} values")
    return dict(zip(ids, values, strict=True))


def step_event(engine: str, message: pb.StepRequest, namespace: pb.Namespace) -> Step:
    """A StepRequest as the core's event. Raises InvalidArgument for arrays that do not fit together.

    Token ids that the engine's namespace does not ask for are left out.
    """
    return Step(
        engine,
        message.epoch,
        message.number,
        message.notices_seen,
        fence_values(message.fence),
        _progress(message.requests, namespace),
        tuple(_open(entry, namespace) for entry in message.open),
        tuple(_close(entry) for entry in message.close),
        tuple(_turn_end(entry) for entry in message.turn_ends),
    )


def check_token_ids(namespace: pb.Namespace, keys: bytes, token_ids: bytes, what: str) -> None:
    """Raises InvalidArgument where a namespace asks for token ids and there are not those of every key."""
    wanted = len(keys) // max(namespace.key_bytes, 1) * namespace.key_tokens * 4
    if namespace.token_ids and len(token_ids) != wanted:
        raise InvalidArgument(
            f"{what} has {len(token_ids)} bytes; the namespace asks for the token ids of every key, which are {wanted}"
        )


def _progress(rows: pb.RequestVector, namespace: pb.Namespace) -> tuple[Progress, ...]:
    ids = unpack_u64(rows.request_ids, "requests.request_ids")
    columns: dict[str, npt.NDArray[np.unsignedinteger[Any]]] = {
        "capacity_tokens": unpack_u64(rows.capacity_tokens, "requests.capacity_tokens"),
        "committed_tokens": unpack_u64(rows.committed_tokens, "requests.committed_tokens"),
        "rejected_tokens": unpack_u32(rows.rejected_tokens, "requests.rejected_tokens"),
        "new_key_counts": unpack_u32(rows.new_key_counts, "requests.new_key_counts"),
    }
    for name, column in columns.items():
        if len(column) != len(ids):
            raise InvalidArgument(f"requests.{name} has {len(column)} entries for {len(ids)} request_ids")
    capacity, committed, rejected, counts = (column.tolist() for column in columns.values())
    total = sum(counts)
    width, rest = divmod(len(rows.new_keys), total) if total else (0, len(rows.new_keys))
    if rest:
        raise InvalidArgument(f"requests.new_keys has {len(rows.new_keys)} bytes for {total} keys")
    check_token_ids(namespace, rows.new_keys, rows.token_ids, "requests.token_ids")
    keys = _pieces(rows.new_keys, counts, width)
    token_ids = _pieces(rows.token_ids, counts, namespace.key_tokens * 4 if namespace.token_ids else 0)
    return tuple(map(Progress, ids.tolist(), capacity, committed, rejected, keys, token_ids))


def _pieces(packed: bytes, counts: list[int], width: int) -> Iterable[bytes]:
    """`counts[i]` values of `width` bytes for each i, one after the other."""
    if not width:
        return [b""] * len(counts)
    ends = list(itertools.accumulate((count * width for count in counts), initial=0))
    return [packed[start:end] for start, end in itertools.pairwise(ends)]


def check_text(text: str, what: str) -> None:
    """Raises InvalidArgument for one that is longer than people read."""
    if len(text) > TEXT_CHARS:
        raise InvalidArgument(f"{what} has {len(text)} characters; at most {TEXT_CHARS}")


def _open(entry: pb.OpenRequest, namespace: pb.Namespace) -> Open:
    check_text(entry.name, "name")
    ticket = None
    if entry.HasField("ticket"):
        ticket = TicketInfo(
            entry.ticket.ticket_id,
            entry.ticket.node_address,
            max(entry.ticket.committed_tokens, entry.ticket.expected_tokens),
            entry.ticket.lease_ttl_ns,
        )
    return Open(
        entry.request_id,
        entry.prompt_tokens,
        entry.growth_tokens,
        entry.prompt_keys,
        entry.session.session_id,
        ticket,
        entry.prompt_token_ids if namespace.token_ids else b"",
        entry.name,
    )


def _close(entry: pb.CloseRequest) -> Close:
    closing = _CLOSINGS.get(entry.reason)
    if closing is None:
        raise InvalidArgument(f"close of request {entry.request_id}: reason must be FINISHED, ABORTED or RETRACTED")
    return Close(entry.request_id, closing, entry.stop_reason, bool(entry.session_ends))


def _turn_end(entry: pb.TurnEnd) -> TurnEnded:
    return TurnEnded(entry.session_id, entry.stop_reason, bool(entry.session_ends))


# -------------------------------------------------------------------------------------- replies


def pages_to_wire(pages: npt.NDArray[np.int64]) -> bytes:
    """Page indexes as u32[], -1 as NO_PAGE."""
    if len(pages) <= FEW_PAGES:
        return pack_u32([NO_PAGE if page < 0 else page for page in pages.tolist()])
    return pack_u32(np.where(pages < 0, NO_PAGE, pages))


def span_run(table: SpanRunTable) -> pb.SpanRun:
    """A table of spans as a message."""
    run = pb.SpanRun(
        chain=table.chain,
        first_span=table.first_span,
        first_tokens=pack_u64(table.first_tokens),
        segments=pack_u32(table.segments),
        interleave=pack_u32(table.interleave),
        uids=pack_u64(table.uids),
    )
    for name, (device, host) in table.pages.items():
        host_pages = pages_to_wire(host) if any_true(host >= 0) or any_true(device < 0) else b""
        run.pages.add(page_class=name, device_pages=pages_to_wire(device), host_pages=host_pages)
    return run


def open_reply(opened: Opened) -> pb.OpenReply:
    """The answer to an open."""
    reply = pb.OpenReply(
        request_id=opened.request_id,
        state=_STATES[opened.state],
        cached_tokens=opened.cached_tokens,
        spans=[span_run(table) for table in opened.spans],
        worker_plans=[plan_to_proto(plan) for plan in opened.worker_plans],
        whole_lacks_slabs=opened.whole_lacks_slabs,
    )
    if opened.hot is not None:
        reply.hot.add(request_id=opened.request_id, pages=pages_to_wire(opened.hot))
    if opened.error is not None:
        reply.error.CopyFrom(error_to_proto(opened.error))
    return reply


def _growth(grown: Grown) -> pb.Growth:
    growth = pb.Growth(
        request_id=grown.request_id, spans=[span_run(table) for table in grown.spans], spans_kept=grown.spans_kept,
        worker_plans=[plan_to_proto(plan) for plan in grown.worker_plans],
    )  # fmt: skip
    if grown.error is not None:
        growth.error.CopyFrom(error_to_proto(grown.error))
    return growth


def _residency(rows: ResidencyRows) -> pb.Residency:
    return pb.Residency(
        request_id=rows.request_id,
        page_class=rows.page_class,
        page_ordinals=pack_u32(rows.ordinals),
        device_pages=pages_to_wire(rows.device),
        host_pages=pages_to_wire(rows.host),
    )


def _hot(grant: HotGrant) -> pb.HotPages:
    plans = [plan_to_proto(plan) for plan in grant.worker_plans]
    return pb.HotPages(request_id=grant.request_id, pages=pages_to_wire(grant.pages), worker_plans=plans)


def _failed(failed: RequestFailed) -> pb.RequestError:
    return pb.RequestError(request_id=failed.request_id, error=error_to_proto(failed.error))


def notice_message(notice: Notice) -> pb.Notice:
    """A notice as a message."""
    message = pb.Notice(sequence=notice.sequence)
    if notice.ready is not None:
        message.ready.CopyFrom(open_reply(notice.ready))
    if notice.failed is not None:
        message.failed.CopyFrom(_failed(notice.failed))
    if notice.draining:
        message.draining = notice.draining
    return message


def step_reply(boot_id: int, done: StepDone, notices: Iterable[Notice]) -> pb.StepReply:
    """The numbered reply with all notices not yet seen."""
    return pb.StepReply(
        number=done.number,
        boot_id=boot_id,
        opened=[open_reply(opened) for opened in done.opened],
        growth=[_growth(grown) for grown in done.grown],
        residency=[_residency(rows) for rows in done.residency],
        hot=[_hot(grant) for grant in done.hot],
        errors=[_failed(failed) for failed in done.errors],
        notices=[notice_message(notice) for notice in notices],
    )
