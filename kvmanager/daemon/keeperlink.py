"""The daemon's side of its conversation with the keeper (`kvmanager.keeper.deposits` describes it), across keepers.

    linked --the keeper dies--> alone: serving goes on --a new keeper connects to keeper.sock--> linked

While it is alone, deposits are kept here; the next keeper gets all of them at once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvmanager.errors import DaemonError, KVError, PeerUnreachable
from kvmanager.framing import readable, receive_json, send_json
from kvmanager.keeper.deposits import Deposit
from kvmanager.runtime_dir import KEEPER_SOCKET, bind_socket, peer_credentials

_ANSWER_TIMEOUT_S: Final = 5.0
_PAUSE_S: Final = 0.1
_log = logging.getLogger("kvmanager.keeperlink")


class KeeperLink:
    """What the daemon has its keeper hold. Thread-safe."""

    def __init__(self, fd: int) -> None:
        """`fd`: the socket that `--keeper-fd` names."""
        self._lock = threading.Lock()  # guards what follows; held for a whole question and answer
        self._channel: socket.socket | None = socket.socket(fileno=fd)
        self._channel.settimeout(_ANSWER_TIMEOUT_S)
        self._held: dict[str, Deposit] = {}  # our own duplicates
        self._state = "starting"
        self._unheard = False  # the keeper is of a version that takes no signs of life
        self._listener: socket.socket | None = None
        self._path: Path | None = None
        self._wake_source, self._wake_target = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="keeperlink", daemon=True)

    def listen(self, runtime_dir: Path) -> None:
        """From now on the keeper may die: another one finds us in `runtime_dir`. Raises ConfigError."""
        self._path = runtime_dir / KEEPER_SOCKET
        self._listener = bind_socket(self._path)
        self._thread.start()

    def deposit(self, name: str, size_bytes: int, fd: int) -> None:
        """Gives the keeper a duplicate of `fd`. Raises DaemonError when it refuses, or is gone before `listen`."""
        with self._lock:
            self._tell({"op": "deposit", "name": name, "size": size_bytes}, [fd])
            if name in self._held:
                raise DaemonError(f"the keeper refused: {name!r} is deposited already; forget it first")
            self._held[name] = Deposit(name, size_bytes, os.dup(fd))

    def forget(self, name: str) -> None:
        """Ends the keeper's hold on `name`. Raises DaemonError when nobody holds it, or as `deposit`."""
        with self._lock:
            self._tell({"op": "forget", "name": name})
            held = self._held.pop(name, None)
            if held is not None:
                os.close(held.fd)
            elif self._channel is None:
                raise DaemonError(f"the keeper refused: nothing called {name!r} is deposited")

    def reclaim(self) -> list[Deposit]:
        """All that is held, in order of deposit; the caller owns the descriptors, the keeper keeps its own.

        Raises DaemonError when the keeper is gone.
        """
        with self._lock:
            try:
                deposits = self._receive_all()
            except PeerUnreachable as error:
                raise DaemonError(f"the keeper is gone: {error}") from error
            for deposit in deposits:
                before = self._held.pop(deposit.name, None)
                if before is not None:
                    os.close(before.fd)
                self._held[deposit.name] = Deposit(deposit.name, deposit.size_bytes, os.dup(deposit.fd))
        return deposits

    def say(self, state: str) -> None:
        """Tells the keeper how we do: "serving", "draining". A keeper that is gone is told when the next comes."""
        with self._lock:
            self._state = state
            self._tell_if_there({"op": "state", "state": state})

    def alive(self, every_ms: int) -> None:
        """Tells the keeper that the core makes progress, and that it will hear so again within `every_ms`."""
        with self._lock:
            try:
                if not self._unheard:
                    self._tell_if_there({"op": "alive", "every_ms": every_ms})
            except DaemonError as error:
                self._unheard = True
                _log.warning("the keeper takes no signs of life, upgrade it: %s", error)

    def leave(self, exit_code: int) -> None:
        """Tells the keeper what this process ends with, and closes the link."""
        with self._lock:
            self._tell_if_there({"op": "leave", "code": exit_code})
        self.close()

    def close(self) -> None:
        """Ends the link and lets go of our duplicates."""
        self._wake_source.close()
        if self._thread.is_alive():
            self._thread.join()
        if self._listener is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            self._listener.close()
        self._wake_target.close()
        with self._lock:
            self._lose_channel()
            for held in self._held.values():
                os.close(held.fd)
            self._held.clear()

    # ------------------------------------------------------------ under the lock

    def _tell(self, question: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """As `_ask`; a keeper that is gone is DaemonError only while no other can find us."""
        try:
            self._tell_if_there(question, fds)
        finally:
            alone = self._channel is None and self._listener is None
        if alone:
            raise DaemonError("the keeper is gone, and no other can reach this daemon yet")

    def _tell_if_there(self, question: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        if self._channel is None:
            return
        try:
            self._ask(question, fds)
        except PeerUnreachable as error:
            self._lose_channel()
            _log.warning("the keeper is gone (%s); serving goes on, a new one will be let in", error)

    def _ask(self, question: Mapping[str, Any], fds: Sequence[int] = ()) -> Mapping[str, Any]:
        """One question, one answer. Raises PeerUnreachable, DaemonError when it was refused."""
        if self._channel is None:
            raise PeerUnreachable("there is no keeper")
        send_json(self._channel, question, fds)
        return self._receive()[0]

    def _receive(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        if self._channel is None:
            raise PeerUnreachable("there is no keeper")
        payload, fds = receive_json(self._channel)
        if "error" in payload:
            raise DaemonError(f"the keeper refused: {payload['error']}")
        return payload, fds

    def _receive_all(self) -> list[Deposit]:
        deposits: list[Deposit] = []
        try:
            for _ in range(self._ask({"op": "reclaim"})["count"]):
                payload, fds = self._receive()
                deposits.append(Deposit(payload["name"], payload["size"], fds[0]))
        except KVError:
            for deposit in deposits:
                os.close(deposit.fd)
            raise
        return deposits

    def _lose_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        """Notices the keeper's end and lets a new one in, until `close`."""
        listener = self._listener
        assert listener is not None
        while True:
            with self._lock:
                channel = self._channel
            watched = [listener.fileno(), self._wake_target.fileno()]
            ready = readable(watched if channel is None else [*watched, channel.fileno()])
            if self._wake_target.fileno() in ready:
                return
            if listener.fileno() in ready:
                self._accept(listener)
            elif channel is not None:
                self._look_at(channel)

    def _look_at(self, channel: socket.socket) -> None:
        """Nobody asks at the moment, so what is readable here is the end, or nonsense."""
        with self._lock:
            if channel is not self._channel or not readable([channel.fileno()], 0.0):
                return  # it was the answer to a question that is over now
            self._lose_channel()
            _log.warning("the keeper is gone; serving goes on, a new one will be let in")

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            _log.warning("a keeper could not be let in: %s", error)
            time.sleep(_PAUSE_S)
            return
        _, uid = peer_credentials(connection)
        if uid != os.getuid():
            _log.warning("refused a keeper of uid %d", uid)
            connection.close()
            return
        connection.settimeout(_ANSWER_TIMEOUT_S)
        with self._lock:
            self._lose_channel()
            self._channel, self._unheard = connection, False
            try:
                self._return_all()
            except KVError as error:
                _log.error("the new keeper took not everything: %s", error)
                self._lose_channel()
            else:
                _log.info("a new keeper holds all %d deposits", len(self._held))

    def _return_all(self) -> None:
        self._ask({"op": "return"})
        for held in self._held.values():
            self._ask({"op": "deposit", "name": held.name, "size": held.size_bytes}, [held.fd])
        self._ask({"op": "returned"})
        self._ask({"op": "state", "state": self._state})
