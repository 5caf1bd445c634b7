"""How a scheduler's hooks ask what waits for nothing else: themselves, or by a thread where that takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvmanager.clients.callline import Question
from kvmanager.clients.callqueue import Answer, CallQueue
from kvmanager.clients.leases import Questions
from kvmanager.clients.nowaitline import NoWaitLine
from kvmanager.clients.vllm.bell import Bell

T = TypeVar("T")


class Reads:
    """One registration's ways to ask. Made by the link's thread, used by the scheduler's alone once it has adopted it.

    Only who uses the line closes it: its descriptor is then not another's while a call is being sent on it.
    """

    def __init__(self, line: NoWaitLine, queue: CallQueue, questions: Questions) -> None:
        self._line = line
        self._queue = queue
        self._questions = questions
        self._lock = threading.Lock()  # guards the two below
        self._adopted = False
        self._over = False

    @property
    def broken(self) -> bool:
        """Whether one of the two ways has ended."""
        return self._line.broken or self._queue.broken

    def adopt(self, bell: Bell) -> bool:
        """From here on the calling thread uses it, and `close`s it; answers on the line end a wait for the bell.

        False, and it is not adopted, where it is over.
        """
        with self._lock:
            if not self._over:
                self._adopted = True
                bell.watch(self._line)
            return self._adopted

    def ask(self, make: Callable[[Questions], Question[T]], *, here: bool) -> Answer[T]:
        """The answer raises the daemon's typed error, NotReady without a daemon. here: sent by the calling thread."""
        answer = self._line.ask(make(self._questions)) if here else None
        return answer or self._queue.ask(lambda: make(self._questions))

    def hear(self) -> None:
        """Takes the answers that are there."""
        self._line.hear()

    def hang_up(self) -> None:
        """Its registration is over; by any thread."""
        self._queue.close()
        with self._lock:
            self._over = True
            if self._adopted:
                self._line.hang_up()
            else:
                self._line.close()

    def close(self) -> None:
        """Ends it, and what was asked on the line fails; by who adopted it."""
        self._line.hang_up()
        self._line.hear()  # what was asked
        self._line.close()
