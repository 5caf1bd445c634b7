"""What SIGHUP changes in a running node: its file is read again, and the keys of one table take effect.

All or nothing: a file that can't be used, or that changes any other key, leaves everything as it was. What such a file
says counts at the next start of the daemon, like any other; so put it right before one is due.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.operationsconfig import HealthSection
from kvmanager.configuration.reading import read_config
from kvmanager.errors import ConfigError

RELOADABLE: Final[Mapping[str, frozenset[str]]] = {
    "node": frozenset({"trust_uids"}),  # who is attached stays
    "fence": frozenset({"action"}),
    "mover": frozenset({"to_host_gb_per_s", "to_device_gb_per_s", "both_ways_gb_per_s"}),
    "checksums": frozenset({"restart_spans", "restart_ms"}),  # used at the next start
    "health": frozenset(field.name for field in dataclasses.fields(HealthSection)),
    "history": frozenset({"max_bytes"}),  # not from or to 0
}
"""Table -> keys that may change while the node runs. All others decide on memory, on the journal or on who listens."""
_LISTS: Final = {"groups": "group", "tenants": "tenant", "events": "events"}
_log = logging.getLogger("kvmanager.reload")


@dataclass(frozen=True)
class Change:
    """One key that differs. where: as the file has it, "[health] core_ms"; safe: it may change in a running node."""

    where: str
    before: object
    after: object
    safe: bool

    def __str__(self) -> str:
        """One line of the difference."""
        return f"{self.where}: {_shown(self.before)} -> {_shown(self.after)}"


def changes(before: NodeConfig, after: NodeConfig) -> list[Change]:
    """Every key whose effective value differs, in the order of the configuration."""
    found: list[Change] = []
    for field in dataclasses.fields(NodeConfig):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name in _LISTS:
            found += _in_list(_LISTS[field.name], old, new)
        else:
            safe = RELOADABLE.get(field.name, frozenset())
            found += _in_table(f"[{field.name}]", old, new, safe)
    return found


def _in_table(where: str, old: Any, new: Any, safe: frozenset[str]) -> Iterator[Change]:
    for field in dataclasses.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            begins_or_ends = (where, field.name) == ("[history]", "max_bytes") and 0 in (before, after)
            yield Change(f"{where} {field.name}", before, after, field.name in safe and not begins_or_ends)


def _in_list(kind: str, old: tuple[Any, ...], new: tuple[Any, ...]) -> Iterator[Change]:
    """Tables are the same one where their names are, or their places where they have no name."""
    named = [{getattr(each, "name", place): each for place, each in enumerate(tables)} for tables in (old, new)]
    for name in dict.fromkeys([*named[0], *named[1]]):
        where = f"[[{kind}]] {name!r}"
        if name not in named[1]:
            yield Change(where, "there", "gone", safe=False)
        elif name not in named[0]:
            yield Change(where, "not there", "new", safe=False)
        else:
            yield from _in_table(where, named[0][name], named[1][name], frozenset())
    if set(named[0]) == set(named[1]) and list(named[0]) != list(named[1]):
        yield Change(f"[[{kind}]] order", list(named[0]), list(named[1]), safe=False)


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, (str, Path)) else str(value)


def reread(path: Path, before: NodeConfig) -> tuple[NodeConfig, list[Change]]:
    """The file's configuration and how it differs.

    Raises ConfigError for a file that can't be used, or that changes a key which takes a restart.
    """
    after = read_config(path)
    found = changes(before, after)
    unsafe = [change for change in found if not change.safe]
    if unsafe:
        raise ConfigError(f"{path}: takes a restart: {'; '.join(map(str, unsafe))}")
    return after, found


class Reloader:
    """Reads a node's file again when asked to, in a thread of its own."""

    def __init__(
        self,
        path: Path,
        config: NodeConfig,
        use: Callable[[NodeConfig], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`use(config)` makes it the one in effect; it gets none that differs in anything but `RELOADABLE`."""
        self._path = path
        self._config = config
        self._use = use
        self._on_failure = on_failure
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    def config(self) -> NodeConfig:
        """What is in effect."""
        return self._config

    def start(self) -> None:
        """Begins to listen to `ask`."""
        self._thread.start()

    def ask(self) -> None:
        """Has the file read again, soon. Safe in a signal handler."""
        self._asked.put(True)

    def close(self) -> None:
        """Ends, after what was asked for."""
        self._asked.put(False)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._asked.get():
            try:
                self.reload()
            except Exception as error:
                _log.exception("a reload broke off")
                self._on_failure(error)
                return

    def reload(self) -> None:
        """Reads the file and uses it, or says why not."""
        try:
            after, found = reread(self._path, self._config)
        except ConfigError as error:
            _log.error("not reloaded, the configuration stays as it was: %s", error)
            return
        self._use(after)
        self._config = after
        for change in found:
            _log.warning("reloaded: %s", change)
        if not found:
            _log.warning("reloaded: nothing differs")
