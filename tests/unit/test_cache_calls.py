"""The stream of cache calls: answers in order, typed errors on it, and what a broken or silent one means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from kvmanager.clients.callstream import CallStream
from kvmanager.clients.leases import LeaseCalls, Questions
from kvmanager.errors import NotReady, StaleBoot, UnknownLease
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import abort_with, error_to_proto

WAIT_S = 60.0
Answered = Callable[[pb.CacheCall, grpc.ServicerContext], pb.CacheAnswer]


class Door(pb_grpc.EngineServicer):
    """Answers as the test says. streams: how many were opened."""

    def __init__(self) -> None:
        self.streams = 0
        self.answered: Answered = lambda call, _context: _tokens(call)

    def CacheCalls(
        self, request_iterator: Iterator[pb.CacheCall], context: grpc.ServicerContext
    ) -> Iterator[pb.CacheAnswer]:
        self.streams += 1
        for call in request_iterator:
            yield self.answered(call, context)


def _tokens(call: pb.CacheCall) -> pb.CacheAnswer:
    return pb.CacheAnswer(lookup=pb.LookupReply(cached_tokens=call.lookup.prompt_tokens))


def _once(go_on: threading.Event) -> Answered:
    """Answers when the test says."""

    def answer(call: pb.CacheCall, _context: grpc.ServicerContext) -> pb.CacheAnswer:
        go_on.wait(WAIT_S)
        return _tokens(call)

    return answer


@pytest.fixture
def door(tmp_path: Path) -> Iterator[tuple[Door, LeaseCalls]]:
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = Door()
    pb_grpc.add_EngineServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{tmp_path / 's'}")
    server.start()
    client = SimpleNamespace(boot_id=1, epoch=1)
    with grpc.insecure_channel(f"unix:{tmp_path / 's'}") as channel:
        yield servicer, LeaseCalls(channel, client, timeout_s=30.0)  # type: ignore[arg-type]
    server.stop(0).wait()


def test_calls_go_over_one_stream_and_a_failed_one_does_not_end_it(door: tuple[Door, LeaseCalls]) -> None:
    servicer, calls = door
    assert calls.lookup(b"", 7) == 7
    servicer.answered = lambda _call, _context: pb.CacheAnswer(error=error_to_proto(UnknownLease("it ended")))
    with pytest.raises(UnknownLease, match="it ended"):
        calls.done(1)
    servicer.answered = lambda call, _context: _tokens(call)
    assert [calls.lookup(b"", n) for n in range(5)] == [0, 1, 2, 3, 4]
    assert servicer.streams == 1


def test_threads_get_their_own_answers(door: tuple[Door, LeaseCalls]) -> None:
    _, calls = door
    wrong: list[int] = []

    def ask(first: int) -> None:
        wrong.extend(n for n in range(first, first + 100) if calls.lookup(b"", n) != n)

    threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_stream_that_broke_meanwhile_is_opened_anew_once(door: tuple[Door, LeaseCalls]) -> None:
    servicer, calls = door
    assert calls.lookup(b"", 1) == 1
    left = [1]

    def breaks(call: pb.CacheCall, context: grpc.ServicerContext) -> pb.CacheAnswer:
        if left[0]:
            left[0] -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return _tokens(call)

    servicer.answered = breaks
    assert calls.lookup(b"", 2) == 2
    assert servicer.streams == 2
    left[0] = 9
    with pytest.raises(NotReady, match="UNAVAILABLE"):
        calls.lookup(b"", 3)
    assert left[0] == 7, "asked twice, and no more"
    with pytest.raises(NotReady, match="UNAVAILABLE"):
        calls.lookup(b"", 3)
    assert left[0] == 6, "on a new stream once"


def test_questions_do_not_wait_for_each_other_s_answers(door: tuple[Door, LeaseCalls]) -> None:
    servicer, calls = door
    go_on = threading.Event()
    servicer.answered = _once(go_on)
    heard: list[object] = []
    stream, questions = CallStream(calls._stub, WAIT_S, heard.append), Questions(calls._client)
    answers = [stream.ask(lambda n=n: questions.lookup(b"", n)) for n in range(20)]  # type: ignore[misc]
    assert not any(answer.done() for answer in answers)
    go_on.set()
    assert [answer.result(WAIT_S) for answer in answers] == list(range(20))
    with pytest.raises(ZeroDivisionError):
        stream.ask(lambda: questions.lookup(b"", 1 // 0)).result(WAIT_S)
    assert stream.ask(lambda: questions.lookup(b"", 5)).result(WAIT_S) == 5, "the stream outlives a bad question"
    assert heard == [None] * 21
    stream.close()


def test_a_stream_that_ends_fails_all_that_was_asked_and_what_is_asked_later(door: tuple[Door, LeaseCalls]) -> None:
    servicer, calls = door
    go_on = threading.Event()
    servicer.answered = _once(go_on)
    heard: list[object] = []
    stream, questions = CallStream(calls._stub, 0.05, heard.append), Questions(calls._client)
    answers = [stream.ask(lambda: questions.lookup(b"", 1)) for _ in range(20)]
    give_up = time.monotonic() + WAIT_S
    while not stream.broken and time.monotonic() < give_up:
        stream.end_if_overdue()
        time.sleep(0.01)
    for answer in answers:
        with pytest.raises(NotReady, match="CANCELLED"):
            answer.result(WAIT_S)
    with pytest.raises(NotReady):
        stream.ask(lambda: questions.lookup(b"", 1)).result(WAIT_S)
    wait = time.monotonic() + WAIT_S
    while len(heard) < 1 and time.monotonic() < wait:
        time.sleep(0.01)
    assert [type(error) for error in heard] == [NotReady]
    go_on.set()


def test_the_daemon_s_word_at_the_stream_s_end_is_typed(door: tuple[Door, LeaseCalls]) -> None:
    servicer, calls = door

    def stale(_call: pb.CacheCall, context: grpc.ServicerContext) -> pb.CacheAnswer:
        abort_with(context, StaleBoot("attach again"))

    servicer.answered = stale
    with pytest.raises(StaleBoot, match="attach again"):
        calls.lookup(b"", 1)


def test_an_answer_that_comes_late_is_nobody_s(door: tuple[Door, LeaseCalls]) -> None:
    servicer, calls = door
    calls._timeout_s = 0.2
    said = threading.Event()

    def slow(call: pb.CacheCall, _context: grpc.ServicerContext) -> pb.CacheAnswer:
        said.wait(30)
        return _tokens(call)

    servicer.answered = slow
    with pytest.raises(NotReady, match="does not answer"):
        calls.lookup(b"", 1)
    servicer.answered = lambda call, _context: _tokens(call)
    calls._timeout_s = 30.0
    said.set()
    time.sleep(0.05)
    assert calls.lookup(b"", 2) == 2
    assert servicer.streams == 2
