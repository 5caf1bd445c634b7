"""Lines in the log about what clients were refused: for a registration which engine, whose process, why.

Who is refused tries again, perhaps for ever, and under any name: each process gets a few lines a minute.
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


class LineBudget:
    """How many lines each process may still cause; thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now()`: seconds."""
        self._now = now
        self._lock = threading.Lock()
        self._windows: OrderedDict[int, _Window] = OrderedDict()

    def take(self, pid: int) -> str | None:
        """What a line says of those that were left out since the last one; None where it is left out too."""
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
        return f" ({carried} more of this process were not logged)" if carried else ""


class RefusedLog:
    """Writes the lines; thread-safe."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now()`: seconds."""
        self._budget = LineBudget(now)

    @contextmanager
    def refusals_of(self, identity: ClientIdentity, engine: str) -> Iterator[None]:
        """What is raised inside refuses the registration of `engine`: it is logged, and goes on."""
        try:
            yield
        except KVError as error:
            self._note(identity, engine, error)
            raise

    def _note(self, identity: ClientIdentity, engine: str, error: KVError) -> None:
        more = self._budget.take(identity.pid)
        if more is None:
            return
        named, why = _shown(engine, NAME_CHARACTERS), _shown(str(error), REASON_CHARACTERS)
        who = f"uid {identity.uid} pid {identity.pid}"
        _log.warning("engine %s of %s is not registered: %s: %s%s", named, who, error.reason, why, more)


def _shown(text: str, most: int) -> str:
    """Its beginning, with escapes for what can't be printed: what a client said must not write lines of its own."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in cut)
