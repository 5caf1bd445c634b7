"""The short way of lease calls: a socket beside gRPC's, for engines of this node.

A call over gRPC passes some six threads of the two processes; here it passes the core's and one more. On `calls.sock`,
in the node's 0700 directory, a connection is a row of frames (`kvmanager/framing.py`), never with descriptors. The
first is a JSON object, `{"token": ...}`, with the session token of `attach.sock`. Its answer is `{"boot_id": ...}`,
or `{"error": {"reason": ..., "message": ...}}` and the end. Each frame after it is a `CacheCall`, answered in its order
with a `CacheAnswer`. What is no CacheCall gets an error for an answer; a frame that can't be read ends it all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvmanager.daemon.attach import CONNECTIONS_MAX, HELLO_DEADLINE_S, ClientIdentity
from kvmanager.errors import InvalidArgument, KVError, LimitExceeded, PeerUnreachable, Unauthorized
from kvmanager.framing import Frame, error_frame, receive_frame, receive_json, send_frame, send_json
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET, bind_socket, peer_credentials
from kvmanager.services.callers import Callers
from kvmanager.wire import MESSAGE_MAX_BYTES, error_to_proto

OF_ONE_CLIENT: Final = 4
"""Connections with one token."""
_GONE: Final = select.POLLHUP | select.POLLRDHUP | select.POLLERR
_log = logging.getLogger(__name__)

Answers = Callable[[pb.CacheCall, str, Callable[[], bool]], pb.CacheAnswer]
"""(call, the caller's token, whether it still waits) -> the answer; raises nothing."""


class CallDoor:
    """Serves `calls.sock`: a thread lets in, and one a connection answers. As many as may attach may connect."""

    def __init__(self, runtime_dir: Path, boot_id: int, callers: Callers, answers: Answers) -> None:
        """Listens; raises ConfigError where it can't."""
        self.path: Final = runtime_dir / CALLS_SOCKET
        self._boot_id = boot_id
        self._callers = callers
        self._answers = answers
        self._listener = bind_socket(self.path)
        self._lock = threading.Lock()  # guards the three below
        self._open: dict[socket.socket, str] = {}  # connection -> token, empty before it was said
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._let_in, name="calls", daemon=True)

    def start(self) -> None:
        """Lets clients in. Call once."""
        self._thread.start()

    def close(self) -> None:
        """Ends every connection, and waits for the calls that run."""
        with self._lock:
            self._closed = True
            for channel in self._open:
                with contextlib.suppress(OSError):  # the client was faster
                    channel.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        for thread in [*threads, self._thread]:
            if thread.is_alive():
                thread.join()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------- threads

    def _let_in(self) -> None:
        while not self._closed:
            try:
                channel, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    _log.warning("a connection was lost before it came in: %s", error)
                continue
            with self._lock:
                if self._closed:  # it came too late: to its client, nobody is here
                    channel.close()
                    return
                full = len(self._open) >= CONNECTIONS_MAX
                if not full:
                    self._open[channel] = ""
                    thread = threading.Thread(target=self._serve, args=(channel,), name="call", daemon=True)
                    self._threads.add(thread)
                    thread.start()
            if full:
                _refuse(channel, LimitExceeded(f"{CONNECTIONS_MAX} connections are open already; close some"))
                channel.close()

    def _serve(self, channel: socket.socket) -> None:
        try:
            channel.settimeout(HELLO_DEADLINE_S)
            token = self._greet(channel)
            if token is not None:
                channel.settimeout(None)
                self._answer_all(channel, token)
        except PeerUnreachable:
            _log.debug("a connection for calls broke")
        except Exception:
            _log.exception("a connection for calls ends")
        finally:
            with self._lock:
                del self._open[channel]
                self._threads.discard(threading.current_thread())
            channel.close()

    def _greet(self, channel: socket.socket) -> str | None:
        """The client's token, once it is let in; None after it was refused."""
        try:
            identity = self._known(channel)
            with self._lock:
                if list(self._open.values()).count(identity.token) >= OF_ONE_CLIENT:
                    raise LimitExceeded(f"{OF_ONE_CLIENT} connections with this token are open already; close some")
                self._open[channel] = identity.token
        except PeerUnreachable:
            raise
        except KVError as error:
            _refuse(channel, error)
            return None
        send_json(channel, {"boot_id": self._boot_id})
        return identity.token

    def _known(self, channel: socket.socket) -> ClientIdentity:
        message, fds = receive_json(channel)
        _close(fds)
        token = message.get("token")
        if fds or message.keys() != {"token"} or not isinstance(token, str):
            raise InvalidArgument("the first frame of this socket is {'token': TEXT}, without descriptors")
        identity = self._callers.bearer(token, "engine")
        uid = peer_credentials(channel)[1]
        if uid != identity.uid:
            raise Unauthorized(f"the session token is of a process of uid {identity.uid}, not of uid {uid}")
        return identity

    def _answer_all(self, channel: socket.socket, token: str) -> None:
        def here() -> bool:
            return not _gone(channel)

        while True:
            try:
                frame = receive_frame(channel, MESSAGE_MAX_BYTES)
            except PeerUnreachable:
                raise
            except KVError as error:  # where the next frame begins, nobody knows
                _send(channel, pb.CacheAnswer(error=error_to_proto(error)))
                return
            if frame is None:
                return
            _send(channel, self._answer(frame, token, here))

    def _answer(self, frame: Frame, token: str, here: Callable[[], bool]) -> pb.CacheAnswer:
        frame.close()
        try:
            if frame.fds:
                raise InvalidArgument(f"a frame brings {len(frame.fds)} descriptors; this connection takes none")
            self._callers.bearer(token, "engine")
            call = _call(frame.payload)
        except KVError as error:
            return pb.CacheAnswer(error=error_to_proto(error))
        return self._answers(call, token, here)


def _call(payload: bytes) -> pb.CacheCall:
    try:
        return pb.CacheCall.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument(f"{len(payload)} bytes are no CacheCall: {error}") from None


def _send(channel: socket.socket, answer: pb.CacheAnswer) -> None:
    """Sends an answer; of one that is too large, that it is."""
    try:
        send_frame(channel, answer.SerializeToString(), (), MESSAGE_MAX_BYTES)
    except LimitExceeded as error:
        send_frame(channel, pb.CacheAnswer(error=error_to_proto(error)).SerializeToString())


def _refuse(channel: socket.socket, error: KVError) -> None:
    _log.warning("refused a connection for calls: %s", error)
    with contextlib.suppress(PeerUnreachable):
        send_json(channel, error_frame(error))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _gone(channel: socket.socket) -> bool:
    """Whether the other side has closed."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    return any(event & _GONE for _, event in poll.poll(0))
