"""The owner loop: what waits for the core is handled in its order, one thing at a time.

It has a thread of its own. Who asks while nothing waits and the core is free has it done in his own thread, at once:
a change of threads, and one back, cost more than most events.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from kvmanager.core.events import READS, Effect, Event, Replied, Step, Tick, TimelinesRead
from kvmanager.core.leaseevents import EndLease
from kvmanager.core.node import Node
from kvmanager.errors import KVError, NotReady
from kvmanager.journal.journal import Journal
from kvmanager.killpoints import reach

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

    def refuse(self, error: KVError) -> None:
        if self.answered is not None:
            self.answered(error)


@dataclass
class _Inspect:
    """found: (whether it was refused, the answer or why). given_up: nobody waits for it any more."""

    look: Callable[[Node], Any]
    found: queue.SimpleQueue[tuple[bool, Any]]
    given_up: bool = False

    def refuse(self, error: KVError) -> None:
        self.found.put((True, error))


class _Look:
    """Nothing to do, but the loop is to see for itself how long it may sleep now."""


_LOOK = _Look()


class OwnerLoop:
    """Runs the core, and keeps what changes it in the journal, before any effect of it leaves.

    `perform` carries out effects and must not block. It, and what else is told to run *in the core*, runs in the loop's
    thread or in that of a caller, never in two at one time.

    `on_failure` is called once, with the exception that ended the loop: the daemon must then stop. After the
    end, however it came, nobody waits in vain: events posted are dropped, questions are answered NotReady.
    """

    def __init__(
        self,
        node: Node,
        timelines: Timelines,
        perform: Callable[[Effect], None],
        on_failure: Callable[[BaseException], None],
        journal: Journal | None = None,
        observe: Callable[[Event, list[Effect], float], None] = lambda _event, _effects, _took_s: None,
    ) -> None:
        """`observe(event, effects, seconds)`: called in the core, after the effects have left."""
        self._node = node
        self._timelines = timelines
        self._perform = perform
        self._on_failure = on_failure
        self._journal = journal
        self._observe = observe
        self._inbox: queue.SimpleQueue[_Apply | _Inspect | _Look | None] = queue.SimpleQueue()
        self._ended = False
        self._waiting = 0  # of the inbox, what is being handled included
        self._lock = threading.Lock()  # guards both: nothing enters the inbox after it was emptied
        self._core = threading.Lock()  # held by who uses the core
        self._started = False
        self._next_tick = time.monotonic() + TICK_S
        self._thread = threading.Thread(target=self._run, name="core", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        """Handles what is queued, then ends the thread. Fine after a failure, too."""
        self._inbox.put(None)
        self._thread.join()
        with self._core:  # a caller who was faster has gone
            pass

    def post(self, event: Event) -> None:
        """Applies an event some time; nobody waits for it."""
        self._put(_Apply(event, None))

    def send(self, event: Event, answered: Callable[[Answer], None]) -> None:
        """Applies an event; `answered` gets the answer (perhaps a KVError), in the core.

        After the loop's end it gets NotReady, in the caller's thread.
        """
        self._do(_Apply(event, answered))

    def call(self, event: Event) -> Answer:
        """Applies an event and waits. Raises the KVError that was the answer."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()  # a Future costs more than most events
        self.send(event, answers.put)
        answer = answers.get()
        if isinstance(answer, KVError):
            raise answer
        return answer

    def inspect(self, look: Callable[[Node], T], timeout_s: float | None = None) -> T:
        """Runs a read-only function in the core, between two events.

        Raises its KVError, or NotReady, also when the core does not come to it within `timeout_s`.
        """
        work = _Inspect(look, queue.SimpleQueue())
        self._do(work)
        try:
            refused, found = work.found.get(timeout=timeout_s)
        except queue.Empty:
            work.given_up = True
            raise NotReady(f"the core did not answer within {timeout_s:g} s; see the daemon's log") from None
        if refused:
            raise found
        seen: T = found
        return seen

    @property
    def tick_age_s(self) -> float:
        """Time since the last tick; what lies between two is at most TICK_S and the longest event."""
        return time.monotonic() - (self._next_tick - TICK_S)

    def settle(self, action: Callable[[Node], None] = lambda _node: None) -> None:
        """Returns when all that this thread posted was applied, and then `action` was run in the core.

        Without the action when the loop has ended.
        """
        try:
            self.inspect(action)
        except NotReady:
            _log.info("the core has ended")

    def _do(self, work: _Apply | _Inspect) -> None:
        """Now, where nothing else is to be done before it; otherwise in its turn."""
        if not self._core.acquire(blocking=False):
            self._put(work)
            return
        try:
            alone = self._started and not self._ended and self._waiting == 0
            if alone:
                self._handle_here(work)
        finally:
            self._core.release()
        if not alone:
            self._put(work)

    def _handle_here(self, work: _Apply | _Inspect) -> None:
        watched = self._node.fences_pending
        try:
            self._handle(work)
        except BaseException as error:
            self._fail(error)
            self._inbox.put(None)  # for the thread
            return
        if self._node.fences_pending and not watched:
            self._inbox.put(_LOOK)

    def _put(self, work: _Apply | _Inspect) -> None:
        with self._lock:
            if not self._ended:
                self._waiting += 1
                self._inbox.put(work)
                return
        work.refuse(_over())

    # ------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._fail(error)
        else:
            self._refuse_the_rest()

    def _fail(self, failure: BaseException) -> None:
        """What ends the loop; only the first is told."""
        _log.critical("the core stops: %s", failure, exc_info=failure)
        if self._refuse_the_rest():
            self._on_failure(failure)

    def _refuse_the_rest(self) -> bool:
        """Whether this ended the loop."""
        with self._lock:
            first, self._ended = not self._ended, True
        while not self._inbox.empty():
            with contextlib.suppress(queue.Empty):  # two may be at it
                work = self._inbox.get_nowait()
                if isinstance(work, _Apply | _Inspect):
                    work.refuse(_over())
        return first

    def _turn(self) -> bool:
        if time.monotonic() >= self._next_tick:  # also when the inbox is never empty
            self._next_tick = time.monotonic() + TICK_S
            with self._core:
                self._apply(_Apply(Tick(), None))
        try:
            work = self._inbox.get(timeout=self._patience())
        except queue.Empty:
            with self._core:
                if self._node.fences_pending:
                    self._read_timelines()
            return True
        if work is None:
            return False
        if isinstance(work, _Look):
            return True
        with self._core:
            self._handle(work)
        with self._lock:
            self._waiting -= 1
        return True

    def _handle(self, work: _Apply | _Inspect) -> None:
        if isinstance(work, _Inspect):
            self._look(work)
            return
        event = work.event
        if isinstance(event, Step) or self._node.fences_pending:
            self._read_timelines()
        elif isinstance(event, EndLease) and event.fence:
            work = _Apply(self._seen(event), work.answered)
        self._apply(work)

    def _seen(self, event: EndLease) -> EndLease:
        """With what its fence's timelines show now: one event less to apply and to keep."""
        values = self._timelines.read()
        return replace(event, seen={attach: values[attach] for attach in event.fence if attach in values})

    def _patience(self) -> float:
        """Seconds until the loop must do something by itself."""
        until_tick = max(self._next_tick - time.monotonic(), 0.0)
        with self._core:
            pending = self._node.fences_pending
        return min(FENCE_POLL_S, until_tick) if pending else until_tick

    def _read_timelines(self) -> None:
        self._apply(_Apply(TimelinesRead(self._timelines.read()), None))

    def _apply(self, work: _Apply) -> None:
        now = time.monotonic_ns()
        if self._node.idle(work.event, now):
            return
        reach("daemon.apply.before")
        start = time.perf_counter()
        try:
            effects = self._node.apply(work.event, now)
            if self._journal is not None and not isinstance(work.event, READS):
                self._journal.append(work.event, now, time.perf_counter() - start)
        except BaseException:
            work.refuse(_over())
            raise
        reach("daemon.apply.after")
        for effect in effects:
            if isinstance(effect, Replied):
                if work.answered is not None:
                    work.answered(effect.answer)
            else:
                self._perform(effect)
        if work.answered is not None:
            reach("daemon.reply.after")
        self._observe(work.event, effects, time.perf_counter() - start)
        if self._journal is not None and self._journal.due(idle=self._inbox.empty()):
            self._journal.snapshot(self._node)

    def _look(self, work: _Inspect) -> None:
        if work.given_up:
            return
        try:
            seen = work.look(self._node)
        except KVError as error:
            work.refuse(error)
        except BaseException:
            work.refuse(_over())
            raise
        else:
            work.found.put((False, seen))


def _over() -> NotReady:
    return NotReady("the daemon is ending; attach again when it is back")
