"""Calls that nobody waits for: sent at once, in the thread that asks, which takes the answers when they have come."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError

from kvmanager.clients.attach import Attachment
from kvmanager.clients.callline import Question, enter
from kvmanager.errors import DaemonError, KVError, NotReady, PeerUnreachable
from kvmanager.framing import FrameReader, FrameWriter
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import SECOND_NS
from kvmanager.wire import MESSAGE_MAX_BYTES, error_from_proto

T = TypeVar("T")
ENDED: Final = "the daemon does not answer: the connection ended"


class Waiter(Protocol):
    """Is told that something is there."""

    def set(self) -> None:
        """Of any thread; does not wait."""
        ...


class Answer(Generic[T]):
    """What a call gives, once it is there. One thread sets it, one other takes it."""

    __slots__ = ("_error", "_there", "_value", "_waiter", "cancelled")

    def __init__(self) -> None:
        self._there = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._waiter: Waiter | None = None
        self.cancelled = False
        """Nobody will ask for it."""

    def done(self) -> bool:
        """Whether it is there."""
        return self._there

    def result(self, timeout: float | None = None) -> T:
        """What the call gave, waited for at most `timeout` seconds. Raises what it raised, or TimeoutError."""
        if not self._there:
            # In this order: who sets it looks for a waiter when it is there already.
            self._waiter = waiter = threading.Event()
            if not self._there and not waiter.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def wake(self, waiter: Waiter) -> None:
        """Sets it when the answer is there."""
        self._waiter = waiter
        if self._there:
            waiter.set()

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


@dataclass(slots=True)
class _Asked:
    """A question that was sent."""

    question: Question[Any]
    answer: Answer[Any]
    asked_s: float


class CallPipe:
    """Questions to one daemon, answered in the order in which they were asked. Nothing here waits.

    One thread asks and collects. `end_if_overdue` and `end` may be called by another. It ends when the daemon is away:
    then make another one.
    """

    def __init__(
        self, attachment: Attachment, timeout_s: float, heard: Callable[[KVError | None], None] = lambda _: None
    ) -> None:
        """Connects, which may wait. Raises NotReady where no daemon answers within `timeout_s`, else its typed error.

        `heard`: called behind each answer, and with what broke the pipe.
        """
        self.broken = False
        """It ended: questions fail at once."""
        self._heard = heard
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * SECOND_NS)
        self._channel = enter(attachment, timeout_s)
        self._channel.setblocking(False)
        self._writer, self._reader = FrameWriter(), FrameReader(MESSAGE_MAX_BYTES)
        self._sent: deque[_Asked] = deque()

    def fileno(self) -> int:
        """What can be read when something is to be collected; -1 after the end."""
        return self._channel.fileno()

    def ask(self, question: Question[T]) -> Answer[T]:
        """Sends it. The answer raises the daemon's typed error, or NotReady without a daemon.

        Raises LimitExceeded for a message that is too large.
        """
        answer: Answer[T] = Answer()
        if self.broken:
            answer.set_exception(NotReady(ENDED))
            return answer
        question.call.timeout_ns = self._timeout_ns
        self._writer.put(question.call.SerializeToString())
        self._sent.append(_Asked(question, answer, time.monotonic()))
        self._flush()
        return answer

    def collect(self) -> None:
        """Takes the answers that have come."""
        if self.broken:
            return
        if self._writer:
            self._flush()
        try:
            frames = self._reader.receive(self._channel)
            for frame in frames:
                frame.close()
                self._take(frame.payload)
        except KVError as error:
            self._break(error)
            return
        if self._reader.ended:
            self._break(NotReady(ENDED))

    def end_if_overdue(self) -> None:
        """Ends it, and with it all questions, where the oldest one has no answer for too long."""
        with contextlib.suppress(IndexError):  # the last answer may come meanwhile
            if time.monotonic() - self._sent[0].asked_s > self._timeout_s:
                self.end()

    def end(self) -> None:
        """Lets the thread that collects see its end. Idempotent."""
        with contextlib.suppress(OSError):  # it ended before
            self._channel.shutdown(socket.SHUT_RDWR)

    def _flush(self) -> None:
        try:
            self._writer.flush(self._channel)
        except PeerUnreachable as error:
            self._break(error)

    def _take(self, payload: bytes) -> None:
        asked = self._sent.popleft()
        error: KVError | None = None
        try:
            answer = pb.CacheAnswer.FromString(payload)
            if answer.HasField("error"):
                raise error_from_proto(answer.error)
            asked.answer.set_result(asked.question.take(answer))
        except DecodeError:
            error = DaemonError(f"{len(payload)} bytes are no CacheAnswer; is it a kvmanager node?")
        except KVError as refused:
            error = refused
        if error is not None:
            asked.answer.set_exception(error)
        self._heard(error)

    def _break(self, error: KVError) -> None:
        """Fails all that is not answered."""
        self.broken = True
        failure = NotReady(f"the daemon does not answer: {error}") if isinstance(error, PeerUnreachable) else error
        while self._sent:
            self._sent.popleft().answer.set_exception(failure)
        self._writer.close()
        self._reader.close()
        self._channel.close()
        self._heard(failure)
