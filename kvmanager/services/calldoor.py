"""The short way of lease calls and sessions: a socket beside gRPC's, for engines of this node.

A call over gRPC passes some six threads of the two processes; here it passes the core's and one more. On `calls.sock`,
in the node's 0700 directory, a connection is a row of frames (`kvmanager/framing.py`), never with descriptors. The
first is a JSON object, `{"token": ...}`, with the session token of `attach.sock`. Its answer is `{"boot_id": ...}`,
or `{"error": {"reason": ..., "message": ...}}` and the end. Each frame after it is a `CacheCall`, answered in its order
with a `CacheAnswer`. What is no CacheCall gets an error for an answer; a frame that can't be read ends it all.

One that says `{"token": ..., "for": "session"}` instead is the engine's session (`sessionframes.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmanager.daemon.attach import CONNECTIONS_MAX, HELLO_DEADLINE_S
from kvmanager.errors import InvalidArgument, KVError, LimitExceeded, PeerUnreachable, Unauthorized
from kvmanager.framing import error_frame, receive_json, send_json
from kvmanager.plainframes import PlainFrames, send_frames
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import CALLS_SOCKET, bind_socket, peer_credentials
from kvmanager.services.callers import Callers
from kvmanager.services.parsing import read_message
from kvmanager.wire import MESSAGE_MAX_BYTES, error_to_proto

OF_ONE_CLIENT: Final = 6
"""Connections with one token for calls, and as many for sessions: one that is broken may not have ended yet."""
GRACE_S: Final = 1.0
"""How long sessions that were ended have to say so, as gRPC's have."""
CALLS: Final = "calls"
SESSION: Final = "session"
_GONE: Final = select.POLLHUP | select.POLLRDHUP | select.POLLERR
_log = logging.getLogger(__name__)

Answers = Callable[[pb.CacheCall, str, Callable[[], bool]], pb.CacheAnswer]
"""(call, the caller's token, whether it still waits) -> the answer; raises nothing."""
ServeSession = Callable[[socket.socket, str], None]
"""(connection, the caller's token): serves a session until it ends."""


@dataclass(frozen=True, slots=True)
class _Guest:
    """Who has a connection, and what for; both empty before it was said."""

    token: str = ""
    what: str = ""


class CallDoor:
    """Serves `calls.sock`: a thread lets in, and one a connection answers. As many as may attach may connect."""

    def __init__(
        self, runtime_dir: Path, boot_id: int, callers: Callers, answers: Answers, serve_session: ServeSession
    ) -> None:
        """Listens; raises ConfigError where it can't."""
        self.path: Final = runtime_dir / CALLS_SOCKET
        self._boot_id = boot_id
        self._callers = callers
        self._answers = answers
        self._serve_session = serve_session
        self._listener = bind_socket(self.path)
        self._lock = threading.Lock()  # guards the three below
        self._open: dict[socket.socket, _Guest] = {}
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._let_in, name="calls", daemon=True)

    def start(self) -> None:
        """Lets clients in. Call once."""
        self._thread.start()

    def close(self) -> None:
        """Ends every connection, and waits for the calls that run. Who serves sessions has ended them."""
        with self._lock:
            self._closed = True
            ending = [self._threads[channel] for channel, guest in self._open.items() if guest.what == SESSION]
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        give_up = time.monotonic() + GRACE_S
        for thread in ending:
            thread.join(max(give_up - time.monotonic(), 0.0))
        with self._lock:
            for channel in self._open:
                with contextlib.suppress(OSError):  # the client was faster
                    channel.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads.values())
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
                    self._open[channel] = _Guest()
                    thread = threading.Thread(target=self._serve, args=(channel,), name="call", daemon=True)
                    self._threads[channel] = thread
                    thread.start()
            if full:
                _refuse(channel, LimitExceeded(f"{CONNECTIONS_MAX} connections are open already; close some"))
                channel.close()

    def _serve(self, channel: socket.socket) -> None:
        try:
            channel.settimeout(HELLO_DEADLINE_S)
            guest = self._greet(channel)
            if guest is not None:
                channel.settimeout(None)
                serve = self._serve_session if guest.what == SESSION else self._answer_all
                serve(channel, guest.token)
        except PeerUnreachable:
            _log.debug("a connection for calls broke")
        except Exception:
            _log.exception("a connection for calls ends")
        finally:
            with self._lock:
                del self._open[channel], self._threads[channel]
            channel.close()

    def _greet(self, channel: socket.socket) -> _Guest | None:
        """The client, once it is let in; None after it was refused."""
        try:
            guest = self._known(channel)
            with self._lock:
                if list(self._open.values()).count(guest) >= OF_ONE_CLIENT:
                    raise LimitExceeded(f"{OF_ONE_CLIENT} connections with this token are open already; close some")
                self._open[channel] = guest
        except PeerUnreachable:
            raise
        except KVError as error:
            _refuse(channel, error)
            return None
        send_json(channel, {"boot_id": self._boot_id})
        return guest

    def _known(self, channel: socket.socket) -> _Guest:
        message, fds = receive_json(channel)
        _close(fds)
        token, what = message.get("token"), message.get("for", CALLS)
        if fds or message.keys() - {"for"} != {"token"} or not isinstance(token, str) or what not in (CALLS, SESSION):
            raise InvalidArgument(
                "the first frame of this socket is {'token': TEXT}, for a session with 'for': 'session', and without "
                "descriptors"
            )
        identity = self._callers.bearer(token, "engine")
        uid = peer_credentials(channel)[1]
        if uid != identity.uid:
            raise Unauthorized(f"the session token is of a process of uid {identity.uid}, not of uid {uid}")
        return _Guest(token, what)

    def _answer_all(self, channel: socket.socket, token: str) -> None:
        def here() -> bool:
            return not _gone(channel)

        frames = PlainFrames(channel, MESSAGE_MAX_BYTES)
        while True:
            try:
                frame = frames.next()
            except PeerUnreachable:
                raise
            except KVError as error:  # where the next frame begins, nobody knows
                _send(channel, pb.CacheAnswer(error=error_to_proto(error)))
                return
            if frame is None:
                return
            _send(channel, self._answer(*frame, token, here))

    def _answer(self, payload: bytes, fds: int, token: str, here: Callable[[], bool]) -> pb.CacheAnswer:
        """`fds`: how many descriptors the frame announces; they are closed already."""
        try:
            if fds:
                raise InvalidArgument(f"a frame brings {fds} descriptors; this connection takes none")
            self._callers.bearer(token, "engine")
            call = read_message(pb.CacheCall.FromString, payload, "CacheCall")
        except KVError as error:
            return pb.CacheAnswer(error=error_to_proto(error))
        return self._answers(call, token, here)


def _send(channel: socket.socket, answer: pb.CacheAnswer) -> None:
    """Sends an answer; of one that is too large, that it is."""
    try:
        send_frames(channel, [answer.SerializeToString()], MESSAGE_MAX_BYTES)
    except LimitExceeded as error:
        send_frames(channel, [pb.CacheAnswer(error=error_to_proto(error)).SerializeToString()], MESSAGE_MAX_BYTES)


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
