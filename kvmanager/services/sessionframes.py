"""An engine's session as frames over `calls.sock`: the messages of `Engine.Session`, without gRPC's threads.

Behind the greeting of `calldoor.py` each frame of the client is a `StepRequest`, each of the daemon a `StepReply`. The
daemon's last one has only `end`: the error that ends the session, or none (its reason is REASON_UNSPECIFIED) where it
ends in order, as it does when the client closes its half. A connection that ends without it broke.

An empty frame is a ping: the daemon sends one when nothing came for `ping_ms`, and the client answers with another. One
from which nothing comes for `silence_ms` more is stopped or hung, and so is one that takes no byte of what it is sent
for as long: its connection is broken, as gRPC does it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
import struct
import threading
from collections.abc import Iterator

from kvmanager.configuration.sections import FenceSection
from kvmanager.daemon.sessions import Outgoing, SessionStream
from kvmanager.errors import InvalidArgument, KVError, LimitExceeded, PeerUnreachable
from kvmanager.framing import Frame, receive_frame, send_frame
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.parsing import read_message
from kvmanager.services.sessionsteps import SessionSteps
from kvmanager.wire import MESSAGE_MAX_BYTES, error_to_proto

_TIMEVAL = struct.Struct("ll")
_log = logging.getLogger(__name__)


class SessionFrames:
    """Serves sessions, each in the thread of its connection and one more, which sends."""

    def __init__(self, steps: SessionSteps, fence: FenceSection) -> None:
        self._steps = steps
        self._fence = fence

    def serve(self, channel: socket.socket, token: str) -> None:
        """One session of the engine with this token, from its first message to its end."""
        line = _Line(channel, self._fence)
        messages = line.messages()
        try:
            first = next(messages, None)
            if first is None:
                return
            with self._steps.session(token, first) as stream:
                writer = threading.Thread(target=line.send_all, args=(stream,), name=f"session-{stream.key[0]}")
                writer.daemon = True
                writer.start()
                try:
                    self._steps.read(stream, itertools.chain((first,), messages))
                finally:
                    writer.join()
            line.say_end()  # once the engine may be replaced: who hears the end may register another one at once
        except KVError as error:
            line.end(error)


class _Line:
    """A connection. One thread reads its messages; any may send."""

    def __init__(self, channel: socket.socket, fence: FenceSection) -> None:
        self._channel = channel
        self._ping_ms = fence.ping_ms
        self._silence_ms = fence.silence_ms
        limit = _TIMEVAL.pack(fence.silence_ms // 1000, fence.silence_ms % 1000 * 1000)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)  # within a frame
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._sending = threading.Lock()
        self._last: Outgoing = None

    # --------------------------------------------------------------------------- the reader's thread

    def messages(self) -> Iterator[pb.StepRequest]:
        """Until the client closes its half, or is gone. Raises what ends the session."""
        try:
            while (frame := self._next()) is not None:
                if frame.payload or frame.fds:
                    yield _message(frame)
        except PeerUnreachable as error:
            _log.warning("a session broke: %s", error)
            self._break()

    def _next(self) -> Frame | None:
        if not self._poll.poll(self._ping_ms):
            self._send(b"")
            if not self._poll.poll(self._silence_ms):
                raise PeerUnreachable(f"its client answered no ping for {self._silence_ms} ms; is it stopped?")
        return receive_frame(self._channel, MESSAGE_MAX_BYTES)

    # --------------------------------------------------------------------------- sending

    def send_all(self, stream: SessionStream) -> None:
        """Sends what the stream gives until it ends; then nothing more is read, and `say_end` has the last word."""
        try:
            while (message := stream.get()) is not None and not isinstance(message, KVError):
                self._send(message.SerializeToString())
            self._last = message
        except LimitExceeded as error:
            self._last = error
        except PeerUnreachable:
            _log.debug("a session's client reads no more")
            self._break()
        finally:
            with contextlib.suppress(OSError):  # the client was faster
                self._channel.shutdown(socket.SHUT_RD)

    def say_end(self) -> None:
        """Tells the client how the session ended, if it listens; then the connection is over."""
        self.end(self._last)
        self._break()

    def end(self, error: Outgoing) -> None:
        """Tells the client that there is no session, and why, if it listens."""
        end = error_to_proto(error) if isinstance(error, KVError) else pb.Error()
        with contextlib.suppress(PeerUnreachable):
            self._send(pb.StepReply(end=end).SerializeToString())

    def _send(self, payload: bytes) -> None:
        with self._sending:
            send_frame(self._channel, payload, (), MESSAGE_MAX_BYTES)

    def _break(self) -> None:
        """Wakes who reads or sends; what was sent can still be read."""
        with contextlib.suppress(OSError):  # the client was faster
            self._channel.shutdown(socket.SHUT_RDWR)


def _message(frame: Frame) -> pb.StepRequest:
    frame.close()
    if frame.fds:
        raise InvalidArgument(f"a frame brings {len(frame.fds)} descriptors; this connection takes none")
    return read_message(pb.StepRequest.FromString, frame.payload, "StepRequest")
