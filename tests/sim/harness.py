"""The simulated node: the core, its memory as real bytes, a mover, a clock, and checks after every event."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from kvmanager.core.audit import audit
from kvmanager.core.events import (
    AbandonTicket,
    AcceptTicket,
    CheckTicket,
    CopyOutcome,
    Effect,
    Event,
    MoverGone,
    Notified,
    PlanEnded,
    ReleaseTicket,
    Replied,
    StartPull,
    SubmitPlan,
    Tick,
)
from kvmanager.core.eviction import Policy, leaf_first_lru
from kvmanager.core.group import Chain, Group
from kvmanager.core.node import Node
from kvmanager.core.plans import CopyPlan, Purpose, Rows, StridedCopies, copy_rows
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.spec import GroupSpec, Limits, PageClass, Placement
from kvmanager.errors import KVError, TransferFailed
from kvmanager.geometry import TokenOrder
from kvmanager.transport.cpu import copy_piece
from tests.sim.content import PAGE_ROWS, Memory, Text, key_of
from tests.sim.driver import nothing_held
from tests.sim.worker import ChainTable, Claim, CopyOp, WrongKV

WHOLE_PAGES = (Purpose.OFFLOAD, Purpose.MIRROR, Purpose.ONBOARD)


@dataclass
class SimReport:
    """What a run did; the counters are the core's."""

    seed: int
    events: int
    counters: dict[str, int]
    happened: Counter[str]


@dataclass(frozen=True)
class RegionUse:
    """What a region holds: pages of which class and pool, as rank or share `share` of `stride`."""

    group: Group
    pool: str
    page_class: PageClass
    share: int = 0
    stride: int = 1

    def claim(self, page: np.ndarray) -> Claim:
        return Claim.on(self.group.pools[self.pool], self.page_class.name, page * self.stride + self.share)


@dataclass
class Flight:
    """A plan the mover has. `early`: bytes move at once; else when it ends. `done`: they have moved."""

    plan: CopyPlan
    claims: list[Claim]
    early: bool
    done: bool = False


@dataclass
class Pull:
    """A hand-off under way: accepted, copied, checked, ended, one at a time."""

    start: StartPull
    claims: list[Claim]
    plan: CopyPlan | None = None
    generations: np.ndarray | None = None


@dataclass
class World:
    """A node under test. `draw` decides everything; nothing else is random."""

    specs: list[GroupSpec]
    sizes: dict[int, int]
    limits: Limits
    draw: random.Random
    policy: Policy = leaf_first_lru
    now: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    story: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    recorded: list[tuple[Event, int]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node = Node(self.specs, self.limits, policy=self.policy)
        self.memory = Memory(self.sizes)
        self.flights: dict[int, Flight] = {}
        self.late: list[Flight] = []  # reported as of unknown fate; their bytes may still arrive
        self.pulls: dict[int, Pull] = {}
        self.abandoned: list[str] = []
        self.inbox: dict[tuple[str, int], list[Notified]] = {}
        self.digests: dict[bytes, list[int]] = {}
        self.uses: dict[int, RegionUse] = {}
        for group in self.node.state.groups.values():
            self._describe(group)
        self._free = self._page_states()

    def _describe(self, group: Group) -> None:
        for chain in group.chains:
            shares = chain.spec.ranks if chain.spec.placement is Placement.REPLICATED else 1
            for c in chain.spec.classes:
                for region in c.device_regions:
                    self.uses.setdefault(region, RegionUse(group, c.device_pool, c))
                for share, region in enumerate(c.host_regions):
                    self.uses[region] = RegionUse(group, c.host_pool, c, share if shares > 1 else 0, shares)

    def learn(self, digests: list[int]) -> None:
        """Segments of a text, so that published keys can be checked against bytes."""
        for start in range(0, len(digests) - PAGE_ROWS + 1, PAGE_ROWS):
            segment = digests[start : start + PAGE_ROWS]
            self.digests[key_of(segment[-1])] = segment

    # ------------------------------------------------------------------------------ events

    def apply(self, event: Event, passes: int = 1_000) -> object:
        """One event into the core, its effects out of it, and all checks. Returns the answer, if any."""
        self.now += passes
        self.story.append(f"{self.now}: {_short(event)}")
        self.recorded.append((event, self.now))
        effects = self.node.apply(event, self.now)
        self.outcomes.append(fingerprint(effects))
        audit(self.node.state)
        self._poison_freed()
        answer: object = None
        for effect in effects:
            match effect:
                case Replied():
                    answer = effect.answer
                    self.story.append(f"    -> {_short(answer)}")
                case SubmitPlan():
                    self._submit(effect.plan)
                case StartPull():
                    self._start_pull(effect)
                case AbandonTicket():
                    self.abandoned.append(effect.ticket.ticket_id)
                case Notified():
                    self.inbox.setdefault((effect.engine, effect.epoch), []).append(effect)
        return answer

    def _page_states(self) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
        pools = [pool for group in self.node.state.groups.values() for pool in group.pools.values()]
        return {
            (pool.name, name): (space.state.copy(), space.generation.copy())
            for pool in pools
            for name, space in pool.spaces.items()
        }

    def _poison_freed(self) -> None:
        """A page that was freed loses its bytes at once: whoever still relies on them finds poison."""
        before, self._free = self._free, self._page_states()
        for region, use in self.uses.items():
            for page_class in self._classes(use):
                state, generation = self._free[(use.pool, page_class.name)]
                old_state, old_generation = before[(use.pool, page_class.name)]
                lost = (old_state != PageState.FREE) & ((state == PageState.FREE) | (generation != old_generation))
                for page in np.flatnonzero(lost).tolist():
                    if page % use.stride == use.share % use.stride:
                        size = page_class.page_bytes
                        self.memory.poison(region, page // use.stride * size, size)

    def _classes(self, use: RegionUse) -> list[PageClass]:
        """Page classes that live in the region."""
        return [
            c
            for chain in use.group.chains
            for c in chain.spec.classes
            if use.pool in (c.device_pool, c.host_pool)
        ]

    # ------------------------------------------------------------------------------- mover

    def claims(self, copies: tuple[StridedCopies, ...]) -> list[Claim]:
        """Pages that copies touch, source and target, as they are now."""
        found = []
        for c in copies:
            for region, offsets in ((c.source_region, c.source_offsets), (c.target_region, c.target_offsets)):
                use = self.uses[region]
                size = use.page_class.page_bytes
                pages = 1 if c.counts else max(1, -(-c.row_bytes // size))
                first = offsets // size
                found.append(use.claim((first[:, None] + np.arange(pages)).ravel()))
        return found

    def _submit(self, plan: CopyPlan) -> None:
        assert plan.plan_id not in self.flights
        self.memory.regions.check(plan)
        if plan.purpose in WHOLE_PAGES:
            for c in plan.copies:
                for offset in c.target_offsets.tolist():
                    self.memory.poison(c.target_region, offset, c.row_bytes)
        flight = Flight(plan, self.claims(plan.copies), self.draw.random() < 0.5)
        self.flights[plan.plan_id] = flight
        if flight.early:
            self._move(flight)

    def _move(self, flight: Flight, share: float = 1.0) -> None:
        CopyOp(flight.plan.describe(), [], flight.claims).run(self.memory)
        for c in flight.plan.copies[: max(1, int(len(flight.plan.copies) * share))]:
            copy_piece(self.memory.regions[c.source_region], self.memory.regions[c.target_region], c)
        flight.done = True

    def end_plan(self, plan_id: int, outcome: CopyOutcome = CopyOutcome.DONE) -> None:
        """The mover reports the end of a copy plan."""
        flight = self.flights.pop(plan_id)
        self.happened[f"plan {outcome.value}"] += 1
        if outcome is CopyOutcome.DONE and not flight.done:
            self._move(flight)
        elif outcome is CopyOutcome.FAILED and not flight.done:
            self._move(flight, 0.5)
        elif outcome is CopyOutcome.UNKNOWN_FATE:
            self.late.append(Flight(flight.plan, [], False))
        self.apply(PlanEnded(plan_id, outcome))
        if self.draw.random() < 0.1:
            self.apply(PlanEnded(plan_id, self.draw.choice(list(CopyOutcome))))  # a second report changes nothing

    def land_late(self) -> None:
        """Bytes of a plan of unknown fate arrive after all; only its quarantined pages may change."""
        if not self.late:
            return
        flight = self.late[self.draw.randrange(len(self.late))]
        for claim in flight.claims:
            if (claim.pool.spaces[claim.page_class].state[claim.pages] != PageState.QUARANTINED).any():
                raise WrongKV(f"late bytes of a pull land in pages of {claim.pool.name} that are in use again")
        for c in flight.plan.copies:
            use = self.uses[c.target_region]
            size = use.page_class.page_bytes
            pages = (c.target_offsets[:, None] // size + np.arange(max(1, c.row_bytes // size))).ravel()
            state = use.group.pools[use.pool].spaces[use.page_class.name].state[pages * use.stride + use.share]
            if (state != PageState.QUARANTINED).any():
                raise WrongKV(f"late bytes of {flight.plan.describe()} land in pages that are in use again")
            for offset in c.target_offsets.tolist():
                self.memory.poison(c.target_region, offset, c.row_bytes)
        self.happened["late bytes"] += 1

    def kill_mover(self) -> None:
        """The mover dies with everything it had."""
        self.happened["mover died"] += 1
        self.flights.clear()
        self.late.clear()
        self.pulls.clear()
        self.apply(MoverGone())

    # ------------------------------------------------------------------------------- pulls

    def _start_pull(self, start: StartPull) -> None:
        group = self.node.state.groups[start.group]
        classes = {c.name: c for c in group.chains[0].spec.classes}
        claims = []
        for target in start.targets:
            c = classes[target.page_class]
            on_host = int(target.rows.region[0]) in c.host_regions
            claims.append(Claim.on(group.pools[c.host_pool if on_host else c.device_pool], c.name, target.rows.page))
            assert target.positions[0] >= start.first_position
            assert (np.diff(target.positions) > 0).all()
        self.pulls[start.plan_id] = Pull(start, claims)

    def advance_pull(self, plan_id: int) -> None:
        """The next stage of a pull; any refusal by the source ends it as failed."""
        pull = self.pulls[plan_id]
        ticket = pull.start.ticket.ticket_id
        if pull.generations is None:
            answer = self.apply(AcceptTicket(ticket, "target"))
            if isinstance(answer, KVError):
                return self.end_pull(plan_id, CopyOutcome.FAILED, answer)
            pull.generations = answer.generations
            pull.plan = self._pull_plan(pull, answer.spans[0])
            return None
        if pull.plan is not None:
            for claim in pull.claims:
                claim.hold("pull")
            for c in pull.plan.copies:
                copy_piece(self.memory.regions[c.source_region], self.memory.regions[c.target_region], c)
            pull.plan = None
            return None
        answer = self.apply(CheckTicket(ticket, pull.generations))
        if isinstance(answer, KVError):
            return self.end_pull(plan_id, CopyOutcome.FAILED, answer)
        return self.end_pull(plan_id, CopyOutcome.DONE)

    def _pull_plan(self, pull: Pull, run: object) -> CopyPlan:
        source_group = self.node.state.groups["prefill"]
        chain = source_group.chains[0].spec
        table = ChainTable(chain, source_group)
        table.apply(run)
        c = chain.classes[0]
        copies: list[StridedCopies] = []
        target_chain = self.node.state.groups[pull.start.group].chains[0].spec
        layouts = {t.name: t.layout for t in target_chain.classes}
        for target in pull.start.targets:
            rank, ordinal, slot = (
                part[target.positions] for part in table.located(0, int(target.positions.max()) + 1)
            )
            source = Rows(np.asarray(c.device_regions, np.int32)[rank], table.device["kv"][ordinal], slot)
            copies += copy_rows(c.layout, layouts[target.page_class], source, target.rows)
        return CopyPlan(pull.start.plan_id, Purpose.PLACE, tuple(copies))

    def end_pull(self, plan_id: int, outcome: CopyOutcome, error: KVError | None = None) -> None:
        """The pull is over; the ticket goes back unless it was refused."""
        pull = self.pulls.pop(plan_id)
        self.happened[f"pull {outcome.value}"] += 1
        if outcome is CopyOutcome.UNKNOWN_FATE:
            self.late.append(Flight(CopyPlan(plan_id, Purpose.PLACE, ()), pull.claims, False))
        self.apply(PlanEnded(plan_id, outcome, error or (None if outcome is CopyOutcome.DONE else TransferFailed("x"))))
        if self.draw.random() < 0.8:
            self.apply(ReleaseTicket(pull.start.ticket.ticket_id, "target"))

    # ------------------------------------------------------------------------------ checks

    def check_published(self) -> None:
        """Everything that can be found holds the right bytes, wherever it is complete."""
        for group in self.node.state.groups.values():
            for chain in group.chains:
                for row in chain.table:
                    if chain.table.published[row]:
                        self._check_span(group, chain, row)

    def _check_span(self, group: Group, chain: Chain, row: int) -> None:
        table = chain.table
        width = group.key_bytes
        keys = table.keys[row]
        digests = [d for i in range(0, len(keys), width) for d in self.digests[keys[i : i + width]]]
        content = Text(digests).content(np.arange(len(digests)), int(table.namespace[row]))
        order = TokenOrder(int(table.segments[row]), int(table.interleave[row]))
        page, slot = order.place(np.arange(len(digests)))
        for c, page_class in enumerate(chain.spec.classes):
            for tier in (DEVICE, HOST):
                copy = table.copies[c, tier, row]
                # A device copy that its own request still fills is right as far as it is valid, unless a plan fills it.
                if copy == CopyState.ABSENT or (copy == CopyState.FILLING and (tier == HOST or table.busy[row])):
                    continue
                for rows in _places(chain, page_class, tier, table.pages[c, tier, row], page, slot):
                    if self.memory.wrong(page_class.layout, rows, content).any():
                        raise WrongKV(
                            f"{group.spec.name}/{chain.spec.name} span {row}, class {page_class.name}, tier {tier}: "
                            f"published content is wrong (pages {table.page_list(c, tier, row).tolist()})"
                        )

    def settle(self) -> None:
        """All plans and pulls end and all leases run out."""
        while self.flights:
            self.end_plan(self.draw.choice(list(self.flights)))
        for plan_id in list(self.pulls):
            self.end_pull(plan_id, CopyOutcome.CANCELLED)
        self.apply(Tick(), passes=10 * self.limits.ticket_ttl_ns)

    def check_empty(self) -> None:
        """Nobody is left: every page is free or cached, nothing pinned, busy, promised or quarantined."""
        nothing_held(self.node.state)
        self.check_published()


def _places(chain: Chain, c: PageClass, tier: int, pages: np.ndarray, page: np.ndarray, slot: np.ndarray) -> list[Rows]:
    """Where the tokens of a span lie, once for every place that holds them all."""
    regions = np.asarray(c.device_regions if tier == DEVICE else c.host_regions, np.int32)
    ranks = chain.spec.ranks
    if chain.spec.placement is Placement.SHARDED:
        return [Rows(regions[page % ranks], pages[page // ranks], slot)]
    if tier == HOST:
        return [Rows(regions[pages[page] % ranks], pages[page] // ranks, slot)]
    return [Rows(np.full(len(page), region, np.int32), pages[page], slot) for region in regions]


def _short(thing: object) -> str:
    text = repr(thing)
    return text if len(text) < 600 else text[:600] + "..."


def fingerprint(effects: list[Effect]) -> str:
    with np.printoptions(threshold=100_000):
        return repr(effects)

