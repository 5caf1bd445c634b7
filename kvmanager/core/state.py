"""All state of the core in one place, and the few operations that every part needs."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvmanager.core.events import (
    CopyOutcome,
    Effect,
    Notice,
    Notified,
    Opened,
    RequestFailed,
    StepDone,
    TicketInfo,
)
from kvmanager.core.extents import shared_regions
from kvmanager.core.group import Chain, Group
from kvmanager.core.lending import Lending
from kvmanager.core.pool import PageState
from kvmanager.core.reclaim import Reclaimer
from kvmanager.core.request import Request
from kvmanager.core.spec import Limits
from kvmanager.core.tenants import Tenants
from kvmanager.errors import StaleEpoch, Suspect, UnknownRequest
from kvmanager.geometry import Int64Array

COUNTERS = (
    "prefix_hit", "prefix_hit_tokens", "prompt_tokens", "partial_span_reuse", "offload", "mirror", "onboard", "reclaim",
    "eviction", "spill", "draft_truncation", "handoff", "export", "refusal", "failed_plan", "expired_ticket",
    "quarantined_copy", "request", "step", "partial_span_tokens", "writeback_retry", "writeback_given_up",
    "host_reclaim", "host_eviction", "writeback_bypass", "writeback_again", "writeback_cancelled", "summed_page",
    "checked_page", "bad_copy", "bad_pull", "restart_check",
    "acquire", "acquired_tokens", "store", "stored_tokens", "failed_load", "expired_lease", "extent_move",
    "retraction", "resumption", "scrubbed_page",
)


@dataclass
class FenceEntry:
    """What happens once the work that a message covers is complete.

    commits: (request id, tokens). unpins: (chain index, rows). frees: (pool, class, pages). truncated: (request id,
    chain index, row), one pin each. closes, retracts: request ids. since: when the message came, ns.
    """

    fence: dict[int, int]
    since: int = 0
    commits: list[tuple[int, int]] = field(default_factory=list)
    unpins: list[tuple[int, list[int]]] = field(default_factory=list)
    frees: list[tuple[str, str, Int64Array]] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)
    truncated: list[tuple[int, int, int]] = field(default_factory=list)
    retracts: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Nothing waits for it."""
        return not (self.commits or self.unpins or self.frees or self.closes or self.truncated or self.retracts)


@dataclass
class Engine:
    """One epoch of an engine.

    fences: entries in message order; timeline values rise, so the head decides. covered: what the next message's
    fence will cover (work that the reply before it allowed). attaches: attach id -> rank. ranks_lost: ranks that
    left so far; what a request opened before that is no longer believed to have been written everywhere.
    ended: attach ids that left and that a fence may still name. fence_values: attach id -> highest value a message
    named. suspect: its stream broke. stalled: a rank stands still while a fence waits for it. suspect_ns: since when
    it is one of both. fenced: that was told once. moved_ns: when a rank that a fence waited for last moved.
    attached: some rank attached once. heard_ns: when it was last heard of.
    note, attach_notes: what the shell wants to know again after a restart.
    """

    name: str
    epoch: int
    group: str
    namespace: int
    ranks: int
    attaches: dict[int, int] = field(default_factory=dict)
    ranks_lost: int = 0
    ended: set[int] = field(default_factory=set)
    fence_values: dict[int, int] = field(default_factory=dict)
    suspect: bool = False
    stalled: bool = False
    suspect_ns: int = 0
    fenced: bool = False
    moved_ns: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    last_number: int = 0
    replies: OrderedDict[int, StepDone] = field(default_factory=OrderedDict)
    notices: deque[Notice] = field(default_factory=deque)
    last_notice: int = 0
    fences: deque[FenceEntry] = field(default_factory=deque)
    covered: FenceEntry = field(default_factory=lambda: FenceEntry({}))
    attached: bool = False
    heard_ns: int = 0
    note: bytes = b""
    attach_notes: dict[int, bytes] = field(default_factory=dict)

    def distrust(self, now: int) -> None:
        """Grants stop at `now`. Said again, the time runs on; after a fence it begins anew: there is something new."""
        if not self.suspect or self.fenced:
            self.suspect, self.suspect_ns, self.fenced = True, now, False

    @property
    def trusted(self) -> bool:
        """Whether it may be granted anything."""
        return not (self.suspect or self.stalled)

    def standing(self, timelines: Mapping[int, int]) -> tuple[int, ...]:
        """Attach ids that the oldest fence waits for."""
        if not self.fences:
            return ()
        return tuple(
            attach for attach, value in self.fences[0].fence.items()
            if attach in self.attaches and timelines.get(attach, 0) < value
        )  # fmt: skip


@dataclass
class Pace:
    """How long things take here, ns: running averages of what was seen; 0 until then.

    fence: from a message to the end of the work it covers. copy: of a plan. request: from admission to its end.
    """

    fence_ns: int = 0
    copy_ns: int = 0
    request_ns: int = 0

    def note(self, name: str, took_ns: int) -> None:
        """One more observation of `name`, which counts an eighth."""
        old = getattr(self, name)
        setattr(self, name, took_ns if old == 0 else old + (took_ns - old) // 8)


@dataclass(frozen=True)
class SumsAsked:
    """Which host pages a plan's sums belong to. pages: int64[pages]; of: int64[pages], places in the job's `rows`."""

    pages: Int64Array
    of: Int64Array


PULL_PARTS: Final = 1 << 16
"""Ids that a pull has: a mover knows its parts by them, one after the other."""


@dataclass
class CopyJob:
    """A plan in flight on spans of one chain: an offload or mirror, or an onboard.

    rows: spans whose copies it reads or fills, one `busy` each. extra: further busy rows (donors).
    waiters: (engine, epoch, request id) that go on when it is done. since: when it was submitted, ns.
    gives_way: it was asked to end early, for its pages are needed.
    asked: what is summed up. loaded_from: of an onboard, the rows whose host copies are read, beside `rows`.
    """

    group: str
    chain: int
    page_class: int
    rows: list[int]
    target_tier: int
    extra: list[int] = field(default_factory=list)
    waiters: list[tuple[str, int, int]] = field(default_factory=list)
    since: int = 0
    gives_way: bool = False
    asked: SumsAsked | None = None
    loaded_from: list[int] = field(default_factory=list)


@dataclass
class CheckJob:
    """A plan in flight that reads host copies and compares them with their sums. rows: one `busy` each."""

    group: str
    chain: int
    page_class: int
    rows: list[int]
    asked: SumsAsked
    since: int = 0


@dataclass
class ScrubJob:
    """A plan in flight that writes zeros over `pages` of a request's new spans. rows: those spans, one `busy` each.

    waiter: as in `CopyJob`. ticket: what is pulled into them then.
    """

    group: str
    chain: int
    page_class: int
    tier: int
    rows: list[int]
    pages: Int64Array
    waiter: tuple[str, int, int]
    ticket: TicketInfo | None = None
    since: int = 0


@dataclass
class PullJob:
    """A hand-off in flight into the rows of one request, by chain.

    orphaned: nobody will ask the source about its bytes.
    """

    group: str
    rows: list[tuple[int, list[int]]]
    waiter: tuple[str, int, int]
    ticket: TicketInfo
    orphaned: bool = False
    since: int = 0


@dataclass
class HostRead:
    """Spans of one chain, int64[spans], that a ticket reads on the host, and their pages there, int64[pages]."""

    rows: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    pages: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class Ticket:
    """An export. rows: (chain index, rows), one pin each; generations as given out. on_host: by chain, as `rows`.

    It grows with its request until committed_tokens is expected_tokens. cut: the request ended before that.
    """

    ticket_id: str
    engine: str
    epoch: int
    group: str
    request_id: int
    committed_tokens: int
    rows: list[tuple[int, list[int]]]
    expires_ns: int
    expected_tokens: int
    on_host: list[HostRead]
    holder: str = ""
    cut: bool = False

    @property
    def final(self) -> bool:
        """Whether it covers all that it will."""
        return self.committed_tokens >= self.expected_tokens


@dataclass
class OperatorPin:
    """A prefix that an operator keeps. rows: (chain index, rows), one pin and one anchor each; since: ns."""

    pin_id: str
    group: str
    key: bytes
    since: int
    rows: list[tuple[int, Int64Array]]


class State:
    """The core's state. Changed only by `Node.apply` and the functions it calls."""

    def __init__(self, groups: list[Group], limits: Limits) -> None:
        self.limits = limits
        self.groups = {group.spec.name: group for group in groups}
        for group in groups:
            for pool in group.pools.values():
                pool.overbooked_slabs = int((limits.overcommit - 1.0) * pool.slabs)
        self.pace = Pace()
        self.tenants = Tenants(limits.tenants)
        for group in groups:
            group.tenants = self.tenants
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.regions = shared_regions([pool for group in groups for pool in group.spec.pools])
        self.reclaimers = self._reclaimers()
        self.lenders = self._lenders()
        for lending in set(self.lenders.values()):
            lending.carve()
        self.engines: dict[str, Engine] = {}
        self.retired: dict[tuple[str, int], Engine] = {}  # replaced or suspect epochs whose processes may still live
        self.timelines: dict[int, int] = {}
        self.dead_attaches: set[int] = set()
        self.jobs: dict[int, CopyJob | PullJob | CheckJob | ScrubJob] = {}
        self.checks: deque[tuple[str, int, int, int]] = deque()  # group, chain, class, row: to be checked
        self.checks_until = 0
        self.tickets: dict[str, Ticket] = {}
        self.pins: dict[str, OperatorPin] = {}
        self.cordon = ""  # why nothing new is let in; empty: it is
        self.namespaces: dict[bytes, int] = {}
        self.quarantine: list[tuple[str, str, str, Int64Array]] = []  # group, pool, class, pages
        self.next_epoch = 1
        self.next_attach = 1
        self.next_plan = 1
        self.words_used = 0  # timeline words below were given to some rank
        self.mover = 0  # incarnation of the mover whose plans these are; 0 while there is none
        self.now = 0
        self.effects: list[Effect] = []

    def _reclaimers(self) -> dict[str, Reclaimer]:
        return {
            name: Reclaimer(group, self.counters, lambda: self.now, self.limits.miss_costs, self._tell)
            for name, group in self.groups.items()
        }

    def _tell(self, effect: Effect) -> None:
        self.effects.append(effect)  # the list of the event being handled

    def _lenders(self) -> dict[str, Lending]:
        """By pool that shares a region: who moves its extents."""
        lenders: dict[str, Lending] = {}
        for region in self.regions.values():
            lending = Lending(region, self.groups, self.reclaimers, self.counters, self.limits.overcommit)
            lenders.update(dict.fromkeys(region.pools, lending))
        for reclaimer in self.reclaimers.values():
            reclaimer.lenders = lenders
        return lenders

    def __getstate__(self) -> dict[str, Any]:
        """All but what follows from the rest."""
        assert not self.effects, "a state is stored between two events"
        return {name: value for name, value in vars(self).items() if name not in ("reclaimers", "lenders", "effects")}

    def __setstate__(self, stored: dict[str, Any]) -> None:
        vars(self).update(stored)
        self.effects = []
        self.reclaimers = self._reclaimers()
        self.lenders = self._lenders()

    def engine(self, name: str, epoch: int) -> Engine:
        """The live engine of that epoch; typed errors for anything else."""
        engine = self.engines.get(name)
        if engine is None or engine.epoch != epoch:
            newest = engine.epoch if engine else "none"
            raise StaleEpoch(f"engine {name!r} epoch {epoch} is not registered (newest: {newest}); register again")
        if engine.stalled:
            raise self.stands_still(engine)
        if engine.suspect:
            raise Suspect(f"engine {name!r} is suspect since its stream broke; open a new session stream first")
        return engine

    def stands_still(self, engine: Engine) -> Suspect:
        """Why a stalled engine gets nothing."""
        ranks = sorted(engine.attaches[attach] for attach in engine.standing(self.timelines))
        return Suspect(
            f"rank {', '.join(map(str, ranks))} of engine {engine.name!r} has not moved for "
            f"{self.limits.stall_after_ns // 1_000_000_000} s while work waits for it; ask again when it has, or end it"
        )

    def any_engine(self, name: str, epoch: int) -> Engine | None:
        """The engine of that epoch whether live, suspect or replaced; None when it is gone."""
        engine = self.engines.get(name)
        if engine is not None and engine.epoch == epoch:
            return engine
        return self.retired.get((name, epoch))

    def all_engines(self) -> list[Engine]:
        """Every epoch that may still hold something."""
        return [*self.engines.values(), *self.retired.values()]

    def request(self, engine: Engine, request_id: int) -> Request:
        """The request, or UnknownRequest."""
        request = engine.requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"engine {engine.name!r} has no request {request_id}")
        return request

    def engine_of(self, request: Request) -> Engine:
        """The engine of a request, in whatever epoch."""
        engine = self.any_engine(request.engine, request.epoch)
        assert engine is not None
        return engine

    def holders(self, group: str) -> list[Request]:
        """Every request of the group, of all engines and epochs."""
        return [r for engine in self.all_engines() if engine.group == group for r in engine.requests.values()]

    def find(self, who: tuple[str, int, int]) -> Request | None:
        """A request by (engine, epoch, request id), None when it has ended."""
        engine = self.any_engine(who[0], who[1])
        return engine.requests.get(who[2]) if engine else None

    def notify(
        self,
        engine: Engine,
        *,
        ready: Opened | None = None,
        failed: RequestFailed | None = None,
        draining: str = "",
    ) -> None:
        """Stores a notice until the engine has seen it, and tells the shell."""
        engine.last_notice += 1
        notice = Notice(engine.last_notice, ready, failed, draining)
        engine.notices.append(notice)
        if len(engine.notices) > self.limits.unseen_notices:
            engine.distrust(self.now)
        self.effects.append(Notified(engine.name, engine.epoch, notice))

    def namespace_id(self, digest: bytes, tenant: str) -> int:
        """A small number for a tenant's namespace, the same for the same digest as long as the daemon lives."""
        number = self.namespaces.setdefault(digest, len(self.namespaces))
        self.tenants.name_namespace(number, tenant)
        return number

    def new_plan_id(self) -> int:
        """A plan id, unique in this boot."""
        self.next_plan += 1
        return self.next_plan - 1

    def new_pull_id(self) -> int:
        """A plan id of which the next `PULL_PARTS` - 1 are the pull's too, for its parts; divisible by `PULL_PARTS`."""
        first = -(-self.next_plan // PULL_PARTS) * PULL_PARTS
        self.next_plan = first + PULL_PARTS
        return first

    def job_id(self, work_id: int) -> int:
        """The job's id, from the id of a plan or of a part of a pull."""
        pull = work_id - work_id % PULL_PARTS
        return pull if isinstance(self.jobs.get(pull), PullJob) else work_id

    def end_attach(self, engine: Engine, attach_id: int) -> None:
        """The rank's process can write no more; remembered while a fence may name it (`forget_attaches`)."""
        del engine.attaches[attach_id]
        del engine.attach_notes[attach_id]
        engine.fence_values.pop(attach_id, None)
        engine.ended.add(attach_id)
        self.dead_attaches.add(attach_id)

    def forget_attaches(self, engine: Engine) -> None:
        """Drops what is known of ended attaches that no fence of the engine names any more."""
        named = {attach_id for entry in engine.fences for attach_id in entry.fence}
        for attach_id in engine.ended - named:
            engine.ended.discard(attach_id)
            self.dead_attaches.discard(attach_id)
            del self.timelines[attach_id]

    def fence_passed(self, fence: dict[int, int]) -> bool:
        """All work before the fence is complete, or its rank can write no more."""
        for attach, value in fence.items():
            if self.timelines.get(attach, 0) < value and attach not in self.dead_attaches:
                return False
        return True

    def quarantine_pages(self, group: Group, chain: Chain, page_class: int, tier: int, row: int) -> None:
        """Takes a copy of unknown fate away from its span; the pages wait for the mover's end."""
        pages = chain.table.drop(page_class, tier, row)
        pool = chain.pool(page_class, tier)
        name = chain.spec.classes[page_class].name
        pool.settle(name, pages, PageState.QUARANTINED)
        self.quarantine.append((group.spec.name, pool.name, name, pages))
        self.counters["quarantined_copy"] += 1


def mark_dirty(state: State, group: Group, chain_number: int, row: int) -> None:
    """The residency of a span changed: every request that holds it must tell its worker."""
    for request in state.holders(group.spec.name):
        ordinal = request.chains[chain_number].ordinal(row)
        if ordinal is not None:
            request.dirty.add((chain_number, ordinal))


def ended_well(outcome: CopyOutcome) -> bool:
    """Whether all bytes arrived."""
    return outcome is CopyOutcome.DONE


def concat(parts: list[Int64Array]) -> Int64Array:
    """One array of all parts, int64, also for none."""
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
