"""The keeper's side of its conversation with the daemon: memory descriptors outlive the daemon.

The daemon (`kvmanager.daemon.keeperlink`) asks, the keeper answers, one frame each way and in order:

    {"op": "deposit", "name": N, "size": BYTES} + 1 descriptor  -> {"op": "deposit"}
    {"op": "forget", "name": N}                                 -> {"op": "forget"}
    {"op": "reclaim"}                                           -> {"op": "reclaim", "count": K}, then K times
                                        {"op": "held", "name": N, "size": BYTES} + 1 descriptor
    {"op": "state", "state": S}         for operators           -> {"op": "state"}
    {"op": "leave", "code": C}          the daemon's exit code  -> {"op": "leave"}
    {"op": "alive", "every_ms": MS}     its core makes progress -> {"op": "alive"}

A daemon that outlived its keeper gives the next one everything: {"op": "return"}, its deposits, {"op": "returned"}.
What the new keeper had from elsewhere (systemd's store) and was not among them is forgotten then.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvmanager.errors import InvalidArgument, RequestError
from kvmanager.framing import MAX_JSON_BYTES, FrameReader, json_object, send_json
from kvmanager.killpoints import reach

SERVING: Final = "serving"
"""The state of a daemon that clients can use."""
JOURNAL: Final = "journal"
"""Deposited when a node is ready to serve: from then on what is held is worth keeping."""
_log = logging.getLogger("kvmanager.keeper")
NAME: Final = re.compile(r"[\w.-]{1,200}", re.ASCII)
"""Names of deposits: what systemd's store takes, too."""


@dataclass(frozen=True, slots=True)
class Deposit:
    """One piece of memory: its name, size in bytes and descriptor."""

    name: str
    size_bytes: int
    fd: int


class Store(Protocol):
    """Keeps descriptors beyond the keeper's own life. Nothing here may fail or block for long."""

    def keep(self, deposit: Deposit) -> None:
        """Takes a duplicate of its descriptor."""
        ...

    def let_go(self, deposit: Deposit) -> None:
        """Closes that."""
        ...


class DepositBox:
    """Holds the descriptors and serves one daemon at a time.

    `exit_code`: what the daemon said that it will end with; None while it has not. `daemon_state`: how it does,
    "" while it has not said. `alive`: when (monotonic, s) it last made progress, and how often it says so (s); None
    while it has not said.
    """

    def __init__(self, store: Store, on_state: Callable[[str], None]) -> None:
        """`on_state(text)` is called when the daemon says how it does."""
        self._store = store
        self._on_state = on_state
        self._held: dict[str, Deposit] = {}
        self._unreturned: dict[str, Deposit] | None = None  # while a daemon gives all back: what it has not named yet
        self._reader = FrameReader(MAX_JSON_BYTES)
        self.exit_code: int | None = None
        self.daemon_state = ""
        self.alive: tuple[float, float] | None = None

    def __len__(self) -> int:
        return len(self._held)

    @property
    def warm(self) -> bool:
        """Whether a daemon could go on with what is held."""
        return JOURNAL in self._held

    @property
    def between_frames(self) -> bool:
        """Whether everything that came was answered: no half frame, no half return."""
        return self._unreturned is None and not self._reader.pending

    def new_daemon(self) -> None:
        """Forgets half a conversation with the daemon before, never a deposit."""
        self._reader.close()
        self._reader = FrameReader(MAX_JSON_BYTES)
        self._unreturned = None
        self.exit_code, self.daemon_state, self.alive = None, "", None

    def take_back(self, deposits: Sequence[Deposit]) -> None:
        """Begins with what was held in a life before; the store has it already. A name that comes twice is lost."""
        times = Counter(deposit.name for deposit in deposits)
        for deposit in deposits:
            if times[deposit.name] == 1:
                self._held[deposit.name] = deposit
            else:  # which one is the newer can't be told
                os.close(deposit.fd)
                self._store.let_go(deposit)

    def deposits(self) -> list[Deposit]:
        """All that is held, in order; the descriptors stay the box's."""
        return list(self._held.values())

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
        began, held = time.monotonic(), len(self._held)
        self._reader.close()
        for name in list(self._held):
            self._drop(name)
        _log.info("gave %d pieces of memory back, %.1f s", held, time.monotonic() - began)

    def _answer(self, channel: socket.socket, payload: Mapping[str, Any], fds: list[int]) -> None:
        match payload:
            case {"op": "deposit", "name": str(name), "size": int(size)}:
                self._take(name, size, fds)
                reach("keeper.deposit")
            case {"op": "forget", "name": str(name)}:
                if name not in self._held:
                    raise InvalidArgument(f"nothing called {name!r} is deposited; held are {sorted(self._held)}")
                self._drop(name)
                reach("keeper.forget")
            case {"op": "reclaim"}:
                self._send_all(channel)
                return
            case {"op": "return"}:
                self._unreturned = dict(self._held)
            case {"op": "returned"}:
                for name in self._unreturned or ():
                    self._drop(name)
                self._unreturned = None
            case _:
                self._note(payload)
        send_json(channel, {"op": payload["op"]})

    def _note(self, payload: Mapping[str, Any]) -> None:
        """What the daemon says of itself."""
        match payload:
            case {"op": "state", "state": str(state)}:
                self.daemon_state = state
                self._on_state(self.daemon_state)
            case {"op": "alive", "every_ms": int(every_ms)}:
                self.alive = time.monotonic(), every_ms / 1000
            case {"op": "leave", "code": int(code)}:
                self.exit_code = code
            case _:
                raise InvalidArgument(f"unknown request with keys {sorted(payload)}, op {payload.get('op')!r}")

    def _send_all(self, channel: socket.socket) -> None:
        send_json(channel, {"op": "reclaim", "count": len(self._held)})
        reach("keeper.reclaim")
        for held in self._held.values():
            send_json(channel, {"op": "held", "name": held.name, "size": held.size_bytes}, [held.fd])

    def _take(self, name: str, size_bytes: int, fds: list[int]) -> None:
        if len(fds) != 1:
            raise InvalidArgument(f"deposit of {name!r} brought {len(fds)} descriptors, not 1")
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} is no name for a deposit: letters, digits, '_', '.' and '-', at most 200")
        if self._unreturned is not None and self._unreturned.pop(name, None) is not None:
            self._drop(name)
        if name in self._held:
            raise InvalidArgument(f"{name!r} is deposited already; forget it first")
        self._held[name] = deposit = Deposit(name, size_bytes, fds.pop())
        self._store.keep(deposit)

    def _drop(self, name: str) -> None:
        deposit = self._held.pop(name)
        self._store.let_go(deposit)
        os.close(deposit.fd)
