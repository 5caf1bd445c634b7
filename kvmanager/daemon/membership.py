"""Who is here and who is gone: which process stands behind which engine and rank.

A broken stream or attach connection makes an engine suspect. It is gone only when nothing of it can touch memory or
come back: each of its ranks detached cleanly or its process is dead, and its scheduler left on purpose, with no
stream open, or its process is dead too. A rank's process is dead when its pidfd is readable and nobody who inherited
from it holds its lifeline (`attach.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvmanager.core.events import DetachRank, EngineGone, EngineSuspect, Event, TimelinesRead
from kvmanager.errors import StaleEpoch, UnknownLease
from kvmanager.protos import kvmanager_pb2 as pb

_log = logging.getLogger("kvmanager.membership")
EngineKey = tuple[str, int]


@dataclass(frozen=True)
class Registration:
    """What an epoch was registered with. `token`: its scheduler's. `tenant`: whose it is, by that token."""

    token: str
    group: str
    namespace: pb.Namespace
    tenant: str = ""


@dataclass
class _Member:
    """One epoch of an engine. `ranks`: live attach id -> worker token.

    `streams`: open session streams. `left`: its scheduler said that it goes, or registered anew. `dead`: its
    scheduler's process is dead, so that no stream of it says anything any more. `unread`: it does not read its stream.
    """

    registration: Registration
    streams: int = 0
    left: bool = False
    dead: bool = False
    unread: bool = False
    ranks: dict[int, str] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Nothing of it can touch memory, and nothing of it will come back."""
        return not self.ranks and (self.dead or (self.left and self.streams == 0))

    @property
    def tokens(self) -> tuple[str, ...]:
        """Of the processes that it waits for."""
        scheduler = () if self.dead or (self.left and self.streams == 0) else (self.registration.token,)
        return tuple(dict.fromkeys([*scheduler, *self.ranks.values()]))


class Membership:
    """Turns what sockets and pidfds say into events for the core. Thread-safe; `post` must not block.

    What is said of a token that is in no engine is forgotten: who records one must look afterwards whether its
    process still lives (`Callers.confirm`).
    """

    def __init__(
        self,
        post: Callable[[Event], None],
        end_word: Callable[[int], int],
        on_gone: Callable[[str, int], None],
        free_words: Callable[[Iterable[int]], None],
    ) -> None:
        """`end_word(attach_id)` ends the watch on a timeline word and gives its last value.

        It and `on_gone(engine, epoch)` come once each, and must not block. `free_words(attach_ids)`: nobody can write
        these words any more, and the core was told of that first.
        """
        self._post = post
        self._end_word = end_word
        self._on_gone = on_gone
        self._free_words = free_words
        self._left: dict[str, list[int]] = {}  # token -> attaches that ended while its process lives
        self._members: dict[EngineKey, _Member] = {}
        self._lock = threading.RLock()

    def registered(self, engine: str, epoch: int, registration: Registration) -> None:
        """An engine's scheduler registered."""
        with self._lock:
            for key, member in list(self._members.items()):
                if key[0] == engine and member.registration.token == registration.token:
                    member.left = True  # its own process has replaced it
                    self._check_gone(key, member)
            self._members[(engine, epoch)] = _Member(registration)

    def restored(self, engine: str, epoch: int, registration: Registration, ranks: dict[int, str]) -> None:
        """An epoch of the daemon before: no stream of it is open. `ranks`: attach id -> worker token."""
        with self._lock:
            self._members[(engine, epoch)] = _Member(registration, ranks=dict(ranks))

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
                self._left.setdefault(token, []).append(attach_id)
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
                token = member.ranks.pop(attach_id, None)
                if token is not None:
                    self._left.setdefault(token, []).append(attach_id)
                    self._end_word(attach_id)
                    self._check_gone(key, member)

    def processes(self, engine: str, epoch: int) -> tuple[str, ...]:
        """Tokens of the processes whose end the epoch waits for; none when it is gone."""
        with self._lock:
            member = self._members.get((engine, epoch))
            return member.tokens if member is not None else ()

    def workers(self, attach_ids: Iterable[int]) -> tuple[str, ...]:
        """Worker tokens behind attaches that live."""
        with self._lock:
            ranks = {attach_id: token for member in self._members.values() for attach_id, token in member.ranks.items()}
        return tuple(dict.fromkeys(ranks[attach_id] for attach_id in attach_ids if attach_id in ranks))

    def has_live_stream(self, engine: str, epoch: int) -> bool:
        """Whether the epoch has a session stream whose client answers pings and reads what it is sent."""
        with self._lock:
            member = self._members.get((engine, epoch))
            return member is not None and member.streams > 0 and not member.unread and not member.dead

    def stream_opened(self, engine: str, epoch: int) -> None:
        """A session stream of this epoch begins; say so before the core is told.

        Then an older stream of the epoch that ends at the same time can't make it suspect afterwards.
        """
        with self._lock:
            member = self._members.get((engine, epoch))
            if member is not None:
                member.streams += 1
                member.unread = False

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

    def stalled(self, engine: str, epoch: int) -> None:
        """The client does not read its stream; its replies were dropped."""
        with self._lock:
            member = self._members.get((engine, epoch))
            if member is not None:
                _log.warning("engine %s epoch %d does not read its session", engine, epoch)
                member.unread = True
                self._post(EngineSuspect(engine, epoch))

    def leaving(self, token: str) -> None:
        """The client says that it goes on purpose. Of a rank this says nothing: that detaches."""
        with self._lock:
            for key, member in list(self._members.items()):
                if member.registration.token == token:
                    member.left = True
                    self._check_gone(key, member)

    def disconnected(self, token: str) -> None:
        """An attach connection broke: the engine is suspect, its memory stays until the process is dead."""
        with self._lock:
            for (engine, epoch), member in list(self._members.items()):
                if token in member.ranks.values():
                    _log.warning("engine %s epoch %d: a rank's connection broke", engine, epoch)
                    self._post(EngineSuspect(engine, epoch))
                elif member.registration.token == token and member.streams == 0:
                    self._post(EngineSuspect(engine, epoch))

    def exited(self, token: str) -> None:
        """The process behind a token is dead: none of its kernels or copies can run any more."""
        with self._lock:
            writes_no_more = self._left.pop(token, [])
            for key, member in list(self._members.items()):
                dead = [attach_id for attach_id, worker in member.ranks.items() if worker == token]
                for attach_id in dead:
                    del member.ranks[attach_id]
                    # What it raised last counts: all its writes came before that.
                    self._post(TimelinesRead({attach_id: self._end_word(attach_id)}))
                    self._post(DetachRank(attach_id))
                writes_no_more += dead
                if member.registration.token == token:
                    member.dead = True
                self._check_gone(key, member)
            self._free_words(writes_no_more)

    def _check_gone(self, key: EngineKey, member: _Member) -> None:
        if member.over and key in self._members:
            del self._members[key]
            _log.info("engine %s epoch %d is gone", *key)
            self._post(EngineGone(*key))
            self._on_gone(*key)
