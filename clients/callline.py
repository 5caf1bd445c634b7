"""Lease calls over the node's own socket for them, answered one after the other, in the thread that asks.

Several go out with one write, and a call whose answer nobody needs is not waited for: its answer is read before the
next one's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from kvmanager.clients.attach import Attachment, ask, connect
from kvmanager.errors import DaemonError, KVError, NotReady, PeerUnreachable, StaleBoot, Suspect
from kvmanager.plainframes import PlainFrames, send_frames
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET
from kvmanager.units import SECOND_NS
from kvmanager.wire import MESSAGE_MAX_BYTES, error_from_proto

T = TypeVar("T")
UNREAD_MOST: Final = 32
"""Calls told whose answers were not read yet: so few that their answers never fill a socket."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Question(Generic[T]):
    """A call, and what its answer says."""

    call: pb.CacheCall
    take: Callable[[pb.CacheAnswer], T]


Make = Callable[[], Question[Any]]
"""Makes a question anew, for the daemon that is there now."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands in the place of an answer that is an error."""

    error: KVError


@dataclass(slots=True)
class Told:
    """Calls that nobody waits for. unread: answers come on the line there is; again: another daemon is to hear them."""

    unread: deque[Make] = field(default_factory=deque)
    again: list[Make] = field(default_factory=list)


def open_line(attachment: Attachment, timeout_s: float) -> socket.socket:
    """A connection for calls, greeted. Raises NotReady where no daemon answers within `timeout_s`, else its error."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(timeout_s)
        connect(channel, attachment.runtime_dir / CALLS_SOCKET)
        ask(channel, {"token": attachment.token})
    except BaseException:
        channel.close()
        raise
    return channel


def read_answer(payload: bytes) -> pb.CacheAnswer:
    """The answer to a call. Raises DaemonError for what is none."""
    try:
        return pb.CacheAnswer.FromString(payload)
    except DecodeError as error:
        raise DaemonError(f"{len(payload)} bytes are no CacheAnswer; is it a kvmanager node?") from error


class CallLine:
    """A connection for calls of an attached engine. One thread at a time; `close` may come from another.

    What breaks it ends it: then open another one.
    """

    def __init__(self, attachment: Attachment, timeout_s: float, told: Told) -> None:
        """Connects. Raises NotReady where no daemon answers within `timeout_s`, else its typed error.

        `told`: on an older line, whose answers nobody has read: they are told again here.
        """
        self.broken = False
        """It ended: calls fail at once."""
        self.silent = False
        """It ended because no answer came in time."""
        self._timeout_s = timeout_s
        self._timeout_ns = int(timeout_s * SECOND_NS)
        self._told = told
        self._channel = open_line(attachment, timeout_s)
        self._frames = PlainFrames(self._channel, MESSAGE_MAX_BYTES)
        try:
            if told.unread:
                self._send([make() for make in told.unread])
        except BaseException:
            self.close()
            raise

    def exchange(self, question: Question[T]) -> T:
        """Asks, and waits for the answer.

        Raises the daemon's typed error, LimitExceeded for a message that is too large, NotReady when the line broke or
        no answer came within the time-out.
        """
        (answer,) = self.exchange_all([question])
        if isinstance(answer, Refused):
            raise answer.error
        found: T = answer
        return found

    def exchange_all(self, questions: Sequence[Question[Any]]) -> list[Any]:
        """Asks several at once, and waits for all answers, in order; for one that is an error there is a `Refused`.

        The daemon handles one after the other, each whatever became of those before. Raises LimitExceeded where one is
        too large, and none is asked; NotReady as `exchange`.
        """
        self._tell_again()
        self._send(questions)
        self.settle()
        answers = [self._heard() for _ in questions]  # all of them, before what one says can be wrong
        return [_taken(question, answer) for question, answer in zip(questions, answers, strict=True)]

    def tell(self, make: Make) -> None:
        """Asks without waiting; the answer is read before the next one's, and logged where it is an error.

        Where the daemon has been replaced, it is told again with the next call. Raises as `exchange`, but never what
        the answer says.
        """
        self._tell_again()
        self._tell(make)

    def _tell(self, make: Make) -> None:
        if len(self._told.unread) >= UNREAD_MOST:
            self.settle()
        self._send([make()])
        self._told.unread.append(make)

    def _tell_again(self) -> None:
        again, self._told.again = self._told.again, []
        for make in again:
            self._tell(make)

    def settle(self) -> None:
        """Waits for the answers of all that was told. Raises NotReady as `exchange`."""
        unread = self._told.unread
        while unread:
            answer = self._heard()
            make = unread.popleft()
            if answer.HasField("error"):
                error = error_from_proto(answer.error)
                if isinstance(error, StaleBoot | Suspect):
                    self._told.again.append(make)
                else:
                    _log.warning("a call that nobody waits for was refused: %s", error)

    def _send(self, questions: Sequence[Question[Any]]) -> None:
        payloads = []
        for question in questions:
            question.call.timeout_ns = self._timeout_ns
            payloads.append(question.call.SerializeToString())
        try:
            send_frames(self._channel, payloads, MESSAGE_MAX_BYTES)
        except (PeerUnreachable, OSError) as error:  # OSError: closed by another thread meanwhile
            raise self._broke(error) from error

    def _heard(self) -> pb.CacheAnswer:
        try:
            return self._answer()
        except (PeerUnreachable, OSError) as error:
            raise self._broke(error) from error

    def _broke(self, error: Exception) -> NotReady:
        self.close()
        self.silent = isinstance(error.__cause__, TimeoutError)
        within = f" within {self._timeout_s:g} s" if self.silent else f": {error}"
        return NotReady(f"the daemon does not answer{within}")

    def _answer(self) -> pb.CacheAnswer:
        frame = self._frames.next()
        if frame is None:
            raise PeerUnreachable("it ended the connection")
        try:
            return read_answer(frame[0])
        except DaemonError:
            self.close()
            raise

    def close(self) -> None:
        """Ends it at once, whoever waits. Idempotent."""
        self.broken = True
        with contextlib.suppress(OSError):  # it ended before
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


def _taken(question: Question[T], answer: pb.CacheAnswer) -> T | Refused:
    return Refused(error_from_proto(answer.error)) if answer.HasField("error") else question.take(answer)


class SteadyLine:
    """A line that is opened when it is first needed, and anew when it broke. One thread at a time."""

    def __init__(self, attachment: Attachment, timeout_s: float) -> None:
        told = self._told = Told()
        self._open: Callable[[], CallLine] = lambda: CallLine(attachment, timeout_s, told)
        self._line: CallLine | None = None

    @property
    def broken(self) -> bool:
        """Whether the last call found no daemon."""
        return self._line is None or self._line.broken

    def exchange(self, question: Question[T]) -> T:
        """As `CallLine.exchange`. Asks again on a new line when the one there was has broken: calls may be repeated."""
        return self._steadily(lambda line: line.exchange(question))

    def exchange_all(self, questions: Sequence[Question[Any]]) -> list[Any]:
        """As `CallLine.exchange_all`, likewise."""
        return self._steadily(lambda line: line.exchange_all(questions))

    def tell(self, make: Make) -> None:
        """As `CallLine.tell`, likewise: also when the line breaks before the answer was read."""
        self._steadily(lambda line: line.tell(make))

    def settle(self) -> None:
        """As `CallLine.settle`, likewise."""
        if self._told.unread:
            self._steadily(lambda line: line.settle())

    def _steadily(self, act: Callable[[CallLine], T]) -> T:
        known = self._line
        try:
            return act(self._newest())
        except NotReady:
            if known is None or known is not self._line or not known.broken or known.silent:
                raise
        return act(self._newest())

    def _newest(self) -> CallLine:
        if self._line is None or self._line.broken:
            self._line = None
            self._line = self._open()
        return self._line

    def close(self) -> None:
        """Ends it. Idempotent."""
        if self._line is not None:
            self._line.close()
