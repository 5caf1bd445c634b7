"""The signals that a keeper obeys: SIGTERM and SIGINT stop the node, SIGHUP reloads, SIGUSR2 upgrades in place."""

from __future__ import annotations

import logging
import selectors
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

_OBEYED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
_log = logging.getLogger("kvmanager.keeper")


class KeeperSignals:
    """Counts them. For the main thread of a process of its own."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        """`on_stop()` is called for each that stops, between two steps of the main thread."""
        self._on_stop = on_stop
        self.stops = 0
        self.upgrade_asked = False
        self.reload_asked = False

    def listen(self, selector: selectors.BaseSelector) -> None:
        """From now on they end the selector's wait. One that is ignored already (nohup) stays so."""
        wake_source, wake_target = socket.socketpair()
        for end in (wake_source, wake_target):
            end.setblocking(False)
        selector.register(wake_target, selectors.EVENT_READ, lambda: wake_target.recv(4096))
        signal.set_wakeup_fd(wake_source.detach(), warn_on_full_buffer=False)
        for number in _OBEYED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)
        self.let_through()

    def hold_back(self) -> None:
        """Keeps them waiting; they wait on after an execve."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _OBEYED)

    def let_through(self) -> None:
        """Lets them in again."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OBEYED)

    def take_reload(self) -> bool:
        """Whether a reload was asked for since this was last called."""
        asked, self.reload_asked = self.reload_asked, False
        return asked

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGUSR2, signal.SIGHUP):
            self.upgrade_asked |= number == signal.SIGUSR2
            self.reload_asked |= number == signal.SIGHUP
            return
        self.stops += 1
        _log.info("%s: stopping", signal.Signals(number).name)
        self._on_stop()
