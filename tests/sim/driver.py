"""Scripted histories of the core: no bytes, no dice; the test says what happens, an audit follows every event."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from kvmanager.core.audit import audit
from kvmanager.core.checksums import SUM_WORDS, PageSections
from kvmanager.core.events import (
    AbandonTicket,
    Attached,
    AttachRank,
    CancelPlan,
    Close,
    Closing,
    CopyOutcome,
    DetachRank,
    EngineGone,
    Event,
    FenceEngine,
    MoverGone,
    Notice,
    Notified,
    Open,
    Opened,
    PlanEnded,
    Progress,
    Registered,
    RegisterEngine,
    Replied,
    StartPull,
    Step,
    StepDone,
    SubmitPlan,
    Tick,
    TicketInfo,
    TimelinesRead,
)
from kvmanager.core.eviction import Policy, leaf_first_lru
from kvmanager.core.node import Node
from kvmanager.core.plans import CopyPlan
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.spec import ChainSpec, GroupSpec, Limits, PageClass, Placement, PoolSpec
from kvmanager.core.state import State
from kvmanager.errors import KVError
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, KVFormat, native_layout


def sharded_group(
    pages: int, host_pages: int, *, ranks: int = 8, page_rows: int = 64, kv_format: KVFormat = GLM53, name: str = "p"
) -> GroupSpec:
    """A DCP group with the real page's bytes; only accounts, so any size will do."""
    layout = native_layout(kv_format, page_rows)
    hbm, host = f"{name}/hbm", f"{name}/host"
    shares = tuple(range(ranks, 2 * ranks)) if host_pages else ()
    kv = PageClass("kv", layout, hbm, tuple(range(ranks)), host if shares else "", shares)
    order = TokenOrder(ranks, 1)
    chain = ChainSpec("main", Placement.SHARDED, ranks, page_rows, order, order, (kv,))
    pools = [PoolSpec(hbm, "device", ranks, pages, layout.page_bytes, (("kv", 1),))]
    if shares:
        pools.append(PoolSpec(host, "host", ranks, host_pages, layout.page_bytes, (("kv", 1),)))
    return GroupSpec(name, ranks, page_rows, kv_format, (chain,), tuple(pools))


def chain_keys(what: object, segments: int, width: int = 16) -> bytes:
    """Chained keys of a session called `what`; two sessions share nothing."""
    chain, out = repr(what).encode(), []
    for _ in range(segments):
        chain = hashlib.sha256(chain).digest()[:width]
        out.append(chain)
    return b"".join(out)


DEFAULT_LIMITS = Limits()


@dataclass
class Driver:
    """A node, and what it asked for that nobody has done yet."""

    specs: list[GroupSpec]
    limits: Limits = DEFAULT_LIMITS
    now: int = 0
    plans: dict[int, CopyPlan] = field(default_factory=dict)
    pulls: dict[int, StartPull] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    fenced: list[tuple[str, int]] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    audited: bool = True
    policy: Policy = leaf_first_lru

    def __post_init__(self) -> None:
        self.node = Node(self.specs, self.limits, policy=self.policy)

    def apply(self, event: Event, passes: int = 1_000) -> object:
        """One event; its answer."""
        self.now += passes
        answer: object = None
        for effect in self.node.apply(event, self.now):
            match effect:
                case Replied():
                    answer = effect.answer
                case SubmitPlan():
                    self.plans[effect.plan.plan_id] = effect.plan
                case CancelPlan():
                    self.cancelled.append(effect.plan_id)
                case StartPull():
                    self.pulls[effect.plan_id] = effect
                case Notified():
                    self.notices.append(effect.notice)
                case AbandonTicket():
                    self.abandoned.append(effect.ticket.ticket_id)
                case FenceEngine():
                    self.fenced.append((effect.engine, effect.epoch))
        if self.audited:
            audit(self.node.state)
        return answer

    def end(self, plan_id: int, outcome: CopyOutcome = CopyOutcome.DONE, error: KVError | None = None) -> None:
        """One plan or pull ends."""
        plan = self.plans.pop(plan_id, None)
        self.pulls.pop(plan_id, None)
        sums = self.sums(plan.sums) if plan and plan.sums and outcome is CopyOutcome.DONE else None
        self.apply(PlanEnded(plan_id, outcome, error, sums))

    def sums(self, pages: PageSections) -> np.ndarray:
        """What the mover says when it has no bytes: equal for all."""
        return np.zeros((len(pages), len(pages.sections) * SUM_WORDS), np.uint64)

    def end_all(self, outcome: CopyOutcome = CopyOutcome.DONE) -> None:
        """Everything under way ends, and what follows from it."""
        while self.plans or self.pulls:
            self.end(min([*self.plans, *self.pulls]), outcome)

    def leave(self, *clients: Client) -> None:
        """Everybody dies, all copies end, all leases run out: nothing may be held."""
        for client in clients:
            client.die()
        self.end_all()
        self.apply(Tick(), passes=10 * (self.limits.ticket_ttl_ns + self.limits.ticket_grace_ns))
        self.apply(MoverGone())
        self.end_all()
        nothing_held(self.node.state)

    def pool(self, name: str) -> Pool:
        """A pool by name, whichever group has it."""
        return next(g.pools[name] for g in self.node.state.groups.values() if name in g.pools)

    def pages(self, pool: str, state: PageState) -> int:
        """Units of a pool in a state (pages, in pools of one class)."""
        return self.pool(pool).units(state)

    @property
    def counters(self) -> dict[str, int]:
        """The core's counters."""
        return self.node.state.counters


class Client:
    """An engine: numbers its messages, fences each with the work launched before it."""

    def __init__(
        self, driver: Driver, group: str, name: str = "e", namespace: bytes = b"ns", key_bytes: int = 16,
        tenant: str = "",
    ):  # fmt: skip
        self.driver, self.name = driver, name
        self.spec = next(spec for spec in driver.specs if spec.name == group)
        prints = tuple(c.layout.fingerprint for chain in self.spec.chains for c in chain.classes)
        rows, ranks = self.spec.page_rows, self.spec.ranks
        answer = driver.apply(RegisterEngine(name, group, namespace, key_bytes, rows, prints, ranks, tenant=tenant))
        assert isinstance(answer, Registered), answer
        self.epoch = answer.epoch
        self.attaches: list[int] = []
        for rank in range(ranks):
            attached = driver.apply(AttachRank(name, self.epoch, rank, rank))
            assert isinstance(attached, Attached), attached
            self.attaches.append(attached.attach_id)
        self.number = 0
        self.value = 0
        self.seen = 0

    def message(self, progress: tuple = (), opens: tuple = (), closes: tuple = ()) -> Step:
        """The next message, not sent."""
        fence = dict.fromkeys(self.attaches, self.value)
        return Step(self.name, self.epoch, self.number + 1, self.seen, fence, progress, opens, closes)

    def step(
        self, progress: tuple = (), opens: tuple = (), closes: tuple = (), turn_ends: tuple = ()
    ) -> StepDone:
        """Sends a message; the work that its reply allows is launched, but not done."""
        reply = self.driver.apply(replace(self.message(progress, opens, closes), turn_ends=turn_ends))
        assert isinstance(reply, StepDone), reply
        self.number += 1
        self.value += 1
        return reply

    def run(self, *, but: tuple[int, ...] = ()) -> None:
        """All ranks (but some) have done everything launched so far."""
        values = {attach: self.value for rank, attach in enumerate(self.attaches) if rank not in but}
        self.driver.apply(TimelinesRead(values))

    def open(
        self, request_id: int, tokens: int, what: object = 0, growth: int = 0, ticket: TicketInfo | None = None
    ) -> Opened:
        """Opens one request with the first `tokens` tokens of session `what`."""
        keys = chain_keys(what, tokens // self.spec.page_rows)
        return self.step(opens=(Open(request_id, tokens, growth, keys, str(what), ticket),)).opened[0]

    def commit(
        self, request_id: int, tokens: int, capacity: int | None = None, keys: bytes = b"", rejected: int = 0
    ) -> StepDone:
        """Says that `tokens` tokens are final."""
        wanted = tokens if capacity is None else capacity
        return self.step((Progress(request_id, wanted, tokens, rejected, keys),))

    def close(self, request_id: int, closing: Closing = Closing.FINISHED) -> StepDone:
        """Closes one request."""
        return self.step(closes=(Close(request_id, closing),))

    def serve(self, request_id: int, tokens: int, what: object = 0, growth: int = 0) -> Opened:
        """Opens, computes, commits and closes a request; all its work and copies are done."""
        opened = self.open(request_id, tokens, what, growth)
        if opened.state == "refused":
            return opened
        self.driver.end_all()
        self.commit(request_id, tokens)
        self.close(request_id)
        self.run()
        self.driver.end_all()
        return opened

    def die(self) -> None:
        """All processes are gone, rank by rank."""
        for attach in self.attaches:
            self.driver.apply(DetachRank(attach))
        self.driver.apply(EngineGone(self.name, self.epoch))


def nothing_held(state: State) -> None:
    """Nobody is left: every page is free or cached, nothing pinned, busy, promised or quarantined."""
    assert not state.jobs
    assert not state.tickets
    assert not state.retired
    assert not state.quarantine
    for group in state.groups.values():
        for pool in group.pools.values():
            assert pool.promised_slabs == 0
            units = {s: pool.units(s) for s in PageState}
            withheld = sum(len(pages) * pool.spaces[name].units for name, pages in pool.withheld.items())
            assert units[PageState.QUARANTINED] == withheld, (pool.name, units)
            assert units[PageState.FREE] + units[PageState.READY] + withheld == pool.capacity_units, (pool.name, units)
        for chain in group.chains:
            assert not chain.table.pins.any()
            assert not chain.table.busy.any()


def pages_of(opened: Opened, page_class: str = "kv") -> list[int]:
    """Device pages of an answer."""
    return np.concatenate([run.pages[page_class][0] for run in opened.spans]).tolist()
