"""Lock files of the runtime directory: who holds one lives, and the file says its pid.

A lock (flock) belongs to an open file, so it goes with an inherited descriptor: the keeper takes a child's lock
before the child exists, the child holds it for all its life, and nobody has to clean up after a death.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Final

_TRIES: Final = 10
_PAUSE_S: Final = 0.02
"""`holder` takes a shared lock for a moment; that may not make somebody else give up."""


def hold(path: Path) -> int | None:
    """Takes the lock; its descriptor, whose end is the lock's, or None while another process holds it.

    The file is there and empty then: `name_holder` writes into it.
    """
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        if _is_at(path, fd):
            os.ftruncate(fd, 0)
            return fd
        os.close(fd)  # who held it until now took the file away
    return None


def name_holder(fd: int, pid: int) -> None:
    """Writes who holds the lock; safe between fork and exec."""
    os.pwrite(fd, b"%d\n" % pid, 0)


def holder(path: Path) -> int | None:
    """The pid of the living process that holds the lock, 0 while it has not said it, None when nobody holds it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        text = os.pread(fd, 32, 0)
    finally:
        os.close(fd)
    return int(text) if text.endswith(b"\n") else 0


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
