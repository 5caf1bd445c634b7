"""An engine with memory of its own beside the others: leases to read and to fill pages of a cache, and their ends.

Its ranks run late, as everybody's do: what a lease gave must hold until the fence that ends it has passed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from kvmanager.core.events import EngineGone, EngineResumed, EngineSuspect, Opened, Registered, RegisterEngine
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans
from kvmanager.core.patterns import Rows
from kvmanager.errors import CapacityError, InvalidArgument, Suspect, UnknownLease
from tests.sim.content import PAGE_ROWS, Text, next_text
from tests.sim.engine import SimEngine
from tests.sim.harness import World
from tests.sim.listener import ids_told
from tests.sim.published import learn
from tests.sim.story import same_effect
from tests.sim.worker import Claim, RowsOp

MOST = 4
"""Leases of one kind at a time."""


@dataclass
class Lease:
    """Pages of segments [first, first + len(pages)) of a text. value: of the last work on them, filled: of a store."""

    asked: AcquirePrefix | ReserveSpans
    answer: Opened
    text: Text
    first: int
    pages: np.ndarray
    value: int = 0
    filled: int = 0


class LeaseEngine(SimEngine):
    """One epoch of such an engine; its session carries nothing."""

    role = "leases"

    def __init__(self, world: World, group: str, texts: list[Text]) -> None:
        super().__init__(world, group, texts, deque())
        self.reading: dict[int, Lease] = {}
        self.writing: dict[int, Lease] = {}
        self.waiting: dict[int, tuple[AcquirePrefix, Text]] = {}  # for what comes into a bounce region
        self.next_lease = 0
        self.looker = 0

    # ------------------------------------------------------------------------------- actions

    def step(self) -> None:
        """Begins a lease, works on one, or ends one."""
        kind = self.draw.random()
        if self.waiting and kind < 0.3:
            self._wait(self.draw.choice(list(self.waiting)))
        elif kind < 0.25 and len(self.reading) < MOST:
            self._acquire()
        elif kind < 0.5 and len(self.writing) < MOST:
            self._reserve()
        elif kind < 0.6 and self.writing:
            self._fill(self.draw.choice(list(self.writing.values())))
        elif kind < 0.8 and self.writing:
            self._end_writing(self.draw.choice(list(self.writing)))
        elif kind < 0.92 and self.reading:
            self._end_reading(self.draw.choice(list(self.reading)))
        elif kind >= 0.92:
            self._look()

    def resend(self) -> None:
        """A lease that is open is asked for once more: the same answer, and not a page moves."""
        if not (open_ones := [*self.reading.values(), *self.writing.values()]):
            return
        lease, before = self.draw.choice(open_ones), self._accounts()
        assert same_effect(self.world.apply(lease.asked), lease.answer)
        assert self._unmoved(before), "a resend moved pages"
        self.world.happened["lease asked again"] += 1

    def export(self) -> None:
        """Leases are not handed over."""

    def cut_stream(self) -> None:
        """The daemon does not hear of it for a while, and grants it nothing; its ranks go on."""
        self.cut = True
        self.world.apply(EngineSuspect(self.name, self.epoch))
        refused = self.world.apply(AcquirePrefix(self.name, self.epoch, 1_000_000, b"k" * 16, 1))
        assert isinstance(refused, Suspect), refused

    def resume_stream(self) -> None:
        """It is heard again, with all its leases."""
        self.cut = False
        self.world.apply(EngineResumed(self.name, self.epoch))

    def leave(self) -> None:
        """Everything ends behind its fence first; whoever never attached a rank is forgotten."""
        if self.cut:
            self.resume_stream()
        if not self.stale:
            for lease in list(self.writing):
                self._end_writing(lease)
            for lease in list(self.reading):
                self._end_reading(lease)
            for lease in list(self.waiting):
                self._wait_no_more(lease)
        if self.looker:
            self.world.apply(EngineGone(f"looker-{self.spec.name}", self.looker))
        super().leave()

    # -------------------------------------------------------------------------------- leases

    def _prompt(self) -> tuple[int, Text, bytes]:
        self.next_lease += 1
        text = next_text(self.texts, self.draw)
        learn(text.digests)
        return self.next_lease, text, text.keys(0, len(text.digests) // PAGE_ROWS)

    def _acquire(self) -> None:
        lease_id, text, keys = self._prompt()
        asked = AcquirePrefix(self.name, self.epoch, lease_id, keys, 1_000_000)
        if not keys:
            assert isinstance(self.world.apply(asked), InvalidArgument)
            return
        self._acquired(asked, text)

    def _acquired(self, asked: AcquirePrefix, text: Text) -> None:
        """Asks: a lease, a wait, or nothing found."""
        answer = self.world.apply(asked)
        assert isinstance(answer, Opened), answer
        if answer.state == "waiting":
            self.waiting[asked.request_id] = asked, text
            self.world.happened["lease waits"] += 1
            return
        assert answer.cached_tokens <= len(asked.keys) // 16 * PAGE_ROWS
        if not answer.cached_tokens:
            return
        lease = self.reading[asked.request_id] = Lease(asked, answer, text, 0, _pages(answer))
        assert len(lease.pages) == answer.cached_tokens // PAGE_ROWS
        self._work(lease, 0, len(lease.pages), write=False)
        self.world.happened["leased"] += 1

    def _wait(self, lease_id: int) -> None:
        """Asks again for what it waits for, or gives it up."""
        if self.draw.random() < 0.15:
            self._wait_no_more(lease_id)
            return
        asked, text = self.waiting.pop(lease_id)
        self._acquired(asked, text)
        self.world.happened["waited lease"] += lease_id in self.reading

    def _wait_no_more(self, lease_id: int) -> None:
        """Its bytes may have come meanwhile, or may have failed to: then it has ended already."""
        del self.waiting[lease_id]
        answer = self.world.apply(EndLease(self.name, self.epoch, lease_id, self._fence()))
        assert answer is None or isinstance(answer, UnknownLease), answer

    def _reserve(self) -> None:
        lease_id, text, keys = self._prompt()
        if not keys:
            return
        session, ids = f"s{self.draw.randrange(7)}", ids_told(self.namespace, keys)
        asked = ReserveSpans(self.name, self.epoch, lease_id, keys, 1_000_000, session, ids)
        answer = self.world.apply(asked)
        if isinstance(answer, CapacityError):
            self.world.happened["lease refused"] += 1
            return
        assert isinstance(answer, Opened), answer
        self.writing[lease_id] = Lease(asked, answer, text, answer.cached_tokens // PAGE_ROWS, _pages(answer))
        self.world.happened["reserved"] += 1

    def _fill(self, lease: Lease) -> None:
        """Some more of its pages."""
        more = self.draw.randint(0, len(lease.pages) - lease.filled)
        if more:
            self._work(lease, lease.filled, lease.filled + more, write=True)
            lease.filled += more

    def _end_writing(self, lease_id: int) -> None:
        """Published as far as it is filled, or given up; ranks may still be filling it."""
        lease = self.writing.pop(lease_id)
        self._fill(lease)
        tokens = (lease.first + lease.filled) * PAGE_ROWS
        commit = tokens > 0 and self.draw.random() < 0.8
        self._end(EndLease(
            self.name, self.epoch, lease_id, self._fence(), committed=commit, committed_tokens=tokens if commit else 0
        ))  # fmt: skip
        self.world.happened["stored" if commit else "store given up"] += 1

    def _end_reading(self, lease_id: int) -> None:
        lease = self.reading.pop(lease_id)
        failed: tuple[int, ...] = ()
        if self.draw.random() < 0.1:
            failed = (int(self.draw.choice(lease.pages.tolist())),)
            self.world.happened["load failed"] += 1
        over = all(rank.word >= lease.value for rank in self.ranks)
        fence = {} if over and self.draw.random() < 0.5 else self._fence()
        self._end(EndLease(self.name, self.epoch, lease_id, fence, failed_pages=failed))

    def _end(self, event: EndLease) -> None:
        deaths = self.world.net.happened["daemon died"]
        if event.request_id % 2:  # an owner loop that looked at the fence's timelines just now
            words = {rank.attach_id: rank.word for rank in self.ranks}
            event = replace(event, seen={attach: words[attach] for attach in event.fence})
        answer = self.world.apply(event)
        heard_before = isinstance(answer, UnknownLease) and self.world.net.happened["daemon died"] > deaths
        assert answer is None or heard_before, answer

    def _look(self) -> None:
        """An engine that never attaches a rank takes a lease: nobody ends it but time."""
        name, spec = f"looker-{self.spec.name}", self.spec
        fingerprints = tuple(c.layout.fingerprint for chain in spec.chains for c in chain.classes)
        answer = self.world.apply(
            RegisterEngine(name, spec.name, bytes([self.namespace]), 16, PAGE_ROWS, fingerprints, spec.ranks)
        )
        assert isinstance(answer, Registered), answer
        self.looker = answer.epoch
        lease_id, _, keys = self._prompt()
        if keys:
            self.world.apply(AcquirePrefix(name, self.looker, lease_id, keys, self.draw.choice((1, 500_000))))

    # ---------------------------------------------------------------------------------- work

    def _fence(self) -> dict[int, int]:
        return {rank.attach_id: self.value for rank in self.ranks}

    def _work(self, lease: Lease, first: int, last: int, *, write: bool) -> None:
        """Every rank reads or writes its part of the lease's pages [first, last), later."""
        (chain,) = self.spec.chains
        (c,) = chain.classes
        pages = np.repeat(lease.pages[first:last], PAGE_ROWS)
        slots = np.tile(np.arange(PAGE_ROWS), last - first)
        positions = np.arange((lease.first + first) * PAGE_ROWS, (lease.first + last) * PAGE_ROWS)
        content = lease.text.content(positions, self.namespace)
        pool = self.world.node.state.groups[self.spec.name].pools[c.device_pool]
        claim = Claim.on(pool, c.name, pages)
        self.value += 1
        lease.value = self.value
        what = f"{'fill' if write else 'read'} of lease {lease.asked.request_id} of {self.name}"
        for rank in self.ranks:
            rows = Rows(np.full(len(pages), c.device_regions[rank.number], np.int32), pages, slots)
            rank.queue.append((self.value, [RowsOp(what, write, c.layout, rows, content, claim)]))


def _pages(answer: Opened) -> np.ndarray:
    if not answer.spans:
        return np.empty(0, np.int64)
    (run,) = answer.spans
    return run.pages["kv"][0]
