"""Connections to other daemons, by runtime directory: made on first use, made again when they are of no use."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import grpc

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.errors import DaemonError, KVError, PeerUnreachable, Suspect, Unauthorized
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import error_from_rpc

CALL_DEADLINE_S = 10.0
_SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class _Peer:
    """One connection. It closes when it was dropped and its last call has ended."""

    def __init__(self, address: str, node: str) -> None:
        self._attachment = attach(Path(address), "peer", node)
        self._channel = grpc_channel(self._attachment)
        self.stub = pb_grpc.PeerStub(self._channel)
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
        self._channel.close()
        self._attachment.close()


class Peers:
    """Calls other daemons' Peer service. Thread-safe; a call never waits for another node's connection."""

    def __init__(self, node: str) -> None:
        """`node`: our name, as the other sides see it."""
        self._node = node
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
                raise PeerUnreachable(f"the node at {address} does not answer: {typed}") from error
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
        try:
            made = _Peer(address, self._node)
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
