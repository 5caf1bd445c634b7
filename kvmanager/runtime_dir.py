"""The node's private directory: its sockets' names, and the rule that nobody else may enter it."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from kvmanager.errors import ConfigError

ATTACH_SOCKET: Final = "attach.sock"
GRPC_SOCKET: Final = "grpc.sock"
CALLS_SOCKET: Final = "calls.sock"
"""The short way of lease calls."""
KEEPER_SOCKET: Final = "keeper.sock"
"""Where the daemon lets in a keeper that comes after another one."""
KEEPER_LOCK: Final = "keeper.lock"
"""Held by the living keeper; `NAME.lock` beside it by its children."""
_UCRED: Final = struct.Struct("iII")


def make_private_dir(path: Path) -> None:
    """Makes the directory with mode 0700, or checks that an existing one is ours and closed to others.

    Raises ConfigError naming what is wrong and the remedy.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"can't make the runtime directory {path}: {error.strerror}; choose another") from error
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"the runtime directory {path} is a link or a file; choose another")
    if found.st_uid != os.getuid():
        raise ConfigError(f"the runtime directory {path} belongs to uid {found.st_uid}, not {os.getuid()}")
    if mode & 0o077:
        raise ConfigError(f"the runtime directory {path} has mode {mode:04o}; run: chmod 0700 {path}")


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, as the kernel noted them then."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def bind_socket(path: Path) -> socket.socket:
    """A listening unix socket with mode 0600; a leftover of a dead process is replaced.

    Where `path` exists, somebody listens: it appears only then. Raises ConfigError when a living process
    listens there already.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        outcome = probe.connect_ex(os.fspath(path))
    if outcome == 0:
        raise ConfigError(f"a node serves {path.parent} already; stop it or choose another runtime_dir")
    if outcome == errno.ECONNREFUSED:
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    assert path.suffix == ".sock", path
    early = path.with_suffix("")  # shorter, for a socket's path has at most 107 bytes
    try:
        early.unlink(missing_ok=True)
        listener.bind(os.fspath(early))
        early.chmod(0o600)
        listener.listen(128)
        path.hardlink_to(early)  # unlike a rename, fails when another process was faster
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {path}: {error.strerror}") from error
    finally:
        early.unlink(missing_ok=True)
    return listener
