"""The process at the other end of a unix socket: who it is, and a descriptor that tells of its end."""

from __future__ import annotations

import errno
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmanager.runtime_dir import peer_credentials

_SO_PEERPIDFD: Final = 77  # Linux 6.5; not in Python's socket module


@dataclass(frozen=True, slots=True)
class Peer:
    """What the kernel says of the process at the other end."""

    pid: int
    uid: int
    pidfd: int


def read_peer(channel: socket.socket) -> Peer:
    """Who is at the other end. Raises ProcessLookupError when it is gone already."""
    pid, uid = peer_credentials(channel)
    try:
        raw = channel.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return Peer(pid, uid, open_pidfd(pid, uid))
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENODATA):  # reaped; the number depends on the kernel
            raise ProcessLookupError(f"pid {pid} is gone") from error
        raise
    return Peer(pid, uid, int.from_bytes(raw, "little"))


def open_pidfd(pid: int, uid: int, started: int | None = None) -> int:
    """A pidfd by number, for kernels whose sockets don't hold one (before 6.5), and for processes known from before.

    The number may be another process's by now, so owner and start time must be the same before and
    after opening, and the latter `started`, if that is known. Raises ProcessLookupError otherwise.
    """
    before = _owner_and_start(pid)
    if started not in (None, before[1]):
        raise ProcessLookupError(f"pid {pid} is another process by now")
    pidfd = os.pidfd_open(pid)
    try:
        if before[0] != uid or _owner_and_start(pid) != before:
            raise ProcessLookupError(f"pid {pid} of uid {uid} is another process by now")
    except ProcessLookupError:
        os.close(pidfd)
        raise
    return pidfd


def started_ticks(pid: int) -> int:
    """The process's start; 0 where it can't be seen (it is gone, or in another namespace)."""
    try:
        return _owner_and_start(pid)[1]
    except ProcessLookupError:
        return 0


def _owner_and_start(pid: int) -> tuple[int, int]:
    """(uid, start time in clock ticks since boot)."""
    process = Path(f"/proc/{pid}")
    try:
        # The command's name, in parentheses, may hold anything; the fields after the last one may not.
        fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return process.stat().st_uid, int(fields[19])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"pid {pid} is gone") from error


def allow_descriptors() -> None:
    """As many as this process may have: clients take up to four each, regions one each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
