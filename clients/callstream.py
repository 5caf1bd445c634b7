"""Calls over one stream. Who asks only queues: the stream's own threads make the messages and read the answers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc

from kvmanager.errors import KVError, NotReady
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.units import SECOND_NS
from kvmanager.wire import ERROR_METADATA_KEY, error_from_proto, error_from_rpc

T = TypeVar("T")
ENDED: Final = "the daemon does not answer: it ended the stream"


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
            waiter = self._waiter = self._waiter or threading.Event()
            if not self._there and not waiter.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def wake(self, waiter: threading.Event) -> None:
        """Sets the event when it is there."""
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
class Question(Generic[T]):
    """A call, and what its answer says."""

    call: pb.CacheCall
    take: Callable[[pb.CacheAnswer], T]


@dataclass(slots=True)
class _Asked:
    """A question on its way. make: gives it, once it is to be sent."""

    make: Callable[[], Question[Any]]
    answer: Answer[Any]
    asked_s: float
    take: Callable[[pb.CacheAnswer], Any] | None = None


class CallStream:
    """A stream of calls, answered in the order in which they were asked. Thread-safe; nothing here waits."""

    def __init__(
        self, stub: pb_grpc.EngineStub, timeout_s: float, heard: Callable[[KVError | None], None] = lambda _: None
    ) -> None:
        """`heard`: called by the stream's thread behind each answer, and with what broke the stream; must not wait."""
        self.broken = False
        """It ended: questions fail at once."""
        self._timeout_s = timeout_s
        self._heard = heard
        self._waiting: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._sent: deque[_Asked] = deque()
        self._call = stub.CacheCalls(self._calls())
        threading.Thread(target=self._read, name="cache-calls", daemon=True).start()

    def ask(self, make: Callable[[], Question[T]]) -> Answer[T]:
        """`make` is called by a thread of the stream. The answer raises the daemon's typed error, or what broke it."""
        answer: Answer[T] = Answer()
        self._waiting.put(_Asked(make, answer, time.monotonic()))
        if self.broken:
            self._fail(NotReady(ENDED))
        return answer

    def end_if_overdue(self) -> None:
        """Ends the stream, and with it all questions, where the oldest one has no answer for too long."""
        with contextlib.suppress(IndexError):  # the last answer may come meanwhile
            if time.monotonic() - self._sent[0].asked_s > self._timeout_s:
                self.close()

    def close(self) -> None:
        """Ends it at once."""
        self._call.cancel()

    def _calls(self) -> Iterator[pb.CacheCall]:
        while (asked := self._waiting.get()) is not None:
            try:
                question = asked.make()
            except Exception as error:
                asked.answer.set_exception(error)
                continue
            question.call.timeout_ns = int(self._timeout_s * SECOND_NS)
            asked.take = question.take
            self._sent.append(asked)
            if self.broken:
                self._fail(NotReady(ENDED))
            yield question.call

    def _read(self) -> None:
        failure: KVError = NotReady(ENDED)
        try:
            for answer in self._call:
                self._take(self._sent.popleft(), answer)
        except grpc.RpcError as error:
            failure = reason_of(error)
            failure.__cause__ = error
        finally:
            self.broken = True
            self._fail(failure)
            self._heard(failure)

    def _take(self, asked: _Asked, answer: pb.CacheAnswer) -> None:
        error: KVError | None = None
        try:
            if answer.HasField("error"):
                raise error_from_proto(answer.error)
            assert asked.take is not None
            asked.answer.set_result(asked.take(answer))
        except KVError as refused:
            error = refused
            asked.answer.set_exception(refused)
        self._heard(error)

    def _fail(self, error: KVError) -> None:
        """Of a stream that is broken: all that is not answered, and the thread that sends."""
        for next_one in (self._sent.popleft, self._waiting.get_nowait):
            with contextlib.suppress(IndexError, queue.Empty):
                while True:
                    asked = next_one()
                    if asked is not None:
                        asked.answer.set_exception(error)
        self._waiting.put(None)


def reason_of(error: grpc.RpcError) -> KVError:
    """The daemon's own word, else that it does not answer."""
    return error_from_rpc(error) if _typed(error) else NotReady(f"the daemon does not answer: {error.code().name}")


def _typed(error: grpc.RpcError) -> bool:
    """Whether the daemon itself refused."""
    metadata: Any = error.trailing_metadata()
    return any(key == ERROR_METADATA_KEY for key, _ in metadata or ())
