"""What the demo shows while it runs: a live table on a terminal, a line a turn elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvmanager.demo.report import ALSO_COUNTED, MECHANISMS

REFRESH_S: Final = 0.5

Counters = Callable[[], Mapping[str, int]]


class Progress:
    """The display; safe to tell from several threads. `lines` are what engines do now, by engine."""

    def __init__(self, console: Console, turns: int) -> None:
        self._console = console
        self._turns = turns
        self._done = 0
        self._lines: dict[str, str] = {}
        self._counters: Mapping[str, int] = {}
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._table, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unwatch()
        self._live.stop()

    def watch(self, counters: Counters) -> None:
        """Reads the counters every `REFRESH_S` until `unwatch`."""
        self._stop.clear()
        self._watcher = threading.Thread(target=self._read, args=(counters,), name="demo-progress", daemon=True)
        self._watcher.start()

    def unwatch(self) -> None:
        """Stops reading counters."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def _read(self, counters: Counters) -> None:
        while not self._stop.wait(REFRESH_S):
            now = counters()
            with self._lock:
                self._counters = now

    def say(self, who: str, what: str) -> None:
        """What an engine, or the demo itself, does now."""
        with self._lock:
            self._lines[who] = what
        if who == "demo" and not self._console.is_terminal:
            self._console.print(f"{self._seconds():6.1f} s  {what}", soft_wrap=True)

    def turn_done(self, text: str) -> None:
        """One turn more has its answer."""
        with self._lock:
            self._done += 1
            done = self._done
        line = f"{self._seconds():6.1f} s  turn {done}/{self._turns}: {text}"
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
        self.say("last", line.strip())

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _table(self) -> Table:
        with self._lock:
            table = Table(title=f"kvmanager demo, {self._seconds():.0f} s, {self._done}/{self._turns} turns")
            table.add_column("engine")
            table.add_column("now", min_width=60)
            for who, what in sorted(self._lines.items()):
                table.add_row(who, what)
            names = [*MECHANISMS, *ALSO_COUNTED]
            table.add_row("counters", "  ".join(f"{name} {self._counters.get(name, 0)}" for name in names))
            return table
