"""Schedules of kills as data: who dies where. One generator for the matrix, `python -m tests.chaos` and other suites.

A kill is aimed at a process of one side, `SOURCE` (the prefill node and its engine) or `TARGET` (the decode node and
its engine), and comes at the n-th passage of a named point or after a time. Whoever carries it out decides what that
means: real nodes send SIGKILL, the simulator lets its daemon or mover die between two events.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvmanager.killpoints import POINTS

SOURCE: Final = "source"
TARGET: Final = "target"
SIDES: Final = (SOURCE, TARGET)

ROLES: Final = ("keeper", "daemon", "mover", "spare", "scheduler", "worker")
"""Processes of a side. At the target scheduler and worker are one process."""
GUEST: Final = "guest"
"""At the source one engine more: it has memory of its own and reads and fills a cache group by leases."""
PLACES: Final = (*((side, role) for side in SIDES for role in ROLES), (SOURCE, GUEST))

_FIRST: Final = {
    "keeper": "keeper", "daemon": "daemon", "mover": "mover", "spare": "spare", "engine": "scheduler",
    "worker": "worker",
}  # fmt: skip
_ONE_SIDED: Final = {
    "daemon.ticket.exported": SOURCE, "daemon.pull.begun": TARGET,
    "mover.pull.chunk_read": TARGET, "mover.pull.chunk_placed": TARGET, "mover.pull.ended": TARGET,
}  # fmt: skip
"""Points of a hand-off, which one side passes."""
_RARE: Final = {
    "keeper.start_child", "keeper.deposit", "keeper.forget", "keeper.reclaim", "daemon.journal.snapshot",
    "daemon.ticket.exported", "daemon.pull.begun", "mover.pull.chunk_read", "mover.pull.chunk_placed",
    "mover.pull.ended", "keeper.spare_begins", "spare.ready", "spare.begins",
}  # fmt: skip
"""Points that a round of work passes a few times: killed at the first or second passage."""
_NEEDS: Final = {
    "keeper.start_child": "mover dies", "keeper.deposit": "engine starts", "keeper.forget": "engine starts",
    "keeper.reclaim": "daemon dies", "keeper.spare_begins": "spare stands in", "spare.begins": "spare stands in",
    "spare.ready": "spare stands in", "daemon.journal.snapshot": "upgrade",
}  # fmt: skip
"""What must happen beside the work for the point to be passed."""
OFTEN_PASSED: Final = {"daemon.apply.before": 40, "daemon.apply.after": 40, "daemon.journal.append": 60}
"""Highest passage drawn for points that every event passes; 6 for the others."""
LINGERS_MS: Final = (0, 0, 20)
"""At once, or with time for other threads of the process."""
HALF_SECOND_S: Final = 0.5


@dataclass(frozen=True)
class Kill:
    """One death. `point` None: `delay_s` seconds after the work began; else at passage `passage` of the point.

    `linger_ms`: the passing thread waits so long at the point first: what was made before it leaves the process, what
    comes behind it never happens.

    `needs`: what else must be done for the point to be passed, in the words of `_NEEDS`; empty: the work alone.
    """

    side: str
    role: str
    point: str | None = None
    passage: int = 1
    delay_s: float = 0.0
    linger_ms: int = 0
    needs: str = ""

    @property
    def name(self) -> str:
        """What the statistics call it."""
        return self.point or f"{self.role} at any time"

    @property
    def costs_the_cache(self) -> bool:
        """Whether keeper and daemon are dead at one time, so that nobody has the memory any more."""
        return self.role == "keeper" and self.needs in ("daemon dies", "spare stands in")

    def __str__(self) -> str:
        if self.point is None:
            return f"{self.side} {self.name} after {self.delay_s:.3f} s"
        return f"{self.side} {self.point}:{self.passage}" + (f" + {self.linger_ms} ms" if self.linger_ms else "")


def sides_of(point: str) -> tuple[str, ...]:
    """Sides whose processes pass the point."""
    return (_ONE_SIDED[point],) if point in _ONE_SIDED else SIDES


def at_point(side: str, point: str, passage: int = 1, linger_ms: int = 0) -> Kill:
    """The kill at a named point."""
    role, needs = _FIRST[point.split(".")[0]], _NEEDS.get(point, "")
    return Kill(side, role, point, passage, linger_ms=linger_ms, needs=needs)


def drawn_at(side: str, point: str, draw: random.Random) -> Kill:
    """The kill at a named point, at a passage that the work reaches."""
    passage = 1 if point in _RARE else draw.randint(1, OFTEN_PASSED.get(point, 6))
    return at_point(side, point, passage, draw.choice(LINGERS_MS))


SIMULATED: Final = ("daemon.journal.append", "daemon.apply.after", "daemon.journal.snapshot")
"""Where a daemon can die that is a core and a journal, as in the simulator."""


def simulated(draw: random.Random) -> Kill:
    """The death of a simulated daemon; the passage is the next one."""
    return at_point(SOURCE, draw.choices(SIMULATED, (3, 4, 3))[0])


def matrix(seed: int) -> list[Kill]:
    """Every point on every side that passes it, and every role at a time of its own; in an order of its own."""
    draw = random.Random(f"matrix/{seed}")
    kills = [drawn_at(side, point, draw) for point in POINTS for side in sides_of(point)]
    kills += [Kill(side, role, delay_s=draw.uniform(0, HALF_SECOND_S)) for side, role in PLACES]
    draw.shuffle(kills)
    return kills


def random_kills(seed: int) -> Iterator[Kill]:
    """Kills without end: half at a point, half at any time."""
    draw = random.Random(f"kills/{seed}")
    points = list(POINTS)
    while True:
        if draw.random() < 0.5:
            point = draw.choice(points)
            yield drawn_at(draw.choice(sides_of(point)), point, draw)
        else:
            yield Kill(*draw.choice(PLACES), delay_s=draw.uniform(0, HALF_SECOND_S))


WIDEST: Final = (
    at_point(SOURCE, "daemon.apply.before", 25), at_point(SOURCE, "mover.plan.half_copied", 1),
    at_point(TARGET, "daemon.apply.after", 20), at_point(TARGET, "mover.pull.chunk_placed", 1),
    at_point(SOURCE, "engine.step.after_send", 3), at_point(SOURCE, "worker.timeline.before_raise", 3),
    at_point(SOURCE, "daemon.journal.append", 31), at_point(TARGET, "daemon.pull.begun", 1),
    at_point(SOURCE, "daemon.completion.received", 1), at_point(SOURCE, "keeper.start_child", 1),
    at_point(TARGET, "mover.pull.ended", 1), at_point(SOURCE, "daemon.ticket.exported", 1),
    at_point(SOURCE, "daemon.journal.snapshot", 1), at_point(SOURCE, "keeper.deposit", 1),
    at_point(SOURCE, "mover.plan.completed", 1), at_point(TARGET, "mover.pull.chunk_read", 1),
    at_point(SOURCE, "daemon.plan.submitted", 1, 20), at_point(SOURCE, "daemon.reply.after", 5, 20),
    at_point(SOURCE, "spare.begins", 1), at_point(TARGET, "keeper.reclaim", 1),
)  # fmt: skip
"""Twenty points with the most behind them, for the default tests."""
