"""The history: what was opened, refused, missed, forgotten and moved, in files of bounded size.

The owner loop only appends to a queue (`note`); a thread of its own derives the records and writes them. When it falls
behind, events are dropped and counted: nothing ever waits for it. Files are JSON lines, `history.jsonl` the newest.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvmanager.configuration.config import NodeConfig
from kvmanager.core.events import Effect, Event, Tick, TimelinesRead
from kvmanager.core.state import State
from kvmanager.errors import ConfigError
from kvmanager.observing.health import JobVitals
from kvmanager.observing.historyrecords import Record, Recorder

FILES: Final = 4
"""Files kept; each holds a quarter of `max_bytes`."""
WAITING_MAX: Final = 8_192
"""Events that may wait to be written."""
PAUSE_S: Final = 0.1
CLOSE_S: Final = 5.0
"""A disk that takes nothing for so long does not keep a daemon from ending."""
SAY_S: Final = 60.0
"""Between two lines of the log about what can't be written."""
_QUIET = (TimelinesRead, Tick)
"""Events that matter only for their effects."""
_LEASES = ('"state":"lease"', '"what":"store"')
_log = logging.getLogger("kvmanager.history")


def files_in(directory: Path) -> list[Path]:
    """The history's files, oldest first."""
    older = [directory / f"history.{number}.jsonl" for number in range(FILES - 1, 0, -1)]
    return [path for path in (*older, directory / "history.jsonl") if path.is_file()]


def lines(directory: Path, *words: str) -> Iterator[Record]:
    """Records that contain one of the words as written, or all; oldest first. A line that was cut off is left out."""
    for path in files_in(directory):
        try:
            file = path.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:  # it was just rotated
            continue
        with file:  # line by line: whole files stay behind in the memory of a daemon that reads them at its start
            for line in file:
                if not words or any(word in line for word in words):
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError:
                        continue


class History:
    """Writes the history of one daemon. `note` belongs to the owner loop; all else is thread-safe."""

    def __init__(self, directory: Path, max_bytes: int, recorder: Recorder) -> None:
        """`directory` is made where it is missing. `max_bytes`: of all files together."""
        self.directory = directory
        self.limit(max_bytes)
        self._recorder = recorder
        self._waiting: deque[tuple[Event, int, Sequence[Effect]]] = deque()
        self.written = 0
        """Records written."""
        self._noted = self._refused = 0  # events; of the owner loop
        self._taken = self._lost = self._settled = self._told = 0  # events; of the thread
        self._said_s = -SAY_S
        self._wake = threading.Event()
        self._over = threading.Event()
        self._caught_up = threading.Condition()
        self._passes = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for record in lines(directory, '"what":"forgot"', *_LEASES):
            recorder.remember(record)
        self._path = directory / "history.jsonl"
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    @property
    def dropped(self) -> int:
        """Events that were not recorded."""
        return self._refused + self._lost

    def vitals(self) -> JobVitals:
        """done: events that the file has, or says that it lacks."""
        settled = self._settled  # before what is noted: what comes in between is waiting
        return JobVitals(self._noted != settled, settled)

    def limit(self, max_bytes: int) -> None:
        """Bytes of all files from now on; larger ones shrink as they are rotated."""
        self._file_bytes = max(max_bytes // FILES, 1)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def note(self, event: Event, now: int, effects: Sequence[Effect]) -> None:
        """One event with its effects, in the owner loop; never waits."""
        if isinstance(event, _QUIET) and not effects:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._refused += 1
            return
        self._noted += 1
        self._waiting.append((event, now, effects))

    def catch_up(self, timeout_s: float = 2.0) -> None:
        """Returns when what was noted before is in the file, or after `timeout_s`."""
        with self._caught_up:
            wanted = self._passes + 2  # one may be under way that began before
            self._wake.set()
            self._caught_up.wait_for(lambda: self._passes >= wanted or not self._thread.is_alive(), timeout_s)

    def close(self) -> None:
        """Writes what waits, and ends the thread; leaves it where it is when that takes longer than CLOSE_S."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.error("the history is left unfinished: %s takes nothing for %g s", self._path, CLOSE_S)

    def _run(self) -> None:
        while True:
            over = self._over.is_set()
            before = self._taken
            try:
                self._write()
            except Exception as error:  # whatever it is, a history must not end a node
                self._lost += self._taken - before
                self._say(error)
            with self._caught_up:
                self._passes += 1
                self._caught_up.notify_all()
            if over:
                return
            self._wake.wait(PAUSE_S)
            self._wake.clear()

    def _say(self, error: Exception) -> None:
        if time.monotonic() - self._said_s >= SAY_S:
            self._said_s = time.monotonic()
            _log.error("a part of the history is lost: %s", error, exc_info=not isinstance(error, OSError))

    def _write(self) -> None:
        """Writes what waits now, and how many events were dropped that the file does not know of."""
        count = len(self._waiting)
        dropped = self.dropped
        if not count and dropped == self._told:
            return
        offset = time.time_ns() - time.monotonic_ns()
        text = []
        for _ in range(count):
            event, now, effects = self._waiting.popleft()
            self._taken += 1
            for record in self._recorder.records(event, now, effects):
                record["t"] = round((now + offset) / 1e9, 6)
                text.append(_line(record))
        if dropped != self._told:
            text.append(_line({"what": "dropped", "events": dropped - self._told, "t": round(time.time(), 6)}))
        self._append(text)
        self._told = dropped
        self._settled = self._taken

    def _append(self, text: list[str]) -> None:
        place = 0
        while place < len(text):
            with self._path.open("a", encoding="utf-8") as file:
                size = file.tell()
                while place < len(text) and (size == 0 or size + len(text[place]) <= self._file_bytes):
                    size += file.write(text[place])
                    place += 1
            if place < len(text):
                self._rotate()
        self.written += len(text)

    def _rotate(self) -> None:
        for number in range(FILES - 1, 0, -1):
            older = self.directory / f"history.{number}.jsonl"
            newer = self.directory / (f"history.{number - 1}.jsonl" if number > 1 else "history.jsonl")
            if newer.exists():
                newer.replace(older)


def begin(config: NodeConfig, state: State) -> History | None:
    """The history of a node that begins, or None where none is kept. Raises ConfigError."""
    if config.history.max_bytes == 0:
        return None
    try:
        return History(config.history_dir, config.history.max_bytes, Recorder(state, config.eviction.policy))
    except OSError as error:
        raise ConfigError(f"[history] directory: can't use {config.history_dir}: {error}") from error


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"
