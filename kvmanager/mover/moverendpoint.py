"""The mover's side of its socket: who is served, what is answered, which completions are kept.

Every process of the mover's own uid may connect; the connection with the newest boot id is served, of one
boot the one that came last. What breaks a rule (garbage, an id in use, a foreign region) closes its
connection and nothing else: the daemon connects again and lists.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvmanager.errors import InvalidArgument, KVError, StaleBoot
from kvmanager.framing import Frame, FrameReader, FrameWriter
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import bind_socket, peer_credentials

KEPT_COMPLETIONS: Final = 16_384
"""Sent ones, kept for a daemon that lost them in its crash; those never sent are all kept."""
_LAST_FLUSH_S: Final = 0.5
_log = logging.getLogger("kvmanager.mover")


@dataclass(eq=False)
class _Connection:
    number: int
    socket: socket.socket
    boot_id: int = 0  # 0 until its first command
    reader: FrameReader = field(default_factory=FrameReader)
    writer: FrameWriter = field(default_factory=FrameWriter)


class _Outbox:
    """Completions by plan id, in order, each with the number of the connection that it last went out on (0: none)."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[pb.MoverEvent, int]] = {}

    def put(self, plan_id: int, event: pb.MoverEvent, connection: int) -> None:
        """Keeps a completion; the oldest that was sent goes when there are too many."""
        self._kept.pop(plan_id, None)
        self._kept[plan_id] = (event, connection)
        while len(self._kept) > KEPT_COMPLETIONS:
            oldest = next((i for i, (_, sent_on) in self._kept.items() if sent_on), None)
            if oldest is None:
                return
            del self._kept[oldest]

    def take_unseen(self, connection: int) -> list[pb.MoverEvent]:
        """What has not gone out on this connection; from now on it has."""
        unseen = [(i, event) for i, (event, sent_on) in self._kept.items() if sent_on != connection]
        for plan_id, event in unseen:
            self._kept[plan_id] = (event, connection)
        return [event for _, event in unseen]


class MoverEndpoint:
    """Listens at `path`; `handle(command, fds)` gives the answers to a command, and the fds are closed after it.

    `handle` raises a KVError for a command that breaks a rule.
    """

    def __init__(
        self,
        path: Path,
        incarnation: int,
        selector: selectors.BaseSelector,
        handle: Callable[[pb.MoverCommand, tuple[int, ...]], list[pb.MoverEvent]],
    ) -> None:
        self._path = path
        self._incarnation = incarnation
        self._selector = selector
        self._handle = handle
        self._listener = bind_socket(path)
        self._listener.setblocking(False)
        self._connections: set[_Connection] = set()
        self._serving: _Connection | None = None
        self._newest_boot = 0
        self._accepted = 0
        self._outbox = _Outbox()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def linked(self) -> bool:
        """Whether a daemon is served."""
        return self._serving is not None

    def complete(self, completion: pb.Completion) -> None:
        """Sends a completion to the daemon that is served, and keeps it for the next one that lists."""
        event = pb.MoverEvent(incarnation=self._incarnation, completion=completion)
        connection = self._serving
        self._outbox.put(completion.plan_id, event, 0 if connection is None else connection.number)
        if connection is None:
            return
        try:
            self._send(connection, event)
        except KVError as error:
            _log.warning("closed connection %d: %s", connection.number, error)
            self._drop(connection)

    def close(self) -> None:
        """Sends what is waiting, as far as the daemon takes it within a moment, and takes the socket away."""
        for connection in list(self._connections):
            connection.socket.settimeout(_LAST_FLUSH_S)
            try:
                connection.writer.flush(connection.socket)
            except KVError as error:
                _log.warning("completions stay unsent: %s", error)
            self._drop(connection)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        _, uid = peer_credentials(sock)
        if uid != os.getuid():
            _log.warning("refused a connection of uid %d", uid)
            sock.close()
            return
        sock.setblocking(False)
        self._accepted += 1
        connection = _Connection(self._accepted, sock)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._serve, connection))

    def _serve(self, connection: _Connection) -> None:
        """Reads and writes what the socket is ready for; a connection that breaks a rule is closed and logged."""
        if connection not in self._connections:  # closed by another's command in this turn
            return
        try:
            connection.writer.flush(connection.socket)
            if not self._take_all(connection, deque(connection.reader.receive(connection.socket))):
                return
            if connection.reader.ended:
                self._drop(connection)
            else:
                self._watch(connection)
        except (KVError, DecodeError) as error:
            _log.warning("closed connection %d: %s: %s", connection.number, type(error).__name__, error)
            self._drop(connection)

    def _take_all(self, connection: _Connection, frames: deque[Frame]) -> bool:
        """Obeys them in order; whether the connection is still there. Frames behind its end are closed."""
        try:
            while frames and connection in self._connections:
                self._take(connection, frames.popleft())
        finally:
            for late in frames:
                late.close()
        return connection in self._connections

    def _watch(self, connection: _Connection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.writer else 0)
        self._selector.modify(connection.socket, events, partial(self._serve, connection))

    def _drop(self, connection: _Connection) -> None:
        """Forgets a connection; plans, completions and regions stay."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if self._serving is connection:
            self._serving = None
        self._selector.unregister(connection.socket)
        connection.reader.close()
        connection.writer.close()
        connection.socket.close()

    def _send(self, connection: _Connection, event: pb.MoverEvent) -> None:
        event.incarnation = self._incarnation
        connection.writer.put(event.SerializeToString())
        connection.writer.flush(connection.socket)
        self._watch(connection)

    def _take(self, connection: _Connection, frame: Frame) -> None:
        try:
            command = pb.MoverCommand.FromString(frame.payload)
            self._follow_newest(connection, command.boot_id)
            answers = self._handle(command, frame.fds)
        finally:
            frame.close()
        if command.WhichOneof("what") == "list_outstanding":
            answers = self._outbox.take_unseen(connection.number) + answers
        for event in answers:
            self._send(connection, event)

    def _follow_newest(self, connection: _Connection, boot_id: int) -> None:
        """Serves the newest boot id; of one boot, the connection that came last."""
        if boot_id == 0 or boot_id < self._newest_boot:
            raise StaleBoot(f"boot id {boot_id}: this mover has seen {self._newest_boot}")
        if connection.boot_id not in (0, boot_id):
            raise InvalidArgument(f"connection {connection.number} changed its boot id to {boot_id}")
        other = self._serving
        if other is connection:
            return
        if other is not None and boot_id == self._newest_boot and other.number > connection.number:
            raise StaleBoot(f"connection {other.number} of the same daemon is newer")
        connection.boot_id = self._newest_boot = boot_id
        self._serving = connection
        if other is not None:
            _log.info("connection %d takes over from %d", connection.number, other.number)
            self._drop(other)
