"""A simulated node: the core, its memory as real bytes, a mover, and checks after every event."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvmanager.core.audit import audit
from kvmanager.core.chainaudit import Passed
from kvmanager.core.events import (
    READS,
    AbandonTicket,
    CancelPlan,
    CopyOutcome,
    Effect,
    Event,
    MoverGone,
    MoverJoined,
    Notified,
    PlanEnded,
    ReleaseTicket,
    Replied,
    StartPull,
    SubmitPlan,
    Tick,
)
from kvmanager.core.eviction import Policy, leaf_first_lru
from kvmanager.core.group import Group
from kvmanager.core.node import Node
from kvmanager.core.plans import CopyPlan, Purpose, StridedCopies
from kvmanager.core.pool import PageState
from kvmanager.core.spec import GroupSpec, Limits, PageClass, Placement
from kvmanager.core.state import CheckJob, CopyJob, ScrubJob
from kvmanager.errors import KVError
from kvmanager.transport.cpu import do_piece
from tests.sim import pulls, rot, tenancy
from tests.sim.driver import nothing_held
from tests.sim.listener import Listener
from tests.sim.network import Entry, Network
from tests.sim.published import PublishedBytes
from tests.sim.worker import Claim, CopyOp, WrongKV

if TYPE_CHECKING:
    from tests.sim.crash import Crashes
    from tests.sim.engine import SimEngine

WHOLE_PAGES = (Purpose.OFFLOAD, Purpose.MIRROR, Purpose.SPILL, Purpose.ONBOARD)
_FREE = int(PageState.FREE)


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
    """A plan the mover has. `early`: bytes move at once; else when it ends. `done`: they have moved.

    targets: what its target regions are to it.
    """

    plan: CopyPlan
    claims: list[Claim]
    early: bool
    done: bool = False
    cancelled: bool = False
    targets: dict[int, RegionUse] = field(default_factory=dict)


class World:
    """A node under test."""

    def __init__(
        self, number: int, specs: list[GroupSpec], limits: Limits, net: Network, policy: Policy = leaf_first_lru
    ) -> None:
        self.number, self.specs, self.limits, self.net, self.policy = number, specs, limits, net, policy
        self.draw, self.memory, self.happened = net.draw, net.memory, net.happened
        self.node = Node(specs, limits, policy=policy)
        self.flights: dict[int, Flight] = {}
        self.lost: list[Flight] = []  # the mover never reports them; their bytes may arrive as long as it lives
        self.late: list[Flight] = []  # reported as of unknown fate; their bytes may still arrive
        self.pulls: dict[int, pulls.Pull] = {}
        self.inbox: dict[tuple[str, int], list[Notified]] = {}
        self.uses: dict[int, list[RegionUse]] = {}
        for group in self.node.state.groups.values():
            self._describe(group)
        self._residents = {
            (use.pool, c.name): [(r, u) for r, uses in self.uses.items() for u in uses if u.pool == use.pool]
            for uses in self.uses.values()
            for use in uses
            for c in self._classes(use)
        }
        self.rot = rot.Rot()
        self.published = PublishedBytes(self.node, net.memory, self.rot)
        self._free = self._page_states()
        self._passed: Passed = {}
        self.engines: list[SimEngine] = []
        self.held: tenancy.Held = {}
        self.mover = 1
        self.crashes: Crashes | None = None
        self.listener = Listener(self.node)
        self.apply(MoverJoined(self.mover))

    @property
    def now(self) -> int:
        return self.net.now

    def _describe(self, group: Group) -> None:
        for chain in group.chains:
            shares = chain.spec.ranks if chain.spec.placement is Placement.REPLICATED else 1
            for c in chain.spec.classes:
                for region in c.device_regions:
                    self.uses.setdefault(region, [RegionUse(group, c.device_pool, c)])
                for share, region in enumerate(c.host_regions):
                    use = RegionUse(group, c.host_pool, c, share if shares > 1 else 0, shares)
                    uses = self.uses.setdefault(region, [])
                    if all(other.pool != use.pool for other in uses):
                        uses.append(use)

    def _use(self, region: int, offset: int) -> RegionUse:
        """Whose page lies there now."""
        uses = self.uses[region]
        if len(uses) == 1:
            return uses[0]
        state = self.node.state
        (shared,) = {state.lenders[use.pool].region.name for use in uses}
        extents = state.regions[shared]
        owner = int(extents.owner[offset // extents.extent_bytes])
        return next(use for use in uses if extents.number(use.pool) == owner)

    # ------------------------------------------------------------------------------ events

    def apply(self, event: Event, passes: int = 1_000) -> object:
        """One event into the core, its effects out of it, and all checks. Returns the answer, if any."""
        net = self.net
        net.now += passes
        net.applied += 1
        if self.crashes is not None and self.crashes.before(event):
            return None
        entry = Entry(self.number, net.now, event, [])
        net.story.append(entry)
        idle = isinstance(event, READS) or self.node.idle(event, net.now)
        effects = self.node.apply(event, net.now)
        entry.effects.extend(effects)
        if not idle:  # what an event changed that is said to change nothing, the next audit finds
            audit(self.node.state, self._passed)
        if self.limits.tenants:
            self.held = tenancy.check(self.node, self.held, event)
        self._poison_freed()
        if self.crashes is not None and self.crashes.after(event, effects):
            # Whoever sent it heard nothing, and says it again; that a mover is gone, the next daemon found out itself.
            return None if isinstance(event, MoverGone) else self.apply(event, 0)
        told = self.listener.told_ids
        self.listener.after(effects)
        self.happened["token ids told"] += self.listener.told_ids - told
        for effect in effects:
            self._perform(effect)
        answers = [effect.answer for effect in effects if isinstance(effect, Replied)]
        return answers[-1] if answers else None

    def _perform(self, effect: Effect) -> None:
        """What the shell around the core does."""
        match effect:
            case SubmitPlan():
                self._submit(effect.plan)
            case CancelPlan():
                self._cancel(effect.plan_id)
            case StartPull():
                group = self.node.state.groups[effect.group]
                self.pulls[effect.plan_id] = pulls.begin(effect, group, self.net.now)
            case AbandonTicket():
                self.net.ask(effect.ticket.ticket_id, ReleaseTicket(effect.ticket.ticket_id, "nobody"))
            case Notified():
                self.inbox.setdefault((effect.engine, effect.epoch), []).append(effect)

    def _page_states(self) -> dict[tuple[str, str], tuple[bytes, bytes]]:
        """Of each page class of a pool, the states and generations of its pages."""
        pools = [pool for group in self.node.state.groups.values() for pool in group.pools.values()]
        return {
            (pool.name, name): (space.state.tobytes(), space.generation.tobytes())
            for pool in pools
            for name, space in pool.spaces.items()
        }

    def _poison_freed(self) -> None:
        """A page that was freed loses its bytes at once: whoever still relies on them finds poison."""
        before, self._free = self._free, self._page_states()
        for key, pages_now in self._free.items():
            if pages_now == before[key]:
                continue
            (old_state, old_generation), (state, generation) = (
                (np.frombuffer(states, np.uint8), np.frombuffer(generations, np.uint32))
                for states, generations in (before[key], pages_now)
            )
            lost = (old_state != _FREE) & ((state == _FREE) | (generation != old_generation))
            pages = np.flatnonzero(lost)
            if len(pages) == 0:
                continue
            for region, use in self._residents.get(key, ()):
                size = next(c.page_bytes for c in self._classes(use) if c.name == key[1])
                for page in pages[pages % use.stride == use.share % use.stride].tolist():
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

    def use_of(self, region: int, offset: int, plan_id: int | None) -> RegionUse:
        """The region as a plan uses it: where several classes share it, the plan's own class says which."""
        use = self._use(region, offset)
        job = self.node.state.jobs.get(plan_id) if plan_id is not None else None
        if not isinstance(job, CopyJob | CheckJob | ScrubJob):
            return use
        return replace(use, page_class=use.group.chains[job.chain].page_class(job.page_class))

    def claims(self, copies: Iterable[StridedCopies], plan_id: int | None = None) -> list[Claim]:
        """Pages that copies touch, source and target, as they are now."""
        found = []
        for c in copies:
            for region, offsets in ((c.source_region, c.source_offsets), (c.target_region, c.target_offsets)):
                if len(offsets) == 0:
                    continue
                use = self.use_of(region, int(offsets[0]), plan_id)
                size = use.page_class.page_bytes
                pages = 1 if c.counts else max(1, -(-c.row_bytes // size))
                first = offsets // size
                found.append(use.claim((first[:, None] + np.arange(pages)).ravel()))
        return found

    def _submit(self, plan: CopyPlan) -> None:
        assert plan.plan_id not in self.flights
        self.memory.regions.check(plan)
        if plan.purpose in WHOLE_PAGES:
            for c in plan.pieces():
                for offset in c.target_offsets.tolist():
                    self.memory.poison(c.target_region, offset, c.row_bytes)
        flight = Flight(plan, self.claims(plan.pieces(), plan.plan_id), self.draw.random() < 0.5)
        flight.targets = {
            c.target_region: self.use_of(c.target_region, int(c.target_offsets[0]), plan.plan_id)
            for c in plan.pieces()
            if len(c.target_offsets)
        }
        self.flights[plan.plan_id] = flight
        if flight.early:
            self._move(flight)

    def _cancel(self, plan_id: int) -> None:
        """The core gives a plan up: it may have begun, may even have ended, and its end comes when it comes."""
        self.happened["plan given up"] += 1
        if plan_id in self.flights:
            self.flights[plan_id].cancelled = True

    def _move(self, flight: Flight, share: float = 1.0) -> None:
        CopyOp(str(flight.plan), [], flight.claims).run(self.memory)
        pieces = list(flight.plan.pieces())
        for c in pieces[: max(1, int(len(pieces) * share))]:
            do_piece(self.memory.regions, flight.plan.purpose, c)
        flight.done = True

    def end_plan(self, plan_id: int, outcome: CopyOutcome = CopyOutcome.DONE) -> None:
        """The mover reports the end of a copy plan."""
        flight = self.flights.pop(plan_id)
        if flight.cancelled and outcome is CopyOutcome.DONE and not flight.done:
            outcome = CopyOutcome.CANCELLED
        self.happened[f"plan {outcome.value}"] += 1
        if outcome is CopyOutcome.DONE and not flight.done:
            self._move(flight)
        elif outcome is CopyOutcome.FAILED and not flight.done:
            self._move(flight, 0.5)
        elif outcome is CopyOutcome.UNKNOWN_FATE:
            self.late.append(Flight(flight.plan, [], False, targets=flight.targets))
        sums = rot.summed(self, flight.plan) if outcome is CopyOutcome.DONE else None
        self.apply(PlanEnded(plan_id, outcome, sums=sums))
        if self.draw.random() < 0.1:
            self.apply(PlanEnded(plan_id, self.draw.choice(list(CopyOutcome))))  # a second report changes nothing

    def lose_plan(self, plan_id: int) -> None:
        """The mover never says how the plan ended."""
        self.net.note(f"plan lost: {plan_id}")
        self.lost.append(self.flights.pop(plan_id))

    def land_late(self) -> None:
        """Bytes of a lost plan or of one of unknown fate arrive after all; their pages may hold nothing else."""
        if self.lost and self.draw.random() < 0.5:
            self._move(self.draw.choice(self.lost))
            return
        if not self.late:
            return
        flight = self.late[self.draw.randrange(len(self.late))]
        for claim in flight.claims:
            if (claim.pool.spaces[claim.page_class].state[claim.pages] != PageState.QUARANTINED).any():
                raise WrongKV(f"late bytes of a pull land in pages of {claim.pool.name} that are in use again")
        for c in flight.plan.pieces():
            use = flight.targets.get(c.target_region) or self._use(c.target_region, int(c.target_offsets[0]))
            size = use.page_class.page_bytes
            pages = (c.target_offsets[:, None] // size + np.arange(max(1, c.row_bytes // size))).ravel()
            state = use.group.pools[use.pool].spaces[use.page_class.name].state[pages * use.stride + use.share]
            if (state != PageState.QUARANTINED).any():
                raise WrongKV(f"late bytes of {flight.plan!s} land in pages that are in use again")
            for offset in c.target_offsets.tolist():
                self.memory.poison(c.target_region, offset, c.row_bytes)
        self.happened["late bytes"] += 1

    def kill_mover(self) -> None:
        """The mover dies with everything it had."""
        self.net.note(f"mover died: node {self.number}")
        self.flights.clear()
        self.lost.clear()
        self.late.clear()
        self.pulls.clear()
        self.mover += 1
        self.apply(MoverGone())
        self.apply(MoverJoined(self.mover))

    # ------------------------------------------------------------------------------- pulls

    def advance_pull(self, plan_id: int) -> None:
        """The next stage of a pull."""
        pull = self.pulls[plan_id]
        end = pulls.advance(pull, self.net, self.node.state.groups[pull.start.group], self.now)
        if end is not None and plan_id in self.pulls:
            self.end_pull(plan_id, *end)

    def end_pull(self, plan_id: int, outcome: CopyOutcome, error: KVError | None = None) -> None:
        """The pull is over; mostly the ticket goes back."""
        pull = self.pulls.pop(plan_id)
        self.happened[f"pull {outcome.value}"] += 1
        if outcome is CopyOutcome.UNKNOWN_FATE:
            self.late.append(Flight(CopyPlan(plan_id, Purpose.PLACE, ()), pull.claims, False))
        self.apply(pulls.ended(pull, outcome, error))
        if self.draw.random() < 0.8:
            pulls.release(pull, self.net)

    # ------------------------------------------------------------------------------ checks

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
        self.published.check()
