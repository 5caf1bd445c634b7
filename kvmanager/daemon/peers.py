"""Connections to other daemons: made on first use, made again when they are of no use.

A node of this machine is known by its runtime directory; it must be served by a user that we trust (the directory comes
from a ticket, and so from an engine). One of another machine is known by HOST:PORT, and proves by mutual TLS that it is
that host.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

import grpc

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.configuration.securityconfig import host_and_port
from kvmanager.errors import DaemonError, KVError, PeerUnreachable, Suspect, Unauthorized
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.certificates import Certificates
from kvmanager.wire import MESSAGE_MAX_BYTES, error_from_rpc

CALL_DEADLINE_S = 10.0
CONNECTIONS_MAX: Final = 64
"""Of other nodes at one time: addresses come from engines."""
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class _Local:
    """A node of this machine."""

    def __init__(self, runtime_dir: Path, node: str, uids: tuple[int, ...]) -> None:
        """Raises Unauthorized where somebody else's process serves there."""
        self._attachment = attach(runtime_dir, "peer", node)
        uid = self._attachment.server_uid
        if uid not in (os.getuid(), *uids):
            self._attachment.close()
            raise Unauthorized(f"{runtime_dir} is served by uid {uid}, whom [access] peers does not name")
        self.channel = grpc_channel(self._attachment)

    def why_silent(self, address: str, error: KVError) -> KVError:
        """What to say when it does not answer."""
        return PeerUnreachable(f"the node at {address} does not answer: {error}")

    def close(self) -> None:
        self.channel.close()
        self._attachment.close()


class _Remote:
    """A node of another machine."""

    def __init__(self, address: str, certificates: Certificates | None) -> None:
        """Raises Unauthorized without certificates of our own, PeerUnreachable for what is no address."""
        try:
            host_and_port(address)
        except ValueError as error:
            raise PeerUnreachable(f"{error}, nor a runtime directory: no node can be there") from error
        if certificates is None:
            raise Unauthorized(f"the node at {address} is called with a certificate, and this node has none: see [tls]")
        self._certificates = certificates
        options = [
            ("grpc.max_send_message_length", MESSAGE_MAX_BYTES),
            ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
        ]
        self.channel = grpc.secure_channel(address, certificates.channel_credentials(), options)

    def why_silent(self, address: str, error: KVError) -> KVError:
        """What to say when it does not answer: perhaps one of the two does not like the other's certificate."""
        found = self._certificates.why_silent(address)
        return type(found)(f"{found} ({error})")

    def close(self) -> None:
        self.channel.close()


class _Peer:
    """One connection. It closes when it was dropped and its last call has ended."""

    def __init__(self, address: str, node: str, certificates: Certificates | None, uids: tuple[int, ...]) -> None:
        local = address.startswith("/")
        self._way = _Local(Path(address), node, uids) if local else _Remote(address, certificates)
        self.why_silent = self._way.why_silent
        self.stub = pb_grpc.PeerStub(self._way.channel)
        self._users = 1  # the table's own
        self._lock = threading.Lock()

    def use(self) -> None:
        """One more user; call it while the table holds this peer."""
        with self._lock:
            self._users += 1

    def let_go(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.close()

    def close(self) -> None:
        """Ends the connection and all calls on it."""
        self._way.close()


class Peers:
    """Calls other daemons' Peer service. Thread-safe; a call never waits for another node's connection."""

    def __init__(self, node: str, certificates: Certificates | None = None, uids: tuple[int, ...] = ()) -> None:
        """`node`: our name, as nodes of this machine see it; those of others see our certificate.

        `uids`: who, but our own user, runs nodes of this machine that we believe.
        """
        self._node = node
        self._certificates, self._uids = certificates, uids
        self._peers: dict[str, _Peer] = {}
        self._closed = False
        self._lock = threading.Lock()

    def call(self, address: str, method: str, request: object, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """The reply. Raises the peer's typed error, PeerUnreachable when it does not answer.

        A peer that no longer knows us (it restarted, or our attach connection broke) is attached to once more.
        """
        peer = self._take(address)
        try:
            return self._once(address, peer, method, request, deadline_s)
        except (Unauthorized, Suspect):
            self._drop(address, peer)
        finally:
            peer.let_go()
        peer = self._take(address)
        try:
            return self._once(address, peer, method, request, deadline_s)
        finally:
            peer.let_go()

    def _once(self, address: str, peer: _Peer, method: str, request: object, deadline_s: float) -> Any:
        try:
            return getattr(peer.stub, method)(request, timeout=deadline_s)
        except grpc.RpcError as error:
            typed = error_from_rpc(error)
            # Without details of ours gRPC itself speaks, not the peer.
            if type(typed) is DaemonError and isinstance(error, grpc.Call) and error.code() in _SILENCE:
                # A new channel tries at once; this one would wait longer after each failure.
                self._drop(address, peer)
                raise peer.why_silent(address, typed) from error
            raise typed from error

    def _take(self, address: str) -> _Peer:
        """A connection to use, and to let go of afterwards. Raises PeerUnreachable."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is not None:
                peer.use()
                return peer
            if self._closed:
                raise PeerUnreachable(f"this node stops; nothing is asked of {address} any more")
            if len(self._peers) >= CONNECTIONS_MAX:
                self._peers.pop(next(iter(self._peers))).let_go()
        try:
            made = _Peer(address, self._node, self._certificates, self._uids)
        except Unauthorized:
            raise
        except KVError as error:
            raise PeerUnreachable(f"the node at {address} can't be reached: {error}") from error
        with self._lock:
            peer = made if self._closed else self._peers.setdefault(address, made)
            peer.use()
        if peer is not made or self._closed:
            made.let_go()
        return peer

    def _drop(self, address: str, peer: _Peer) -> None:
        with self._lock:
            if self._peers.get(address) is not peer:
                return
            del self._peers[address]
        peer.let_go()

    def close(self) -> None:
        """Ends all connections; calls in progress end with PeerUnreachable."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
