"""The keeper's spare daemon: a process that has loaded the daemon's program (`kvmanager.keeper.spare`) and waits.

    none --a daemon serves, and `spare_after_s` later--> loading --it says so--> ready --the daemon dies--> the daemon
    any  --it dies, the node stops, an upgrade begins--> none

It holds nothing of the node until it is the daemon, so its death costs nothing; one that dies too often is not
started again. It ends by itself when the keeper does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvmanager.errors import KVError, NotReady
from kvmanager.framing import receive_json, send_json
from kvmanager.keeper.children import Child, KeeperLimits, spawn
from kvmanager.keeper.systemd import without_systemd
from kvmanager.killpoints import of_child

_ANSWERS_S: Final = 5.0
"""A spare that does not take the daemon's place in so long is ended."""
_log = logging.getLogger("kvmanager.keeper")


class SpareChild:
    """At most one spare. With an empty command there never is one."""

    def __init__(
        self, command: Sequence[str], runtime_dir: Path, limits: KeeperLimits, selector: selectors.BaseSelector
    ) -> None:
        """`command`: what is started, with the number of a socket after its first three words."""
        self._command = tuple(command)
        self._deaths = Child("spare", command, runtime_dir)
        self._limits = limits
        self._selector = selector
        self._pid, self._pidfd = 0, -1
        self._channel: socket.socket | None = None
        self._ready = False
        self.start_at_s: float | None = None
        """When (monotonic) to call `start_if_due`; None while there is nothing to start."""

    def plan(self) -> None:
        """A daemon serves: a spare for the next one is started in a while, when engines have come back to this one."""
        if self._command and not self._pid and len(self._deaths.deaths_s) <= self._limits.restarts_max:
            self.start_at_s = time.monotonic() + self._limits.spare_after_s

    def start_if_due(self, now_s: float) -> None:
        """Starts it when it is time. Only a kill order in a file reaches it: it is no daemon's first process."""
        if self.start_at_s is None or now_s < self.start_at_s:
            return
        self.start_at_s = None
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWERS_S)
        fd = theirs.fileno()
        with theirs:
            command = (*self._command[:3], str(fd), *self._command[3:])
            environment = without_systemd(dict(os.environ))
            self._pid = spawn(command, of_child(environment, first=False), [fd])
        self._pidfd, self._channel, self._ready = os.pidfd_open(self._pid), ours, False
        self._selector.register(ours, selectors.EVENT_READ, self._hear)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._on_death)

    def stand_in(self, daemon: Child, channel: socket.socket) -> bool:
        """Makes the spare the daemon, with its end of `channel`; False when none is ready.

        Raises NotReady while another daemon lives.
        """
        if not self._ready:
            return False
        assert self._channel is not None
        ours = self._channel

        def begin(lock: int) -> None:
            send_json(ours, {"op": "begin"}, [lock, channel.fileno()])
            receive_json(ours)  # one that hangs does not say that it begins

        try:
            daemon.become(self._pid, self._pidfd, begin)
        except NotReady:
            raise
        except KVError as error:
            _log.warning("the spare does not take the daemon's place: %s", error)
            self.end()
            return False
        self._forget()
        return True

    def end(self) -> None:
        """Ends it, where there is one; it has nothing to clean up."""
        self.start_at_s = None
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._reap()

    def _hear(self) -> None:
        if self._channel is None:  # gone earlier in this turn
            return
        try:
            receive_json(self._channel)
        except KVError:
            self._selector.unregister(self._channel)  # its death is about to be reported
            self._ready = False
            return
        self._ready = True
        _log.info("a spare daemon is ready, pid %d", self._pid)

    def _on_death(self) -> None:
        if not self._pid:
            return
        pid = self._pid
        self._reap()
        if self._deaths.note_death(self._limits) is None:
            _log.warning("the spare daemon, pid %d, is dead, the last of many: no other is started", pid)
            return
        _log.warning("the spare daemon, pid %d, is dead; another one is started", pid)
        self.plan()

    def _reap(self) -> None:
        os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        pidfd = self._pidfd
        self._forget()
        os.close(pidfd)

    def _forget(self) -> None:
        """It is no spare any more; what watched it is closed, but for its pidfd."""
        assert self._channel is not None
        for watched in (self._channel, self._pidfd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(watched)
        self._channel.close()
        self._pid, self._pidfd, self._channel, self._ready = 0, -1, None, False
