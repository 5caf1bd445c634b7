"""What a suite is, how one is named, and what its schedules are written with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvmanager.pressure.nodes import Room
from kvmanager.pressure.schedule import Action, Schedule

Make = Callable[[Room, random.Random], Iterator[Action]]
GIANT_TOKENS: Final = 1 << 20
"""The long request, where the pool holds it; else one that takes nearly all of the pool."""


@dataclass(frozen=True)
class Suite:
    """A named kind of pressure. `needs`: of "host", "peer", "own" (a node that we started), "ceiling"."""

    name: str
    about: str
    profile: str
    needs: tuple[str, ...]
    make: Make

    def schedule(self, room: Room, seed: int) -> Schedule:
        """The schedule of a seed: the same for the same room."""
        draw = random.Random(f"{self.name}/{seed}")
        return Schedule(self.name, seed, self.profile, tuple(self.make(room, draw)))


SUITES: Final[dict[str, Suite]] = {}
"""All that were named. Those of this package are there once `kvmanager.pressure.suites` is imported."""


def suite(name: str, profile: str = "node", needs: tuple[str, ...] = ()) -> Callable[[Make], Make]:
    """Names a generator of actions; its docstring says what it is about."""

    def add(make: Make) -> Make:
        assert name not in SUITES, name
        SUITES[name] = Suite(name, (make.__doc__ or "").split("\n")[0], profile, needs, make)
        return make

    return add


class Story:
    """Makes actions with request numbers that are never used twice."""

    def __init__(self, room: Room, draw: random.Random) -> None:
        self.room, self.draw = room, draw
        self._request = 0
        self._piece = draw.randrange(1 << 20) << 8
        self.open_ones: list[tuple[int, int, int]] = []
        """(client, request, tokens) of those that were opened and not closed."""

    def piece(self) -> int:
        """A piece of text that nobody had."""
        self._piece += 1
        return self._piece

    def tokens(self, spans: float) -> int:
        """Tokens of so many spans, and a few more or fewer."""
        return max(1, int(spans * self.room.span_tokens) + self.draw.randint(-3, 3))

    def open(self, client: int, text: list[list[int]], growth: int = 0, **more: Any) -> Action:
        """Opens a text as the next request; the last `growth` tokens of it are not in the prompt."""
        self._request += 1
        length = sum(count for _, count in text)
        growth = min(growth, length - 1)
        self.open_ones.append((client, self._request, length))
        told = {"client": client, "request": self._request, "text": text, "growth": growth, **more}
        return Action("open", told)

    def advance(self, part: float = 1.0) -> Iterator[Action]:
        """One of those that are open goes on, by a part of its length."""
        if self.open_ones:
            client, request, tokens = self.draw.choice(self.open_ones)
            yield Action("advance", {"client": client, "request": request, "to": max(1, int(tokens * part))})

    def close(self, oldest: bool = False, aborted: float = 0.0) -> Iterator[Action]:
        """One of those that are open ends; finished unless the dice say aborted."""
        if self.open_ones:
            client, request, tokens = self.open_ones.pop(0 if oldest else self.draw.randrange(len(self.open_ones)))
            gives_up = self.draw.random() < aborted
            if not gives_up:
                yield Action("advance", {"client": client, "request": request, "to": tokens})
            yield Action("close", {"client": client, "request": request, "aborted": gives_up})


def connect(*clients: int, node: int = 0, process: bool = False) -> Iterator[Action]:
    """Engines come."""
    for client in clients:
        yield Action("connect", {"client": client, "node": node, "process": process})


def quiet(kind: str = "poll") -> Action:
    """Hears or asks again, without waiting."""
    return Action(kind)
