"""Schedules as data: what is done, in order; a failing one is a file that replays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvmanager.errors import InvalidArgument

FORMAT: Final = "kvmanager-pressure/1"


@dataclass(frozen=True)
class Action:
    """One thing that is done; one that makes no sense where it stands (its request is closed) is passed over."""

    do: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """The whole input of a run: a node like `profile` (see `nodes.PROFILES`), and what is done to it."""

    suite: str
    seed: int
    profile: str
    actions: tuple[Action, ...]

    def only(self, actions: Sequence[Action]) -> Schedule:
        """The same with fewer actions."""
        return replace(self, actions=tuple(actions))


def save(schedule: Schedule, path: Path, invariant: str, says: str) -> None:
    """Writes the file that `load` reads."""
    told = {
        "format": FORMAT, "suite": schedule.suite, "seed": schedule.seed, "profile": schedule.profile,
        "invariant": invariant, "says": says, "actions": [[action.do, action.args] for action in schedule.actions],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Schedule:
    """A saved schedule. Raises InvalidArgument."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise InvalidArgument(f"{path} has the format {told['format']!r}, not {FORMAT!r}")
        actions = tuple(Action(do, args) for do, args in told["actions"])
        return Schedule(told["suite"], told["seed"], told["profile"], actions)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is not a saved schedule: {error}") from error


def smaller(
    actions: Sequence[Action], fails: Callable[[Sequence[Action]], bool], most_runs: int = 40
) -> tuple[Action, ...]:
    """Delta debugging: drops ever smaller pieces while the rest still fails, in at most so many runs."""
    left, runs, pieces = tuple(actions), 0, 2
    while len(left) > 1 and runs < most_runs:
        size = -(-len(left) // pieces)
        for start in range(0, len(left), size):
            rest = left[:start] + left[start + size :]
            runs += 1
            if rest and fails(rest):
                left, pieces = rest, max(pieces - 1, 2)
                break
            if runs >= most_runs:
                break
        else:
            if size == 1:
                break
            pieces = min(2 * pieces, len(left))
    return left
