"""The door of `calls.sock` with answers that a test gives, for tests of those who call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvmanager.clients.leases import LeaseCalls
from kvmanager.daemon.attach import ClientIdentity
from kvmanager.errors import Suspect, Unauthorized
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.calldoor import CallDoor
from kvmanager.services.callers import Callers

WAIT_S = 60.0
TOKEN = "t" * 64
Answered = Callable[[pb.CacheCall], pb.CacheAnswer]


def tokens_told(call: pb.CacheCall) -> pb.CacheAnswer:
    return pb.CacheAnswer(lookup=pb.LookupReply(cached_tokens=call.lookup.prompt_tokens))


@dataclass
class Daemon:
    """A door, and what a test says is behind it. here: of the newest call."""

    path: Path
    answered: Answered = tokens_told
    suspect: bool = False
    asked: int = 0
    here: Callable[[], bool] = lambda: True
    door: CallDoor | None = None
    uid: int = field(default_factory=os.getuid)
    clients: list[LeaseCalls] = field(default_factory=list)

    def identity_of(self, token: str) -> ClientIdentity:
        if self.suspect:
            raise Suspect("attach again")
        if token == "operator":
            return ClientIdentity(token, self.uid, 1, -1, "operator", "o")
        if token != TOKEN:
            raise Unauthorized("no client holds this session token")
        return ClientIdentity(token, self.uid, 1, -1, "engine", "e")

    def answer(self, call: pb.CacheCall, token: str, here: Callable[[], bool]) -> pb.CacheAnswer:
        assert token == TOKEN
        self.asked += 1
        self.here = here
        return self.answered(call)

    def start(self) -> None:
        self.door = CallDoor(self.path, 7, Callers(self), self.answer, lambda *_: None)
        self.door.start()

    def stop(self) -> None:
        assert self.door is not None
        self.door.close()

    @property
    def threads(self) -> int:
        assert self.door is not None
        return len(self.door._threads)


def attachment(daemon: Daemon, token: str = TOKEN) -> Any:
    return SimpleNamespace(runtime_dir=daemon.path, token=token)


CLIENT: Any = SimpleNamespace(boot_id=1, epoch=1)


def calls_of(daemon: Daemon, timeout_s: float = 30.0, token: str = TOKEN) -> LeaseCalls:
    calls = LeaseCalls(attachment(daemon, token), CLIENT, timeout_s)
    daemon.clients.append(calls)
    return calls


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.002)


@contextmanager
def serving(path: Path) -> Iterator[Daemon]:
    """A door that is open meanwhile, and leaves nothing in its directory."""
    served = Daemon(path)
    served.start()
    yield served
    for calls in served.clients:
        calls.hang_up()
    served.stop()
    assert list(path.iterdir()) == []
