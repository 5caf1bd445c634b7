"""Answers of the daemon as the engine's thread takes them, and the bell that it waits for while it has nothing to do.

The engine's thread is its scheduler: whether an answer is there costs it one read of a variable, and making a question
no lock. What else an answer can do is done by the line's threads.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Answer(Generic[T]):
    """What a call gives, once it is there. One thread sets it, one other takes it."""

    __slots__ = ("_error", "_there", "_value", "_waiter", "cancelled")

    def __init__(self) -> None:
        self._there = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._waiter: threading.Event | None = None
        self.cancelled = False
        """Nobody will ask for it."""

    def done(self) -> bool:
        """Whether it is there."""
        return self._there

    def result(self, timeout: float | None = None) -> T:
        """What the call gave, waited for at most `timeout` seconds. Raises what it raised, or TimeoutError."""
        if not self._there:
            # In this order: who sets it looks for a waiter when it is there already.
            waiter = self._waiter = threading.Event()
            if not self._there and not waiter.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

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


class Bell:
    """Rung when something is there that an engine without other work waits for.

    Pickled, it is left behind: in another process nobody rings it.
    """

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        """Something is there."""
        self._rung.set()

    def quiet(self) -> None:
        """What was rung for is known."""
        self._rung.clear()

    def wait(self, most_s: float) -> bool:
        """Waits until it is rung, or so long; whether it was rung."""
        return self._rung.wait(most_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_bell, ()


def _no_bell() -> None:
    return None
