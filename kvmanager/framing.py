"""Messages with file descriptors over a unix stream socket.

A frame is a header of two little-endian u32 (payload bytes, number of fds), then the payload. Fds come
as SCM_RIGHTS with the frame's first byte; the header counts them, because the kernel ties fds to a place
in the stream only loosely. `send_frame`/`receive_frame` block; `FrameWriter`/`FrameReader` don't.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.errors import InvalidArgument, LimitExceeded, PeerUnreachable
from kvmanager.units import KIB, MIB

MAX_FRAME_BYTES: Final = 64 * MIB
MAX_FDS: Final = 64
"""Of one frame; the kernel takes at most 253 a call."""
_HEADER: Final = struct.Struct("<II")
_FD_BYTES: Final = struct.calcsize("i")
_READ_BYTES: Final = 256 * KIB


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. Who takes the frame owns its fds and closes them."""

    payload: bytes
    fds: tuple[int, ...] = ()


def _header(payload: bytes, fds: Sequence[int]) -> bytes:
    if len(payload) > MAX_FRAME_BYTES or len(fds) > MAX_FDS:
        raise LimitExceeded(
            f"a frame of {len(payload)} bytes and {len(fds)} fds: at most {MAX_FRAME_BYTES} bytes and {MAX_FDS} fds"
        )
    return _HEADER.pack(len(payload), len(fds))


class FrameWriter:
    """Frames on their way out of a non-blocking socket. The caller closes what is left with `close`."""

    def __init__(self) -> None:
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def __bool__(self) -> bool:
        """Whether bytes are waiting: watch the socket for writing."""
        return bool(self._queue)

    def put(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Queues a frame; fds are duplicated, so the caller may close its own. Raises LimitExceeded."""
        header = _header(payload, fds)
        self._queue.append((memoryview(header + payload), tuple(_duplicate(fd) for fd in fds)))

    def flush(self, sock: socket.socket) -> None:
        """Sends what the socket takes now. Raises PeerUnreachable when the other side is gone."""
        while self._queue:
            data, fds = self._queue[0]
            try:
                sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error
            for fd in fds:
                os.close(fd)
            if sent == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = (data[sent:], ())

    def close(self) -> None:
        """Drops what was not sent and closes its fds."""
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()


def _duplicate(fd: int) -> int:
    return os.dup(fd)  # close-on-exec, as all fds of Python


class FrameReader:
    """Frames out of a socket, however its bytes are cut up. `ended`: the other side has closed."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: deque[int] = deque()
        self.ended = False

    def receive(self, sock: socket.socket) -> list[Frame]:
        """Reads once and returns the frames that are complete, perhaps none.

        Raises LimitExceeded for a frame that is too large (before its payload is read), PeerUnreachable for
        a broken connection or one that ended within a frame, InvalidArgument for fds that nobody announced.
        """
        try:
            data = _receive(sock, _READ_BYTES, self._fds)
        except BlockingIOError:
            return []
        except OSError as error:
            raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error
        self._data += data
        frames = self._complete()
        if not data:
            self.ended = True
            if self._data or self._fds:
                raise PeerUnreachable(f"the connection ended within a frame, {len(self._data)} bytes into it")
        return frames

    def _complete(self) -> list[Frame]:
        frames = []
        start = 0
        while len(self._data) - start >= _HEADER.size:
            size, count = _HEADER.unpack_from(self._data, start)
            if size > MAX_FRAME_BYTES or count > MAX_FDS:
                raise LimitExceeded(
                    f"a frame of {size} bytes and {count} fds: at most {MAX_FRAME_BYTES} bytes and {MAX_FDS} fds"
                )
            end = start + _HEADER.size + size
            if len(self._data) < end:
                break
            if count > len(self._fds):
                raise InvalidArgument(f"a frame announced {count} fds, {len(self._fds)} came")
            payload = bytes(memoryview(self._data)[start + _HEADER.size : end])
            frames.append(Frame(payload, tuple(self._fds.popleft() for _ in range(count))))
            start = end
        del self._data[:start]
        return frames

    def close(self) -> None:
        """Closes fds that came for frames that never completed."""
        while self._fds:
            os.close(self._fds.popleft())


def send_frame(sock: socket.socket, payload: bytes, fds: Sequence[int] = ()) -> None:
    """Sends one frame on a blocking socket. Raises LimitExceeded, PeerUnreachable."""
    data = memoryview(_header(payload, fds) + payload)
    try:
        sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
        sock.sendall(data[sent:])
    except OSError as error:
        raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error


def receive_frame(sock: socket.socket) -> Frame | None:
    """The next frame of a blocking socket; None when the other side has closed. Reads not a byte beyond it.

    Raises LimitExceeded, PeerUnreachable (also when the socket's time-out passes), InvalidArgument.
    """
    fds: list[int] = []
    try:
        head = _read_exactly(sock, _HEADER.size, fds)
        if not head:
            return None
        size, count = _HEADER.unpack(head)
        if size > MAX_FRAME_BYTES or count > MAX_FDS:
            raise LimitExceeded(f"a frame of {size} bytes and {count} fds: at most {MAX_FRAME_BYTES} and {MAX_FDS}")
        payload = _read_exactly(sock, size, fds)
        if len(payload) < size:
            raise PeerUnreachable("the connection ended within a frame")
        if len(fds) != count:
            raise InvalidArgument(f"a frame announced {count} fds, {len(fds)} came")
        frame = Frame(payload, tuple(fds))
        fds = []
        return frame
    finally:
        for fd in fds:
            os.close(fd)


def _receive(sock: socket.socket, most_bytes: int, fds: list[int] | deque[int]) -> bytes:
    """One read; fds that come along are appended to `fds`, close-on-exec (`socket.recv_fds` drops its flags)."""
    room = socket.CMSG_LEN(MAX_FDS * _FD_BYTES)
    data, ancillary, flags, _ = sock.recvmsg(most_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _FD_BYTES
            fds.extend(memoryview(content[:whole]).cast("i"))
    if flags & socket.MSG_CTRUNC:
        raise InvalidArgument(f"more than {MAX_FDS} fds in one message, or no room for them in this process")
    return data


def _read_exactly(sock: socket.socket, size: int, fds: list[int]) -> bytes:
    """`size` bytes, or none at all when the connection has ended; fds that come along are appended."""
    data = bytearray()
    while len(data) < size:
        try:
            part = _receive(sock, min(size - len(data), _READ_BYTES), fds)
        except OSError as error:
            raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error
        if not part:
            if data:
                raise PeerUnreachable(f"the connection ended {len(data)} bytes into {size}")
            break
        data += part
    return bytes(data)
