"""Hand-offs that fail: each a typed error to the target's engine, and both nodes are as they were."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from nodes_support import (
    GROUP,
    PAGE_BYTES,
    SLAB_BYTES,
    SPAN,
    Node,
    decode_engine,
    decode_toml,
    device_pages,
    fill,
    kill_and_wait,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.errors import (
    InvalidArgument,
    KVError,
    LayoutMismatch,
    PeerUnreachable,
    StalePage,
    Unauthorized,
    UnknownLease,
)
from kvmanager.layout import GLM53, GLM53_TINY
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.transport.paths import PullPath
from kvmanager.wire import error_from_rpc

TENANT = f"uid {os.getuid()}"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[Node]:
    lease = "ticket_ttl_ms = 2000\ngrace_ms = 100"
    with node(tmp_path_factory.mktemp("source"), "prefill", prefill_toml, pages=64, lease=lease) as running:
        yield running


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("target"), "decode", decode_toml) as running:
        yield running


@pytest.fixture
def prefill(source: Node) -> Iterator[AttachedEngine]:
    engine = prefill_engine(source.runtime_dir)
    yield engine
    engine.close()
    source.wait_at_rest()
    assert list(source.admin.leases().leases) == []


@pytest.fixture
def decode(target: Node) -> Iterator[AttachedEngine]:
    engine = decode_engine(target.runtime_dir)
    yield engine
    engine.close()
    target.wait_at_rest()


def export(engine: AttachedEngine, request_id: int, seed: int, spans: int = 2) -> pb.Ticket:
    """A ticket on a request that was prefilled, committed and closed."""
    tokens = tokens_of(seed, spans * SPAN)
    opened = engine.open(open_of(request_id, tokens, growth=0))
    fill(engine, device_pages(opened), seed)
    engine.step([RequestStep(request_id, len(tokens), len(tokens))])
    ticket = engine.client.export(request_id)
    engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])
    return ticket


def hand_over(engine: AttachedEngine, request_id: int, seed: int, ticket: pb.Ticket, spans: int = 2) -> pb.OpenReply:
    """Opens with a ticket, and waits for the bytes or the error."""
    return engine.open(open_of(request_id, tokens_of(seed, spans * SPAN), ticket=ticket), timeout_s=10.0)


def close(engine: AttachedEngine, request_id: int) -> None:
    engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.ABORTED)])


def peer_calls(source: Node):
    """A second node's way in: a peer stub, and what closes it."""
    attachment = attach(source.runtime_dir, "peer", "thief")
    channel = grpc_channel(attachment)
    return pb_grpc.PeerStub(channel), lambda: (channel.close(), attachment.close())


def typed(method, request):
    try:
        return method(request)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def test_bytes_arrive_and_the_ticket_is_over(
    source: Node, target: Node, prefill: AttachedEngine, decode: AttachedEngine
) -> None:
    assert not target.admin.status().movers[0].agent_started, "an idle node starts no NIXL"
    ticket = export(prefill, 1, seed=1)
    assert ticket.kv_fingerprint == GLM53_TINY.fingerprint
    assert ticket.namespace.model == prefill.client.namespace.model
    wait_for(lambda: source.admin.status().movers[0].agent_started)
    (lease,) = source.admin.leases().leases
    assert (lease.lease_id, lease.holder, lease.tokens) == (ticket.ticket_id, "", 2 * SPAN)
    opened = hand_over(decode, 1, 1, ticket)
    assert opened.cached_tokens == 2 * SPAN
    # The latent rows of a source page are a prefix of it, and come as one page.
    memory = decode.workers.ranks[0].classes["latent"].device
    latent_bytes = GLM53_TINY.latent_page_bytes(16)
    sources = [rank.classes["kv"].device for rank in prefill.workers.ranks]
    pages = device_pages(opened, "latent")
    (path,) = target.admin.transfers().paths
    (mover,) = target.admin.status().movers
    assert [each.SerializeToString() for each in mover.pull_paths] == [path.SerializeToString()]
    assert path.chosen in {*map(str, PullPath)}
    assert path.ring_bytes_per_s + path.direct_bytes_per_s > 0
    wait_for(lambda: not source.admin.leases().leases)
    again = prefill.open(open_of(9, tokens_of(1, 2 * SPAN + 1), growth=0))
    for place, page in enumerate(pages.tolist()):
        at = int(device_pages(again)[place // 2]) * PAGE_BYTES
        expected = sources[place % 2][at : at + latent_bytes]
        assert (memory[page * SLAB_BYTES : page * SLAB_BYTES + latent_bytes] == expected).all(), place
    close(prefill, 9)
    close(decode, 1)
    with pytest.raises(UnknownLease, match="never given, released or expired"):
        hand_over(decode, 2, 2, pb.Ticket.FromString(ticket.SerializeToString()))


def test_what_the_target_has_already_is_not_pulled(
    source: Node, target: Node, prefill: AttachedEngine, decode: AttachedEngine
) -> None:
    """The ticket is given back at once."""
    handoffs = target.counters()["handoff"]
    ticket = export(prefill, 1, seed=1)
    assert hand_over(decode, 1, 1, ticket).cached_tokens == 2 * SPAN
    wait_for(lambda: not source.admin.leases().leases)
    assert target.counters()["handoff"] == handoffs
    close(decode, 1)


def test_a_ticket_that_nobody_gave(target: Node, prefill: AttachedEngine, decode: AttachedEngine) -> None:
    before = target.pools()
    ticket = export(prefill, 1, seed=3)
    unknown = pb.Ticket()
    unknown.CopyFrom(ticket)
    unknown.ticket_id = "0" * 32
    with pytest.raises(UnknownLease, match=f"no ticket '{'0' * 32}'"):
        hand_over(decode, 1, 3, unknown)
    target.wait_at_rest()
    assert target.pools() == before
    assert hand_over(decode, 1, 3, ticket).cached_tokens == 2 * SPAN
    close(decode, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_fingerprint": GLM53.fingerprint}, [GLM53.fingerprint, GLM53_TINY.fingerprint]),
        ({"kv_fingerprint": ""}, ["''", GLM53_TINY.fingerprint]),
        ({"model": "glm-9"}, ["model", "'glm-9'"]),
        ({"weights_revision": "other"}, ["weights_revision", "'other'", "'seed'"]),
    ],
)
def test_kv_of_another_kind_is_refused_before_any_address_is_known(
    source: Node,
    target: Node,
    prefill: AttachedEngine,
    decode: AttachedEngine,
    changes: dict[str, str],
    words: list[str],
) -> None:
    before = target.pools()
    ticket = export(prefill, 1, seed=4)
    foreign = pb.Ticket()
    foreign.CopyFrom(ticket)
    for name, value in changes.items():
        setattr(foreign if name == "kv_fingerprint" else foreign.namespace, name, value)
    with pytest.raises(LayoutMismatch) as failed:
        hand_over(decode, 1, 4, foreign)
    for word in words:
        assert word in str(failed.value)
    assert target.pools() == before
    decode.step()  # the session goes on
    stub, leave = peer_calls(source)
    typed(stub.Release, pb.ReleaseRequest(ticket_id=ticket.ticket_id))
    leave()


def test_a_ticket_that_another_node_took(
    source: Node, target: Node, prefill: AttachedEngine, decode: AttachedEngine
) -> None:
    before = target.pools()
    ticket = export(prefill, 1, seed=5)
    stub, leave = peer_calls(source)
    with pytest.raises(Unauthorized, match="is not of tenant 'them'"):
        typed(stub.Accept, pb.AcceptRequest(ticket=ticket, target_node="thief", tenant="them"))
    accepted = typed(stub.Accept, pb.AcceptRequest(ticket=ticket, target_node="thief", tenant=TENANT))
    assert accepted.agent_name
    (lease,) = source.admin.leases().leases
    assert "thief" in lease.holder
    with pytest.raises(InvalidArgument, match="was accepted by 'thief"):
        hand_over(decode, 1, 5, ticket)
    assert target.pools() == before
    typed(stub.Check, pb.CheckRequest(
        ticket_id=ticket.ticket_id, mover_incarnation=accepted.mover_incarnation, generations=accepted.generations
    ))  # fmt: skip
    typed(stub.Release, pb.ReleaseRequest(ticket_id=ticket.ticket_id))
    with pytest.raises(UnknownLease):
        typed(stub.Release, pb.ReleaseRequest(ticket_id=ticket.ticket_id))
    leave()


def test_a_ticket_that_nobody_accepts_expires_by_itself(
    source: Node, target: Node, prefill: AttachedEngine, decode: AttachedEngine
) -> None:
    """No call, no event: time alone. And nobody can use it afterwards."""
    expired = source.counters()["expired_ticket"]
    ticket = export(prefill, 1, seed=6)
    pinned = source.held()[f"{GROUP}/hbm"][-2]
    assert pinned == 2 * 2 * PAGE_BYTES
    time.sleep(2.5)
    wait_for(lambda: list(source.admin.leases().leases) == [])
    assert source.held()[f"{GROUP}/hbm"][-2] == 0
    assert source.counters()["expired_ticket"] == expired + 1
    before = target.pools()
    with pytest.raises(UnknownLease, match="prefill again"):
        hand_over(decode, 1, 6, ticket)
    assert target.pools() == before


def test_heartbeats_keep_a_ticket_alive(source: Node, prefill: AttachedEngine) -> None:
    ticket = export(prefill, 1, seed=7)
    stub, leave = peer_calls(source)
    for _ in range(8):
        time.sleep(0.3)
        assert list(typed(stub.Heartbeat, pb.HeartbeatRequest(ticket_ids=[ticket.ticket_id])).unknown_ids) == []
    typed(stub.Release, pb.ReleaseRequest(ticket_id=ticket.ticket_id))
    leave()


def test_our_mover_dies_during_a_pull(
    source: Node, target: Node, prefill: AttachedEngine, decode: AttachedEngine
) -> None:
    """The source is stopped, so the pull hangs in Accept; the mover that comes back must not run it."""
    before = target.pools()
    ticket = export(prefill, 1, seed=8, spans=4)
    daemon, mover = source.pid_of("daemon"), source.admin.status().movers[0].pid
    os.kill(mover, signal.SIGSTOP)
    os.kill(daemon, signal.SIGSTOP)
    try:
        result = decode.client.step(
            fence=decode.workers.fence(), opens=[open_of(1, tokens_of(8, 4 * SPAN), ticket=ticket)]
        )
        assert result.opened[1].state == pb.OpenReply.WAITING
        old = target.admin.status().movers[0].pid
        kill_and_wait(old)
        wait_for(lambda: target.admin.status().movers[0].pid not in (0, old))
        # Refused by now: these pages may be anybody's.
        with pytest.raises(KVError, match="mover died"):
            decode.client.wait_ready(1, 10.0)
        regions = list(decode.workers.ranks[0].regions.values())
        bytes_before = [memory.copy() for memory in regions]
    finally:
        os.kill(daemon, signal.SIGCONT)
        os.kill(mover, signal.SIGCONT)
    wait_for(lambda: not source.admin.leases().leases)  # the late Accept was answered, and the ticket given back
    for memory, was in zip(regions, bytes_before, strict=True):
        assert np.array_equal(memory, was)
    target.wait_at_rest()
    assert target.pools() == before
    fresh = export(prefill, 2, seed=8, spans=4)
    assert hand_over(decode, 3, 8, fresh, spans=4).cached_tokens == 4 * SPAN
    close(decode, 3)


def test_a_source_page_is_reused_under_its_reader(
    source: Node, target: Node, prefill: AttachedEngine, decode: AttachedEngine
) -> None:
    """The target stands still until the lease is over and its pages hold other bytes; its daemon finds out first."""
    before = target.pools()
    ticket = export(prefill, 1, seed=9, spans=4)
    mover, daemon = target.admin.status().movers[0].pid, target.pid_of("daemon")
    os.kill(mover, signal.SIGSTOP)
    try:
        result = decode.client.step(
            fence=decode.workers.fence(), opens=[open_of(1, tokens_of(9, 4 * SPAN), ticket=ticket)]
        )
        assert result.opened[1].state == pb.OpenReply.WAITING
        wait_for(lambda: [lease.holder for lease in source.admin.leases().leases] not in ([], [""]))
        os.kill(daemon, signal.SIGSTOP)  # nobody renews the lease
        try:
            wait_for(lambda: not source.admin.leases().leases)
            for request_id in range(2, 10):
                run_request(prefill, request_id, tokens_of(100 + request_id, 20 * SPAN), 100 + request_id)
        finally:
            os.kill(daemon, signal.SIGCONT)
        wait_for(lambda: "is given up: no ticket" in target.log())
        assert list(target.admin.transfers().transfers), "its read may be in flight: the mover has not said a word"
    finally:
        os.kill(mover, signal.SIGCONT)
    with pytest.raises(StalePage, match="not what was exported"):
        decode.client.wait_ready(1, 60.0)
    wait_for(lambda: target.pools() == before)
    decode.step()


@pytest.mark.parametrize("noticed", [True, False])
def test_the_source_dies_and_comes_back(tmp_path, target: Node, decode: AttachedEngine, noticed: bool) -> None:
    """Killed with a ticket out, and back with its memory: the ticket is good, and the pages are the same.

    `noticed`: a pull failed in between; otherwise our connection is one that the new daemon does not know.
    """
    before = target.pools()
    with node(tmp_path, "prefill", prefill_toml) as first:
        engine = prefill_engine(first.runtime_dir)
        seed = 20 if noticed else 30
        used, ticket = export(engine, 1, seed=seed), export(engine, 2, seed=12)
        assert hand_over(decode, 1, seed, used).cached_tokens == 2 * SPAN  # so there is a connection to lose
        close(decode, 1)
        kill_and_wait(first.pid_of("daemon"))
        if noticed:
            os.kill(first.process._process.pid, signal.SIGSTOP)  # nobody starts another daemon yet
            with pytest.raises(PeerUnreachable):
                hand_over(decode, 2, 12, ticket)
            os.kill(first.process._process.pid, signal.SIGCONT)
        wait_for(lambda: first.log().count("started the daemon") == 2)
        first.reopen()
        assert hand_over(decode, 2, 12, ticket).cached_tokens == 2 * SPAN
        close(decode, 2)
        engine.step()
        engine.close()
        engine = prefill_engine(first.runtime_dir)
        assert hand_over(decode, 3, seed + 1, export(engine, 1, seed + 1)).cached_tokens == 2 * SPAN
        close(decode, 3)
        last = export(engine, 2, seed=14)
        engine.close()
    with pytest.raises(PeerUnreachable, match=r"can't be reached|does not answer"):
        hand_over(decode, 4, 14, last)
    target.wait_at_rest()
    after = target.pools()
    assert sum(after["decode-0/hbm"][:1] + after["decode-0/hbm"][3:4]) == sum(
        before["decode-0/hbm"][:1] + before["decode-0/hbm"][3:4]
    )
