"""The two ways of an engine's session to its daemon: frames over `calls.sock`, and gRPC for who is elsewhere."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from kvmanager.clients.attach import CONNECT_MS, Attachment, connect, hear
from kvmanager.errors import DaemonError, KVError, NotReady, PeerUnreachable, StaleBoot, Suspect, Unauthorized
from kvmanager.framing import receive_frame, send_frame, send_json
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.runtime_dir import CALLS_SOCKET
from kvmanager.wire import ERROR_METADATA_KEY, MESSAGE_MAX_BYTES, error_from_proto, error_from_rpc

UNTAKEN_S: Final = 30
"""A daemon that takes no byte of a message for so long is not answering: then the stream is over."""
_TIMEVAL: Final = struct.Struct("ll")
_PING: Final = bytes(8)
"""An empty frame."""
_BROKEN: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Why a stream, or a call, ended.

    error: None when it ended in order. lost: it broke underneath, as opposed to the daemon ending it with an answer.
    """

    error: KVError | None = None
    lost: bool = False

    @property
    def replaced(self) -> bool:
        """Whether its daemon ended, or it met one that came after it."""
        return self.lost or isinstance(self.error, (StaleBoot, NotReady, Suspect, Unauthorized))


def end_of_rpc(error: grpc.RpcError) -> StreamEnd:
    """The same of a gRPC call that failed.

    A daemon that dies while it answers may leave its calls cancelled; it never cancels one as an answer.
    """
    lost = (
        isinstance(error, grpc.Call)
        and error.code() in _BROKEN
        and all(key != ERROR_METADATA_KEY for key, _ in error.trailing_metadata() or ())
    )
    return StreamEnd(error_from_rpc(error), lost)


class Stream(Protocol):
    """A session's messages on their way; `end` says why it is over, once it is."""

    end: StreamEnd

    def send(self, message: pb.StepRequest) -> None:
        """Sends a message. What fails ends the stream."""
        ...

    def close(self, timeout_s: float) -> None:
        """Half-closes, and waits for the daemon's end; breaks the stream when that does not come."""
        ...

    def break_off(self) -> None:
        """Breaks it, and waits for its reader."""
        ...


Deliver = Callable[[pb.StepReply], None]
Ended = Callable[[Stream], None]
"""Both are called by the stream's reader thread."""


class CallStream:
    """A Session call of gRPC: a queue going out, a thread reading in."""

    def __init__(self, stub: pb_grpc.EngineStub, deliver: Deliver, ended: Ended) -> None:
        self.end = StreamEnd()
        self._outgoing: queue.SimpleQueue[pb.StepRequest | None] = queue.SimpleQueue()
        self._call = stub.Session(self._requests())
        self._thread = threading.Thread(target=self._read, args=(deliver, ended), name="session-reader", daemon=True)
        self._thread.start()

    def _requests(self) -> Iterator[pb.StepRequest]:
        while (message := self._outgoing.get()) is not None:
            yield message

    def _read(self, deliver: Deliver, ended: Ended) -> None:
        try:
            for reply in self._call:
                deliver(reply)
        except grpc.RpcError as error:
            self.end = end_of_rpc(error)
        finally:
            self._outgoing.put(None)
            ended(self)

    def send(self, message: pb.StepRequest) -> None:
        """Queues a message."""
        self._outgoing.put(message)

    def close(self, timeout_s: float) -> None:
        """Half-closes and waits for the daemon's end; cancels the call when that does not come."""
        self._outgoing.put(None)
        self._thread.join(timeout_s)
        self.break_off()

    def break_off(self) -> None:
        """Cancels the call, and waits for its reader."""
        self._call.cancel()
        self._thread.join()


class FrameStream:
    """A session of an attached engine over the node's own socket: who sends does so himself, a thread reads in.

    The thread also answers the daemon's pings; it never waits to send, so that both sides can't wait for each other.
    """

    def __init__(self, attachment: Attachment, deliver: Deliver, ended: Ended) -> None:
        """Connects; where that fails, the stream has ended."""
        self.end = StreamEnd()
        self._sending = threading.Lock()
        self._unsent: KVError | None = None
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        refused = self._enter(attachment)
        self._thread = threading.Thread(
            target=self._read, args=(refused, deliver, ended), name="session-reader", daemon=True
        )
        self._thread.start()

    def _enter(self, attachment: Attachment) -> StreamEnd | None:
        """Says who it is, without waiting for an answer. Why nobody hears it; None: somebody does."""
        channel = self._channel
        try:
            channel.settimeout(CONNECT_MS / 1000)
            connect(channel, attachment.runtime_dir / CALLS_SOCKET)
            channel.settimeout(None)
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(UNTAKEN_S, 0))
            with contextlib.suppress(PeerUnreachable):  # refused before it heard us: the reason lies in the socket
                send_json(channel, {"token": attachment.token, "for": "session"})
        except NotReady as error:
            return _lost(error)
        except KVError as error:
            return StreamEnd(error)
        return None

    # ----------------------------------------------------------------------------- the reader's thread

    def _read(self, refused: StreamEnd | None, deliver: Deliver, ended: Ended) -> None:
        try:
            self.end = refused or self._deliver_all(deliver)
        finally:
            self._break()
            with self._sending:
                self._channel.close()
            ended(self)

    def _deliver_all(self, deliver: Deliver) -> StreamEnd:
        try:
            hear(self._channel)
        except PeerUnreachable as error:
            return _lost(self._unsent or error)
        except KVError as error:
            return StreamEnd(error)
        return self._deliver_replies(deliver)

    def _deliver_replies(self, deliver: Deliver) -> StreamEnd:
        # What can't be read is a lost stream, no answer: the daemon may have counted the message that waits for one.
        try:
            while (frame := receive_frame(self._channel, MESSAGE_MAX_BYTES)) is not None:
                frame.close()
                if not frame.payload:
                    self._answer_ping()
                    continue
                reply = pb.StepReply.FromString(frame.payload)
                if reply.HasField("end"):
                    return StreamEnd(error_from_proto(reply.end) if reply.end.reason else None)
                deliver(reply)
        except PeerUnreachable as error:
            return _lost(self._unsent or error)
        except KVError as error:
            return _lost(error)
        except DecodeError as error:
            return _lost(DaemonError(f"a frame is no StepReply: {error}; is it a kvmanager node?"))
        return _lost(self._unsent or PeerUnreachable("the daemon closed it"))

    def _answer_ping(self) -> None:
        # Who holds the lock, or filled the socket, has sent something: that is a sign of life as good as this.
        if self._sending.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    self._channel.send(_PING, socket.MSG_DONTWAIT)
            finally:
                self._sending.release()

    # ----------------------------------------------------------------------------- the others'

    def send(self, message: pb.StepRequest) -> None:
        """Sends a message, in the caller's thread. Raises LimitExceeded over MESSAGE_MAX_BYTES."""
        payload = message.SerializeToString()
        with self._sending:
            try:
                send_frame(self._channel, payload, (), MESSAGE_MAX_BYTES)
            except PeerUnreachable as error:  # part of it may have gone; the reader finds what the daemon said
                self._unsent = self._unsent or error
                self._break()

    def close(self, timeout_s: float) -> None:
        """Half-closes and waits for the daemon's end; breaks the connection when that does not come."""
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_WR)
        self._thread.join(timeout_s)
        self.break_off()

    def break_off(self) -> None:
        """Breaks the connection, and waits for the reader."""
        self._break()
        self._thread.join()

    def _break(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._channel.shutdown(socket.SHUT_RDWR)


def _lost(error: KVError) -> StreamEnd:
    return StreamEnd(DaemonError(f"the connection to the daemon broke: {error}"), lost=True)
