"""Messages with file descriptors over a unix stream socket.

A frame is a header of two little-endian u32 (payload bytes, number of fds), then the payload. Fds come
as SCM_RIGHTS with the frame's first byte; the header counts them, because the kernel ties fds to a place
in the stream only loosely. `send_frame`/`receive_frame` block; `FrameWriter`/`FrameReader` don't.

Payloads are protobuf messages between daemon and mover, up to 64 MiB; on the attach socket and between
keeper and daemon each is one JSON object, up to 64 KiB (`send_json`, `receive_json`, `json_object`).
Standard library only: the keeper uses it too.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvmanager.errors import InvalidArgument, KVError, LimitExceeded, PeerUnreachable
from kvmanager.units import KIB, MIB

MAX_FRAME_BYTES: Final = 64 * MIB
MAX_JSON_BYTES: Final = 64 * KIB
MAX_FDS: Final = 64
"""Of one frame; the kernel takes at most 253 a call."""
HEADER: Final = struct.Struct("<II")
_FD_BYTES: Final = struct.calcsize("i")
_READ_BYTES: Final = 256 * KIB


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. Who takes the frame owns its fds and closes them."""

    payload: bytes
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Closes its fds. Call it once."""
        for fd in self.fds:
            os.close(fd)


def frame_header(payload: bytes, fds: Sequence[int], max_bytes: int) -> bytes:
    """What goes before a payload. Raises LimitExceeded."""
    _check_size(len(payload), len(fds), max_bytes)
    return HEADER.pack(len(payload), len(fds))


def _check_size(payload_bytes: int, fds: int, max_bytes: int) -> None:
    if payload_bytes > max_bytes or fds > MAX_FDS:
        raise LimitExceeded(
            f"a frame of {payload_bytes} bytes and {fds} fds: at most {max_bytes} bytes and {MAX_FDS} fds"
        )


class FrameWriter:
    """Frames on their way out of a non-blocking socket. The caller closes what is left with `close`."""

    def __init__(self) -> None:
        self._begun: tuple[memoryview, tuple[int, ...]] | None = None
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._yielding: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def __bool__(self) -> bool:
        """Whether bytes are waiting: watch the socket for writing."""
        return bool(self._begun or self._queue or self._yielding)

    def put(self, payload: bytes, fds: Sequence[int] = (), *, yields: bool = False) -> None:
        """Queues a frame; fds are duplicated, so the caller may close its own. Raises LimitExceeded.

        Frames keep their order, but one that `yields` lets all pass that do not.
        """
        header = frame_header(payload, fds, MAX_FRAME_BYTES)
        frame = memoryview(header + payload), tuple(_duplicate(fd) for fd in fds)
        (self._yielding if yields else self._queue).append(frame)

    def flush(self, sock: socket.socket) -> None:
        """Sends what the socket takes now. Raises PeerUnreachable when the other side is gone."""
        while self:
            if self._begun is None:
                self._begun = (self._queue or self._yielding).popleft()
            data, fds = self._begun
            try:
                sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error
            for fd in fds:
                os.close(fd)
            self._begun = None if sent == len(data) else (data[sent:], ())

    def close(self) -> None:
        """Drops what was not sent and closes its fds."""
        for _, fds in [self._begun or (b"", ()), *self._queue, *self._yielding]:
            for fd in fds:
                os.close(fd)
        self._begun = None
        self._queue.clear()
        self._yielding.clear()


def _duplicate(fd: int) -> int:
    return os.dup(fd)  # close-on-exec, as all fds of Python


class FrameReader:
    """Frames out of a socket, however its bytes are cut up. `ended`: the other side has closed.

    After an error the stream makes no sense any more: close the reader and the socket.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`max_bytes`: the largest payload taken."""
        self._max_bytes = max_bytes
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
        frames = self.feed(data)
        if not data:
            self.ended = True
            if self._data or self._fds:
                raise PeerUnreachable(f"the connection ended within a frame, {len(self._data)} bytes into it")
        return frames

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete with these bytes, which somebody else has read. Raises as `receive` does."""
        self._data += data
        frames: list[Frame] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
            if len(self._fds) > (MAX_FDS if self._data else 0):
                raise InvalidArgument(f"{len(self._fds)} fds came that no frame announced")
        except KVError:
            for frame in frames:
                frame.close()
            raise
        return frames

    def _next(self) -> Frame | None:
        """Takes the next frame off the front, if it is complete."""
        if len(self._data) < HEADER.size:
            return None
        size, count = HEADER.unpack_from(self._data)
        _check_size(size, count, self._max_bytes)
        end = HEADER.size + size
        if len(self._data) < end:
            return None
        if count > len(self._fds):
            raise InvalidArgument(f"a frame announced {count} fds, {len(self._fds)} came")
        payload = bytes(memoryview(self._data)[HEADER.size : end])
        del self._data[:end]
        return Frame(payload, tuple(self._fds.popleft() for _ in range(count)))

    @property
    def pending(self) -> bool:
        """Whether part of a frame is here and the rest is not."""
        return bool(self._data or self._fds)

    def close(self) -> None:
        """Closes fds that came for frames that never completed."""
        while self._fds:
            os.close(self._fds.popleft())


def send_frame(
    sock: socket.socket, payload: bytes, fds: Sequence[int] = (), max_bytes: int = MAX_FRAME_BYTES
) -> None:
    """Sends one frame; the fds stay open here. Raises LimitExceeded, PeerUnreachable.

    PeerUnreachable: also a socket that does not block and takes less, or that takes nothing within its time-out.
    """
    data = memoryview(frame_header(payload, fds, max_bytes) + payload)
    try:
        sent = socket.send_fds(sock, [data], fds) if fds else sock.send(data)
        if sent < len(data):  # an empty send fails when the other side has read it all and closed
            sock.sendall(data[sent:])
    except (BlockingIOError, TimeoutError) as error:
        raise PeerUnreachable("the other side of the socket takes no more of a frame") from error
    except OSError as error:
        raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error


def receive_frame(sock: socket.socket, max_bytes: int = MAX_FRAME_BYTES) -> Frame | None:
    """The next frame of a blocking socket; None when the other side has closed. Reads not a byte beyond it.

    Raises LimitExceeded, PeerUnreachable (also when the socket's time-out passes), InvalidArgument.
    """
    fds: list[int] = []
    try:
        head = _read_exactly(sock, HEADER.size, fds)
        if not head:
            return None
        size, count = HEADER.unpack(head)
        _check_size(size, count, max_bytes)
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


def send_json(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Sends one JSON object, as `send_frame` does. Raises LimitExceeded over 64 KiB, PeerUnreachable."""
    send_frame(sock, json.dumps(message, separators=(",", ":")).encode(), fds, MAX_JSON_BYTES)


def receive_json(sock: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The next JSON object of a blocking socket and its fds, which are the caller's to close.

    Raises what `receive_frame` and `json_object` raise; a closed connection is PeerUnreachable.
    """
    frame = receive_frame(sock, MAX_JSON_BYTES)
    if frame is None:
        raise PeerUnreachable("the other side closed the connection")
    try:
        return json_object(frame.payload), frame.fds
    except InvalidArgument:
        frame.close()
        raise


def json_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a payload. Raises InvalidArgument for anything else."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"a frame of {len(payload)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise InvalidArgument(f"a frame holds {type(message).__name__}, not a JSON object")
    return message


def error_frame(error: KVError) -> dict[str, Any]:
    """What says, as a JSON object, that something was refused."""
    return {"error": {"reason": error.reason, "message": str(error)}}


def readable(fds: Sequence[int], timeout_s: float | None = None) -> set[int]:
    """Those of `fds` that can be read now, or have ended; waits for the first of them, at most `timeout_s`."""
    poll = select.poll()  # not select(): a daemon's descriptors may be beyond 1,024
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


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
