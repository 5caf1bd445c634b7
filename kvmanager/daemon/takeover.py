"""The beginning of a daemon: cold, with new memory, or warm, with what the keeper holds from the daemon before.

Warm: the journal gives the core back, the regions are those that engines and the mover have mapped, and clients
are known by the descriptors that tell of their life. The journal is deposited last, when the node is ready to
serve, so where there is none nobody was ever served, and a cold start loses nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.groups import NodeMemory, core_limits, plan_memory
from kvmanager.core.audit import audit
from kvmanager.core.eviction import POLICIES, Policy
from kvmanager.core.node import Node
from kvmanager.core.spec import Limits
from kvmanager.daemon.attach import ClientIdentity
from kvmanager.daemon.clientnotes import ClientNote
from kvmanager.daemon.memory import NodeRegions, region_name
from kvmanager.daemon.peerprocess import open_pidfd
from kvmanager.framing import readable
from kvmanager.journal import journal
from kvmanager.journal.journal import Fingerprints, Journal, JournalMismatch
from kvmanager.journal.journalcodec import Codec, configuration
from kvmanager.keeper.deposits import JOURNAL, Deposit
from kvmanager.wire import RegionInfo

_CLIENT: Final = "client-"
_log = logging.getLogger("kvmanager.takeover")


class Keeping(Protocol):
    """The keeper, as far as a daemon's beginning needs it."""

    def deposit(self, name: str, size_bytes: int, fd: int) -> None:
        """Gives it a duplicate of `fd`."""
        ...

    def forget(self, name: str) -> None:
        """Ends its hold."""
        ...

    def reclaim(self) -> list[Deposit]:
        """All that it holds."""
        ...


@dataclass(frozen=True)
class NodeParts:
    """What the configuration makes of a core."""

    memory: NodeMemory
    limits: Limits
    policy: Policy

    @classmethod
    def of(cls, config: NodeConfig) -> NodeParts:
        """Pure: nothing is allocated."""
        return cls(plan_memory(config), core_limits(config), POLICIES[config.eviction.policy])

    @property
    def prints(self) -> Fingerprints:
        """Who writes this node's journal."""
        return Fingerprints(configuration(self.memory.groups, self.limits, self.policy))


@dataclass(frozen=True)
class Beginning:
    """A daemon's core, memory and journal. `warm`: they were there before. `finish`: the node is ready to serve."""

    node: Node
    regions: NodeRegions
    journal: Journal
    boot_id: int
    warm: bool
    finish: Callable[[], None]


class Leftovers:
    """What the keeper holds when a daemon begins; the descriptors are ours."""

    def __init__(self, keeper: Keeping | None) -> None:
        self._keeper = keeper
        self._held = {deposit.name: deposit for deposit in (keeper.reclaim() if keeper is not None else [])}

    @property
    def journal(self) -> int | None:
        """The journal's descriptor; it stays here."""
        held = self._held.get(JOURNAL)
        return None if held is None else held.fd

    def begin(self, parts: NodeParts) -> Beginning:
        """Warm where there is a journal.

        Raises JournalMismatch, and leaves everything as it is, where the journal is of another program or
        configuration; ConfigError where new memory does not fit.
        """
        fd = self.journal
        if fd is not None:
            return self._warm(parts, fd)
        if self._held:
            _log.warning("cold start: the daemon before this one had not begun to serve")
        self.forget_rest()
        return self._cold(parts)

    def _warm(self, parts: NodeParts, fd: int) -> Beginning:
        start = time.perf_counter()
        journal.check_format(fd)
        kept = Journal(fd, Codec(parts.memory.groups, parts.limits), parts.prints)
        node = kept.recover()
        audit(node.state)
        found = {region.region_id: self._region(region) for region in parts.memory.regions}
        regions = NodeRegions(parts.memory, self._keeper, found, node.state.words_used)
        boot_id = journal.next_boot_id(fd, time.time_ns())
        journal.note_boot_id(fd, boot_id)
        del self._held[JOURNAL]
        took_s = time.perf_counter() - start
        _log.info("warm start in %.3f s: boot %d goes on where the last one ended", took_s, boot_id)
        return Beginning(node, regions, kept, boot_id, warm=True, finish=lambda: None)

    def _region(self, region: RegionInfo) -> int:
        held = self._held.pop(region_name(region.region_id), None)
        if held is None or held.size_bytes != region.size_bytes:
            raise JournalMismatch(
                f"region {region.region_id} of the node's memory is lost or of another size; give up the cache with "
                "`kvmanager serve --cold`"
            )
        return held.fd

    def _cold(self, parts: NodeParts) -> Beginning:
        boot_id = time.time_ns()
        # A mover outlives a daemon: plan ids are new over all boots.
        node = Node(list(parts.memory.groups), parts.limits, first_plan_id=boot_id, policy=parts.policy)
        regions = NodeRegions(parts.memory, self._keeper)
        fd = journal.create()
        journal.note_boot_id(fd, boot_id)
        kept = Journal(fd, Codec(parts.memory.groups, parts.limits), parts.prints)
        kept.snapshot(node)
        keeper = self._keeper

        def finish() -> None:
            if keeper is not None:
                keeper.deposit(JOURNAL, journal.file_bytes(journal.HALF_BYTES), fd)

        return Beginning(node, regions, kept, boot_id, warm=False, finish=finish)

    def identity(self, note: ClientNote) -> ClientIdentity | None:
        """The client of a note, with the descriptors of its life; None when its process is dead and all its children.

        Without its descriptors (the daemon died before they were deposited) the process is found by its number.
        """
        pidfd, lifeline = (self._held.pop(name, None) for name in _names(note.token))
        found = -1 if pidfd is None else pidfd.fd
        if found < 0:
            try:
                found = open_pidfd(note.pid, note.uid, note.started)
            except ProcessLookupError:
                return None
        return ClientIdentity(
            note.token, note.uid, note.pid, found, note.role, note.name, lifeline.fd if lifeline else -1, note.started
        )

    def forget_rest(self) -> bool:
        """Ends the keeper's hold on what nobody asked for; whether no client lives that was among it."""
        assert self._keeper is not None or not self._held
        lives = [held.fd for held in self._held.values() if held.name.startswith(_CLIENT)]
        ended = len(readable(lives, 0.0)) == len(lives)  # pidfds of the dead, lifelines at their end
        for held in self._held.values():
            os.close(held.fd)
            if self._keeper is not None:
                self._keeper.forget(held.name)
        self._held.clear()
        return ended


def _names(token: str) -> tuple[str, str]:
    """Names of the deposits that tell of a client's life; the token itself is nobody's business."""
    digest = hashlib.sha256(token.encode()).hexdigest()[:24]
    return f"{_CLIENT}{digest}-pidfd", f"{_CLIENT}{digest}-lifeline"


class ClientLives:
    """Deposits what tells of the life of clients that may hold something; the attach server's thread alone uses it.

    What a dead client had there is let go of by a thread of its own: the pages of its neighbours do not wait for that.
    A daemon that dies before leaves it to its successor, which asks for no such client.
    """

    def __init__(self, keeper: Keeping | None, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure(error)`: the keeper refused to let go, or is gone where it must not be."""
        self._keeper = keeper
        self._on_failure = on_failure
        self._kept: dict[str, list[str]] = {}
        self._over: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._forget, name="lives", daemon=True)
        self._thread.start()

    def begin(self, identity: ClientIdentity) -> None:
        """Before the client gets its token; nothing for one that is known. Raises DaemonError of the keeper."""
        if self._keeper is None or identity.role not in ("engine", "worker") or identity.token in self._kept:
            return
        names = []
        for name, fd in zip(_names(identity.token), (identity.pidfd, identity.lifeline), strict=True):
            if fd >= 0:
                self._keeper.deposit(name, identity.started, fd)
                names.append(name)
        self._kept[identity.token] = names

    def known(self, identity: ClientIdentity) -> None:
        """The client was known to the daemon before: its deposits are there."""
        names = _names(identity.token)
        self._kept[identity.token] = [*names] if identity.lifeline >= 0 else [names[0]]

    def end(self, token: str) -> None:
        """The client is gone."""
        for name in self._kept.pop(token, ()):
            self._over.put(name)

    def close(self) -> None:
        """Returns when all that `end` was told is let go of."""
        self._over.put(None)
        self._thread.join()

    def _forget(self) -> None:
        try:
            while (name := self._over.get()) is not None:
                assert self._keeper is not None, "what was deposited lies with a keeper"
                self._keeper.forget(name)
        except Exception as error:
            _log.exception("what told of a client's life is not let go of")
            self._on_failure(error)
