"""A client's way in: the attach socket, its token, and gRPC channels that carry it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from kvmanager.errors import DaemonError, KVError, NotReady, PeerUnreachable, StaleBoot, Unauthorized
from kvmanager.framing import receive_json, send_json
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import ATTACH_SOCKET, peer_credentials
from kvmanager.wire import MESSAGE_MAX_BYTES, TOKEN_METADATA_KEY, error_from_proto

ATTACH_TIMEOUT_S: Final = 10.0
CONNECT_MS: Final = 5_000


class Attachment:
    """The open connection of one client process.

    The daemon counts this process as alive until the kernel says that it is dead; of a worker, also every child that
    it forked, for those inherit `lifeline` (-1 for other roles), which stays open until the process ends.
    `token` goes with every gRPC call; `grpc_path` is the daemon's socket; `boot_id` changes when the
    daemon restarts. Safe to use from several threads.
    """

    def __init__(self, runtime_dir: Path, role: str, name: str, door: Door) -> None:
        self.lifeline = door.lifeline
        self.token = door.token
        self.grpc_path = door.grpc_path
        self.boot_id = door.boot_id
        self._channel = door.channel
        self.runtime_dir = runtime_dir
        self._who = (runtime_dir, role, name)
        self._lock = threading.Lock()

    @property
    def server_uid(self) -> int:
        """The user whose process listened on the socket, as the kernel says."""
        return peer_credentials(self._channel)[1]

    def renew(self, timeout_s: float = ATTACH_TIMEOUT_S) -> int:
        """Attaches once more, after the daemon was replaced or the connection broke; the daemon's boot id now.

        The token stays, and all that the daemon gave this process. Raises NotReady while no node answers, StaleBoot
        from a daemon that does not know this process: it started cold, so register again.
        """
        if self._is_open():
            return self.boot_id
        door = _enter(*self._who, timeout_s)
        if door.token != self.token:
            door.channel.close()
            if door.lifeline >= 0:
                os.close(door.lifeline)
            raise StaleBoot(f"the daemon in {self._who[0]} does not know this process any more; register again")
        with self._lock:
            self._channel.close()
            self._channel = door.channel
            self.boot_id = door.boot_id
        return door.boot_id

    def fetch_fds(self, attach_id: int) -> list[int]:
        """The descriptors of a worker's attach, in the order of AttachReply.regions; the caller closes them.

        Raises the daemon's typed error, NotReady when the connection is broken.
        """
        with self._lock:
            payload, fds = ask(self._channel, {"fds_for": attach_id})
        if payload.get("fds_for") != attach_id:
            for fd in fds:
                os.close(fd)
            raise DaemonError(f"asked for the descriptors of attach {attach_id}, got {payload}")
        return list(fds)

    def _is_open(self) -> bool:
        """Whether the daemon still holds the other end."""
        with self._lock:
            # The daemon says nothing unasked: what is readable is the end.
            if self._channel.fileno() < 0:
                return False
            poll = select.poll()
            poll.register(self._channel, select.POLLIN)
            return not poll.poll(0)

    def release_lifeline(self) -> None:
        """For a process whose mappings of the node's memory are gone, or that detached cleanly. Idempotent."""
        lifeline, self.lifeline = self.lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)

    def close(self) -> None:
        """Leaves on purpose: the daemon is told, and the connection ends at once. Idempotent."""
        with contextlib.suppress(PeerUnreachable, OSError):  # it is broken, or closed
            self._channel.setblocking(False)
            send_json(self._channel, {"leave": True})
        self._channel.close()


class Door(NamedTuple):
    """What the daemon says to a process that attaches."""

    channel: socket.socket
    token: str
    grpc_path: Path
    boot_id: int
    lifeline: int


def attach(runtime_dir: Path, role: str, name: str, timeout_s: float = ATTACH_TIMEOUT_S) -> Attachment:
    """Connects this process to the node in `runtime_dir` as "engine", "worker", "operator" or "peer".

    Raises NotReady when no node answers there, Unauthorized when this uid may not attach,
    InvalidArgument for a role or name that is refused.
    """
    return Attachment(runtime_dir, role, name, _enter(runtime_dir, role, name, timeout_s))


def _enter(runtime_dir: Path, role: str, name: str, timeout_s: float) -> Door:
    path = runtime_dir / ATTACH_SOCKET
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.settimeout(timeout_s)
        connect(channel, path)
        payload, fds = ask(channel, {"role": role, "name": name})
        token, grpc_path, boot_id = payload.get("token"), payload.get("grpc"), payload.get("boot_id")
        if not isinstance(token, str) or not isinstance(grpc_path, str) or not isinstance(boot_id, int):
            raise DaemonError(f"{path} answered {sorted(payload)}, not a token; is it a kvmanager node?")
    except BaseException:
        channel.close()
        raise
    return Door(channel, token, Path(grpc_path), boot_id, fds[0] if fds else -1)


def connect(channel: socket.socket, path: Path) -> None:
    """Connects to a socket of a node. Raises Unauthorized, NotReady."""
    try:
        channel.connect(os.fspath(path))
    except PermissionError as error:
        raise Unauthorized(f"uid {os.getuid()} may not open {path}; run as the node's own user") from error
    except OSError as error:
        raise NotReady(f"no node answers on {path} ({error}); is it started?") from error


def ask(channel: socket.socket, question: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Sends a JSON object; what comes back, and descriptors with it. Raises the error that it names, NotReady."""
    try:
        with contextlib.suppress(PeerUnreachable):  # refused before it heard us: the reason lies in the socket
            send_json(channel, question)
        return hear(channel)
    except PeerUnreachable as error:
        raise NotReady(f"the connection to the node broke ({error}); attach again") from error


def hear(channel: socket.socket) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A JSON object that comes, and descriptors with it. Raises the error that it names, PeerUnreachable."""
    payload, fds = receive_json(channel)
    if "error" in payload:
        raise _typed(payload["error"])
    return payload, fds


def _typed(error: object) -> KVError:
    """The error of an error frame, in the class of its reason."""
    if not isinstance(error, dict):
        return DaemonError(f"the node refused: {error}")
    reason, message = str(error.get("reason")), str(error.get("message"))
    if reason not in dict(pb.ErrorReason.items()):
        return DaemonError(f"{reason}: {message}")
    return error_from_proto(pb.Error(reason=pb.ErrorReason.Value(reason), message=message))


class _TokenCall:
    """A method of the daemon, whichever side streams, whose calls carry the token.

    An interceptor would cost a tenth of a call.
    """

    def __init__(self, call: Any, token: str) -> None:
        self._call = call
        self._entry = (TOKEN_METADATA_KEY, token)

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **how: Any) -> Any:
        """Makes the call, and waits where there is one reply."""
        return self._call(request, timeout, self._with_token(metadata), **how)

    def with_call(self, request: Any, timeout: float | None = None, metadata: Any = None, **how: Any) -> Any:
        """The same with what the server says beside the reply."""
        return self._call.with_call(request, timeout, self._with_token(metadata), **how)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **how: Any) -> Any:
        """Makes the call and does not wait."""
        return self._call.future(request, timeout, self._with_token(metadata), **how)

    def _with_token(self, metadata: Any) -> tuple[Any, ...]:
        return (*(metadata or ()), self._entry)


class _TokenChannel(grpc.Channel):
    """A channel whose calls carry the token."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        """One request, one reply."""
        return _TokenCall(self._channel.unary_unary(*method, **how), self._token)

    def unary_stream(self, *method: Any, **how: Any) -> Any:
        """One request, many replies."""
        return _TokenCall(self._channel.unary_stream(*method, **how), self._token)

    def stream_unary(self, *method: Any, **how: Any) -> Any:
        """Many requests, one reply."""
        return _TokenCall(self._channel.stream_unary(*method, **how), self._token)

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        """Many of both."""
        return _TokenCall(self._channel.stream_stream(*method, **how), self._token)

    def subscribe(self, callback: Callable[..., None], try_to_connect: bool | None = False) -> None:
        """Is told of the connection's state."""
        self._channel.subscribe(callback, bool(try_to_connect))

    def unsubscribe(self, callback: Callable[..., None]) -> None:
        """Is told no more."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Ends it and its calls."""
        self._channel.close()

    def __enter__(self) -> _TokenChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def grpc_channel(attachment: Attachment) -> grpc.Channel:
    """A channel to the node's daemon whose calls carry the token; the caller closes it."""
    options = [
        ("grpc.max_send_message_length", MESSAGE_MAX_BYTES),
        ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
        # A daemon that is replaced is back within a second.
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Also how long one attempt may take, long on a loaded machine; where nobody listens it fails at once.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 500),
    ]
    channel = grpc.insecure_channel(f"unix:{attachment.grpc_path}", options=options)
    return _TokenChannel(channel, attachment.token)
