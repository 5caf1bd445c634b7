"""Messages become events and effects become messages without a loss; what does not fit together is named."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.clients.engine import StepResult
from kvmanager.core.events import (
    Close,
    Closing,
    Grown,
    HotGrant,
    Notice,
    Open,
    Opened,
    Progress,
    RequestFailed,
    ResidencyRows,
    SpanRunTable,
    Step,
    StepDone,
    TicketInfo,
)
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.daemon.probe import probe_key
from kvmanager.errors import InvalidArgument, PoolExhausted, UnknownRequest
from kvmanager.planwire import plan_from_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.leasemessages import store_event
from kvmanager.services.messages import (
    namespace_digest,
    notice_message,
    open_reply,
    register_event,
    step_event,
    step_reply,
)
from kvmanager.wire import NO_PAGE, error_from_proto, pack_u32, pack_u64, unpack_u32, unpack_u64

NAMESPACE = pb.Namespace(
    model="m", weights_revision="r", kv_format="f", key_hash="sha256", key_bytes=16, key_tokens=16
)
BIG = (1 << 64) - 1


def test_a_step_with_everything() -> None:
    message = pb.StepRequest(
        number=BIG,
        boot_id=3,
        epoch=4,
        notices_seen=5,
        fence=pb.Fence(attach_ids=pack_u64([1, BIG]), values=pack_u64([10, BIG])),
        requests=pb.RequestVector(
            request_ids=pack_u64([7, 8, 9]),
            capacity_tokens=pack_u64([70, 80, BIG]),
            committed_tokens=pack_u64([17, 18, 19]),
            rejected_tokens=pack_u32([0, 2, 0]),
            new_key_counts=pack_u32([2, 0, 1]),
            new_keys=b"a" * 16 + b"b" * 16 + b"c" * 16,
        ),
        open=[
            pb.OpenRequest(
                request_id=11,
                prompt_tokens=33,
                growth_tokens=44,
                prompt_keys=b"k" * 32,
                session=pb.SessionHint(session_id="s"),
                ticket=pb.Ticket(ticket_id="t", node_address="/run/x", committed_tokens=32, lease_ttl_ns=9),
            ),
            pb.OpenRequest(request_id=12, prompt_tokens=1),
        ],
        close=[
            pb.CloseRequest(request_id=1, reason=pb.FINISHED),
            pb.CloseRequest(request_id=2, reason=pb.ABORTED),
        ],
    )
    assert step_event("e", message, NAMESPACE) == Step(
        "e",
        4,
        BIG,
        5,
        {1: 10, BIG: BIG},
        (
            Progress(7, 70, 17, 0, b"a" * 16 + b"b" * 16),
            Progress(8, 80, 18, 2, b""),
            Progress(9, BIG, 19, 0, b"c" * 16),
        ),
        (Open(11, 33, 44, b"k" * 32, "s", TicketInfo("t", "/run/x", 32, 9)), Open(12, 1, 0, b"")),
        (Close(1, Closing.FINISHED), Close(2, Closing.ABORTED)),
    )


def test_an_empty_step() -> None:
    assert step_event("e", pb.StepRequest(number=1, epoch=2), NAMESPACE) == Step("e", 2, 1)


ROW = {
    "request_ids": pack_u64([1]),
    "capacity_tokens": pack_u64([1]),
    "committed_tokens": pack_u64([1]),
    "rejected_tokens": pack_u32([0]),
    "new_key_counts": pack_u32([0]),
}


@pytest.mark.parametrize("column", [name for name in ROW if name != "request_ids"])
@pytest.mark.parametrize("count", [0, 2])
def test_columns_of_other_lengths(column: str, count: int) -> None:
    pack = pack_u32 if column in ("rejected_tokens", "new_key_counts") else pack_u64
    rows = pb.RequestVector(**{**ROW, column: pack([0] * count)})
    with pytest.raises(InvalidArgument, match=rf"requests.{column} has {count} entries for 1 request_ids"):
        step_event("e", pb.StepRequest(requests=rows), NAMESPACE)


@pytest.mark.parametrize("column", list(ROW))
def test_columns_that_are_no_whole_numbers(column: str) -> None:
    with pytest.raises(InvalidArgument, match=f"requests.{column}"):
        step_event("e", pb.StepRequest(requests=pb.RequestVector(**{**ROW, column: b"123"})), NAMESPACE)


@pytest.mark.parametrize(("counts", "data"), [([0], b"x"), ([3], b"x" * 16), ([(1 << 32) - 1], b"x")])
def test_keys_that_do_not_divide(counts: list[int], data: bytes) -> None:
    rows = pb.RequestVector(**{**ROW, "new_key_counts": pack_u32(counts), "new_keys": data})
    with pytest.raises(InvalidArgument, match=rf"{len(data)} bytes for {counts[0]} keys"):
        step_event("e", pb.StepRequest(requests=rows), NAMESPACE)


def test_a_fence_of_two_lengths_and_a_close_without_reason() -> None:
    with pytest.raises(InvalidArgument, match="fence: 1 attach_ids, 2 values"):
        step_event("e", pb.StepRequest(fence=pb.Fence(attach_ids=pack_u64([1]), values=pack_u64([1, 2]))), NAMESPACE)
    with pytest.raises(InvalidArgument, match="close of request 5: reason must be FINISHED, ABORTED or RETRACTED"):
        step_event("e", pb.StepRequest(close=[pb.CloseRequest(request_id=5)]), NAMESPACE)


def table(host: bool) -> SpanRunTable:
    host_pages = np.array([4, -1, 6], np.int64) if host else np.full(3, -1, np.int64)
    return SpanRunTable(
        "main",
        2,
        np.array([32, 64], np.int64),
        np.array([2, 1], np.int32),
        np.array([1, 1], np.int32),
        np.array([1 << 63, 2, 3], np.uint64),
        {"latent": (np.array([1, -1, (1 << 32) - 2], np.int64), host_pages)},
    )


def test_an_open_reply_keeps_every_number() -> None:
    reply = open_reply(Opened(9, "runnable", 48, (table(host=True),), (), np.array([3, 1], np.int64)))
    (run,) = reply.spans
    assert (run.chain, run.first_span) == ("main", 2)
    assert unpack_u64(run.first_tokens, "").tolist() == [32, 64]
    assert unpack_u32(run.segments, "").tolist() == [2, 1]
    assert unpack_u32(run.interleave, "").tolist() == [1, 1]
    assert unpack_u64(run.uids, "").tolist() == [1 << 63, 2, 3]
    (pages,) = run.pages
    assert unpack_u32(pages.device_pages, "").tolist() == [1, NO_PAGE, (1 << 32) - 2]
    assert unpack_u32(pages.host_pages, "").tolist() == [4, NO_PAGE, 6]
    assert unpack_u32(reply.hot[0].pages, "").tolist() == [3, 1]
    assert (reply.state, reply.cached_tokens, reply.HasField("error")) == (pb.OpenReply.RUNNABLE, 48, False)


def test_a_refusal_keeps_its_figures() -> None:
    error = PoolExhausted("full", pool="g/hbm", needed=3, free=1, holder="h", retry_after_ns=5)
    back = error_from_proto(open_reply(Opened(9, "refused", error=error)).error)
    assert isinstance(back, PoolExhausted)
    assert vars(back) == vars(error)


def test_a_step_reply_with_everything() -> None:
    failed = RequestFailed(4, UnknownRequest("no request 4"))
    done = StepDone(
        6,
        (Opened(1, "waiting", 16),),
        (Grown(2, (table(host=False),), 3, PoolExhausted("full")), Grown(3, (), 1)),
        (ResidencyRows(2, "latent", np.array([0, 5]), np.array([-1, 7]), np.array([8, -1])),),
        (HotGrant(2, np.array([9], np.int64), (CopyPlan(12, Purpose.SCRUB, ()),)),),
        (failed,),
    )
    reply = step_reply(77, done, [Notice(1, ready=Opened(8, "runnable")), Notice(2, failed=failed), Notice(3)])
    assert (reply.number, reply.boot_id, reply.opened[0].state) == (6, 77, pb.OpenReply.WAITING)
    assert [(g.request_id, g.spans_kept, len(g.spans), g.HasField("error")) for g in reply.growth] == [
        (2, 3, 1, True), (3, 1, 0, False),
    ]  # fmt: skip
    (rows,) = reply.residency
    assert unpack_u32(rows.page_ordinals, "").tolist() == [0, 5]
    assert unpack_u32(rows.device_pages, "").tolist() == [NO_PAGE, 7]
    assert unpack_u32(rows.host_pages, "").tolist() == [8, NO_PAGE]
    assert unpack_u32(reply.hot[0].pages, "").tolist() == [9]
    result = StepResult({}, {}, {}, {2: reply.hot[0]}, {})
    assert [plan_from_proto(plan).purpose for plan in result.worker_plans] == [Purpose.SCRUB]
    assert reply.errors[0].error.reason == pb.UNKNOWN_REQUEST
    assert [(n.sequence, n.WhichOneof("what")) for n in reply.notices] == [(1, "ready"), (2, "failed"), (3, None)]
    assert notice_message(Notice(4, draining="why")).draining == "why"


def changed(**fields: object) -> pb.Namespace:
    made = pb.Namespace()
    made.CopyFrom(NAMESPACE)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_no_two_namespaces_share_keys() -> None:
    spellings = [
        ("u", NAMESPACE),
        ("v", NAMESPACE),
        ("u", changed(model="mr", weights_revision="")),
        ("u", changed(model="", weights_revision="mr")),
        ("u", changed(kv_format="g")),
        ("u", changed(key_hash="sha256_cbor")),
        ("u", changed(key_bytes=32)),
        ("u", changed(key_tokens=161)),
        ("u", changed(model="m14:weights_revision")),
    ]
    assert len({namespace_digest(*each) for each in spellings}) == len(spellings)
    assert namespace_digest("u", NAMESPACE) == namespace_digest("u", changed())


def test_registrations() -> None:
    request = pb.RegisterRequest(
        engine="e",
        group="g",
        namespace=NAMESPACE,
        layout_fingerprints=["a", "b"],
        ranks=2,
        probe_key=probe_key(NAMESPACE),
    )
    event = register_event(request, "u")
    assert (event.engine, event.group, event.key_bytes, event.key_tokens) == ("e", "g", 16, 16)
    assert (event.layout_fingerprints, event.ranks) == (("a", "b"), 2)
    assert event.namespace == namespace_digest("u", NAMESPACE)
    with pytest.raises(InvalidArgument, match="no name"):
        register_event(pb.RegisterRequest(namespace=NAMESPACE), "u")
    with pytest.raises(InvalidArgument, match="'md5' is not known here; use one of sha256, sha256_cbor"):
        register_event(pb.RegisterRequest(engine="e", namespace=changed(key_hash="md5")), "u")


def test_token_ids_are_taken_where_the_namespace_asks_for_them_and_must_be_those_of_every_key() -> None:
    asks = pb.Namespace()
    asks.CopyFrom(NAMESPACE)
    asks.token_ids = True
    ids = np.arange(48, dtype="<u4").tobytes()
    rows = pb.RequestVector(
        request_ids=pack_u64([7, 8, 9]), capacity_tokens=pack_u64([64] * 3), committed_tokens=pack_u64([64] * 3),
        rejected_tokens=pack_u32([0] * 3), new_key_counts=pack_u32([2, 0, 1]), new_keys=bytes(48), token_ids=ids,
    )  # fmt: skip
    opened = pb.OpenRequest(request_id=1, prompt_tokens=16, prompt_keys=bytes(16), prompt_token_ids=ids[:64])
    message = pb.StepRequest(requests=rows, open=[opened])
    event = step_event("e", message, asks)
    assert [row.token_ids for row in event.progress] == [ids[:128], b"", ids[128:]]
    assert event.opens[0].token_ids == ids[:64]
    unasked = step_event("e", message, NAMESPACE)
    assert all(row.token_ids == b"" for row in unasked.progress)
    assert unasked.opens[0].token_ids == b""
    message.requests.token_ids = ids[:-4]
    with pytest.raises(InvalidArgument, match="has 188 bytes; the namespace asks for the token ids of every key"):
        step_event("e", message, asks)
    lacks = pb.StoreRequest(reserve=pb.StoreReserve(keys=bytes(16), token_ids=ids[:60]))
    with pytest.raises(InvalidArgument, match="token_ids has 60 bytes"):
        store_event("e", lacks, asks)


def test_what_a_namespace_asks_for_keeps_it_apart() -> None:
    plain = namespace_digest("t", NAMESPACE)
    for changes in ({"token_ids": True}, {"hash_seed": "0"}, {"hash_seed": "told"}):
        other = pb.Namespace()
        other.MergeFrom(NAMESPACE)
        for name, value in changes.items():
            setattr(other, name, value)
        assert namespace_digest("t", other) != plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hash_seed": "0"}, "hash_seed"),
        ({"key_hash": "sha256_cbor", "key_bytes": 16}, "32 bytes each"),
    ],
)
def test_namespaces_of_vllms_keys_are_checked(changes: dict[str, object], said: str) -> None:
    namespace = pb.Namespace()
    namespace.CopyFrom(NAMESPACE)
    for name, value in changes.items():
        setattr(namespace, name, value)
    with pytest.raises(InvalidArgument, match=said):
        register_event(pb.RegisterRequest(engine="e", group="g", namespace=namespace, ranks=1), "t")
