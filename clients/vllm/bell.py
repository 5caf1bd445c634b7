"""What an engine's thread waits for while it has nothing to do."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Any


class Bell:
    """Rung when something is there that an engine without other work waits for.

    That is when somebody sets it, and when there is something to read from what it watches. Pickled, it is left behind:
    in another process nobody rings it.
    """

    def __init__(self) -> None:
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watched = -1
        """A descriptor; -1: none."""

    def set(self) -> None:
        """Rings it; of any thread."""
        os.eventfd_write(self._rung, 1)

    def clear(self) -> None:
        """What it was rung for has been seen."""
        with contextlib.suppress(BlockingIOError):  # nobody rang
            os.eventfd_read(self._rung)

    def wait(self, most_s: float) -> None:
        """Waits until it is rung, or so long."""
        poll = select.poll()
        for fd in (self._rung, self.watched):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        if any(fd == self._rung for fd, _ in poll.poll(most_s * 1000)):
            self.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_bell, ()

    def __del__(self) -> None:
        os.close(self._rung)


def _no_bell() -> None:
    return None
