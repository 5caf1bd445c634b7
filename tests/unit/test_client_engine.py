"""The engine client against a scripted server: numbering, notices, resend, typed errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvmanager import __version__
from kvmanager.clients.engine import EngineClient, RequestStep, refusal_pause_s
from kvmanager.clients.keys import probe_key
from kvmanager.errors import (
    Draining,
    InvalidArgument,
    LimitExceeded,
    NotReady,
    PoolExhausted,
    StaleEpoch,
    Suspect,
    UnknownRequest,
)
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import WIRE_VERSION

Script = Callable[[pb.StepRequest], list[pb.StepReply]]
NAMESPACE = pb.Namespace(model="m", kv_format="f", key_hash="sha256", key_bytes=16, key_tokens=16)


class Break(Exception):
    """The script asks for the stream to break with this status."""

    def __init__(self, code: grpc.StatusCode, error: pb.Error | None = None) -> None:
        super().__init__(code.name)
        self.code = code
        self.error = error


class Hang(Exception):
    """The script asks for silence."""


def fail(context: Any, code: grpc.StatusCode, error: pb.Error | None) -> None:
    if error is not None:
        context.set_trailing_metadata((("kvmanager-error-bin", error.SerializeToString()),))
    context.abort(code, error.message if error else "scripted")


class ScriptedServer(pb_grpc.EngineServicer, pb_grpc.PeerServicer):
    """Answers each step with what the script says; keeps all messages it saw."""

    def __init__(self) -> None:
        self.script: Script = lambda message: [pb.StepReply(number=message.number)]
        self.exports: list[pb.Ticket | pb.Error] = []
        self.limits = pb.Limits(message_bytes=1 << 20, requests_per_step=4)
        self.registered: list[pb.RegisterRequest] = []
        self.seen: list[pb.StepRequest] = []
        self.streams = 0
        self.ended = threading.Event()

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterReply:
        self.registered.append(request)
        if request.group != "prefill":
            fail(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                pb.Error(reason=pb.INVALID_ARGUMENT, message=f"no group {request.group!r}"),
            )
        return pb.RegisterReply(boot_id=7, epoch=3, limits=self.limits)

    def Session(self, request_iterator: Iterator[pb.StepRequest], context: Any) -> Iterator[pb.StepReply]:
        self.streams += 1
        for message in request_iterator:
            self.seen.append(message)
            try:
                yield from self.script(message)
            except Break as asked:
                if asked.code is grpc.StatusCode.OK:
                    return
                fail(context, asked.code, asked.error)
            except Hang:
                self.ended.wait(10)
                return

    def Export(self, request: pb.ExportRequest, context: Any) -> pb.ExportReply:
        assert request.epoch == 3
        answer = self.exports.pop(0)
        if isinstance(answer, pb.Error):
            fail(context, grpc.StatusCode.UNAVAILABLE, answer)
        return pb.ExportReply(ticket=answer)


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
def channel(server: ScriptedServer, tmp_path: Path) -> Iterator[grpc.Channel]:
    runner = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_EngineServicer_to_server(server, runner)
    pb_grpc.add_PeerServicer_to_server(server, runner)
    address = f"unix:{tmp_path}/s"
    runner.add_insecure_port(address)
    runner.start()
    with grpc.insecure_channel(address) as channel:
        yield channel
    server.ended.set()
    runner.stop(None).wait()


@pytest.fixture
def client(channel: grpc.Channel) -> Iterator[EngineClient]:
    client = make_client(channel)
    yield client
    client.close()


def make_client(channel: grpc.Channel, group: str = "prefill") -> EngineClient:
    return EngineClient(channel, engine="e", group=group, namespace=NAMESPACE, layout_fingerprints=["ab"], ranks=2)


def ready(sequence: int, request_id: int, state: pb.OpenReply.State.ValueType = pb.OpenReply.RUNNABLE) -> pb.Notice:
    error = pb.Error(reason=pb.EXHAUSTED, message="no room", retry_after_ns=5_000_000)
    refused = state == pb.OpenReply.REFUSED
    opened = pb.OpenReply(request_id=request_id, state=state, error=error if refused else None)
    return pb.Notice(sequence=sequence, ready=opened)


def test_registers_and_numbers_its_steps(client: EngineClient, server: ScriptedServer) -> None:
    rows = [RequestStep(5, 32, 16, 2, b"k" * 32), RequestStep(6, 20, 20)]
    client.step(requests=rows, fence=pb.Fence(attach_ids=b"a" * 8, values=b"b" * 8))
    client.step(closes=[pb.CloseRequest(request_id=5, reason=pb.FINISHED)])
    assert server.registered == [
        pb.RegisterRequest(
            engine="e",
            group="prefill",
            namespace=NAMESPACE,
            layout_fingerprints=["ab"],
            ranks=2,
            probe_key=probe_key(NAMESPACE),
            wire_version=WIRE_VERSION,
            client_version=__version__,
        )
    ]
    first, second = server.seen
    assert [(m.number, m.boot_id, m.epoch) for m in (first, second)] == [(1, 7, 3), (2, 7, 3)]
    vector = first.requests
    assert np.frombuffer(vector.request_ids, "<u8").tolist() == [5, 6]
    assert np.frombuffer(vector.capacity_tokens, "<u8").tolist() == [32, 20]
    assert np.frombuffer(vector.committed_tokens, "<u8").tolist() == [16, 20]
    assert np.frombuffer(vector.rejected_tokens, "<u4").tolist() == [2, 0]
    assert np.frombuffer(vector.new_key_counts, "<u4").tolist() == [2, 0]
    assert vector.new_keys == b"k" * 32
    assert first.fence.attach_ids == b"a" * 8
    assert not second.HasField("requests")


def test_reply_is_sorted_by_request(client: EngineClient, server: ScriptedServer) -> None:
    error = pb.Error(reason=pb.EXHAUSTED, message="full")
    server.script = lambda message: [
        pb.StepReply(
            number=message.number,
            opened=[pb.OpenReply(request_id=1, state=pb.OpenReply.WAITING)],
            growth=[pb.Growth(request_id=2, spans_kept=3), pb.Growth(request_id=3, error=error)],
            residency=[pb.Residency(request_id=2, page_class=name) for name in ("latent", "indexer")],
            hot=[pb.HotPages(request_id=2, pages=b"\1\0\0\0")],
            errors=[pb.RequestError(request_id=4, error=pb.Error(reason=pb.UNKNOWN_REQUEST, message="4"))],
        )
    ]
    result = client.step()
    assert result.opened[1].state == pb.OpenReply.WAITING
    assert result.growth[2].spans_kept == 3
    assert [rows.page_class for rows in result.residency[2]] == ["latent", "indexer"]
    assert result.hot[2].pages == b"\1\0\0\0"
    assert isinstance(result.errors[3], PoolExhausted)
    assert isinstance(result.errors[4], UnknownRequest)
    assert set(result.errors) == {3, 4}


def test_notice_seen_twice_counts_once_and_is_acknowledged(client: EngineClient, server: ScriptedServer) -> None:
    failed = pb.Notice(sequence=2, failed=pb.RequestError(request_id=8, error=pb.Error(reason=pb.TRANSFER_FAILED)))
    server.script = lambda message: [
        pb.StepReply(notices=[ready(1, 9)]),
        pb.StepReply(number=message.number, notices=[ready(1, 9), failed] if message.number < 3 else []),
    ]
    assert set(client.step().errors) == {8}
    assert client.wait_ready(9, 1.0).request_id == 9
    assert client.step().errors == {}
    with pytest.raises(NotReady, match="request 9"):
        client.wait_ready(9, 0.01)
    assert [message.notices_seen for message in server.seen] == [0, 2]


def test_waits_for_a_notice_that_comes_alone(client: EngineClient, server: ScriptedServer) -> None:
    go = threading.Event()

    def script(message: pb.StepRequest) -> Iterator[pb.StepReply]:
        yield pb.StepReply(number=message.number)
        go.wait(10)
        yield pb.StepReply(
            notices=[ready(1, 1), ready(2, 2, pb.OpenReply.REFUSED), pb.Notice(sequence=3, draining="x")]
        )

    server.script = script  # type: ignore[assignment]
    client.step()
    threading.Timer(0.05, go.set).start()
    assert client.wait_ready(1, 10).request_id == 1
    with pytest.raises(PoolExhausted, match="no room") as refused:
        client.wait_ready(2, 10)
    assert refusal_pause_s(refused.value) == 0.005
    assert client.draining == "x"


def test_take_ready_does_not_wait(client: EngineClient, server: ScriptedServer) -> None:
    server.script = lambda message: [
        pb.StepReply(number=message.number, notices=[ready(1, 1), ready(2, 2, pb.OpenReply.REFUSED)])
    ]
    client.step()
    assert client.take_ready(3) is None
    taken = client.take_ready(1)
    assert taken is not None
    assert taken.request_id == 1
    assert client.take_ready(1) is None
    with pytest.raises(PoolExhausted):
        client.take_ready(2)


def test_unanswered_step_is_sent_again_once_after_a_break(client: EngineClient, server: ScriptedServer) -> None:
    def script(message: pb.StepRequest) -> list[pb.StepReply]:
        if message.number == 2 and server.streams == 1:
            raise Break(grpc.StatusCode.UNAVAILABLE)
        return [pb.StepReply(number=message.number, growth=[pb.Growth(request_id=message.number)])]

    server.script = script
    client.step()
    assert list(client.step(requests=[RequestStep(1, 2, 1)]).growth) == [2]
    assert list(client.step().growth) == [3]
    assert [message.number for message in server.seen] == [1, 2, 2, 3]
    assert server.seen[1] == server.seen[2]
    assert server.streams == 2


def test_a_second_break_is_told(client: EngineClient, server: ScriptedServer) -> None:
    def script(_: pb.StepRequest) -> list[pb.StepReply]:
        error = pb.Error(reason=pb.SUSPECT, message="attach again")
        raise Break(grpc.StatusCode.UNAVAILABLE, error if server.streams == 2 else None)

    server.script = script
    with pytest.raises(Suspect, match="attach again"):
        client.step()
    assert server.streams == 2


@pytest.mark.parametrize(
    ("asked", "kind", "named"),
    [
        (
            Break(grpc.StatusCode.FAILED_PRECONDITION, pb.Error(reason=pb.STALE_EPOCH, message="epoch 3")),
            StaleEpoch,
            "epoch 3",
        ),
        (
            Break(grpc.StatusCode.UNAVAILABLE, pb.Error(reason=pb.DRAINING, message="going down")),
            Draining,
            "going down",
        ),
        (Break(grpc.StatusCode.OK), Suspect, "ended the session"),
    ],
)
def test_a_refused_step_is_not_sent_again(
    client: EngineClient, server: ScriptedServer, asked: Break, kind: type[Exception], named: str
) -> None:
    def script(_: pb.StepRequest) -> list[pb.StepReply]:
        raise asked

    server.script = script
    with pytest.raises(kind, match=named):
        client.step()
    assert server.streams == 1


def test_a_refused_step_gives_its_number_back(client: EngineClient, server: ScriptedServer) -> None:
    def refuse(_: pb.StepRequest) -> list[pb.StepReply]:
        raise Break(grpc.StatusCode.INVALID_ARGUMENT, pb.Error(reason=pb.INVALID_ARGUMENT, message="no"))

    client.step()
    good, server.script = server.script, refuse
    with pytest.raises(InvalidArgument):
        client.step()
    server.script = good
    client.step()
    assert [message.number for message in server.seen] == [1, 2, 2]


def test_silence_ends_with_a_typed_error(client: EngineClient, server: ScriptedServer) -> None:
    def script(_: pb.StepRequest) -> list[pb.StepReply]:
        raise Hang

    server.script = script
    with pytest.raises(NotReady, match="step 1"):
        client.step(timeout_s=0.05)
    server.ended.set()


def test_an_unanswered_step_is_sent_again_before_the_next(client: EngineClient, server: ScriptedServer) -> None:
    """The daemon may have counted it: another message of its number, or one that skips it, would be refused."""
    client.step()
    server.script = lambda _: []
    with pytest.raises(NotReady, match="step 2"):
        client.step(requests=[RequestStep(1, 2, 1)], timeout_s=0.05)
    server.script = lambda message: [pb.StepReply(number=message.number)]
    client.step()
    assert [message.number for message in server.seen] == [1, 2, 2, 3]
    assert server.seen[1] == server.seen[2]


def test_waiting_ends_with_the_stream(client: EngineClient, server: ScriptedServer) -> None:
    def script(message: pb.StepRequest) -> Iterator[pb.StepReply]:
        yield pb.StepReply(number=message.number)
        raise Break(grpc.StatusCode.OK)

    server.script = script  # type: ignore[assignment]
    client.step()
    with pytest.raises(Suspect):
        client.wait_ready(1, 10)


def test_limits_are_kept_before_anything_is_sent(client: EngineClient, server: ScriptedServer) -> None:
    with pytest.raises(LimitExceeded, match="5 requests"):
        client.step(requests=[RequestStep(i, 1, 0) for i in range(5)])
    with pytest.raises(LimitExceeded, match="at most 1048576 B"):
        client.step(opens=[pb.OpenRequest(request_id=1, prompt_keys=bytes(1 << 20))])
    assert client.step().errors == {}
    assert [message.number for message in server.seen] == [1]


def test_register_error_is_typed(channel: grpc.Channel) -> None:
    with pytest.raises(InvalidArgument, match="no group 'nosuch'"):
        make_client(channel, group="nosuch")


def test_export_asks_again_until_the_commit_was_seen(client: EngineClient, server: ScriptedServer) -> None:
    not_yet = pb.Error(reason=pb.NOT_READY, message="fence of request 4 has not passed")
    server.exports = [not_yet, not_yet, pb.Ticket(ticket_id="t")]
    assert client.export(4).ticket_id == "t"
    server.exports = [pb.Error(reason=pb.UNKNOWN_REQUEST, message="no request 4")]
    with pytest.raises(UnknownRequest, match="no request 4"):
        client.export(4)
    server.exports = [not_yet]
    with pytest.raises(NotReady, match="has not passed"):
        client.export(4, timeout_s=0.0)


def test_a_refusal_that_can_not_be_helped_has_no_pause() -> None:
    assert refusal_pause_s(PoolExhausted("never", needed=9, free=1)) is None
    assert refusal_pause_s(StaleEpoch("gone")) is None
