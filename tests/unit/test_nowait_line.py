"""Calls of a thread that does not wait: against the daemon's door, and a server that does what it is told."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmanager.clients.callqueue import Answer
from kvmanager.clients.leases import Questions
from kvmanager.clients.nowaitline import MOST_BYTES, NoWaitLine
from kvmanager.clients.vllm.bell import Bell
from kvmanager.clients.vllm.reads import Reads
from kvmanager.errors import KVError, NotReady, Unauthorized, UnknownLease
from kvmanager.framing import receive_frame, receive_json, send_frame, send_json
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET
from kvmanager.wire import MESSAGE_MAX_BYTES, error_to_proto

WAIT_S = 60.0
QUESTIONS = Questions(SimpleNamespace(boot_id=1, epoch=1))  # type: ignore[arg-type]


class Server:
    """One connection of `calls.sock`, on which a test says what is answered."""

    def __init__(self, path: Path, greeting: dict[str, Any]) -> None:
        self.attachment: Any = SimpleNamespace(runtime_dir=path, token="t")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(path / CALLS_SOCKET))
        self._listener.listen()
        self._greeting = greeting
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()

    def _greet(self) -> None:
        self.channel, _ = self._listener.accept()
        assert receive_json(self.channel)[0] == {"token": "t"}
        send_json(self.channel, self._greeting)

    def line(self, timeout_s: float = WAIT_S, failed: Callable[[KVError], None] = lambda _: None) -> NoWaitLine:
        made = NoWaitLine(self.attachment, timeout_s, failed)
        self._thread.join()
        return made

    def asked(self) -> pb.CacheCall:
        frame = receive_frame(self.channel, MESSAGE_MAX_BYTES)
        assert frame is not None
        return pb.CacheCall.FromString(frame.payload)

    def answer(self, **said: Any) -> None:
        send_frame(self.channel, pb.CacheAnswer(**said).SerializeToString())

    def close(self) -> None:
        self._thread.join()
        self.channel.close()
        self._listener.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, {"boot_id": 1})
    yield made
    made.close()


def lookup(line: NoWaitLine, tokens: int, keys: int = 1) -> Answer[int]:
    answer = line.ask(QUESTIONS.lookup(bytes(32 * keys), tokens))
    assert answer is not None
    return answer


def hear(line: NoWaitLine, answer: Answer[Any]) -> None:
    """Listens until the answer is there."""
    give_up = time.monotonic() + WAIT_S
    while not answer.done():
        assert time.monotonic() < give_up
        select.select([] if line.broken else [line], [], [], 0.05)
        line.hear()


def cached(tokens: int) -> dict[str, Any]:
    return {"lookup": pb.LookupReply(cached_tokens=tokens)}


def test_nothing_waits_and_answers_come_in_the_order_of_the_calls(server: Server) -> None:
    line = server.line()
    answers = [lookup(line, n) for n in range(3)]
    line.hear()
    assert not any(answer.done() for answer in answers)
    assert [server.asked().lookup.prompt_tokens for _ in range(3)] == [0, 1, 2]
    server.answer(**cached(10))
    hear(line, answers[0])
    assert [answer.done() for answer in answers] == [True, False, False]
    server.answer(**cached(11))
    server.answer(error=error_to_proto(UnknownLease("it ended")))
    hear(line, answers[2])
    assert [answer.result(0) for answer in answers[:2]] == [10, 11]
    with pytest.raises(UnknownLease, match="it ended"):
        answers[2].result(0)
    assert not line.broken
    line.close()


def test_an_answer_that_comes_in_pieces(server: Server) -> None:
    line = server.line()
    answer = lookup(line, 1)
    payload = pb.CacheAnswer(**cached(77)).SerializeToString()
    for byte in struct.pack("<II", len(payload), 0) + payload:
        assert not answer.done()
        server.channel.send(bytes([byte]))
        select.select([line], [], [])
        line.hear()
    assert answer.result(0) == 77
    line.close()


def test_who_is_told_of_failures(server: Server) -> None:
    told: list[KVError] = []
    line = server.line(failed=told.append)
    answers = [lookup(line, n) for n in range(2)]
    server.answer(error=error_to_proto(UnknownLease("no")))
    hear(line, answers[0])
    assert [type(error) for error in told] == [UnknownLease]
    server.channel.shutdown(socket.SHUT_RDWR)
    hear(line, answers[1])
    assert [type(error) for error in told] == [UnknownLease, NotReady]
    line.hear()
    assert len(told) == 2
    assert line.ask(QUESTIONS.lookup(b"", 1)) is None


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(lambda s: s.channel.shutdown(socket.SHUT_RDWR), id="the end"),
        pytest.param(lambda s: s.channel.send(b"\x10\0\0\0\0\0\0\0half"), id="some bytes"),
        pytest.param(lambda s: s.channel.send(struct.pack("<II", 1 << 31, 0)), id="too large a frame"),
        pytest.param(lambda s: s.channel.send(struct.pack("<II", 0, 3)), id="descriptors that do not come"),
        pytest.param(lambda s: send_frame(s.channel, b"\xff\xff\xff"), id="no CacheAnswer"),
        pytest.param(lambda s: [s.answer(**cached(n)) for n in range(3)], id="more answers than calls"),
    ],
)
def test_what_breaks_it_fails_what_was_asked(server: Server, said: Callable[[Server], object]) -> None:
    line = server.line()
    answers = [lookup(line, 1), lookup(line, 2)]
    said(server)
    give_up = time.monotonic() + WAIT_S
    while not line.broken:
        assert time.monotonic() < give_up
        line.hear()
        server.channel.close()  # behind half a frame
    assert all(answer.done() for answer in answers)
    if answers[0]._error is not None:
        with pytest.raises(NotReady):
            answers[0].result(0)


def test_an_answer_that_does_not_come_in_time_ends_it(server: Server) -> None:
    line = server.line(timeout_s=0.05)
    answer = lookup(line, 1)
    hear(line, answer)
    with pytest.raises(NotReady, match=r"within 0\.05 s"):
        answer.result(0)
    assert line.broken


def test_what_is_too_large_is_not_sent(server: Server) -> None:
    line = server.line()
    assert line.ask(QUESTIONS.lookup(bytes(MOST_BYTES), 1)) is None
    answer = lookup(line, 5)
    assert server.asked().lookup.prompt_tokens == 5
    assert not answer.done()
    line.close()


def test_a_daemon_that_reads_nothing_fills_the_socket_and_no_more(server: Server) -> None:
    line = server.line()
    answers = []
    while (answer := line.ask(QUESTIONS.lookup(bytes(MOST_BYTES - 64), 1))) is not None and not line.broken:
        answers.append(answer)
        assert len(answers) < 10_000
    assert len(answers) > 2
    server.channel.close()
    if not line.broken:
        hear(line, answers[-1])
    assert all(answer.done() for answer in answers)


def test_hanging_up_from_another_thread_ends_it_when_it_is_heard(server: Server) -> None:
    line = server.line()
    answer = lookup(line, 1)
    thread = threading.Thread(target=line.hang_up)
    thread.start()
    thread.join()
    assert not line.broken
    hear(line, answer)
    assert line.broken
    with pytest.raises(NotReady):
        answer.result(0)


def test_a_refused_greeting_is_raised(tmp_path: Path) -> None:
    server = Server(tmp_path, {"error": {"reason": "UNAUTHORIZED", "message": "no client holds this token"}})
    with pytest.raises(Unauthorized, match="no client"):
        server.line()
    server.close()


def test_without_a_daemon_there_is_no_line(tmp_path: Path) -> None:
    with pytest.raises(NotReady):
        NoWaitLine(SimpleNamespace(runtime_dir=tmp_path, token="t"), 1.0)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------- the two ways of a hook


class Queue:
    """Stands for the thread."""

    broken = False

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.closed = False

    def ask(self, make: Callable[[], Any]) -> Answer[Any]:
        self.asked.append(make().call.lookup.prompt_tokens)
        return Answer()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


def test_what_shall_not_be_sent_here_or_is_too_large_is_left_to_the_thread(server: Server, bell: Bell) -> None:
    queue = Queue()
    reads = Reads(server.line(), queue, QUESTIONS)  # type: ignore[arg-type]
    assert reads.adopt(bell)
    few = reads.ask(lambda questions: questions.lookup(bytes(32), 1), here=True)
    reads.ask(lambda questions: questions.lookup(bytes(32), 2), here=False)
    reads.ask(lambda questions: questions.lookup(bytes(MOST_BYTES), 4), here=True)
    assert (server.asked().lookup.prompt_tokens, queue.asked) == (1, [2, 4])
    server.answer(**cached(3))
    while not few.done():
        bell.wait(WAIT_S)
        reads.hear()
    assert few.result(0) == 3
    reads.close()
    assert reads.broken


@pytest.mark.parametrize("adopted", [False, True])
def test_one_that_is_over_is_not_adopted_and_closed_by_who_uses_it(
    server: Server, bell: Bell, adopted: bool
) -> None:
    line = server.line()
    reads = Reads(line, Queue(), QUESTIONS)  # type: ignore[arg-type]
    assert not adopted or reads.adopt(bell)
    reads.hang_up()
    assert line.broken is not adopted
    assert reads.adopt(bell) is adopted
    reads.close()
    assert line.broken
