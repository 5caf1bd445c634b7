"""A running node is told nonsense: each time a typed error that names the value and the remedy, and nothing is lost."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from nodes_support import (
    GROUP,
    LAYOUT,
    RANKS,
    SPAN,
    WAIT_S,
    Node,
    keys_of,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    says,
    script,
    tokens_of,
    wait_for,
    wait_for_error,
)

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.daemon.probe import probe_key
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import (
    InvalidArgument,
    KVError,
    LayoutMismatch,
    LimitExceeded,
    PoolExhausted,
    StaleBoot,
    StaleEpoch,
    Unauthorized,
    UnknownLease,
    UnknownRequest,
)
from kvmanager.layout import GLM53_TINY, native_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.runtime_dir import GRPC_SOCKET
from kvmanager.wire import WIRE_VERSION, error_from_proto, error_from_rpc, pack_u32, pack_u64

REFUSED = """
import sys
from pathlib import Path
from nodes_support import LAYOUT, NAMESPACE
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.errors import KVError
try:
    AttachedEngine(Path(sys.argv[1]), "stranger", group="nowhere", namespace=NAMESPACE, layouts=[LAYOUT], ranks=2)
except KVError as error:
    print("refused:", error)
"""
"""An engine that names a group which the node does not have."""
CACHED = tokens_of(7, 2 * SPAN)
PAGES = 96
"""Enough that nothing is evicted over the whole module."""
NEW_SEEDS = itertools.count(1000)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("bad"), "prefill", prefill_toml, pages=PAGES) as running:
        yield running


@pytest.fixture
def engine(served: Node) -> Iterator[AttachedEngine]:
    """An engine on a node at rest; afterwards all that the node held before is there, and requests still work."""
    made = prefill_engine(served.runtime_dir)
    run_request(made, 900, CACHED, seed=7)
    served.wait_at_rest()
    before = served.pools()
    yield made
    made.close()
    served.wait_at_rest()
    assert served.pools() == before
    longer = np.concatenate((CACHED, tokens_of(next(NEW_SEEDS), SPAN)))
    newest = prefill_engine(served.runtime_dir)
    assert run_request(newest, 901, longer, seed=7) == len(CACHED)
    newest.close()
    served.wait_at_rest()


class Raw:
    """Messages that no client library would send, on a stream of their own each."""

    def __init__(self, engine: AttachedEngine) -> None:
        self._engine = engine
        self._stub = engine.client._engine_stub

    def step(self, **fields: object) -> pb.StepReply:
        """One message with the right number, boot id and epoch unless told otherwise; raises the typed error."""
        client = self._engine.client
        message = {"number": client._number + 1, "boot_id": client.boot_id, "epoch": client.epoch, **fields}
        try:
            return next(iter(self._stub.Session(iter([pb.StepRequest(**message)]))))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


def replaced(engine: AttachedEngine) -> None:
    """Waits until the engine's own stream was ended by a newer one of its epoch."""
    engine.client._stream._thread.join(WAIT_S)


def call(method: object, request: object) -> object:
    """A unary call whose failure is the typed error."""
    try:
        return method(request)
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def register(registered: AttachedEngine, **changes: object) -> None:
    """Registers again, with something changed."""
    fields = {
        "engine": "other",
        "group": GROUP,
        "namespace": NAMESPACE,
        "layout_fingerprints": [LAYOUT.fingerprint],
        "ranks": RANKS,
        **changes,
    }
    fields.setdefault("probe_key", probe_key(fields["namespace"]))
    call(registered.client._engine_stub.Register, pb.RegisterRequest(wire_version=WIRE_VERSION, **fields))


def namespace(**changes: object) -> pb.Namespace:
    made = pb.Namespace()
    made.CopyFrom(NAMESPACE)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


OTHER_LAYOUT = native_layout(GLM53_TINY, 32).fingerprint


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ({"layout_fingerprints": [OTHER_LAYOUT]}, LayoutMismatch, [OTHER_LAYOUT[:12], LAYOUT.fingerprint[:12]]),
        ({"layout_fingerprints": []}, LayoutMismatch, ["kv=" + LAYOUT.fingerprint[:12]]),
        ({"namespace": namespace(kv_format="fp4")}, LayoutMismatch, ["'fp4'", GLM53_TINY.name]),
        ({"namespace": namespace(key_hash="md5")}, InvalidArgument, ["'md5'", "sha256"]),
        ({"namespace": namespace(key_bytes=8)}, InvalidArgument, ["keys of 8 bytes", "16 and 32"]),
        ({"namespace": namespace(key_tokens=64)}, InvalidArgument, ["keys of 64 tokens", "16"]),
        ({"group": "decode"}, InvalidArgument, ["'decode'", GROUP]),
        ({"ranks": 3}, InvalidArgument, ["3 ranks", "2"]),
        ({"engine": ""}, InvalidArgument, ["engine"]),
        ({}, InvalidArgument, ["'engine'", "one engine a group"]),
    ],
    ids=lambda value: None if isinstance(value, (type, list)) else "-".join(value) or "second-engine",
)
def test_registrations_that_do_not_fit(
    engine: AttachedEngine, changes: dict[str, object], expected: type[KVError], words: list[str]
) -> None:
    with pytest.raises(expected) as failed:
        register(engine, **changes)
    for word in words:
        assert word in str(failed.value)


def test_a_refused_registration_is_in_the_log(served: Node) -> None:
    """Which engine, whose process, why. A process of its own: this one was refused so often that lines are left out."""
    with script(REFUSED, str(served.runtime_dir)) as refused:
        why = says(refused, "refused:")
        line = f"engine stranger of uid {os.getuid()} pid {refused.pid} is not registered: INVALID_ARGUMENT: {why}"
        wait_for(lambda: line in served.log(), lambda: f"no line {line!r} in\n{served.log()}")


def test_a_second_registration_makes_the_first_stale(served: Node, engine: AttachedEngine) -> None:
    newer = prefill_engine(served.runtime_dir)
    words = rf"epoch {engine.client.epoch} .*newest: {newer.client.epoch}.*register again"
    with pytest.raises(StaleEpoch, match=words):
        engine.step()
    with pytest.raises(StaleEpoch):
        engine.client.export(1)
    assert run_request(newer, 1, CACHED, seed=7) == len(CACHED) - 16
    newer.close()


def test_numbers_that_name_another_daemon_or_no_request(engine: AttachedEngine) -> None:
    raw = Raw(engine)
    with pytest.raises(StaleBoot, match=r"boot id 5 is not this daemon's.*register again"):
        raw.step(boot_id=5)
    with pytest.raises(StaleBoot):
        call(engine.client._engine_stub.Lookup, pb.LookupRequest(boot_id=5, epoch=engine.client.epoch))
    with pytest.raises(StaleEpoch, match="epoch 99"):
        raw.step(epoch=99)
    with pytest.raises(InvalidArgument, match="step 9 after 3: numbers rise by one"):
        raw.step(number=9)
    replaced(engine)
    result = engine.client.step(fence=engine.workers.fence(), requests=[RequestStep(41, 1, 1)])
    assert isinstance(result.errors[41], UnknownRequest)
    assert "no request 41" in str(result.errors[41])
    result = engine.client.step(
        fence=engine.workers.fence(), closes=[pb.CloseRequest(request_id=42, reason=pb.FINISHED)]
    )
    assert isinstance(result.errors[42], UnknownRequest)
    with pytest.raises(UnknownRequest):
        engine.client.export(43)


def test_rows_that_can_not_be(engine: AttachedEngine) -> None:
    """Of a running request: each row fails alone, and the request goes on."""
    tokens = tokens_of(8, SPAN + 3)
    engine.open(open_of(1, tokens))

    def row(**fields: object) -> KVError:
        step = RequestStep(**{"request_id": 1, "capacity_tokens": len(tokens), "committed_tokens": 0, **fields})
        return engine.client.step(fence=engine.workers.fence(), requests=[step]).errors[1]

    error = row(committed_tokens=2 * SPAN + 1)
    assert isinstance(error, InvalidArgument)
    assert f"committed_tokens {2 * SPAN + 1} outside 0" in str(error)
    assert f".. {2 * SPAN} (pages held)" in str(error)
    error = row(committed_tokens=1, new_keys=b"x" * 16)
    assert isinstance(error, InvalidArgument)
    assert "cover more than the 1 committed" in str(error)
    engine.step([RequestStep(1, len(tokens), 0)], closes=[pb.CloseRequest(request_id=1, reason=pb.ABORTED)])


def test_opens_that_can_not_be(engine: AttachedEngine) -> None:
    """Each is refused alone: the one beside it is served."""
    good = open_of(10, CACHED)
    short = open_of(11, tokens_of(9, SPAN))
    short.prompt_keys = short.prompt_keys[:-1]
    greedy = open_of(12, tokens_of(9, SPAN), growth=1 << 40)
    empty = pb.OpenRequest(request_id=13)
    twice = open_of(10, CACHED)
    result = engine.client.step(fence=engine.workers.fence(), opens=[good, short, greedy, empty])
    assert result.opened[10].state == pb.OpenReply.RUNNABLE
    for request_id, words in ((11, "31 key bytes"), (12, "admission.growth_cap_tokens"), (13, "at least 1")):
        opened = result.opened[request_id]
        assert opened.state == pb.OpenReply.REFUSED
        error = error_from_proto(opened.error)
        assert isinstance(error, InvalidArgument)
        assert words in str(error)
    opened = engine.client.step(fence=engine.workers.fence(), opens=[twice]).opened[10]
    assert "request 10 is open already" in opened.error.message
    engine.step(closes=[pb.CloseRequest(request_id=10, reason=pb.ABORTED)])


def test_a_request_larger_than_the_pool_is_never_asked_to_come_again(engine: AttachedEngine) -> None:
    with pytest.raises(PoolExhausted) as failed:
        engine.open(open_of(1, tokens_of(9, (PAGES + 1) * SPAN), growth=0))
    error = failed.value
    assert (error.pool, error.needed, error.retry_after_ns) == (f"{GROUP}/hbm", PAGES + 1, 0)
    assert 0 < error.free <= PAGES
    assert error.pool in str(error)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fence": pb.Fence(attach_ids=pack_u64([7001, 7002]), values=pack_u64([1, 1]))}, r"\[7001, 7002\]"),
        ({"fence": pb.Fence(attach_ids=pack_u64([1]))}, "1 attach_ids, 0 values"),
        ({"fence": pb.Fence(attach_ids=b"123")}, "fence.attach_ids"),
        ({"requests": pb.RequestVector(request_ids=pack_u64([1, 2]), capacity_tokens=pack_u64([1]))},
         "requests.capacity_tokens has 1 entries for 2"),
        ({"requests": pb.RequestVector(request_ids=b"12345")}, "requests.request_ids"),
        ({"requests": pb.RequestVector(
            request_ids=pack_u64([1]), capacity_tokens=pack_u64([1]), committed_tokens=pack_u64([1]),
            rejected_tokens=pack_u32([0]), new_key_counts=pack_u32([3]), new_keys=b"x" * 16)},
         "16 bytes for 3 keys"),
        ({"close": [pb.CloseRequest(request_id=1)]}, "FINISHED, ABORTED or RETRACTED"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_together(engine: AttachedEngine, fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Raw(engine).step(**fields)


def test_a_message_over_the_limit(engine: AttachedEngine) -> None:
    with pytest.raises(LimitExceeded, match=r"at most 67108864 B, split the step"):
        engine.client.step(opens=[pb.OpenRequest(request_id=1, prompt_keys=bytes(65 << 20))])
    # The client library stops it; so does the daemon, for one without those manners.
    attachment = attach(engine_dir(engine), "engine", "rude")
    with grpc.insecure_channel(
        f"unix:{attachment.grpc_path}", options=[("grpc.max_send_message_length", -1)]
    ) as channel:
        stub = pb_grpc.EngineStub(channel)
        with pytest.raises(LimitExceeded, match="67108864"):
            call(
                lambda request: stub.Lookup(request, metadata=(("kvmanager-token", attachment.token),)),
                pb.LookupRequest(keys=bytes(65 << 20)),
            )
    attachment.close()


def engine_dir(engine: AttachedEngine):
    """The runtime directory that the engine attached in."""
    return engine.workers.ranks[0]._attachment.grpc_path.parent


@pytest.mark.usefixtures("engine")
def test_callers_without_a_token_or_of_another_role(served: Node) -> None:
    with grpc.insecure_channel(f"unix:{served.runtime_dir / GRPC_SOCKET}") as channel:
        for method, request in (
            (pb_grpc.AdminStub(channel).Pools, pb.PoolsRequest()),
            (pb_grpc.EngineStub(channel).Register, pb.RegisterRequest()),
            (pb_grpc.PeerStub(channel).Accept, pb.AcceptRequest()),
        ):
            with pytest.raises(Unauthorized, match="attach on the node's attach socket first"):
                call(method, request)
            with pytest.raises(Unauthorized, match=r"attach on .*attach.sock first"):
                call(lambda each, m=method: m(each, metadata=(("kvmanager-token", "made-up"),)), request)
    attachment = attach(served.runtime_dir, "operator", "curious")
    channel = grpc_channel(attachment)
    for method, request, role in (
        (pb_grpc.EngineStub(channel).Register, pb.RegisterRequest(), "engine"),
        (pb_grpc.WorkerStub(channel).Attach, pb.AttachRequest(), "worker"),
        (pb_grpc.PeerStub(channel).Accept, pb.AcceptRequest(), "peer"),
        (pb_grpc.PeerStub(channel).Release, pb.ReleaseRequest(), "peer"),
    ):
        with pytest.raises(Unauthorized, match=rf"role 'operator' may not.*for {role}"):
            call(method, request)
    with pytest.raises(Unauthorized, match="role 'operator' may not"):
        call(lambda message: list(pb_grpc.EngineStub(channel).Session(iter([message]))), pb.StepRequest())
    channel.close()
    attachment.close()


def test_the_ranks_of_others(served: Node, engine: AttachedEngine) -> None:
    """Another process's attach: not its descriptors, not its end."""
    attachment = attach(served.runtime_dir, "worker", "thief")
    channel = grpc_channel(attachment)
    stub = pb_grpc.WorkerStub(channel)
    theirs = engine.workers.ranks[0].attach_id
    with pytest.raises(Unauthorized, match=f"attach {theirs} belongs to another process"):
        attachment.fetch_fds(theirs)
    with pytest.raises(Unauthorized, match=f"attach {theirs} belongs to another process"):
        call(stub.Detach, pb.DetachRequest(attach_id=theirs))
    with pytest.raises(UnknownLease, match="attach 12345"):
        attachment.fetch_fds(12345)
    with pytest.raises(InvalidArgument, match="rank 0 of engine 'engine' is attached already"):
        call(stub.Attach, pb.AttachRequest(engine="engine", epoch=engine.client.epoch, rank=0))
    with pytest.raises(InvalidArgument, match="rank 2 of engine 'engine', which has 2"):
        call(stub.Attach, pb.AttachRequest(engine="engine", epoch=engine.client.epoch, rank=2))
    with pytest.raises(StaleEpoch, match="'nobody'"):
        call(stub.Attach, pb.AttachRequest(engine="nobody", epoch=1, rank=0))
    channel.close()
    attachment.close()


@pytest.mark.usefixtures("engine")
def test_tickets_that_nobody_gave(served: Node) -> None:
    attachment = attach(served.runtime_dir, "peer", "elsewhere")
    channel = grpc_channel(attachment)
    stub = pb_grpc.PeerStub(channel)
    with pytest.raises(UnknownLease, match=r"no ticket 'x'.*prefill again"):
        call(stub.Accept, pb.AcceptRequest(ticket=pb.Ticket(ticket_id="x")))
    with pytest.raises(UnknownLease, match="no ticket x"):
        call(stub.Release, pb.ReleaseRequest(ticket_id="x"))
    assert list(call(stub.Heartbeat, pb.HeartbeatRequest(ticket_ids=["x"])).unknown_ids) == ["x"]
    assert not served.admin.status().movers[0].agent_started, "a ticket that does not exist starts no NIXL"
    channel.close()
    attachment.close()


def test_the_operator_asks_for_no_pool(served: Node) -> None:
    with pytest.raises(InvalidArgument, match=rf"no pool 'hbm'; this node has {GROUP}/hbm, {GROUP}/host"):
        served.admin.map("hbm")


def serve(tmp_path, text: str) -> subprocess.CompletedProcess[str]:
    """`kvmanager serve` with this configuration, which must end it."""
    path = tmp_path / "node.toml"
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "kvmanager.command.cli", "serve", "--config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_key_that_the_configuration_does_not_know(tmp_path) -> None:
    done = serve(tmp_path, prefill_toml(tmp_path / "node").replace("staging_bytes", "stageing_bytes"))
    assert done.returncode == 78
    assert "unknown key 'stageing_bytes' in [mover]; did you mean 'staging_bytes'?" in done.stderr + done.stdout
    assert not (tmp_path / "node" / "attach.sock").exists()


def test_a_pool_larger_than_memory(tmp_path) -> None:
    done = serve(tmp_path, prefill_toml(tmp_path / "node", pages=1 << 30))
    assert done.returncode == 78
    text = done.stderr + done.stdout
    assert "pool larger than memory" in text
    assert f"lower [[group]] '{GROUP}' host_bytes_per_rank" in text


def test_keys_of_another_width_are_other_keys(engine: AttachedEngine) -> None:
    """Lookup counts whole keys; a width that is not the namespace's finds nothing and harms nothing."""
    client = engine.client

    def cached(keys: bytes) -> int:
        request = pb.LookupRequest(boot_id=client.boot_id, epoch=client.epoch, keys=keys, prompt_tokens=len(CACHED))
        return int(call(client._engine_stub.Lookup, request).cached_tokens)

    keys = keys_of(CACHED)
    assert cached(keys) == len(CACHED)
    assert cached(np.frombuffer(keys, np.uint8).reshape(-1, 16)[:, :8].tobytes()) == 0
    assert cached(keys[:31]) == 16


def test_a_stream_that_breaks_a_rule_is_over_and_the_next_one_is_served(engine: AttachedEngine) -> None:
    raw = Raw(engine)
    with pytest.raises(InvalidArgument):
        raw.step(number=77)
    replaced(engine)
    error = wait_for_error(lambda: raw.step(boot_id=1), StaleBoot)
    assert "attach and register again" in str(error)
    assert run_request(engine, 5, CACHED, seed=7) == len(CACHED) - 16


def test_growth_without_end_is_exhausted_and_the_request_goes_on(served: Node) -> None:
    """It may take what is free and reclaimable: cached spans move to the host, so this test comes last."""
    engine = prefill_engine(served.runtime_dir)
    tokens = tokens_of(10, SPAN)
    engine.open(open_of(1, tokens))
    error = engine.client.step(fence=engine.workers.fence(), requests=[RequestStep(1, 1 << 62, 0)]).errors[1]
    assert isinstance(error, PoolExhausted), error
    assert error.pool == f"{GROUP}/hbm"
    engine.step([RequestStep(1, SPAN, SPAN)], closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
    served.wait_at_rest()
    assert run_request(engine, 2, tokens_of(11, (PAGES - 1) * SPAN), seed=11) == 0
    engine.close()
    served.wait_at_rest()
