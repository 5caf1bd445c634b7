"""What an engine's thread waits for while it has nothing to do."""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Any, Final, Protocol

_DRAIN_BYTES: Final = 4096


class HasFileno(Protocol):
    """What can be waited on."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


class Bell:
    """Rung when something is there that an engine without other work waits for; or it comes on a line that it watches.

    Any thread rings it, one waits. Pickled, it is left behind: in another process nobody rings it.
    """

    def __init__(self) -> None:
        self.rung = False
        """Since it was last waited for, or `clear`ed."""
        self._hears, self._rings = socket.socketpair()
        self._hears.setblocking(False)
        self._rings.setblocking(False)
        self._watched = select.epoll()
        self._watched.register(self._hears, select.EPOLLIN)

    def watch(self, line: HasFileno) -> None:
        """Waits for this, too, until it is closed."""
        self._watched.register(line, select.EPOLLIN)

    def ring(self) -> None:
        """Ends a wait, this one or the next."""
        if not self.rung:
            self.rung = True
            with contextlib.suppress(OSError):  # rung often enough, or the engine has gone
                self._rings.send(b"!")

    def wait(self, most_s: float) -> None:
        """Waits until it is rung, or something comes, or so long."""
        if any(fd == self._hears.fileno() for fd, _ in self._watched.poll(most_s)):
            self._take_back()

    def clear(self) -> None:
        """Takes a ring back: what it was rung for is looked at now."""
        if self.rung:
            self._take_back()

    def _take_back(self) -> None:
        with contextlib.suppress(BlockingIOError):  # who rings has not sent it yet: the next wait is a short one
            self._hears.recv(_DRAIN_BYTES)
        self.rung = False

    def close(self) -> None:
        """Nobody waits any more. Idempotent."""
        self._watched.close()
        self._hears.close()
        self._rings.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_bell, ()


def _no_bell() -> None:
    return None
