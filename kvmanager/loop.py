"""The owner loop: one thread that owns the core. Everybody else sends events and gets answers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvmanager.core.events import Effect, Event, Replied, Step, Tick, TimelinesRead
from kvmanager.core.node import Node
from kvmanager.errors import KVError

TICK_S = 0.5
"""Time between ticks: leases expire with no new work."""
FENCE_POLL_S = 0.001
"""How often timelines are read while a fence is pending; never while none is."""

Answer = Any
_log = logging.getLogger("kvmanager.loop")
T = TypeVar("T")


class Timelines(Protocol):
    """Reads timeline words."""

    def read(self) -> dict[int, int]:
        """Attach id -> value of its word."""
        ...


@dataclass(frozen=True)
class _Apply:
    event: Event
    answered: Callable[[Answer], None] | None


@dataclass(frozen=True)
class _Inspect:
    look: Callable[[Node], Any]
    result: Future[Any]


class OwnerLoop:
    """Runs the core. `perform` carries out effects in the loop's thread and must not block.

    `on_failure` is called once, with the exception that ended the loop: the daemon must then stop.
    """

    def __init__(
        self,
        node: Node,
        timelines: Timelines,
        perform: Callable[[Effect], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._node = node
        self._timelines = timelines
        self._perform = perform
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[_Apply | _Inspect | None] = queue.SimpleQueue()
        self._next_tick = time.monotonic() + TICK_S
        self._thread = threading.Thread(target=self._run, name="core", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Handles what is queued, then ends the thread."""
        self._inbox.put(None)
        self._thread.join()

    def post(self, event: Event) -> None:
        """Applies an event some time; nobody waits for it."""
        self._inbox.put(_Apply(event, None))

    def send(self, event: Event, answered: Callable[[Answer], None]) -> None:
        """Applies an event; `answered` gets the answer (perhaps a KVError) in the loop's thread."""
        self._inbox.put(_Apply(event, answered))

    def call(self, event: Event) -> Answer:
        """Applies an event and waits. Raises the KVError that was the answer."""
        result: Future[Answer] = Future()
        self.send(event, result.set_result)
        answer = result.result()
        if isinstance(answer, KVError):
            raise answer
        return answer

    def inspect(self, look: Callable[[Node], T]) -> T:
        """Runs a read-only function on the core, between two events."""
        result: Future[T] = Future()
        self._inbox.put(_Inspect(look, result))
        return result.result()

    # ------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            _log.critical("the core stops: %s", error, exc_info=True)
            self._on_failure(error)

    def _turn(self) -> bool:
        try:
            work = self._inbox.get(timeout=self._patience())
        except queue.Empty:
            work = _Apply(Tick(), None) if time.monotonic() >= self._next_tick else None
            if work is None:
                self._read_timelines()
                return True
        if work is None:
            return False
        if isinstance(work, _Inspect):
            _set(work.result, lambda: work.look(self._node))
            return True
        if isinstance(work.event, Tick):
            self._next_tick = time.monotonic() + TICK_S
        if isinstance(work.event, Step) or self._node.fences_pending:
            self._read_timelines()
        self._apply(work.event, work.answered)
        return True

    def _patience(self) -> float:
        """Seconds until the loop must do something by itself."""
        until_tick = max(self._next_tick - time.monotonic(), 0.0)
        return min(FENCE_POLL_S, until_tick) if self._node.fences_pending else until_tick

    def _read_timelines(self) -> None:
        self._apply(TimelinesRead(self._timelines.read()), None)

    def _apply(self, event: Event, answered: Callable[[Answer], None] | None) -> None:
        for effect in self._node.apply(event, time.monotonic_ns()):
            if isinstance(effect, Replied):
                if answered is not None:
                    answered(effect.answer)
            else:
                self._perform(effect)


def _set(result: Future[Any], look: Callable[[], Any]) -> None:
    try:
        result.set_result(look())
    except KVError as error:
        result.set_exception(error)
