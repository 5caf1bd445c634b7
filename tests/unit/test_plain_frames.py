"""Frames of a stream: however they are cut up, too large, or torn."""

from __future__ import annotations

import os
import random
import socket
import threading

import pytest

from kvmanager.errors import LimitExceeded, PeerUnreachable
from kvmanager.framing import send_frame
from kvmanager.plainframes import PlainFrames, send_frames

MOST = 1 << 20


def test_frames_come_as_they_were_sent_however_they_are_cut_up() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    payloads = [draw.randbytes(draw.choice((0, 1, 7, 40_000, MOST))) for _ in range(40)]
    ours, theirs = socket.socketpair()

    def send() -> None:
        left = b"".join(len(payload).to_bytes(4, "little") + bytes(4) + payload for payload in payloads)
        while left:
            some = draw.choice((1, 7, 8, 9, 5_000, 200_000))
            ours.sendall(left[:some])
            left = left[some:]
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    with theirs:
        frames = PlainFrames(theirs, MOST)
        for payload in payloads:
            assert frames.next() == (payload, 0)
        assert frames.next() is None
    sender.join()


def test_several_go_with_one_write_or_none_of_them() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frames(ours, [b"a", b"", b"bc"], 2)
        with pytest.raises(LimitExceeded):
            send_frames(ours, [b"d", b"efg"], 2)
        ours.close()
        frames = PlainFrames(theirs, 2)
        assert [frames.next() for _ in range(4)] == [(b"a", 0), (b"", 0), (b"bc", 0), None]
        with pytest.raises(PeerUnreachable):
            send_frames(theirs, [b"a"], 2)


def test_a_frame_that_is_too_large_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((MOST + 1).to_bytes(4, "little") + bytes(4))
        with pytest.raises(LimitExceeded):
            PlainFrames(theirs, MOST).next()


@pytest.mark.parametrize("sent", [b"\x05", b"\x05\0\0\0\0\0\0\0abc"])
def test_one_that_is_torn_is_no_end(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(sent)
        ours.close()
        with pytest.raises(PeerUnreachable, match="within a frame"):
            PlainFrames(theirs, MOST).next()


def test_descriptors_are_told_of_and_closed() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        send_frame(ours, b"x", [write])
        os.close(write)
        send_frame(ours, b"y")
        frames = PlainFrames(theirs, MOST)
        assert [frames.next(), frames.next()] == [(b"x", 1), (b"y", 0)]
        assert os.read(read, 1) == b"", "nobody holds the other end"
    os.close(read)
