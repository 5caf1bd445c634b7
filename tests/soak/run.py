"""Replayed sessions on two nodes under random kills for a stated time; then nothing may be left, and memory be flat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.run import Chaos, Report, run_rounds
from tests.chaos.schedule import SOURCE, TARGET, Kill, random_kills
from tests.soak.text import SessionText, replayed

TURNS_A_KILL: Final = 12
"""Requests between two kills."""
WARM_KILLS: Final = 4
"""Memory is first looked at after so many kills: pools are full and every path was taken once."""
GROWTH_KIB: Final = 16 * 1024
"""Most that a daemon or a mover may have grown between the first look and the last, in KiB of its own memory.

Both looks are at processes that have just come to rest. One of them may be younger than the other: a process that a
kill replaced starts small, so what is compared is the largest seen in the first and in the last fifth of the looks.
"""
ROLES: Final = ("daemon", "mover")


@dataclass
class Memory:
    """RssAnon of daemons and movers at rest, KiB, look by look."""

    looks: dict[str, list[int]] = field(default_factory=dict)

    def note(self, name: str, kib: int) -> None:
        """One more look."""
        self.looks.setdefault(name, []).append(kib)

    def before_and_after(self) -> dict[str, tuple[int, int]]:
        """name -> the largest of the first and of the last fifth of its looks."""
        found = {}
        for name, looks in self.looks.items():
            part = max(1, len(looks) // 5)
            found[name] = max(looks[:part]), max(looks[-part:])
        return found

    def grown(self) -> list[str]:
        """Those that grew by more than the bound."""
        return [
            f"{name} grew from {before} to {after} KiB, at most {GROWTH_KIB} KiB are allowed"
            for name, (before, after) in self.before_and_after().items()
            if after - before > GROWTH_KIB
        ]


def own_memory_kib(pid: int) -> int:
    """Memory that is the process's own: not the pools, which are shared."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(text.partition("RssAnon:")[2].split()[0])


class Soak(Chaos):
    """Kills beside a replay."""

    def __init__(self, directory: Path, report: Report, say: Callable[[str], object]) -> None:
        super().__init__(directory, report, say)
        self._stream = replayed(report.seed)
        self._offered: tuple[SessionText, str] | None = None
        self.memory = Memory()
        self.looks_from = WARM_KILLS

    def engine_module(self) -> str:
        """Whose process serves."""
        return "tests.soak.engine"

    def guest_module(self) -> str:
        """The replay has none."""
        return ""

    def _turn(self) -> None:
        """The next recorded request through the source; the one before it through the target."""
        source, target = self.sides[SOURCE], self.sides[TARGET]
        offered, self._offered = self._offered, None
        for side in (source, target):
            if side.engine is None:
                side.mend()
        text = next(self._stream)
        assert source.engine is not None
        assert target.engine is not None
        source.engine.tell(do="play", text=_told(text), export=True)
        if offered is not None:
            target.engine.tell(do="take", text=_told(offered[0]), ticket=offered[1])
        answer = self._judge(source, source.hear())
        if answer is not None and answer["ticket"]:
            self._offered = (text, answer["ticket"])
        if offered is not None:
            self._judge(target, target.hear())
        self._report.turns += 1

    def round(self, number: int, kill: Kill) -> None:
        """Some of the replay, a kill, and all the looks that follow it."""
        for _ in range(TURNS_A_KILL):
            self._turn()
        super().round(number, kill)
        if number >= self.looks_from:
            self._look_at_memory()

    def _look_at_memory(self) -> None:
        for name, side in self.sides.items():
            for role in ROLES:
                pid = side.pid_of(role)
                if pid:
                    self.memory.note(f"{role} of {name}", own_memory_kib(pid))

    def rest(self) -> None:
        """As after kills; tickets that nobody took are let go."""
        self._offered = None
        super().rest()


def _told(text: SessionText) -> dict[str, Any]:
    return {"play": text.play, "nodes": list(text.nodes), "number": text.number}


def _for_seconds(seconds: float, seed: int) -> Iterator[Kill]:
    deadline = time.monotonic() + seconds
    for kill in random_kills(seed):
        if time.monotonic() > deadline:
            return
        yield kill


def soak(minutes: float, seed: int, say: Callable[[str], object] = print) -> tuple[Report, Memory]:
    """Runs for so many minutes. What is wrong is in the report, growth of memory among the leaks."""
    held: list[Soak] = []

    def make(directory: Path, report: Report) -> Soak:
        held.append(Soak(directory, report, say))
        return held[0]

    report = run_rounds(_for_seconds(60 * minutes, seed), seed, make)
    report.leaks += held[0].memory.grown()
    return report, held[0].memory
