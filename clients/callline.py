"""Lease calls over the node's own socket for them: one after the other, in the thread that asks."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError

from kvmanager.clients.attach import Attachment, ask, connect
from kvmanager.errors import DaemonError, NotReady, PeerUnreachable
from kvmanager.framing import receive_frame, send_frame
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET
from kvmanager.units import SECOND_NS
from kvmanager.wire import MESSAGE_MAX_BYTES, error_from_proto

T = TypeVar("T")


@dataclass(slots=True)
class Question(Generic[T]):
    """A call, and what its answer says."""

    call: pb.CacheCall
    take: Callable[[pb.CacheAnswer], T]


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


class CallLine:
    """A connection for calls of an attached engine. One thread at a time; `close` may come from another.

    What breaks it ends it: then open another one.
    """

    def __init__(self, attachment: Attachment, timeout_s: float) -> None:
        """Connects. Raises NotReady where no daemon answers within `timeout_s`, else its typed error."""
        self.broken = False
        """It ended: calls fail at once."""
        self.silent = False
        """It ended because no answer came in time."""
        self._timeout_s = timeout_s
        self._channel = open_line(attachment, timeout_s)

    def exchange(self, question: Question[T]) -> T:
        """Asks, and waits for the answer.

        Raises the daemon's typed error, LimitExceeded for a message that is too large, NotReady when the line broke or
        no answer came within the time-out.
        """
        call = question.call
        call.timeout_ns = int(self._timeout_s * SECOND_NS)
        payload = call.SerializeToString()
        try:
            send_frame(self._channel, payload, (), MESSAGE_MAX_BYTES)
            answer = self._answer()
        except (PeerUnreachable, OSError) as error:  # OSError: closed by another thread meanwhile
            self.close()
            self.silent = isinstance(error.__cause__, TimeoutError)
            within = f" within {self._timeout_s:g} s" if self.silent else f": {error}"
            raise NotReady(f"the daemon does not answer{within}") from error
        if answer.HasField("error"):
            raise error_from_proto(answer.error)
        return question.take(answer)

    def _answer(self) -> pb.CacheAnswer:
        frame = receive_frame(self._channel, MESSAGE_MAX_BYTES)
        if frame is None:
            raise PeerUnreachable("it ended the connection")
        frame.close()
        try:
            return pb.CacheAnswer.FromString(frame.payload)
        except DecodeError as error:
            self.close()
            raise DaemonError(f"{len(frame.payload)} bytes are no CacheAnswer; is it a kvmanager node?") from error

    def close(self) -> None:
        """Ends it at once, whoever waits. Idempotent."""
        self.broken = True
        with contextlib.suppress(OSError):  # it ended before
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


class SteadyLine:
    """A line that is opened when it is first needed, and anew when it broke. One thread at a time."""

    def __init__(self, attachment: Attachment, timeout_s: float) -> None:
        self._open: Callable[[], CallLine] = lambda: CallLine(attachment, timeout_s)
        self._line: CallLine | None = None

    @property
    def broken(self) -> bool:
        """Whether the last call found no daemon."""
        return self._line is None or self._line.broken

    def exchange(self, question: Question[T]) -> T:
        """As `CallLine.exchange`. Asks again on a new line when the one there was has broken: calls may be repeated."""
        known = self._line
        try:
            return self._newest().exchange(question)
        except NotReady:
            if known is None or known is not self._line or not known.broken or known.silent:
                raise
        return self._newest().exchange(question)

    def _newest(self) -> CallLine:
        if self._line is None or self._line.broken:
            self._line = None
            self._line = self._open()
        return self._line

    def close(self) -> None:
        """Ends it. Idempotent."""
        if self._line is not None:
            self._line.close()
