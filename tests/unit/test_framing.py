"""Frames and fds across a real socket pair."""

import os
import random
import socket
import struct
import threading

import pytest

from kvmanager.errors import InvalidArgument, LimitExceeded, PeerUnreachable
from kvmanager.framing import (
    MAX_FDS,
    MAX_FRAME_BYTES,
    MAX_JSON_BYTES,
    Frame,
    FrameReader,
    FrameWriter,
    json_object,
    receive_frame,
    receive_json,
    send_frame,
    send_json,
)


@pytest.fixture
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    a.settimeout(20)
    b.settimeout(20)
    yield a, b
    a.close()
    b.close()


@pytest.fixture(autouse=True)
def no_fd_leaks():
    before = set(os.listdir("/proc/self/fd"))
    yield
    # Fixtures end in reverse order: the pair above is closed before this runs only when asked for later.
    leaked = [fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    assert [fd for fd in leaked if "socket" not in os.readlink(f"/proc/self/fd/{fd}")] == []


def _memory(content: bytes) -> int:
    fd = os.memfd_create("t", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def _contents(frame: Frame) -> list[bytes]:
    found = []
    for fd in frame.fds:
        assert not os.get_inheritable(fd)
        found.append(os.pread(fd, 100, 0))
        os.close(fd)
    return found


def test_blocking_frames_and_their_fds_arrive_in_order(pair):
    a, b = pair
    fds = [_memory(b"one"), _memory(b"two"), _memory(b"three")]
    send_frame(a, b"first")
    send_frame(a, b"second", fds[:2])
    send_frame(a, b"", fds[2:])
    for fd in fds:
        os.close(fd)
    a.close()
    assert receive_frame(b) == Frame(b"first")
    second = receive_frame(b)
    assert (second.payload, _contents(second)) == (b"second", [b"one", b"two"])
    third = receive_frame(b)
    assert (third.payload, _contents(third)) == (b"", [b"three"])
    assert receive_frame(b) is None


def test_a_large_frame_crosses_in_pieces(pair):
    a, b = pair
    payload = random.Random(1).randbytes(5_000_000)
    sender = threading.Thread(target=send_frame, args=(a, payload))
    sender.start()
    assert receive_frame(b).payload == payload
    sender.join()


@pytest.mark.parametrize("seed", range(10))
def test_non_blocking_frames_of_any_size_with_fds_keep_their_order(pair, seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    a, b = pair
    a.setblocking(False)
    b.setblocking(False)
    writer, reader = FrameWriter(), FrameReader()
    sent, got = [], []
    for number in range(60):
        payload = rng.randbytes(rng.choice((0, 1, 7, 8, 9, 1000, 300_000)))
        marks = [f"{number}.{i}".encode() for i in range(rng.choice((0, 0, 0, 1, 3)))]
        fds = [_memory(mark) for mark in marks]
        writer.put(payload, fds)
        for fd in fds:
            os.close(fd)
        sent.append((payload, marks))
        if rng.random() < 0.5:
            writer.flush(a)
        if rng.random() < 0.5:
            got += [(f.payload, _contents(f)) for f in reader.receive(b)]
    while writer or len(got) < len(sent):
        writer.flush(a)
        got += [(f.payload, _contents(f)) for f in reader.receive(b)]
    assert got == sent
    assert not reader.ended
    a.close()
    assert reader.receive(b) == []
    assert reader.ended


def test_bytes_one_at_a_time(pair):
    a, b = pair
    b.setblocking(False)
    reader = FrameReader()
    got = []
    for byte in struct.pack("<II", 3, 0) + b"abc" + struct.pack("<II", 0, 0):
        a.send(bytes([byte]))
        got += reader.receive(b)
    assert got == [Frame(b"abc"), Frame(b"")]


def test_too_large_is_refused_on_both_sides(pair):
    a, b = pair
    with pytest.raises(LimitExceeded):
        send_frame(a, bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(LimitExceeded):
        FrameWriter().put(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(LimitExceeded):
        FrameWriter().put(b"", [0] * (MAX_FDS + 1))
    for header in (struct.pack("<II", MAX_FRAME_BYTES + 1, 0), struct.pack("<II", 0, MAX_FDS + 1)):
        a.send(header)
        with pytest.raises(LimitExceeded):
            FrameReader().receive(b)
        a.send(header)
        with pytest.raises(LimitExceeded):
            receive_frame(b)


def test_an_end_within_a_frame_is_an_error_not_a_short_frame(pair):
    a, b = pair
    fd = _memory(b"x")
    socket.send_fds(a, [struct.pack("<II", 10, 1) + b"abc"], [fd])
    os.close(fd)
    a.close()
    reader = FrameReader()
    assert reader.receive(b) == []
    with pytest.raises(PeerUnreachable):
        reader.receive(b)
    reader.close()


def test_an_end_within_a_blocking_frame(pair):
    a, b = pair
    fd = _memory(b"x")
    socket.send_fds(a, [struct.pack("<II", 10, 1) + b"abc"], [fd])
    os.close(fd)
    a.close()
    with pytest.raises(PeerUnreachable):
        receive_frame(b)


def test_announced_fds_that_do_not_come(pair):
    a, b = pair
    a.send(struct.pack("<II", 0, 2))
    with pytest.raises(InvalidArgument, match="announced 2 fds, 0 came"):
        FrameReader().receive(b)
    a.send(struct.pack("<II", 0, 2))
    with pytest.raises(InvalidArgument, match="announced 2 fds, 0 came"):
        receive_frame(b)


def test_a_gone_reader_is_a_typed_error(pair):
    a, b = pair
    b.close()
    writer = FrameWriter()
    fd = _memory(b"x")
    writer.put(b"lost", [fd])
    os.close(fd)
    with pytest.raises(PeerUnreachable):
        writer.flush(a)
    writer.close()
    with pytest.raises(PeerUnreachable):
        send_frame(a, b"lost")


def test_fds_of_good_frames_are_closed_when_a_bad_one_follows(pair):
    a, b = pair
    source, target = os.pipe()
    socket.send_fds(a, [struct.pack("<II", 1, 1) + b"x" + struct.pack("<II", MAX_FRAME_BYTES + 1, 0)], [target])
    os.close(target)
    reader = FrameReader()
    with pytest.raises(LimitExceeded):
        reader.receive(b)
    reader.close()
    assert os.read(source, 1) == b""
    os.close(source)


def test_fds_that_no_frame_announced(pair):
    a, b = pair
    fd = _memory(b"x")
    socket.send_fds(a, [struct.pack("<II", 0, 0)], [fd])
    reader = FrameReader()
    with pytest.raises(InvalidArgument, match="1 fds came that no frame announced"):
        reader.receive(b)
    reader.close()
    # Within a frame that never ends they are bounded too.
    a.send(struct.pack("<II", 1000, 0))
    reader = FrameReader()
    assert reader.receive(b) == []
    for _ in range(MAX_FDS):
        socket.send_fds(a, [b"x"], [fd])
        assert reader.receive(b) == []
    socket.send_fds(a, [b"x"], [fd])
    with pytest.raises(InvalidArgument, match=f"{MAX_FDS + 1} fds came"):
        reader.receive(b)
    reader.close()
    os.close(fd)


def test_json_objects_and_their_fds(pair):
    a, b = pair
    fd = _memory(b"one")
    send_json(a, {"op": "take", "size": 1 << 63}, [fd])
    send_json(a, {})
    os.close(fd)
    a.close()
    message, fds = receive_json(b)
    assert message == {"op": "take", "size": 1 << 63}
    assert _contents(Frame(b"", fds)) == [b"one"]
    assert receive_json(b) == ({}, ())
    with pytest.raises(PeerUnreachable, match="closed"):
        receive_json(b)


def test_json_is_bounded_before_it_is_read(pair):
    a, b = pair
    with pytest.raises(LimitExceeded):
        send_json(a, {"name": "x" * MAX_JSON_BYTES})
    a.send(struct.pack("<II", MAX_JSON_BYTES + 1, 0))
    with pytest.raises(LimitExceeded, match=str(MAX_JSON_BYTES + 1)):
        receive_json(b)
    a.send(struct.pack("<II", MAX_JSON_BYTES + 1, 0))
    with pytest.raises(LimitExceeded, match=str(MAX_JSON_BYTES + 1)):
        FrameReader(MAX_JSON_BYTES).receive(b)


@pytest.mark.parametrize("payload", [b"", b"garbage", b"\xff\xfe", b"[]", b"3", b"[" * 20_000])
def test_what_is_no_json_object(pair, payload):
    a, b = pair
    with pytest.raises(InvalidArgument):
        json_object(payload)
    source, target = os.pipe()
    send_frame(a, payload, [target])
    os.close(target)
    with pytest.raises(InvalidArgument):
        receive_json(b)
    assert os.read(source, 1) == b"", "the fds of a message that can't be read are closed"
    os.close(source)


class _ReadsAllAndCloses(socket.socket):
    """A socket whose other side closes as soon as the whole frame has arrived."""

    def __init__(self, sock: socket.socket, other: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self.other = other

    def send(self, data, flags=0):
        sent = super().send(data, flags)
        self.other.close()
        return sent


def test_a_frame_that_was_read_before_the_close_was_sent(pair):
    a, b = pair
    with _ReadsAllAndCloses(a, b) as sender:
        send_frame(sender, b"whole")


def test_frames_that_yield_let_others_pass_but_not_what_has_begun(pair):
    a, b = pair
    a.setblocking(False)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    writer, reader = FrameWriter(), FrameReader()
    large = bytes(1 << 20)
    fd = _memory(b"region")
    writer.put(large, yields=True)
    writer.flush(a)
    assert writer, "a part of it is out"
    writer.put(b"write-back 1", yields=True)
    writer.put(b"onboard 1")
    writer.put(b"write-back 2", [fd], yields=True)
    writer.put(b"onboard 2", [fd])
    os.close(fd)
    found = []
    while writer or len(found) < 5:
        writer.flush(a)
        found += reader.receive(b)
    assert [frame.payload for frame in found] == [large, b"onboard 1", b"onboard 2", b"write-back 1", b"write-back 2"]
    assert [_contents(frame) for frame in found] == [[], [], [b"region"], [], [b"region"]]
    writer.put(b"never sent", yields=True)
    writer.close()
    assert not writer
