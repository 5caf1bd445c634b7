"""Lease calls over their socket: who gets in, answers in order, typed errors, and what broken or silent means."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmanager.clients.callline import SteadyLine
from kvmanager.clients.callqueue import CallQueue
from kvmanager.clients.leases import Questions
from kvmanager.daemon.attach import CONNECTIONS_MAX
from kvmanager.errors import InvalidArgument, LimitExceeded, NotReady, StaleBoot, Suspect, Unauthorized, UnknownLease
from kvmanager.framing import receive_frame, receive_json, send_frame, send_json
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET
from kvmanager.services.calldoor import OF_ONE_CLIENT, CallDoor
from kvmanager.services.callers import Callers
from kvmanager.wire import MESSAGE_MAX_BYTES, error_from_proto, error_to_proto
from tests.calldaemon import CLIENT, TOKEN, WAIT_S, Daemon, attachment, calls_of, serving, tokens_told, until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with serving(tmp_path) as served:
        yield served


def test_calls_go_over_one_line_and_a_failed_one_does_not_end_it(daemon: Daemon) -> None:
    calls = calls_of(daemon)
    assert calls.lookup(b"", 7) == 7
    daemon.answered = lambda _call: pb.CacheAnswer(error=error_to_proto(UnknownLease("it ended")))
    with pytest.raises(UnknownLease, match="it ended"):
        calls.done(1)
    daemon.answered = lambda _call: pb.CacheAnswer(error=error_to_proto(StaleBoot("attach again")))
    with pytest.raises(StaleBoot, match="attach again"):
        calls.lookup(b"", 1)
    daemon.answered = tokens_told
    assert [calls.lookup(b"", n) for n in range(5)] == [0, 1, 2, 3, 4]
    assert (daemon.threads, daemon.asked) == (1, 8)
    calls.hang_up()
    until(lambda: daemon.threads == 0)


def test_threads_get_their_own_answers(daemon: Daemon) -> None:
    calls = calls_of(daemon)
    wrong: list[int] = []

    def ask(first: int) -> None:
        wrong.extend(n for n in range(first, first + 100) if calls.lookup(b"", n) != n)

    threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, daemon.asked) == ([], 400)


def test_a_line_that_broke_meanwhile_is_opened_anew_once(daemon: Daemon) -> None:
    calls = calls_of(daemon)
    assert calls.lookup(b"", 1) == 1
    daemon.stop()
    daemon.start()
    assert calls.lookup(b"", 2) == 2
    daemon.stop()
    for _ in range(2):
        with pytest.raises(NotReady, match="no node answers"):
            calls.lookup(b"", 3)
    daemon.start()
    assert calls.lookup(b"", 4) == 4


def test_a_silent_daemon_is_not_asked_again(daemon: Daemon) -> None:
    go_on = threading.Event()
    calls = calls_of(daemon, timeout_s=0.2)
    assert calls.lookup(b"", 1) == 1

    def slow(call: pb.CacheCall) -> pb.CacheAnswer:
        assert call.timeout_ns == 200_000_000
        go_on.wait(WAIT_S)
        return tokens_told(call)

    daemon.answered = slow
    with pytest.raises(NotReady, match=r"does not answer within 0\.2 s"):
        calls.lookup(b"", 2)
    assert daemon.asked == 2
    assert not daemon.here(), "who gave up is not waited for"
    daemon.answered = tokens_told
    assert calls.lookup(b"", 3) == 3, "the late answer is nobody's"
    go_on.set()
    until(lambda: daemon.threads == 1)


def test_questions_do_not_wait_for_each_other_s_answers(daemon: Daemon) -> None:
    go_on = threading.Event()

    def slow(call: pb.CacheCall) -> pb.CacheAnswer:
        go_on.wait(WAIT_S)
        return tokens_told(call)

    daemon.answered = slow
    heard: list[object] = []
    asked, questions = CallQueue(SteadyLine(attachment(daemon), WAIT_S), heard.append), Questions(CLIENT)
    answers = [asked.ask(lambda n=n: questions.lookup(b"", n)) for n in range(20)]  # type: ignore[misc]
    assert not any(answer.done() for answer in answers)
    assert daemon.here is not None
    go_on.set()
    assert [answer.result(WAIT_S) for answer in answers] == list(range(20))
    with pytest.raises(ZeroDivisionError):
        asked.ask(lambda: questions.lookup(b"", 1 // 0)).result(WAIT_S)
    daemon.answered = lambda _call: pb.CacheAnswer(error=error_to_proto(UnknownLease("it ended")))
    with pytest.raises(UnknownLease):
        asked.ask(lambda: questions.lookup(b"", 5)).result(WAIT_S)
    daemon.answered = tokens_told
    assert asked.ask(lambda: questions.lookup(b"", 5)).result(WAIT_S) == 5, "it outlives a bad question"
    until(lambda: len(heard) == 22)
    assert [error for error in heard if error is not None] == [heard[20]]
    asked.close()
    until(lambda: daemon.threads == 0)
    with pytest.raises(NotReady):
        asked.ask(lambda: questions.lookup(b"", 1)).result(WAIT_S)


def test_without_a_daemon_all_that_was_asked_fails_and_what_is_asked_later(daemon: Daemon) -> None:
    go_on = threading.Event()

    def slow(call: pb.CacheCall) -> pb.CacheAnswer:
        go_on.wait(WAIT_S)
        return tokens_told(call)

    daemon.answered = slow
    heard: list[object] = []
    asked, questions = CallQueue(SteadyLine(attachment(daemon), 0.1), heard.append), Questions(CLIENT)
    answers = [asked.ask(lambda: questions.lookup(b"", 1)) for _ in range(20)]
    for answer in answers:
        with pytest.raises(NotReady, match="does not answer"):
            answer.result(WAIT_S)
    with pytest.raises(NotReady):
        asked.ask(lambda: questions.lookup(b"", 1)).result(WAIT_S)
    until(lambda: len(heard) == 1)
    assert isinstance(heard[0], NotReady)
    go_on.set()


def test_who_does_not_belong_here_is_told_why(daemon: Daemon) -> None:
    def refused(kind: type[Exception], token: str, why: str) -> None:
        with pytest.raises(kind, match=why):
            calls_of(daemon, token=token).lookup(b"", 1)

    refused(Unauthorized, "x", "no client holds")
    refused(Unauthorized, "operator", "role 'operator' may not")
    daemon.uid += 1
    refused(Unauthorized, TOKEN, f"of a process of uid {daemon.uid}, not of uid {os.getuid()}")
    daemon.uid -= 1
    calls = calls_of(daemon)
    assert calls.lookup(b"", 1) == 1
    daemon.suspect = True
    with pytest.raises(Suspect, match="attach again"):
        calls.lookup(b"", 1)
    daemon.suspect = False
    assert calls.lookup(b"", 1) == 1, "the line is as good as before"


def _knock(daemon: Daemon) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(os.fspath(daemon.path / CALLS_SOCKET))  # with a time-out it would not wait for its turn
    channel.settimeout(WAIT_S)
    return channel


def _enter(daemon: Daemon) -> socket.socket:
    channel = _knock(daemon)
    send_json(channel, {"token": TOKEN})
    assert receive_json(channel) == ({"boot_id": 7}, ())
    return channel


@pytest.mark.parametrize(
    "hello",
    [b"{}", b'{"token": 1}', b'{"token": "x", "role": "engine"}', b'{"for": "session"}',
     b'{"token": "x", "for": "all"}', b'{"token": "x", "for": ["session"]}', b"[]", b"\xff", b""],
)  # fmt: skip
def test_what_is_no_greeting_is_refused(daemon: Daemon, hello: bytes) -> None:
    with _knock(daemon) as channel:
        send_frame(channel, hello)
        answer, _ = receive_json(channel)
        assert answer["error"]["reason"] == "INVALID_ARGUMENT"
        assert receive_frame(channel) is None
    until(lambda: daemon.threads == 0)


def _error(channel: socket.socket) -> Exception:
    frame = receive_frame(channel)
    assert frame is not None
    return error_from_proto(pb.CacheAnswer.FromString(frame.payload).error)


def test_descriptors_are_closed_and_refused(daemon: Daemon) -> None:
    ours, theirs = socket.socketpair()
    with ours, _enter(daemon) as channel:
        send_frame(channel, pb.CacheCall(lookup=pb.LookupRequest()).SerializeToString(), [theirs.fileno()])
        theirs.close()
        assert isinstance(_error(channel), InvalidArgument)
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b"", "nobody holds the other end"
        send_frame(channel, b"\xff\xff\xff")
        assert "are no CacheCall" in str(_error(channel))
        send_frame(channel, pb.CacheCall(lookup=pb.LookupRequest(prompt_tokens=3)).SerializeToString())
        frame = receive_frame(channel)
        assert frame is not None
        assert pb.CacheAnswer.FromString(frame.payload).lookup.cached_tokens == 3


def test_a_frame_that_is_too_large_ends_the_line_with_a_word(daemon: Daemon) -> None:
    with _enter(daemon) as channel:
        channel.sendall((MESSAGE_MAX_BYTES + 1).to_bytes(4, "little") + bytes(4))
        assert isinstance(_error(channel), LimitExceeded)
        assert receive_frame(channel) is None
    with _enter(daemon) as channel:
        channel.sendall(b"\x10")
    until(lambda: daemon.threads == 0)


def test_an_answer_that_is_too_large_is_an_error_and_the_line_goes_on(daemon: Daemon) -> None:
    sums = bytes(MESSAGE_MAX_BYTES + 1)
    daemon.answered = lambda _call: pb.CacheAnswer(acquire=pb.AcquireReply(sums=sums))
    calls = calls_of(daemon)
    with pytest.raises(LimitExceeded):
        calls.acquire(1, b"")
    daemon.answered = tokens_told
    assert calls.lookup(b"", 1) == 1


def test_connections_are_limited(daemon: Daemon) -> None:
    held = [_enter(daemon) for _ in range(OF_ONE_CLIENT)]
    with pytest.raises(LimitExceeded, match="with this token"):
        calls_of(daemon).lookup(b"", 1)
    until(lambda: daemon.threads == OF_ONE_CLIENT)
    silent = [_knock(daemon) for _ in range(CONNECTIONS_MAX - OF_ONE_CLIENT)]
    until(lambda: daemon.threads == CONNECTIONS_MAX)
    with pytest.raises(LimitExceeded, match="are open already"):
        calls_of(daemon).lookup(b"", 1)
    for channel in [*silent, held.pop()]:
        channel.close()
    until(lambda: daemon.threads == OF_ONE_CLIENT - 1)
    assert calls_of(daemon).lookup(b"", 1) == 1
    for channel in held:
        channel.close()


def test_sessions_pass_the_same_checks_and_have_a_limit_of_their_own(daemon: Daemon) -> None:
    served, go_on = threading.Semaphore(0), threading.Event()

    def serve(_channel: socket.socket, token: str) -> None:
        assert token == TOKEN
        served.release()
        go_on.wait(WAIT_S)

    assert daemon.door is not None
    daemon.door._serve_session = serve
    calls = _enter(daemon)

    def knock(token: str = TOKEN) -> tuple[socket.socket, dict[str, Any]]:
        channel = _knock(daemon)
        send_json(channel, {"token": token, "for": "session"})
        return channel, receive_json(channel)[0]

    held = [calls]
    for _ in range(OF_ONE_CLIENT):
        channel, said = knock()
        held.append(channel)
        assert said == {"boot_id": 7}
        assert served.acquire(timeout=WAIT_S)
    for token, reason in ((TOKEN, "LIMIT_EXCEEDED"), ("x", "UNAUTHORIZED"), ("operator", "UNAUTHORIZED")):
        channel, said = knock(token)
        held.append(channel)
        assert said["error"]["reason"] == reason
    daemon.uid += 1
    channel, said = knock()
    held.append(channel)
    assert f"of uid {daemon.uid}, not of uid {os.getuid()}" in said["error"]["message"]
    go_on.set()
    for channel in held:
        channel.close()


def test_who_says_nothing_is_let_go(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager.services.calldoor.HELLO_DEADLINE_S", 0.05)
    with _knock(daemon) as channel:
        assert channel.recv(1) == b""


def test_a_door_that_never_opened_closes(tmp_path: Path) -> None:
    CallDoor(tmp_path, 1, Callers(Daemon(tmp_path)), lambda *_: pb.CacheAnswer(), lambda *_: None).close()
    assert list(tmp_path.iterdir()) == []


def test_a_door_that_closes_ends_calls_that_wait(daemon: Daemon) -> None:
    calls = calls_of(daemon)
    began = threading.Event()

    def waits(call: pb.CacheCall) -> pb.CacheAnswer:
        began.set()
        until(lambda: not daemon.here())
        return tokens_told(call)

    daemon.answered = waits
    failed: list[Exception] = []

    def ask() -> None:
        try:
            calls.lookup(b"", 1)
        except NotReady as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(WAIT_S)
    daemon.stop()
    thread.join(WAIT_S)
    assert len(failed) == 1
    daemon.start()


def test_who_comes_while_the_door_closes_finds_nobody(daemon: Daemon) -> None:
    """It asks the next daemon then; that the door is full would be final."""
    door = daemon.door
    assert door is not None
    lock = door._lock

    class ClosesMeanwhile:
        def __enter__(self) -> None:
            lock.acquire()
            if threading.current_thread() is door._thread:  # a connection came in
                door._closed = True

        def __exit__(self, *_: object) -> None:
            lock.release()

    door._lock = ClosesMeanwhile()  # type: ignore[assignment]
    with pytest.raises(NotReady):
        calls_of(daemon).lookup(b"", 5)
    assert daemon.asked == 0
