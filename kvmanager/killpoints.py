"""Places where a process under test dies by SIGKILL, chosen from outside by one environment variable.

    KVMANAGER_KILL_AT="daemon.apply.after:40"             at the 40th passage in that process
    KVMANAGER_KILL_AT="mover.plan.received:1,keeper.forget:2"

Without the variable, `reach` is a call that does nothing. The name's first part says which process passes
the point: every process of a node inherits the variable, and each counts its own passages from 1. The keeper
gives the variable to the first process of each of its children only, so a child that was killed comes back
for good. Production never sets it. Standard library only: the keeper passes points too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Final

from kvmanager.errors import ConfigError

VARIABLE: Final = "KVMANAGER_KILL_AT"

POINTS: Final[Mapping[str, str]] = {
    "keeper.start_child": "a child runs, and the keeper has not noted it",
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


def _armed(environment: Mapping[str, str]) -> Callable[[str], None]:
    text = environment.get(VARIABLE)
    if text is None:
        return _pass_by
    left = parse(text)

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
"""Call it with a point's name where the process may die. A bad variable is a ConfigError when this is imported."""
