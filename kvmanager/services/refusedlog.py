"""One line in the log for each refused registration: which engine, whose process, why.

An engine that is refused tries again, perhaps for ever, and under any name: each process gets a few lines a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvmanager.daemon.attach import ClientIdentity
from kvmanager.errors import KVError

LINES: Final = 8
"""Of one process in `WINDOW_S`; what is beyond is counted, and told in its next line."""
WINDOW_S: Final = 60.0
PROCESSES: Final = 256
"""Whose lines are counted; of more, those whose window began first are forgotten."""
NAME_CHARACTERS: Final = 100
REASON_CHARACTERS: Final = 500
_log = logging.getLogger("kvmanager.engine")


@dataclass
class _Window:
    began: float
    lines: int = 0
    left_out: int = 0


class RefusedLog:
    """Writes the lines; thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now()`: seconds."""
        self._now = now
        self._lock = threading.Lock()
        self._windows: OrderedDict[int, _Window] = OrderedDict()

    @contextmanager
    def refusals_of(self, identity: ClientIdentity, engine: str) -> Iterator[None]:
        """What is raised inside refuses the registration of `engine`: it is logged, and goes on."""
        try:
            yield
        except KVError as error:
            self._note(identity, engine, error)
            raise

    def _note(self, identity: ClientIdentity, engine: str, error: KVError) -> None:
        left_out = self._take_line(identity.pid)
        if left_out is None:
            return
        more = f" ({left_out} more of this process were not logged)" if left_out else ""
        named, why = _shown(engine, NAME_CHARACTERS), _shown(str(error), REASON_CHARACTERS)
        who = f"uid {identity.uid} pid {identity.pid}"
        _log.warning("engine %s of %s is not registered: %s: %s%s", named, who, error.reason, why, more)

    def _take_line(self, pid: int) -> int | None:
        """How many were left out since the last line; None where this one is left out too."""
        now = self._now()
        with self._lock:
            window = self._windows.get(pid)
            carried = 0
            if window is None or now - window.began >= WINDOW_S:
                carried = 0 if window is None else window.left_out
                window = self._windows[pid] = _Window(now)
                self._windows.move_to_end(pid)
                if len(self._windows) > PROCESSES:
                    self._windows.popitem(last=False)
            if window.lines == LINES:
                window.left_out += 1
                return None
            window.lines += 1
            return carried


def _shown(text: str, most: int) -> str:
    """Its beginning, with escapes for what can't be printed: what a client said must not write lines of its own."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in cut)
