"""A replay's course: requests begin, wait for room in the order they came, hold their pages, and end.

Time is the stream's: between two things that happen nothing takes any. What is driven (the core alone, or a live node)
says whether a request found room.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvmanager.errors import CapacityError
from kvmanager.replay.lanes import Source
from kvmanager.replay.stream import Request

TICK_S: Final = 60.0
WARM_UP: Final = 0.25
"""Share of the requests, from the beginning, that is not counted."""
SETTLE_TRIES: Final = 5
"""With nothing open, a refusal that may pass is tried again so often; then the request is refused for good."""
Progressed = Callable[[int], None] | None


@dataclass
class Served:
    """One request: tokens of its prompt that were found, and how many of them had to be loaded.

    refusal: why it got no room; retry: whether that may pass.
    """

    cached_tokens: int = 0
    loaded_tokens: int = 0
    refusal: CapacityError | None = None

    @property
    def refused(self) -> bool:
        """Whether it found no room."""
        return self.refusal is not None

    @property
    def may_pass(self) -> bool:
        """Whether it is worth asking again."""
        return self.refusal is not None and bool(self.refusal.retry_after_ns)


class Driven(Protocol):
    """What a course drives."""

    def at(self, moment_s: float) -> None:
        """Time goes on."""

    def tick(self) -> None:
        """What happens with time alone."""

    def settle(self) -> None:
        """Everything under way ends."""

    def open(self, number: int, request: Request) -> Served:
        """A request begins: its prompt's pages, and their content."""

    def close(self, number: int) -> None:
        """It gives its pages back."""

    def turn_ends(self, request: Request) -> None:
        """Its answer is complete: its session is idle, or over."""


@dataclass
class Queueing:
    """What waited. waits_s: of the counted requests, those that waited, in seconds of the stream."""

    waits_s: list[float] = field(default_factory=list)
    most_waiting: int = 0
    most_open: int = 0
    most_open_tokens: int = 0

    def waited_s(self, share: float) -> float:
        """The wait that `share` of those that waited stayed below; 0 for none."""
        ordered = sorted(self.waits_s)
        return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


class Course:
    """Drives `driven` with what `source` asks.

    counted(request, served): called for each request behind the warm-up, when it begins.
    holds: share of a request's service time for which it keeps its pages; at 0 it opens and closes at one moment.
    counting: called once, when the warm-up is over.
    """

    def __init__(
        self,
        driven: Driven,
        source: Source,
        holds: float,
        counted: Callable[[Request, Served], None],
        counting: Callable[[], None],
        progress: Progressed = None,
    ) -> None:
        self._driven, self._source, self._holds = driven, source, holds
        self._counted, self._counting, self._progress = counted, counting, progress
        self.queueing = Queueing()
        self._now_s, self._next_tick_s = 0.0, TICK_S
        self._queue: deque[tuple[int, Request]] = deque()
        self._happens: list[tuple[float, int, bool, Request]] = []  # moment, number, is a turn's end, request
        self._open: dict[int, int] = {}  # number -> tokens
        self._first_counted = 0
        self._begun = False

    def run(self, total: int) -> None:
        """`total` requests in the order of their start; returns when all of them gave their pages back."""
        self._first_counted = int(total * WARM_UP)
        number = 0
        while number < total or self._open:
            if not self._open and number < total:
                self._source.idle(self._now_s)
            arrival_s = self._source.next_s if number < total else float("inf")
            if self._happens and self._happens[0][0] <= arrival_s:
                self._next_thing()
            else:
                number += 1
                self._arrive(number, self._source.take())
                if self._progress is not None and number % 100 == 0:
                    self._progress(number)

    def _go_to(self, moment_s: float) -> None:
        self._now_s = max(self._now_s, moment_s)
        self._driven.at(self._now_s)

    def _next_thing(self) -> None:
        moment_s, number, is_turn, request = heapq.heappop(self._happens)
        self._go_to(moment_s)
        if is_turn:
            self._driven.turn_ends(request)
            return
        self._close(number)
        self._admit()

    def _close(self, number: int) -> None:
        del self._open[number]
        self._driven.close(number)

    def _arrive(self, number: int, request: Request) -> None:
        self._go_to(request.start_s)
        if request.start_s >= self._next_tick_s:
            self._driven.tick()
            self._next_tick_s = request.start_s + TICK_S
        if not self._begun and self._counts(number, request):
            self._begun = True
            self._counting()
        self._queue.append((number, request))
        if len(self._queue) == 1:
            self._admit()
        self.queueing.most_waiting = max(self.queueing.most_waiting, len(self._queue))

    def _counts(self, number: int, request: Request) -> bool:
        return number > self._first_counted and not request.warm_up

    def _admit(self) -> None:
        """Opens what waits, in order, until one finds no room. With nothing open nothing will make room for it."""
        tries = 0
        while self._queue:
            number, request = self._queue[0]
            served = self._driven.open(number, request)
            if served.may_pass and self._open:
                return
            if served.may_pass and tries < SETTLE_TRIES:
                tries += 1
                self._driven.settle()
                continue
            self._queue.popleft()
            tries = 0
            self._begin(number, request, served)

    def _begin(self, number: int, request: Request, served: Served) -> None:
        waited_s = self._now_s - request.start_s
        if self._counts(number, request):
            self._counted(request, served)
            if waited_s > 0:
                self.queueing.waits_s.append(waited_s)
        request = request.later(waited_s)
        if not served.refused:
            self._open[number] = request.tokens
            self.queueing.most_open = max(self.queueing.most_open, len(self._open))
            self.queueing.most_open_tokens = max(self.queueing.most_open_tokens, sum(self._open.values()))
            if self._holds:
                held_s = self._holds * (request.end_s - request.start_s)
                heapq.heappush(self._happens, (request.start_s + held_s, number, False, request))
            else:
                self._close(number)
        heapq.heappush(self._happens, (request.end_s, number, True, request))
        self._source.ended(request, request.end_s)
