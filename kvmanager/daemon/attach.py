"""The door of the node: who connects is read from the kernel, and gets a session token.

gRPC does not tell the uid of a peer on a unix socket. So every client first connects here, on
`attach.sock` in the node's 0700 directory; uid, pid and pidfd come from the socket itself. Its first
frame names a role; the answer holds the token that its gRPC calls carry, where gRPC listens and the
daemon's boot id. The connection stays open as long as the client lives:

    connected --socket breaks--> disconnected (suspect) --pidfd readable, lifeline at its end--> exited (gone)

A worker, which maps memory, also gets its *lifeline* with the answer: the write end of a pipe that it keeps open
and never uses. A child that it forks inherits that end with everything else, and nobody can end the pipe but by
closing it; so the pipe is at its end only when the process and all who inherited from it are gone. The socket
would not do: any of its holders can shut it down, and it is gone with the daemon that accepted it.

Exit is reported after disconnect, always. Later frames `{"fds_for": attach_id}` are answered with the descriptors
of that attach. `{"leave": true}` says that the client goes on purpose; it is not answered.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvmanager.daemon.peerprocess import Peer, read_peer, started_ticks
from kvmanager.errors import InvalidArgument, KVError, LimitExceeded, PeerUnreachable, Suspect, Unauthorized
from kvmanager.framing import MAX_JSON_BYTES, Frame, FrameReader, error_frame, json_object, send_json
from kvmanager.runtime_dir import ATTACH_SOCKET, bind_socket, make_private_dir

ROLES: Final = ("engine", "worker", "operator", "reader", "peer")
_HOLDS_SOMETHING: Final = ("engine", "worker")
"""Roles whose process must be known to be dead before what it held is used again, also after it left."""
NAME_MAX_CHARS: Final = 200
CONNECTIONS_MAX: Final = 256
"""Each takes up to three descriptors, and one more for its gRPC connection."""
FOR_OPERATORS: Final = 32
"""Of these, places that only operators and readers get: whatever engines do, somebody can look."""
HELLO_DEADLINE_S: Final = 5.0
"""A connection that has not said who it is by then is closed."""

_LIFELINE_READ_BYTES: Final = 4096
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """One attached process.

    `token`: 256 random bits, hex. `pidfd` is readable once the process is gone. `lifeline` is at its end once the
    process and its children hold their end no more; -1 for a role that maps no memory. Both are the server's, which
    closes them after `on_exit`. `started`: clock ticks from the machine's boot to the process's start, which tells it
    from another one of the same number.
    """

    token: str
    uid: int
    pid: int
    pidfd: int
    role: str
    name: str
    lifeline: int = -1
    started: int = 0


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """What is known of an attached process. `inherited`: it is dead, but a child holds its lifeline."""

    pid: int
    inherited: bool


@dataclass(eq=False, slots=True)
class _Connection:
    """A socket and its peer. `identity` is set once it attached; `channel` is None once it broke.

    `dead`: the pidfd was readable. `lifeline_open`: somebody holds the other end. `left`: it went on purpose.
    """

    channel: socket.socket | None
    peer: Peer
    opened_s: float
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_JSON_BYTES))
    identity: ClientIdentity | None = None
    dead: bool = False
    lifeline_open: bool = False
    left: bool = False


class AttachServer:
    """Serves `attach.sock` from one thread of its own.

    The callbacks run in that thread, one at a time, and must not block:

    * `on_attach(identity)` before the token is handed out, also to one that had it; a KVError refuses the client.
    * `on_leave(token)` when the client said that it goes, before its disconnect.
    * `on_disconnect(token)` when the socket broke; then `on_exit(token)` when the process is gone, and every
      child that holds its lifeline.
    * `fds_for(token, attach_id)` gives the descriptors of an attach, which stay the callee's; a KVError
      is passed on to the client.
    * `check_role(uid, role)` raises Unauthorized for a role that a user may not have.
    * `on_failure(error)` when a callback raised anything else: the server has stopped and the daemon must.
    """

    def __init__(
        self,
        runtime_dir: Path,
        *,
        trust_uids: Collection[int],
        boot_id: int,
        grpc_path: Path,
        on_attach: Callable[[ClientIdentity], None],
        on_leave: Callable[[str], None],
        on_disconnect: Callable[[str], None],
        on_exit: Callable[[str], None],
        fds_for: Callable[[str, int], Sequence[int]],
        on_failure: Callable[[Exception], None],
        check_role: Callable[[int, str], None] = lambda _uid, _role: None,
    ) -> None:
        self.path: Final = runtime_dir / ATTACH_SOCKET
        self.trust(trust_uids)
        self._boot_id = boot_id
        self._grpc_path = grpc_path
        self._on_attach = on_attach
        self._on_leave = on_leave
        self._on_disconnect = on_disconnect
        self._on_exit = on_exit
        self._fds_for = fds_for
        self._on_failure = on_failure
        self._check_role = check_role
        # Connections by token, until exit. Written by the thread only, read by `identity_of` under the lock.
        self._attached: dict[str, _Connection] = {}
        self._lock = threading.Lock()
        # Connections that have not said who they are yet; thread only.
        self._waiting: set[_Connection] = set()
        self._selector = selectors.DefaultSelector()
        make_private_dir(runtime_dir)
        self._listener = bind_socket(self.path)
        self._listener.setblocking(False)
        self._wake_source, self._wake_target = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="attach", daemon=True)

    def trust(self, uids: Collection[int]) -> None:
        """Whom it lets in from now on; who is attached stays."""
        self._trust_uids = frozenset(uids)

    def adopt(self, identity: ClientIdentity) -> None:
        """A client of the daemon before, whose process may live on; before `start`.

        Its connection is broken. Its token is good again once it has attached again.
        """
        connection = _Connection(None, Peer(identity.pid, identity.uid, identity.pidfd), 0.0, identity=identity)
        self._attached[identity.token] = connection
        self._watch_life(connection)

    def start(self) -> None:
        """Starts the thread. Call once."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_target, selectors.EVENT_READ, None)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread, closes all connections and removes the socket. No callback runs any more."""
        if self._thread.is_alive():
            self._wake_source.send(b"x")
            self._thread.join()
        with self._lock:
            connections = [*self._attached.values(), *self._waiting]
            self._attached.clear()
            self._waiting.clear()
        for connection in connections:
            if connection.channel is not None:
                connection.channel.close()
            connection.reader.close()
            os.close(connection.peer.pidfd)
            if connection.identity is not None and connection.identity.lifeline >= 0:
                os.close(connection.identity.lifeline)
        self._selector.close()
        for end in (self._listener, self._wake_source, self._wake_target):
            end.close()
        self.path.unlink(missing_ok=True)

    def identity_of(self, token: str) -> ClientIdentity:
        """Whose token this is; from any thread.

        Raises Unauthorized for a token never given or of a process that is gone, Suspect when the
        connection broke while the process may live on.
        """
        with self._lock:
            connection = self._attached.get(token)
            if connection is None or connection.identity is None:
                raise Unauthorized(f"no client holds this session token; attach on {self.path} first")
            if connection.channel is None:
                identity = connection.identity
                raise Suspect(f"the attach connection of {identity.role} {identity.name!r} broke; attach again")
            return connection.identity

    def life_of(self, token: str) -> ProcessLife | None:
        """The process behind a token, from any thread; None when it is gone."""
        with self._lock:
            connection = self._attached.get(token)
            return None if connection is None else ProcessLife(connection.peer.pid, connection.dead)

    def kill(self, token: str) -> bool:
        """SIGKILL to the process behind a token, through its pidfd: never to another one that got its number.

        From any thread. False when it is dead already, or this uid may not end it.
        """
        with self._lock:  # the pidfd is closed only after the token is forgotten
            connection = self._attached.get(token)
            if connection is None or connection.dead:
                return False
            try:
                signal.pidfd_send_signal(connection.peer.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return False
            except PermissionError:
                _log.error("may not end pid %d of uid %d", connection.peer.pid, connection.peer.uid)
                return False
        return True

    # ------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            _log.exception("the attach server stops")
            self._on_failure(error)

    def _turn(self) -> bool:
        """Handles what is ready; False once `close` was called."""
        timeout = HELLO_DEADLINE_S if self._waiting else None
        events = self._selector.select(timeout)
        actions = [key.data for key, _ in events]
        if None in actions:
            return False
        # Sockets before the signs of death, so that a break and an exit seen together are reported in this order.
        for action in sorted(actions, key=lambda each: isinstance(each, _Exit)):
            action()
        now = time.monotonic()
        for connection in [each for each in self._waiting if now - each.opened_s >= HELLO_DEADLINE_S]:
            self._refuse(connection, InvalidArgument(f"no first frame within {HELLO_DEADLINE_S} s; attach again"))
        return True

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        channel.setblocking(False)
        try:
            peer = read_peer(channel)
        except ProcessLookupError:
            channel.close()
            return
        connection = _Connection(channel, peer, time.monotonic())
        self._waiting.add(connection)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._receive(connection))
        if peer.uid not in self._trust_uids:
            trusted = ", ".join(map(str, sorted(self._trust_uids)))
            self._refuse(
                connection,
                Unauthorized(
                    f"uid {peer.uid} (pid {peer.pid}) may not attach; run it as one of uid {trusted}, "
                    "or add its uid to trust_uids in [node]"
                ),
            )
        elif len(self._waiting) + len(self._attached) > CONNECTIONS_MAX:
            self._refuse(connection, LimitExceeded(f"{CONNECTIONS_MAX} clients are attached already; close some"))

    def _receive(self, connection: _Connection) -> None:
        channel = connection.channel
        if channel is None:  # dropped earlier in this turn
            return
        try:
            frames = connection.reader.receive(channel)
        except PeerUnreachable:
            self._drop(connection)
            return
        except KVError as error:
            self._refuse(connection, error)
            return
        for frame in frames:
            frame.close()  # a client has no descriptors for us; `_serve` says so
            if connection.channel is None:  # refused for the frame before
                continue
            try:
                self._serve(connection, frame)
            except KVError as error:
                self._refuse(connection, error)
        if connection.reader.ended:
            self._drop(connection)

    def _serve(self, connection: _Connection, frame: Frame) -> None:
        if frame.fds:
            raise InvalidArgument(f"a frame brings {len(frame.fds)} descriptors; this connection takes none")
        message = json_object(frame.payload)
        if connection.identity is None:
            self._greet(connection, message)
            return
        if message == {"leave": True}:
            connection.left = True
            self._on_leave(connection.identity.token)
            self._drop(connection)
            if connection.identity.role not in _HOLDS_SOMETHING:  # a tool that asks every second would fill our table
                self._let_go(connection)
            return
        attach_id = message.get("fds_for")
        if not isinstance(attach_id, int) or isinstance(attach_id, bool) or message.keys() != {"fds_for"}:
            raise InvalidArgument(
                f"a frame with keys {sorted(message)}; this connection serves {{'fds_for': attach_id}} "
                "and {'leave': true}"
            )
        try:
            fds = self._fds_for(connection.identity.token, attach_id)
            self._send(connection, {"fds_for": attach_id}, fds)
        except KVError as error:  # the question was well formed, so the connection stays
            self._send(connection, error_frame(error))

    def _greet(self, connection: _Connection, message: dict[str, object]) -> None:
        role, name = message.get("role"), message.get("name")
        if role not in ROLES:
            raise InvalidArgument(f"role {role!r} is not one of {', '.join(ROLES)}")
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX_CHARS:
            raise InvalidArgument(f"name {str(name)[:40]!r} is not a text of 1 to {NAME_MAX_CHARS} characters")
        peer = connection.peer
        self._check_role(peer.uid, str(role))
        started = started_ticks(peer.pid)
        if role not in ("operator", "reader") and len(self._attached) >= CONNECTIONS_MAX - FOR_OPERATORS:
            raise LimitExceeded(f"{len(self._attached)} clients are attached already; close some")
        known = self._known(connection, started, str(role), name)
        if known is not None:
            self._come_back(connection, known)
            return
        lifeline, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if role == "worker" else (-1, -1)
        fds = [theirs] if role == "worker" else []
        try:
            identity = ClientIdentity(
                secrets.token_hex(32), peer.uid, peer.pid, peer.pidfd, str(role), name, lifeline, started
            )
            self._on_attach(identity)
        except BaseException:
            for fd in (lifeline, *fds):
                if fd >= 0:
                    os.close(fd)
            raise
        with self._lock:
            connection.identity = identity
            self._attached[identity.token] = connection
        self._waiting.discard(connection)
        answer = {"token": identity.token, "grpc": os.fspath(self._grpc_path), "boot_id": self._boot_id}
        self._send(connection, answer, fds)
        for fd in fds:
            os.close(fd)
        self._watch_life(connection)

    def _watch_life(self, connection: _Connection) -> None:
        identity = connection.identity
        assert identity is not None
        self._selector.register(identity.pidfd, selectors.EVENT_READ, _Exit(lambda: self._died(connection)))
        if identity.lifeline >= 0:
            connection.lifeline_open = True
            self._selector.register(identity.lifeline, selectors.EVENT_READ, _Exit(lambda: self._lifeline(connection)))

    def _known(self, connection: _Connection, started: int, role: str, name: str) -> _Connection | None:
        """The broken connection that the same process had under the same name, if it did not leave."""
        for other in self._attached.values():
            was = other.identity
            if (
                was is not None
                and other.channel is None
                and not (other.dead or other.left)
                and started != 0
                and (was.pid, was.started, was.uid) == (connection.peer.pid, started, connection.peer.uid)
                and (was.role, was.name) == (role, name)
            ):
                return other
        return None

    def _come_back(self, connection: _Connection, known: _Connection) -> None:
        """The client goes on with the token that it had; what tells of its life is watched already."""
        channel = connection.channel
        assert channel is not None
        assert known.identity is not None
        self._on_attach(known.identity)
        self._waiting.discard(connection)
        os.close(connection.peer.pidfd)
        self._selector.modify(channel, selectors.EVENT_READ, lambda: self._receive(known))
        with self._lock:
            known.channel, known.reader = channel, connection.reader
        connection.channel = None
        answer = {"token": known.identity.token, "grpc": os.fspath(self._grpc_path), "boot_id": self._boot_id}
        self._send(known, answer)

    def _send(self, connection: _Connection, payload: dict[str, object], fds: Sequence[int] = ()) -> None:
        """Sends without waiting; a client that does not read, or is gone, is dropped."""
        if connection.channel is None:
            return
        try:
            send_json(connection.channel, payload, fds)
        except PeerUnreachable:
            self._drop(connection)

    def _refuse(self, connection: _Connection, error: KVError) -> None:
        _log.warning("refused pid %d: %s", connection.peer.pid, error)
        self._send(connection, error_frame(error))
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """Closes the socket. An attached client becomes suspect; its pidfd is watched on."""
        channel = connection.channel
        if channel is None:
            return
        with self._lock:
            connection.channel = None
        self._selector.unregister(channel)
        channel.close()
        connection.reader.close()
        if connection.identity is None:
            self._waiting.discard(connection)
            os.close(connection.peer.pidfd)
        else:
            self._on_disconnect(connection.identity.token)

    def _died(self, connection: _Connection) -> None:
        """The pidfd is readable."""
        identity = connection.identity
        assert identity is not None, "only attached processes are watched"
        if connection.dead:  # let go earlier in this turn
            return
        self._drop(connection)
        self._selector.unregister(identity.pidfd)
        with self._lock:
            connection.dead = True
        if connection.lifeline_open:
            self._lifeline(connection)  # it ended before the process did, if nobody inherited it
        else:
            self._exited(identity)
        if connection.lifeline_open:
            _log.warning("pid %d is dead, but a child of it holds its memory: waiting for that", identity.pid)

    def _let_go(self, connection: _Connection) -> None:
        """It left, and its life is of no interest any more."""
        identity = connection.identity
        assert identity is not None, "only who has attached can leave"
        self._selector.unregister(identity.pidfd)
        with self._lock:
            connection.dead = True
        self._exited(identity)

    def _lifeline(self, connection: _Connection) -> None:
        """The lifeline is readable: at its end, or written to, which means nothing."""
        identity = connection.identity
        assert identity is not None, "only attached processes are watched"
        if not connection.lifeline_open:  # seen by `_died` earlier in this turn
            return
        try:
            if os.read(identity.lifeline, _LIFELINE_READ_BYTES):
                return
        except BlockingIOError:
            return
        connection.lifeline_open = False
        self._selector.unregister(identity.lifeline)
        if connection.dead:
            self._exited(identity)

    def _exited(self, identity: ClientIdentity) -> None:
        with self._lock:
            del self._attached[identity.token]
        self._on_exit(identity.token)
        os.close(identity.pidfd)
        if identity.lifeline >= 0:
            os.close(identity.lifeline)


@dataclass(frozen=True, slots=True)
class _Exit:
    """What to do at a sign of death; a type of its own, so that a turn can order it after sockets."""

    do: Callable[[], None]

    def __call__(self) -> None:
        self.do()
