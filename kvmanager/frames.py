"""Small JSON messages with file descriptors over a unix stream socket.

A frame is a little-endian u32 length and that many bytes of one JSON object, at most
`FRAME_MAX_BYTES`. Descriptors ride on the frame's first byte; the object's `"fds"` says how many,
and their order is the sender's. Standard library only: the keeper uses it too.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvmanager.errors import InvalidArgument, LimitExceeded

FRAME_MAX_BYTES: Final = 64 << 10
FDS_MAX: Final = 250
"""Descriptors of one frame; the kernel's own limit is 253."""

_HEADER: Final = struct.Struct("<I")
_READ_BYTES: Final = 16 << 10


def send_frame(connection: socket.socket, payload: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Sends one frame; the descriptors stay open here.

    Raises LimitExceeded for a frame or a descriptor list over the limit, OSError when the peer is gone
    or (non-blocking) does not read.
    """
    if len(fds) > FDS_MAX:
        raise LimitExceeded(f"{len(fds)} descriptors in one frame; at most {FDS_MAX}: ask for fewer at a time")
    body = json.dumps({**payload, "fds": len(fds)} if fds else payload, separators=(",", ":")).encode()
    if len(body) > FRAME_MAX_BYTES:
        raise LimitExceeded(f"a frame of {len(body)} bytes; at most {FRAME_MAX_BYTES}")
    data = _HEADER.pack(len(body)) + body
    sent = socket.send_fds(connection, [data], list(fds)) if fds else connection.send(data)
    if sent < len(data):
        connection.sendall(data[sent:])


class FrameReader:
    """Cuts what arrives into frames. Owns descriptors that no frame has claimed yet; `close` closes them."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: deque[int] = deque()

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Takes in bytes and descriptors in the order they arrived."""
        self._bytes += data
        self._fds.extend(fds)

    def next(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next whole frame and its descriptors, or None. The caller owns the descriptors.

        Raises InvalidArgument for anything but one JSON object, LimitExceeded for a frame over the
        limit; the stream can't be used after either.
        """
        if len(self._bytes) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._bytes)
        if length > FRAME_MAX_BYTES:
            raise LimitExceeded(f"a frame says it has {length} bytes; at most {FRAME_MAX_BYTES}")
        if len(self._bytes) < _HEADER.size + length:
            return None
        body = bytes(self._bytes[_HEADER.size : _HEADER.size + length])
        del self._bytes[: _HEADER.size + length]
        try:
            payload = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"a frame of {length} bytes is not JSON: {error}") from error
        if not isinstance(payload, dict):
            raise InvalidArgument(f"a frame holds {type(payload).__name__}, not a JSON object")
        count = payload.get("fds", 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= len(self._fds):
            raise InvalidArgument(f"a frame says it brings {count!r} descriptors; {len(self._fds)} came")
        return payload, [self._fds.popleft() for _ in range(count)]

    def close(self) -> None:
        """Closes descriptors that came with no frame."""
        while self._fds:
            os.close(self._fds.popleft())


def receive_with_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One read: bytes (empty: the peer closed) and descriptors, close-on-exec. Raises OSError."""
    space = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError("descriptors were lost on the way: the process's descriptor limit is reached (ulimit -n)")
    return data, list(fds)


def receive_frame(connection: socket.socket, reader: FrameReader) -> tuple[dict[str, Any], list[int]]:
    """Waits for the next frame on a blocking socket.

    Raises ConnectionError when the peer closes first, TimeoutError after the socket's timeout, and what
    `FrameReader.next` raises.
    """
    while (frame := reader.next()) is None:
        data, fds = receive_with_fds(connection)
        if not data:
            raise ConnectionError("the peer closed the connection")
        reader.feed(data, fds)
    return frame
