"""The keeper's connection to its daemon: made at the daemon's start, or anew to one that was running already."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from pathlib import Path
from typing import Final

from kvmanager.errors import KVError
from kvmanager.framing import readable
from kvmanager.keeper.deposits import DepositBox
from kvmanager.runtime_dir import KEEPER_SOCKET, peer_credentials

_ANSWER_TIMEOUT_S: Final = 5.0
_CONNECT_PAUSE_S: Final = 0.1
_log = logging.getLogger("kvmanager.keeper")


class DaemonChannel:
    """Serves `box` to the daemon, in the keeper's loop. At most one connection at a time."""

    def __init__(self, runtime_dir: Path, box: DepositBox, selector: selectors.BaseSelector) -> None:
        self._path = runtime_dir / KEEPER_SOCKET
        self._box = box
        self._selector = selector
        self._socket: socket.socket | None = None
        self._connect_at_s = 0.0

    @property
    def fd(self) -> int:
        """The connection's descriptor, -1 while there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def connect_at_s(self) -> float | None:
        """When (monotonic) to call `connect_if_due`; None while there is a connection."""
        return self._connect_at_s if self._socket is None else None

    def pair(self) -> socket.socket:
        """A new connection; the end that a new daemon inherits."""
        ours, theirs = socket.socketpair()
        self._box.new_daemon()
        self.use(ours)
        return theirs

    def use(self, connection: socket.socket) -> None:
        """Serves this connection from now on."""
        assert self._socket is None, "the daemon before has ended"
        connection.settimeout(_ANSWER_TIMEOUT_S)
        self._socket = connection
        self._selector.register(connection, selectors.EVENT_READ, self._serve)

    def connect_if_due(self, now: float) -> None:
        """Tries to reach a living daemon that lost its keeper; it answers by giving everything back."""
        if self.connect_at_s is not None and now >= self.connect_at_s:
            self._connect()

    def _connect(self) -> None:
        self._connect_at_s = time.monotonic() + _CONNECT_PAUSE_S
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_ANSWER_TIMEOUT_S)
        try:
            connection.connect(os.fspath(self._path))
        except OSError:  # it has not got so far, or has ended: its pidfd tells
            connection.close()
            return
        _, uid = peer_credentials(connection)
        if uid != os.getuid():
            _log.error("%s is listened on by uid %d, not by our daemon", self._path, uid)
            connection.close()
            return
        self._box.new_daemon()
        self.use(connection)

    def drain(self) -> None:
        """After the daemon's death: hears what it still said, then closes. Somebody else may hold its end open."""
        while self._socket is not None and readable([self._socket.fileno()], 0.0):
            self._serve()
        self._close()

    def _serve(self) -> None:
        if self._socket is None:  # closed earlier in this turn
            return
        try:
            more = self._box.serve(self._socket)
        except KVError as error:
            _log.error("the daemon's channel is closed: %s", error)
            more = False
        if not more:
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
