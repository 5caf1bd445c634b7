"""Sessions as frames over calls.sock, from a client that no library would be: replies, refusals, limits and ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes_support import (
    ROWS,
    SPAN,
    Node,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    says,
    script,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attach import attach, grpc_channel, hear
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import EngineClient, RequestStep
from kvmanager.clients.sessionstream import CallStream, FrameStream, StreamEnd
from kvmanager.daemon.sessions import UNREAD_MAX_BYTES
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import InvalidArgument, KVError, LimitExceeded, StaleBoot, StaleEpoch, Suspect, Unauthorized
from kvmanager.framing import receive_frame, send_frame, send_json
from kvmanager.layout import GLM53_TINY
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET
from kvmanager.units import KIB, MIB
from kvmanager.wire import MESSAGE_MAX_BYTES, error_from_proto
from tests.integration import nodes_support

WAIT_S = 60.0
IDLE = """
import sys
from pathlib import Path
from nodes_support import *
engine = prefill_engine(Path(sys.argv[1]), "stopped")
engine.step()
print("steps", flush=True)
sys.stdin.readline()
engine.step()
print("goes on", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Node]:
    quick = f"""
[fence]
action = "hold"
ping_ms = 200
silence_ms = 400
[[group]]
name = "others"
kind = "sharded"
format = "{GLM53_TINY.name}"
ranks = 2
page_rows = {ROWS}
interleave = 1
hbm_bytes_per_rank = "1 MiB"
host_bytes_per_rank = "1 MiB"
"""
    with node(tmp_path_factory.mktemp("frames"), "frames", prefill_toml, pages=64, more=quick) as running:
        yield running


@pytest.fixture
def engine(served: Node) -> Iterator[AttachedEngine]:
    made = prefill_engine(served.runtime_dir)
    yield made
    made.close()
    served.wait_at_rest()


class Raw:
    """A connection for an engine's session."""

    def __init__(self, served: Node, engine: AttachedEngine, token: str | None = None) -> None:
        self.channel = socket.socket(socket.AF_UNIX)
        self.channel.connect(os.fspath(served.runtime_dir / CALLS_SOCKET))
        self.channel.settimeout(WAIT_S)
        self._client = engine.client
        stream = engine.client._open_stream.args[0]  # type: ignore[attr-defined]
        send_json(self.channel, {"token": stream.token if token is None else token, "for": "session"})
        try:
            hear(self.channel)
        except KVError:
            self.channel.close()
            raise

    def send(self, number: int, **fields: object) -> None:
        known = {"number": number, "boot_id": self._client.boot_id, "epoch": self._client.epoch}
        send_frame(self.channel, pb.StepRequest(**{**known, **fields}).SerializeToString())  # type: ignore[arg-type]

    def read(self) -> pb.StepReply | None:
        """The next one that is no ping, which is answered; None: it was closed without a word."""
        while (frame := receive_frame(self.channel, MESSAGE_MAX_BYTES)) is not None:
            if frame.payload:
                return pb.StepReply.FromString(frame.payload)
            send_frame(self.channel, b"")
        return None

    def end(self) -> KVError | None:
        """How the daemon ends it, with nothing before."""
        reply = self.read()
        assert reply is not None
        assert reply.HasField("end"), reply
        assert receive_frame(self.channel) is None
        return error_from_proto(reply.end) if reply.end.reason else None


@pytest.fixture
def raw(served: Node, engine: AttachedEngine) -> Iterator[Raw]:
    made = Raw(served, engine)
    yield made
    made.channel.close()


def anonymous_bytes(served: Node) -> int:
    """Memory of the daemon itself."""
    text = Path(f"/proc/{served.pid_of('daemon')}/status").read_text(encoding="ascii")
    return int(text.partition("RssAnon:")[2].split()[0]) * KIB


def state_of(served: Node, name: str) -> str:
    return {engine.engine: engine.state for engine in served.admin.status().engines}[name]


def test_both_ways_give_the_same_replies(served: Node) -> None:
    said = []
    for local in (True, False):
        attachment = attach(served.runtime_dir, "engine", "engine")
        with grpc_channel(attachment) as channel:
            client = EngineClient(
                channel, attachment=attachment if local else None, engine="engine", group=nodes_support.GROUP,
                namespace=NAMESPACE, layout_fingerprints=[nodes_support.LAYOUT.fingerprint], ranks=nodes_support.RANKS,
            )  # fmt: skip
            answers = [client.step(), client.step(requests=[RequestStep(9, SPAN, 0)])]
            with pytest.raises(InvalidArgument, match="attach all before opening") as refused:
                client.step(opens=[open_of(1, tokens_of(1, SPAN))])
            answers.append(client.step(closes=[pb.CloseRequest(request_id=5, reason=pb.FINISHED)]))
            told = [{number: str(error) for number, error in answer.errors.items()} for answer in answers]
            said.append((told, str(refused.value).replace(f"epoch {client.epoch}", "")))
            assert isinstance(client._stream, FrameStream if local else CallStream)
            client.close()
            assert client._stream.end == StreamEnd()
        attachment.close()
        served.wait_at_rest()
    assert said[0] == said[1]
    assert set(said[0][0][1]) == {9}


def test_what_was_sent_is_answered_before_the_end_in_order(raw: Raw) -> None:
    for number in range(1, 20):
        raw.send(number)
    raw.channel.shutdown(socket.SHUT_WR)
    replies = [raw.read() for _ in range(19)]
    assert [reply.number for reply in replies if reply is not None] == list(range(1, 20))
    assert raw.end() is None


def test_a_first_message_that_is_none_is_refused(served: Node, engine: AttachedEngine) -> None:
    def refused(kind: type[Exception], payload: bytes) -> None:
        raw = Raw(served, engine)
        with raw.channel:
            send_frame(raw.channel, payload)
            assert isinstance(raw.end(), kind)

    boot_id, epoch = engine.client.boot_id, engine.client.epoch
    refused(InvalidArgument, b"\xff\xff\xff")
    refused(StaleBoot, pb.StepRequest(number=1, boot_id=boot_id + 1, epoch=epoch).SerializeToString())
    refused(StaleEpoch, pb.StepRequest(number=1, boot_id=boot_id, epoch=epoch + 1).SerializeToString())
    engine.step()


def test_a_token_of_nobody_and_one_of_another_engine_are_refused(served: Node, engine: AttachedEngine) -> None:
    with pytest.raises(Unauthorized):
        Raw(served, engine, token="x" * 64)
    other = attach(served.runtime_dir, "engine", "other")
    raw = Raw(served, engine, token=other.token)
    with raw.channel:
        raw.send(1)
        assert isinstance(raw.end(), StaleEpoch)
    other.close()
    operator = attach(served.runtime_dir, "operator", "other")
    with pytest.raises(Unauthorized, match="operator"):
        Raw(served, engine, token=operator.token)
    operator.close()


def test_a_second_epoch_in_a_stream_ends_it(raw: Raw, engine: AttachedEngine) -> None:
    raw.send(1)
    raw.send(2, epoch=engine.client.epoch + 1)
    reply = raw.read()
    assert reply is not None
    assert reply.number == 1
    assert "open a stream for each epoch" in str(raw.end())


def test_a_frame_that_is_too_large_ends_it_with_a_word(raw: Raw) -> None:
    raw.channel.sendall(struct.pack("<II", MESSAGE_MAX_BYTES + 1, 0))
    assert isinstance(raw.end(), LimitExceeded)


def test_descriptors_are_refused_and_closed(raw: Raw) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        send_frame(raw.channel, b"", [theirs.fileno()])
        theirs.close()
        assert isinstance(raw.end(), InvalidArgument)
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b"", "nobody holds the other end"


def test_who_is_idle_and_answers_pings_stays(served: Node, raw: Raw) -> None:
    raw.send(1)
    pings = 0
    while pings < 5:
        frame = receive_frame(raw.channel)
        assert frame is not None
        if not frame.payload:
            send_frame(raw.channel, b"")
            pings += 1
    assert state_of(served, "engine") == "attached"
    # And one that answers none is thrown out without a word: a client that comes back must see a broken connection.
    frames = iter(lambda: receive_frame(raw.channel), None)
    assert all(not frame.payload for frame in frames)
    wait_for(lambda: state_of(served, "engine") == "suspect")


def test_who_does_not_read_is_suspect_and_others_are_served(served: Node, engine: AttachedEngine, raw: Raw) -> None:
    """What waits for it is bounded: it sends until the daemon takes no more, and loses its connection."""
    closes = [pb.CloseRequest(request_id=number, reason=pb.FINISHED) for number in range(100)]  # of nothing: all fail
    fence = engine.workers.fence()
    other = AttachedEngine(
        served.runtime_dir, "other", group="others", namespace=NAMESPACE, layouts=[nodes_support.LAYOUT], ranks=2
    )
    before = anonymous_bytes(served)
    sent = 0
    with contextlib.suppress(KVError):
        while sent < 100_000:
            raw.send(sent + 1, fence=fence, close=closes)
            sent += 1
            if sent % 100 == 0:
                served.admin.status()
                other.step()
    assert sent < 100_000
    grown = anonymous_bytes(served) - before
    print(f"{sent} steps unread: the daemon grew by {grown / MIB:.1f} MiB")
    assert grown < 2 * UNREAD_MAX_BYTES
    assert not other.step().errors
    other.close()
    wait_for(lambda: state_of(served, "engine") == "suspect", lambda: f"{sent} steps")
    replies = []
    with contextlib.suppress(KVError):
        while (reply := raw.read()) is not None:
            replies.append(reply)
    numbers = [reply.number for reply in replies if not reply.HasField("end")]
    assert numbers == list(range(1, len(numbers) + 1)), "what was sent before came whole and in order"
    ends = [error_from_proto(reply.end) for reply in replies[len(numbers) :]]
    assert all(isinstance(error, Suspect) for error in ends), ends


def test_who_gives_signs_of_life_and_reads_nothing_loses_its_connection(
    served: Node, engine: AttachedEngine, raw: Raw
) -> None:
    """Too few replies to be too many unread ones, and more than its socket takes: it is broken off by time alone."""
    closes = [pb.CloseRequest(request_id=number, reason=pb.FINISHED) for number in range(100)]
    fence = engine.workers.fence()
    with contextlib.suppress(KVError):
        for number in range(1, 101):  # on a busy machine its time is over before all are sent
            raw.send(number, fence=fence, close=closes)
        while True:
            send_frame(raw.channel, b"")
            served.admin.status()
    wait_for(lambda: state_of(served, "engine") == "suspect")
    replies = []
    with contextlib.suppress(KVError):
        while (reply := raw.read()) is not None:
            replies.append(reply)
    assert [reply.number for reply in replies] == list(range(1, len(replies) + 1))
    assert 0 < len(replies) < 100, "the socket took all of them: nothing was proved"


def test_a_stopped_process_is_suspect_and_goes_on_when_it_wakes(served: Node) -> None:
    with script(IDLE, str(served.runtime_dir)) as process:
        says(process, "steps")
        assert state_of(served, "stopped") == "attached"
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: state_of(served, "stopped") == "suspect")
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        says(process, "goes on")
        assert state_of(served, "stopped") == "attached"
    served.wait_at_rest()


def test_a_killed_daemon_is_replaced_in_the_middle_of_a_session(served: Node, engine: AttachedEngine) -> None:
    """The session goes on, with its numbers and pages, and another connection."""
    tokens = tokens_of(3, 2 * SPAN)
    opened = engine.open(open_of(1, tokens))
    before = engine.client._stream
    os.kill(served.pid_of("daemon"), signal.SIGKILL)
    result = engine.step([RequestStep(1, len(tokens) + 1, len(tokens))])
    assert not result.errors
    after = engine.client._stream
    assert isinstance(after, FrameStream)
    assert after is not before
    assert before is not None
    assert before.end.lost
    assert opened.spans
    engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
    assert engine.client._number == 3
    served.reopen()
