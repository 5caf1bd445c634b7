"""Who is here and who is gone: which process stands behind which engine and rank.

A broken stream or attach connection makes an engine suspect. It is gone only when nothing of it can touch
memory any more: its stream has ended (or its scheduler's process is dead) and each of its ranks detached cleanly
or its process is dead (pidfd). The scheduler itself maps no memory, so its own life does not matter once its
stream is over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmanager.core.events import DetachRank, EngineGone, EngineSuspect, Event
from kvmanager.errors import StaleEpoch, UnknownLease
from kvmanager.protos import kvmanager_pb2 as pb

_log = logging.getLogger("kvmanager.membership")
EngineKey = tuple[str, int]


@dataclass(frozen=True)
class Registration:
    """What an epoch was registered with. `token`: its scheduler's."""

    token: str
    group: str
    namespace: pb.Namespace


@dataclass
class _Member:
    """One epoch of an engine. `ranks`: live attach id -> worker token.

    `streams`: open session streams. `started`: it opened one once. `left`: its scheduler's attach connection
    broke. `dead`: its scheduler's process is dead, so that no stream of it says anything any more.
    """

    registration: Registration
    streams: int = 0
    started: bool = False
    left: bool = False
    dead: bool = False
    ranks: dict[int, str] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Nothing of it can touch memory, and nothing of it will come back."""
        silent = self.streams == 0 and (self.started or self.left)
        return not self.ranks and (self.dead or silent)


class Membership:
    """Turns what sockets and pidfds say into events for the core. Thread-safe; `post` must not block.

    What is said of a token that is in no engine is forgotten: who records one must look afterwards whether its
    process still lives (`Callers.confirm`).
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        on_rank_ended: Callable[[int], None],
        on_gone: Callable[[str, int], None],
    ) -> None:
        """`on_rank_ended(attach_id)` and `on_gone(engine, epoch)` come once each, and must not block."""
        self._post = post
        self._on_rank_ended = on_rank_ended
        self._on_gone = on_gone
        self._members: dict[EngineKey, _Member] = {}
        self._lock = threading.RLock()

    def registered(self, engine: str, epoch: int, registration: Registration) -> None:
        """An engine's scheduler registered."""
        with self._lock:
            self._members[(engine, epoch)] = _Member(registration)

    def registration(self, engine: str, epoch: int) -> Registration:
        """What the epoch was registered with. Raises StaleEpoch when it is gone."""
        with self._lock:
            member = self._members.get((engine, epoch))
            if member is None:
                raise StaleEpoch(f"engine {engine!r} epoch {epoch} is gone; register again")
            return member.registration

    def engine_of(self, token: str, epoch: int) -> str:
        """The engine that this token registered as `epoch`. Raises StaleEpoch."""
        with self._lock:
            for (engine, number), member in self._members.items():
                if member.registration.token == token and number == epoch:
                    return engine
        raise StaleEpoch(f"this client has no engine registered with epoch {epoch}; register again")

    def attached(self, engine: str, epoch: int, attach_id: int, token: str) -> None:
        """A rank's process attached. Raises StaleEpoch when its engine has left in the meantime."""
        with self._lock:
            member = self._members.get((engine, epoch))
            if member is None:
                raise StaleEpoch(f"engine {engine!r} epoch {epoch} left while a rank attached; register again")
            member.ranks[attach_id] = token

    def token_of(self, attach_id: int) -> str:
        """The worker token behind an attach. Raises UnknownLease."""
        with self._lock:
            for member in self._members.values():
                if attach_id in member.ranks:
                    return member.ranks[attach_id]
        raise UnknownLease(f"attach {attach_id} is unknown or has ended; attach again")

    def rank_ended(self, attach_id: int) -> None:
        """A rank detached cleanly, and the core was told."""
        with self._lock:
            for key, member in list(self._members.items()):
                if member.ranks.pop(attach_id, None) is not None:
                    self._on_rank_ended(attach_id)
                    self._check_gone(key, member)

    def stream_opened(self, engine: str, epoch: int) -> None:
        """A session stream of this epoch begins; say so before the core is told.

        Then an older stream of the epoch that ends at the same time can't make it suspect afterwards.
        """
        with self._lock:
            member = self._members.get((engine, epoch))
            if member is not None:
                member.streams += 1
                member.started = True

    def stream_ended(self, engine: str, epoch: int) -> None:
        """A session stream ended, cleanly or not."""
        with self._lock:
            member = self._members.get((engine, epoch))
            if member is None:
                return
            member.streams -= 1
            if member.streams == 0:
                self._post(EngineSuspect(engine, epoch))
                self._check_gone((engine, epoch), member)

    def disconnected(self, token: str) -> None:
        """An attach connection broke: the engine is suspect, its memory stays until the pidfd says more."""
        with self._lock:
            for (engine, epoch), member in list(self._members.items()):
                if token in member.ranks.values():
                    _log.warning("engine %s epoch %d: a rank's connection broke", engine, epoch)
                    self._post(EngineSuspect(engine, epoch))
                if member.registration.token == token:
                    member.left = True
                    self._check_gone((engine, epoch), member)

    def exited(self, token: str) -> None:
        """The process behind a token is dead: none of its kernels or copies can run any more."""
        with self._lock:
            for key, member in list(self._members.items()):
                dead = [attach_id for attach_id, worker in member.ranks.items() if worker == token]
                for attach_id in dead:
                    del member.ranks[attach_id]
                    self._post(DetachRank(attach_id))
                    self._on_rank_ended(attach_id)
                if member.registration.token == token:
                    member.dead = True
                self._check_gone(key, member)

    def _check_gone(self, key: EngineKey, member: _Member) -> None:
        if member.over and key in self._members:
            del self._members[key]
            _log.info("engine %s epoch %d is gone", *key)
            self._post(EngineGone(*key))
            self._on_gone(*key)
