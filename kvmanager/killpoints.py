"""Places where a process under test dies by SIGKILL, chosen from outside by one environment variable.

    KVMANAGER_KILL_AT="daemon.apply.after:40"             at the 40th passage in that process
    KVMANAGER_KILL_AT="mover.plan.received:1,keeper.forget:2"
    KVMANAGER_KILL_AT="@FILE"                      the order lies in FILE, and may change while processes live

Without the variable, `reach` is a call that does nothing. The name's first part says which process passes
the point: every process of a node inherits the variable, and each counts its own passages from 1. The keeper
gives the variable to the first process of each of its children only, so a child that was killed comes back
for good. An order in a file (`KillOrder`) arms processes that run already, those of later starts as well, and is
carried out once. Production never sets it. Standard library only: the keeper passes points too.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from kvmanager.errors import ConfigError
from kvmanager.exitcodes import EXIT_CONFIG

VARIABLE: Final = "KVMANAGER_KILL_AT"
_ORDER_BYTES: Final = 128

POINTS: Final[Mapping[str, str]] = {
    "keeper.start_child": "a child runs, and the keeper has not noted it",
    "keeper.spare_begins": "the spare has what makes it the daemon, and the keeper has not noted it",
    "keeper.deposit": "a descriptor was taken in, the daemon has no answer yet",
    "keeper.forget": "a descriptor was let go, the daemon has no answer yet",
    "keeper.reclaim": "a daemon asked for what is held and knows how much, but has none of it",
    "daemon.apply.before": "an event was taken from the queue, the core has not seen it",
    "daemon.apply.after": "the core has applied an event, none of its effects was carried out",
    "daemon.reply.after": "the effects of an event that somebody waits for were carried out, the answer among them",
    "daemon.plan.submitted": "the core's plan was given to the mover's link",
    "daemon.completion.received": "a completion came from the mover, the core does not know it",
    "daemon.ticket.exported": "the core has pinned an export, nobody has its ticket",
    "daemon.pull.begun": "a pull was given to the mover's link",
    "daemon.journal.append": "a record is about to be made durable",
    "daemon.journal.snapshot": "a snapshot is written and not yet in force",
    "spare.ready": "a spare daemon has loaded everything, and nobody knows",
    "spare.begins": "a spare was made the daemon and has done nothing yet",
    "mover.plan.received": "a plan came in, no byte has moved",
    "mover.plan.half_copied": "a piece of a plan is copied, and there is more (also in a worker that runs a plan)",
    "mover.plan.completed": "a plan's last byte is in place, its completion is not sent",
    "mover.pull.chunk_read": "a chunk lies in the staging ring",
    "mover.pull.chunk_placed": "a chunk lies in its pages",
    "mover.pull.ended": "a pull is over, its completion is not sent",
    "engine.step.before_send": "a step message is made, not sent",
    "engine.step.after_send": "a step message is on its way, its reply is not read",
    "worker.timeline.before_raise": "a rank's work is done, its timeline does not say so",
    "worker.timeline.after_raise": "a rank's timeline was raised, the engine has not named the fence",
}
"""Every point: its name, and where the process stands when it dies there."""


def parse(text: str) -> dict[str, int]:
    """Point -> passage (from 1) of a value of the variable. Raises ConfigError for what names no point."""
    passages = {}
    for part in text.split(","):
        name, colon, count = part.strip().partition(":")
        if name not in POINTS:
            raise ConfigError(f"{VARIABLE}: no kill point is called {name!r}; there are {', '.join(POINTS)}")
        if not colon or not count.isascii() or not count.isdigit() or int(count) < 1:
            raise ConfigError(f"{VARIABLE}: {part.strip()!r} is not NAME:PASSAGE with a passage of 1 or more")
        if name in passages:
            raise ConfigError(f"{VARIABLE}: {name} is named twice; a process dies once")
        passages[name] = int(count)
    return passages


class KillOrder:
    """The order in a file: one death, of whichever process passes the point for the n-th time first.

    Byte 0 changes with each order, byte 1 says that it is over, byte 2 how many milliseconds the passing thread waits
    before the process dies, so that others can send what was made before the point; then the text. One process gives
    orders.
    """

    def __init__(self, path: Path) -> None:
        """Makes the file, with nothing to be done."""
        self.path = path
        path.write_bytes(b"\x00\x01\x00".ljust(_ORDER_BYTES))
        self._memory = _order_memory(path)

    @property
    def value(self) -> str:
        """What the variable says in processes that obey."""
        return f"@{self.path}"

    @property
    def over(self) -> bool:
        """Whether it was carried out, or withdrawn."""
        return self._memory[1] == 1

    def give(self, name: str, passage: int, linger_ms: int = 0) -> None:
        """From now on: die at the n-th passage of `name`, counted in each process from here, `linger_ms` (0-255) later.

        Raises ConfigError for what names no point.
        """
        text = f"{name}:{passage}"
        parse(text)
        self.withdraw()
        self._memory[2:] = bytes([linger_ms]) + text.encode().ljust(_ORDER_BYTES - 3)
        self._memory[0] = (self._memory[0] + 1) % 256
        self._memory[1] = 0

    def withdraw(self) -> None:
        """Nobody dies from now on."""
        self._memory[1] = 1

    def close(self) -> None:
        """Withdraws it and lets go of the file."""
        self.withdraw()
        self._memory.close()


def of_child(environment: Mapping[str, str], *, first: bool) -> dict[str, str]:
    """The environment of a child's process: an order by name is for the `first` one only."""
    keep = first or environment.get(VARIABLE, "").startswith("@")
    return {name: value for name, value in environment.items() if keep or name != VARIABLE}


def _order_memory(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), _ORDER_BYTES)


def _obeying(path: Path) -> Callable[[str], None]:
    try:
        memory = _order_memory(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{VARIABLE}: no order in {path}: {error}") from error
    seen = -1
    left: dict[str, int] = {}

    def count(name: str) -> None:
        nonlocal seen, left
        assert name in POINTS, f"kill point {name!r} is not in the table"
        if memory[1] == 1:
            return
        if memory[0] != seen:
            seen, left = memory[0], parse(memory[3:].decode().strip())
        if name in left:
            left[name] -= 1
            if left[name] == 0:
                memory[1] = 1
                time.sleep(memory[2] / 1000)
                os.kill(os.getpid(), signal.SIGKILL)

    return count


def _armed(environment: Mapping[str, str]) -> Callable[[str], None]:
    text = environment.get(VARIABLE)
    if text is None:
        return _pass_by
    if text.startswith("@"):
        return _obeying(Path(text[1:]))
    try:
        left = parse(text)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)

    def count(name: str) -> None:
        if name not in left:
            assert name in POINTS, f"kill point {name!r} is not in the table"
            return
        left[name] -= 1
        if left[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def _pass_by(_name: str) -> None:
    """Not armed."""


reach: Final = _armed(os.environ)
"""Call it with a point's name where the process may die. A bad variable ends the program, 78."""
