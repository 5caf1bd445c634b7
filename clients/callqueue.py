"""Calls that nobody waits for: who asks only queues, and a thread makes messages, sends them and reads the answers."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from kvmanager.clients.callline import Question, SteadyLine
from kvmanager.errors import KVError, NotReady

T = TypeVar("T")
ENDED: Final = "the daemon does not answer: the connection ended"


class Answer(Generic[T]):
    """What a call gives, once it is there. One thread sets it, one other takes it."""

    __slots__ = ("_error", "_ring", "_there", "_value", "_waiter", "cancelled")

    def __init__(self) -> None:
        self._there = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._waiter: threading.Event | None = None
        self._ring: Callable[[], None] | None = None
        self.cancelled = False
        """Nobody will ask for it."""

    def done(self) -> bool:
        """Whether it is there."""
        return self._there

    def result(self, timeout: float | None = None) -> T:
        """What the call gave, waited for at most `timeout` seconds. Raises what it raised, or TimeoutError."""
        if not self._there:
            # In this order: who sets it looks for a waiter when it is there already.
            waiter = self._waiter = self._waiter or threading.Event()
            if not self._there and not waiter.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def wake(self, ring: Callable[[], None]) -> None:
        """Calls this when it is there, perhaps twice; in the thread that sets it, so it must not wait."""
        self._ring = ring
        if self._there:
            ring()

    def set_result(self, value: T) -> None:
        """The call gave this."""
        self._value = value
        self._tell()

    def set_exception(self, error: Exception) -> None:
        """The call raised this."""
        self._error = error
        self._tell()

    def cancel(self) -> None:
        """Nobody will ask for it."""
        self.cancelled = True

    def _tell(self) -> None:
        self._there = True
        if self._waiter is not None:
            self._waiter.set()
        if self._ring is not None:
            self._ring()


@dataclass(slots=True)
class _Asked:
    """A question on its way. make: gives it, once it is to be sent."""

    make: Callable[[], Question[Any]]
    answer: Answer[Any]


class CallQueue:
    """Questions to one daemon, answered in the order in which they were asked. Thread-safe; nothing here waits.

    It ends when the daemon is away: then make another one.
    """

    def __init__(self, line: SteadyLine, heard: Callable[[KVError | None], None] = lambda _: None) -> None:
        """`heard`: called by the queue's thread behind each answer, and at its end; must not wait."""
        self.broken = False
        """It ended: questions fail at once."""
        self._line = line
        self._heard = heard
        self._waiting: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="cache-calls", daemon=True).start()

    def ask(self, make: Callable[[], Question[T]]) -> Answer[T]:
        """`make` is called by the queue's thread. The answer raises the daemon's typed error, NotReady without one."""
        answer: Answer[T] = Answer()
        self._waiting.put(_Asked(make, answer))
        if self.broken:
            self._fail(NotReady(ENDED))
        return answer

    def close(self) -> None:
        """Ends it behind what was asked so far."""
        self._waiting.put(None)

    def _run(self) -> None:
        failure: KVError = NotReady(ENDED)
        try:
            self._answer_all()
        except KVError as error:
            failure = error
        finally:
            self._line.close()
            self.broken = True
            self._fail(failure)
            self._heard(failure)

    def _answer_all(self) -> None:
        """Until somebody closes it. Raises what says that the daemon is away."""
        while (asked := self._waiting.get()) is not None:
            error: KVError | None = None
            try:
                asked.answer.set_result(self._line.exchange(asked.make()))
            except KVError as refused:
                error = refused
                asked.answer.set_exception(refused)
            except Exception as bug:
                asked.answer.set_exception(bug)
                continue
            if error is not None and self._line.broken:
                raise error
            self._heard(error)

    def _fail(self, error: KVError) -> None:
        """All that is not answered."""
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._waiting.get_nowait()
                if asked is not None:
                    asked.answer.set_exception(error)
