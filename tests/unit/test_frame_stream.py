"""The client's end of a session over frames, against a daemon that is a script: the test itself, byte by byte."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvmanager.clients import sessionstream
from kvmanager.clients.sessionstream import FrameStream, Stream, StreamEnd
from kvmanager.errors import DaemonError, InvalidArgument, LimitExceeded, StaleBoot, Suspect
from kvmanager.framing import error_frame, receive_frame, receive_json, send_frame, send_json
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET
from kvmanager.wire import MESSAGE_MAX_BYTES, error_to_proto

WAIT_S = 60.0
BEYOND = (1 << 31) - 1
"""A reason that no version has yet."""
LARGE = pb.StepRequest(number=7, open=[pb.OpenRequest(prompt_keys=bytes(8 << 20))])
"""More than any socket takes at once."""
GREETED = {"boot_id": 1}


class Line:
    """A stream, and the daemon's end of it, which nobody serves but the test."""

    def __init__(self, runtime_dir: Path, listener: socket.socket | None) -> None:
        self.replies: list[pb.StepReply] = []
        self.ended: list[Stream] = []
        self._over = threading.Event()
        self._changed = threading.Condition()
        attachment = SimpleNamespace(runtime_dir=runtime_dir, token="its token")
        self.stream = FrameStream(attachment, self._deliver, self._end)  # type: ignore[arg-type]
        if listener is not None:
            self.daemon, _ = listener.accept()
            self.daemon.settimeout(WAIT_S)

    def _deliver(self, reply: pb.StepReply) -> None:
        with self._changed:
            self.replies.append(reply)
            self._changed.notify_all()

    def _end(self, stream: Stream) -> None:
        self.ended.append(stream)
        self._over.set()

    def heard(self, count: int) -> list[int]:
        """Numbers of the replies, once there are so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.replies) >= count, WAIT_S)
            return [reply.number for reply in self.replies]

    def end(self) -> StreamEnd:
        """Why it is over; it says so once."""
        assert self._over.wait(WAIT_S)
        assert self.ended == [self.stream]
        return self.stream.end

    # ---------------------------------------------------------------------------- what the daemon does

    def greet(self) -> None:
        assert receive_json(self.daemon) == ({"token": "its token", "for": "session"}, ())
        send_json(self.daemon, GREETED)

    def reply(self, number: int) -> None:
        send_frame(self.daemon, pb.StepReply(number=number).SerializeToString())

    def say_end(self, end: pb.Error) -> None:
        send_frame(self.daemon, pb.StepReply(end=end).SerializeToString())

    def ping(self) -> None:
        send_frame(self.daemon, b"")

    def number(self) -> int:
        """Of the next message."""
        frame = receive_frame(self.daemon)
        assert frame is not None
        assert frame.payload, "a ping"
        return pb.StepRequest.FromString(frame.payload).number

    def closed(self) -> bool:
        """Whether the client's half has ended."""
        return receive_frame(self.daemon) is None


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.fspath(tmp_path / CALLS_SOCKET))
        made.listen()
        made.settimeout(WAIT_S)
        yield made


@pytest.fixture
def fresh(tmp_path: Path, listener: socket.socket) -> Iterator[Line]:
    """Connected; the daemon has said nothing yet."""
    made = Line(tmp_path, listener)
    yield made
    made.stream.break_off()
    made.daemon.close()


@pytest.fixture
def line(fresh: Line) -> Line:
    """In session."""
    fresh.greet()
    return fresh


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(WAIT_S)
    assert not thread.is_alive()


def fill(stream: FrameStream) -> None:
    """Until its socket takes no byte more."""
    with contextlib.suppress(BlockingIOError):
        while True:
            stream._channel.send(struct.pack("<II", 0, 0), socket.MSG_DONTWAIT)


def until_it_blocks(line: Line, thread: threading.Thread) -> None:
    """The sender has the lock and a full socket: something has come, and it has not gone on."""
    line.daemon.recv(1, socket.MSG_PEEK)
    assert thread.is_alive()
    assert line.stream._sending.locked()


# ------------------------------------------------------------------------------------------ greeting


def test_nobody_there_is_a_lost_stream(tmp_path: Path) -> None:
    line = Line(tmp_path, None)
    end = line.end()
    assert end.lost
    assert end.replaced
    assert "no node answers" in str(end.error)
    line.stream.send(pb.StepRequest(number=1))
    line.stream.close(WAIT_S)
    assert line.ended == [line.stream], "once"


def test_a_refused_greeting_ends_it_with_the_daemons_own_error(fresh: Line) -> None:
    send_json(fresh.daemon, error_frame(StaleBoot("another boot")))
    end = fresh.end()
    assert isinstance(end.error, StaleBoot)
    assert not end.lost
    assert end.replaced


def test_who_refuses_before_it_hears_a_word_is_heard(tmp_path: Path, listener: socket.socket) -> None:
    """The daemon is full: it says so and closes, with the greeting unread."""
    line = Line(tmp_path, listener)
    with line.daemon:
        line.daemon.recv(1, socket.MSG_PEEK)  # it is there
        send_json(line.daemon, error_frame(LimitExceeded("too many")))
    assert isinstance(line.end().error, LimitExceeded)
    assert not line.stream.end.lost


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", struct.pack("<II", 3, 0) + b"[1]"])
def test_a_greeting_that_is_none_is_an_error(fresh: Line, said: bytes) -> None:
    fresh.daemon.sendall(said)
    assert isinstance(fresh.end().error, (InvalidArgument, LimitExceeded))


def test_a_daemon_that_dies_before_it_greets_is_lost(fresh: Line) -> None:
    fresh.daemon.shutdown(socket.SHUT_RDWR)
    assert fresh.end().lost


# ------------------------------------------------------------------------------------------ replies and ends


def test_replies_come_in_order_and_before_the_end(line: Line) -> None:
    for number in range(1, 6):
        line.reply(number)
    line.say_end(pb.Error())
    assert line.end() == StreamEnd()
    assert not line.stream.end.replaced
    assert line.heard(5) == [1, 2, 3, 4, 5]


def test_an_end_with_an_error_is_that_error(line: Line) -> None:
    line.reply(1)
    line.say_end(error_to_proto(Suspect("did not read")))
    end = line.end()
    assert isinstance(end.error, Suspect)
    assert "did not read" in str(end.error)
    assert not end.lost


def test_an_end_with_a_reason_of_a_later_version_is_an_error(line: Line) -> None:
    line.say_end(pb.Error(reason=BEYOND, message="something new"))  # type: ignore[arg-type]
    assert isinstance(line.end().error, DaemonError)
    assert "something new" in str(line.stream.end.error)


def test_nothing_is_delivered_behind_the_end(line: Line) -> None:
    send_frame(line.daemon, pb.StepReply(number=1, end=pb.Error()).SerializeToString())
    line.end()
    assert line.replies == []


def test_a_connection_that_closes_without_a_word_is_lost(line: Line) -> None:
    line.reply(1)
    line.daemon.close()
    end = line.end()
    assert end.lost
    assert end.replaced
    assert line.heard(1) == [1]


def test_a_connection_that_ends_within_a_frame_is_lost(line: Line) -> None:
    line.daemon.sendall(struct.pack("<II", 100, 0) + bytes(40))
    line.daemon.close()
    assert line.end().lost
    assert line.replies == []


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (struct.pack("<II", 3, 0) + b"\xff\xff\xff", "no StepReply"),
        (struct.pack("<II", MESSAGE_MAX_BYTES + 1, 0), "at most"),
        (struct.pack("<II", 0, 1), "announced 1 fds, 0 came"),
    ],
)
def test_wrong_bytes_are_a_lost_stream_and_no_answer(line: Line, said: bytes, why: str) -> None:
    """The daemon may have counted the message that waits: its number must not be given to another one."""
    line.daemon.sendall(said)
    end = line.end()
    assert why in str(end.error)
    assert end.lost
    assert line.closed(), "and the daemon sees that it is over"


def test_descriptors_that_come_along_are_closed(line: Line) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        send_frame(line.daemon, pb.StepReply(number=1).SerializeToString(), [theirs.fileno()])
        theirs.close()
        assert line.heard(1) == [1]
        ours.settimeout(WAIT_S)
        assert ours.recv(1) == b"", "nobody holds the other end"


# ------------------------------------------------------------------------------------------ pings


def test_pings_are_answered(line: Line) -> None:
    for _ in range(3):
        line.ping()
        frame = receive_frame(line.daemon)
        assert frame is not None
        assert frame.payload == b""


def test_a_ping_while_a_send_blocks_waits_for_nothing_and_tears_no_frame(line: Line) -> None:
    sender = in_thread(lambda: line.stream.send(LARGE))
    until_it_blocks(line, sender)
    line.ping()
    line.reply(1)
    assert line.heard(1) == [1], "the reader did not wait for the sender"
    assert sender.is_alive()
    assert line.number() == LARGE.number
    join(sender)
    line.stream.send(pb.StepRequest(number=8))
    assert line.number() == 8, "nothing was between the two: the message was the sign of life"
    line.ping()
    frame = receive_frame(line.daemon)
    assert frame is not None
    assert frame.payload == b""


def test_a_ping_to_a_full_socket_waits_for_nothing(line: Line) -> None:
    fill(line.stream)
    line.ping()
    line.reply(1)
    assert line.heard(1) == [1]


# ------------------------------------------------------------------------------------------ sending


def test_messages_go_out_whole_from_many_threads(line: Line) -> None:
    senders = [
        in_thread(lambda first=first: [line.stream.send(pb.StepRequest(number=first + at)) for at in range(100)])  # type: ignore[misc]
        for first in (1000, 2000, 3000)
    ]
    numbers = [line.number() for _ in range(300)]
    for sender in senders:
        join(sender)
    for first in (1000, 2000, 3000):
        assert [number for number in numbers if first <= number < first + 100] == list(range(first, first + 100))


def test_a_message_that_is_too_large_is_refused_and_the_stream_goes_on(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessionstream, "MESSAGE_MAX_BYTES", 1_000)
    with pytest.raises(LimitExceeded):
        line.stream.send(LARGE)
    line.stream.send(pb.StepRequest(number=2))
    assert line.number() == 2
    assert not line.ended


def test_a_daemon_that_takes_no_byte_ends_it_and_says_so(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessionstream, "UNTAKEN_S", 1)
    line = Line(tmp_path, listener)
    with line.daemon:
        line.greet()
        line.stream.send(LARGE)
        end = line.end()
        assert end.lost
        assert "takes no more of a frame" in str(end.error)
    line.stream.break_off()


def test_what_the_daemon_said_is_found_by_who_can_not_send(line: Line) -> None:
    """It ended the session and closed while a message was on its way to it."""
    line.say_end(error_to_proto(Suspect("too slow")))
    line.daemon.close()
    line.stream.send(LARGE)
    assert isinstance(line.end().error, Suspect)
    line.stream.send(LARGE)
    assert isinstance(line.stream.end.error, Suspect), "and nothing more is said"


# ------------------------------------------------------------------------------------------ closing


def test_close_half_closes_and_waits_for_what_is_still_to_come(line: Line) -> None:
    line.stream.send(pb.StepRequest(number=1))

    def daemon() -> None:
        assert line.number() == 1
        assert line.closed()
        line.reply(1)
        line.say_end(pb.Error())

    serving = in_thread(daemon)
    line.stream.close(WAIT_S)
    join(serving)
    assert line.stream.end == StreamEnd()
    assert line.heard(1) == [1]
    assert line.ended == [line.stream]


def test_close_breaks_what_does_not_end(line: Line) -> None:
    line.stream.close(0.01)
    assert line.closed()
    assert line.end().lost
    with pytest.raises(BrokenPipeError):
        line.daemon.send(bytes(8))


def test_close_while_a_send_blocks_ends_both(line: Line) -> None:
    sender = in_thread(lambda: line.stream.send(LARGE))
    until_it_blocks(line, sender)
    line.stream.close(0.01)
    join(sender)
    assert line.end().lost


def test_break_off_is_at_once_and_again_nothing(line: Line) -> None:
    line.stream.break_off()
    line.stream.break_off()
    line.stream.close(WAIT_S)
    assert line.end().lost
    assert line.closed()


def test_break_off_before_the_greeting(fresh: Line) -> None:
    fresh.stream.break_off()
    assert fresh.end().lost
