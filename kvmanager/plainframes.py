"""Frames (`kvmanager/framing.py`) without descriptors on a blocking socket: as few reads and writes as can be."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from kvmanager.errors import LimitExceeded, PeerUnreachable
from kvmanager.framing import HEADER
from kvmanager.units import KIB

_FIRST_READ_BYTES: Final = 32 * KIB
"""Where nothing of a frame is here yet: most are small, and room for more is not free."""
_READ_BYTES: Final = 256 * KIB


class PlainFrames:
    """Frames, one after the other; what else a read brought is kept for the next.

    Descriptors that come along are closed by the system, unseen.
    """

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        """`max_bytes`: the largest payload taken. The socket stays the caller's."""
        self._sock = sock
        self._max_bytes = max_bytes
        self._data = b""

    def next(self) -> tuple[bytes, int] | None:
        """(payload, number of descriptors that were announced) of the next frame; None when the other side has closed.

        Raises LimitExceeded for a frame that is too large, before it is read, and then the stream makes no sense any
        more; PeerUnreachable, also when the socket's time-out passes.
        """
        data = self._data or self._read(_FIRST_READ_BYTES)
        if not data:
            return None
        if len(data) < HEADER.size:
            data = self._until(data, HEADER.size)
        size, fds = HEADER.unpack_from(data)
        _check_size(size, self._max_bytes)
        end = HEADER.size + size
        if len(data) < end:
            data = self._until(data, end)
        self._data = data[end:]
        return data[HEADER.size : end], fds

    def _until(self, data: bytes, size: int) -> bytes:
        """At least `size` bytes, of which the first are here."""
        parts, count = [data], len(data)
        while count < size:
            part = self._read(_READ_BYTES)
            if not part:
                raise PeerUnreachable(f"the connection ended within a frame, {count} bytes into it")
            parts.append(part)
            count += len(part)
        return b"".join(parts)

    def _read(self, most_bytes: int) -> bytes:
        try:
            return self._sock.recv(most_bytes)
        except OSError as error:
            raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error


def send_frames(sock: socket.socket, payloads: Sequence[bytes], max_bytes: int) -> None:
    """Sends frames with one write. Raises LimitExceeded, and sends none of them; PeerUnreachable."""
    parts: list[bytes] = []
    for payload in payloads:
        _check_size(len(payload), max_bytes)
        parts += (HEADER.pack(len(payload), 0), payload)
    try:
        sock.sendall(b"".join(parts))
    except OSError as error:
        raise PeerUnreachable(f"the other side of the socket is gone: {error}") from error


def _check_size(payload_bytes: int, max_bytes: int) -> None:
    if payload_bytes > max_bytes:
        raise LimitExceeded(f"a frame of {payload_bytes} bytes: at most {max_bytes} bytes")
