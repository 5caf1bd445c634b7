"""Whose turn it is among plans: the most urgent first, in a ring among equals, and nobody starves.

The rule: who waits, may start, and has seen `FAIR_TURNS` turns go to others takes the next one. So a plan that a
request waits for overtakes all queued write-backs, and write-backs keep one turn in 17 beside a stream of such plans
that never ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Final, Generic, TypeVar

from kvmanager.core.plans import Purpose

FAIR_TURNS: Final = 16
Item = TypeVar("Item")


class Turns(Generic[Item]):
    """Items that wait for a turn, by the purpose of their plans."""

    def __init__(self) -> None:
        self._waiting: dict[Purpose, deque[Item]] = {}
        self._passed_over: dict[Purpose, int] = {}

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        """All that wait."""
        for items in self._waiting.values():
            yield from items

    @property
    def purposes(self) -> Collection[Purpose]:
        """Purposes of what waits."""
        return self._waiting.keys()

    def put(self, purpose: Purpose, item: Item) -> None:
        """Lets an item wait behind those of its purpose."""
        self._waiting.setdefault(purpose, deque()).append(item)
        self._passed_over.setdefault(purpose, 0)

    def take(self, may_start: Collection[Purpose]) -> tuple[Purpose, Item]:
        """The next item of these purposes, of which one must wait. What may not start is passed over for nothing."""
        ready = [purpose for purpose in self._waiting if purpose in may_start]
        passed = self._passed_over
        starved = [purpose for purpose in ready if passed[purpose] >= FAIR_TURNS]
        chosen = min(starved or ready, key=lambda purpose: (purpose.urgency, -passed[purpose]))
        for purpose in ready:
            passed[purpose] += 1
        passed[chosen] = 0
        items = self._waiting[chosen]
        item = items.popleft()
        if not items:
            del self._waiting[chosen]
        return chosen, item

    def drop(self, unwanted: Callable[[Item], bool]) -> int:
        """Takes those away; how many they were."""
        dropped = 0
        for purpose, items in list(self._waiting.items()):
            kept = deque(item for item in items if not unwanted(item))
            dropped += len(items) - len(kept)
            self._waiting[purpose] = kept
            if not kept:
                del self._waiting[purpose]
        return dropped
