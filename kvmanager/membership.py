"""Who is here and who is gone: which process stands behind which engine and rank.

A broken stream or attach connection makes an engine suspect. It is gone only when nothing of it can touch
memory any more: its stream has ended and each of its ranks detached cleanly or its process is dead (pidfd).
The scheduler itself maps no memory, so its own life does not matter once its stream is over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmanager.core.events import DetachRank, EngineGone, EngineSuspect, Event
from kvmanager.errors import Unauthorized, UnknownLease

_log = logging.getLogger("kvmanager.membership")
EngineKey = tuple[str, int]


@dataclass
class _Member:
    """One epoch of an engine. `token`: its scheduler's. `ranks`: live attach id -> worker token.

    `started`: it opened a stream once. `left`: its scheduler's attach connection broke.
    """

    token: str
    streams: int = 0
    started: bool = False
    left: bool = False
    ranks: dict[int, str] = field(default_factory=dict)


class Membership:
    """Turns what sockets and pidfds say into events for the core. Thread-safe; `post` must not block."""

    def __init__(self, post: Callable[[Event], None], on_rank_ended: Callable[[int], None]) -> None:
        self._post = post
        self._on_rank_ended = on_rank_ended
        self._members: dict[EngineKey, _Member] = {}
        self._lock = threading.RLock()

    def registered(self, engine: str, epoch: int, token: str) -> None:
        """An engine's scheduler registered with this token."""
        with self._lock:
            self._members[(engine, epoch)] = _Member(token)

    def owner(self, engine: str, token: str, epoch: int) -> None:
        """Raises Unauthorized when the epoch was registered with another token."""
        with self._lock:
            member = self._members.get((engine, epoch))
            if member is not None and member.token != token:
                raise Unauthorized(f"engine {engine!r} epoch {epoch} was registered by another process")

    def engine_of(self, token: str, epoch: int) -> str:
        """The engine that this token registered as `epoch`. Raises Unauthorized."""
        with self._lock:
            for (engine, number), member in self._members.items():
                if member.token == token and number == epoch:
                    return engine
        raise Unauthorized(f"this token has not registered an engine with epoch {epoch}; register first")

    def attached(self, engine: str, epoch: int, attach_id: int, token: str) -> None:
        """A rank's process attached."""
        with self._lock:
            self._members[(engine, epoch)].ranks[attach_id] = token

    def token_of(self, attach_id: int) -> str:
        """The worker token behind an attach. Raises UnknownLease."""
        with self._lock:
            for member in self._members.values():
                if attach_id in member.ranks:
                    return member.ranks[attach_id]
        raise UnknownLease(f"attach {attach_id} is unknown or has ended")

    def rank_ended(self, attach_id: int) -> None:
        """A rank detached cleanly, and the core was told."""
        with self._lock:
            for key, member in list(self._members.items()):
                if member.ranks.pop(attach_id, None) is not None:
                    self._on_rank_ended(attach_id)
                    self._check_gone(key, member)

    def stream_opened(self, engine: str, epoch: int) -> None:
        """A session stream of this epoch began."""
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
                if member.token == token:
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
                if dead or member.token == token:
                    self._check_gone(key, member)

    def _check_gone(self, key: EngineKey, member: _Member) -> None:
        over = member.streams == 0 and not member.ranks and (member.started or member.left)
        if over and key in self._members:
            del self._members[key]
            self._post(EngineGone(*key))
