"""Both ends of the socket pair between keeper and daemon: memory descriptors outlive the daemon.

The daemon asks, the keeper answers, one frame each way and in order:

    {"op": "deposit", "name": N, "size": BYTES} + 1 descriptor  -> {"op": "deposit"}
    {"op": "forget", "name": N}                                 -> {"op": "forget"}
    {"op": "reclaim"}                                           -> {"op": "reclaim", "count": K}, then K times
                                        {"op": "held", "name": N, "size": BYTES} + 1 descriptor
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmanager.errors import DaemonError, InvalidArgument, PeerUnreachable, RequestError
from kvmanager.framing import MAX_JSON_BYTES, FrameReader, json_object, receive_json, send_json
from kvmanager.killpoints import reach


@dataclass(frozen=True, slots=True)
class Deposit:
    """One piece of memory: its name, size in bytes and descriptor."""

    name: str
    size_bytes: int
    fd: int


class DepositBox:
    """The keeper's side: holds the descriptors and serves one daemon at a time."""

    def __init__(self) -> None:
        self._held: dict[str, Deposit] = {}
        self._reader = FrameReader(MAX_JSON_BYTES)

    def __len__(self) -> int:
        return len(self._held)

    def new_daemon(self) -> None:
        """Forgets half a frame of the daemon before, never a deposit."""
        self._reader.close()
        self._reader = FrameReader(MAX_JSON_BYTES)

    def serve(self, channel: socket.socket) -> bool:
        """Reads once and answers each whole frame; False when the daemon closed its end.

        Raises PeerUnreachable when it does not take the answer or broke off within a frame, InvalidArgument
        or LimitExceeded when the stream makes no sense any more.
        """
        frames = deque(self._reader.receive(channel))
        try:
            while frames:
                frame = frames.popleft()
                self._serve_frame(channel, frame.payload, list(frame.fds))
        finally:
            for frame in frames:
                frame.close()
        return not self._reader.ended

    def _serve_frame(self, channel: socket.socket, payload: bytes, fds: list[int]) -> None:
        """Answers one request and closes the descriptors that were not taken in."""
        try:
            self._answer(channel, json_object(payload), fds)
        except RequestError as error:
            send_json(channel, {"error": str(error)})
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Lets go of all memory: what nobody else holds is gone."""
        self._reader.close()
        for deposit in self._held.values():
            os.close(deposit.fd)
        self._held.clear()

    def _answer(self, channel: socket.socket, payload: Mapping[str, Any], fds: list[int]) -> None:
        match payload:
            case {"op": "deposit", "name": str(name), "size": int(size)}:
                self._take(name, size, fds)
                reach("keeper.deposit")
                send_json(channel, {"op": "deposit"})
            case {"op": "forget", "name": str(name)}:
                if name not in self._held:
                    raise InvalidArgument(f"nothing called {name!r} is deposited; held are {sorted(self._held)}")
                os.close(self._held.pop(name).fd)
                reach("keeper.forget")
                send_json(channel, {"op": "forget"})
            case {"op": "reclaim"}:
                send_json(channel, {"op": "reclaim", "count": len(self._held)})
                reach("keeper.reclaim")
                for held in self._held.values():
                    send_json(channel, {"op": "held", "name": held.name, "size": held.size_bytes}, [held.fd])
            case _:
                raise InvalidArgument(f"unknown request with keys {sorted(payload)}, op {payload.get('op')!r}")

    def _take(self, name: str, size_bytes: int, fds: list[int]) -> None:
        if len(fds) != 1:
            raise InvalidArgument(f"deposit of {name!r} brought {len(fds)} descriptors, not 1")
        if name in self._held:
            raise InvalidArgument(f"{name!r} is deposited already; forget it first")
        self._held[name] = Deposit(name, size_bytes, fds.pop())


class KeeperLink:
    """The daemon's side, on the descriptor that `--keeper-fd` names. Use it from one thread."""

    def __init__(self, fd: int) -> None:
        self._channel = socket.socket(fileno=fd)

    def deposit(self, name: str, size_bytes: int, fd: int) -> None:
        """Gives the keeper a duplicate of `fd`. Raises DaemonError when it refuses or is gone."""
        self._ask({"op": "deposit", "name": name, "size": size_bytes}, [fd])

    def forget(self, name: str) -> None:
        """Ends the keeper's hold on `name`. Raises DaemonError when it holds no such thing or is gone."""
        self._ask({"op": "forget", "name": name}, [])

    def reclaim(self) -> list[Deposit]:
        """All that is held, in order of deposit; the caller owns the descriptors, the keeper keeps its own.

        Raises DaemonError when the keeper is gone.
        """
        count = self._ask({"op": "reclaim"}, [])["count"]
        deposits = []
        for _ in range(count):
            payload, fds = self._receive()
            deposits.append(Deposit(payload["name"], payload["size"], fds[0]))
        return deposits

    def close(self) -> None:
        """Closes the daemon's end."""
        self._channel.close()

    def _ask(self, question: Mapping[str, Any], fds: list[int]) -> Mapping[str, Any]:
        try:
            send_json(self._channel, question, fds)
        except PeerUnreachable as error:
            raise DaemonError(f"the keeper is gone: {error}") from error
        payload, _ = self._receive()
        return payload

    def _receive(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        try:
            payload, fds = receive_json(self._channel)
        except PeerUnreachable as error:
            raise DaemonError(f"the keeper is gone: {error}") from error
        if "error" in payload:
            raise DaemonError(f"the keeper refused: {payload['error']}")
        return payload, fds
