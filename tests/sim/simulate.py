"""`Simulation(seed).run(events)`: a history of one small cluster, checked after every event.

The seed is the only input: it gives the world, and with its number every action gives its own dice. So an action
means the same whether or not another one before it is left out, and a failing history can be made smaller.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from kvmanager.core.events import CheckCopies, CopyOutcome, RenewTickets, Tick
from kvmanager.core.eviction import POLICIES, Policy
from kvmanager.core.operatorevents import Reset, ResetDone
from kvmanager.core.spec import BOUNCE
from tests.chaos.schedule import simulated
from tests.sim.content import Memory, Text
from tests.sim.crash import Crashes
from tests.sim.engine import SimEngine
from tests.sim.exports import export, waits
from tests.sim.harness import World
from tests.sim.leases import LeaseEngine
from tests.sim.network import Network
from tests.sim.operator import operate, unpin_all
from tests.sim.standstill import nobody_stands_still, quiet
from tests.sim.worlds import KINDS, LIMITS, Nodes, Regions, kind_of, limits_of

ACTIONS = {
    "step": 34, "advance": 34, "plan": 24, "pull": 14, "resend": 2, "export": 6, "tick": 3, "renew": 1,
    "late": 1, "lose_plan": 0.5, "mover": 0.3, "break_stream": 0.3, "lose": 5, "register": 0.6,
    "cut_stream": 0.7, "resume_stream": 3, "partition": 0.5, "heal": 2,
    "crash": 2, "get_on": 1.5, "reset": 0.2, "rot": 1, "check": 0.3, "pin": 0.6, "unpin": 0.4,
    "evict": 0.3,
}  # fmt: skip
MORE = {kind: {"export": 20, "pull": 40} for kind in ("handoff", "many", "pressure", "caches")}
PLAN_ENDS = [CopyOutcome.DONE] * 17 + [CopyOutcome.FAILED, CopyOutcome.CANCELLED, CopyOutcome.UNKNOWN_FATE]
LEASES = "@leases"
STAGES_AT_ONCE = 6
"""Of a pull, between two other actions: it has some ten, and other engines seldom wait for all of them."""
FINISH = -1
"""Number of the last action: everybody leaves, all leases expire, nothing may be left."""


@dataclass
class SimReport:
    """What a run did. events: applied by cores; counters: the cores', summed."""

    seed: int
    events: int
    actions: int
    counters: Counter[str]
    happened: Counter[str]


def policy_of(seed: int) -> Policy:
    """Histories of half the seeds rank by return rate."""
    return POLICIES["return-rate" if seed // len(KINDS) % 2 else "lru"]


class Simulation:
    """One cluster with its engines. `at`: the action being done."""

    def __init__(self, seed: int, build: Callable[[Regions, random.Random], Nodes] | None = None) -> None:
        """`build`: other nodes than those of the seed's kind."""
        self.seed, self.kind, self.at = seed, kind_of(seed), 0
        self.draw = random.Random(f"{seed}")
        weights = {**ACTIONS, **MORE.get(self.kind, {})}
        self._names, self._weights = list(weights), list(weights.values())
        regions = Regions({})
        nodes = (build or KINDS[self.kind])(regions, self.draw)
        self.net = Network(self.draw, Memory(regions.sizes))
        policy = policy_of(seed)
        self.worlds = [World(i, specs, limits_of(self.kind), self.net, policy) for i, specs in enumerate(nodes)]
        for world in self.worlds:
            world.crashes = Crashes(world)
        self.texts: list[Text] = []
        self.tickets: deque = deque(maxlen=6)
        tenants = [f"#{tenant.name}" for tenant in limits_of(self.kind).tenants] or [""]
        # Where each rank has its part of a page behind a bounce region there are leases alone.
        opened = [(w, s) for w in self.worlds for s in w.specs if not (s.ranks > 1 and s.pools[0].tier == BOUNCE)]
        keys = [(w, spec.name + tenant) for w, spec in opened for tenant in tenants]
        keys += [(w, spec.name + LEASES) for w in self.worlds for spec in w.specs if spec.cache_only]
        self.engines = {key: self._new_engine(w, key) for w, key in keys}
        self.dying: list[SimEngine] = []

    def _new_engine(self, world: World, key: str) -> SimEngine:
        """The engine of `group` or `group#tenant`; of `group@leases` the one that takes leases."""
        if key.endswith(LEASES):
            return LeaseEngine(world, key.removesuffix(LEASES), self.texts)
        group, _, tenant = key.partition("#")
        return SimEngine(world, group, self.texts, self.tickets, tenant)

    def run(self, events: int, bytes_every: int = 12) -> SimReport:
        """Actions until the cores have applied that many events, and the end."""
        try:
            for number in count():
                if self.net.applied >= events:
                    break
                self._do(number, number % bytes_every == 0)
            self._do(FINISH, True)
        finally:
            self._close()
        counters: Counter[str] = Counter()
        for world in self.worlds:
            counters.update(world.node.state.counters)
        return SimReport(self.seed, self.net.applied, self.at, counters, self.net.happened)

    def replay(self, actions: Iterable[int]) -> None:
        """Just these actions, with all bytes checked after each."""
        try:
            for number in actions:
                self._do(number, True)
        finally:
            self._close()

    def _close(self) -> None:
        """Gives the journals' memory back; nothing can be done any more."""
        for world in self.worlds:
            crashes, world.crashes = world.crashes, None
            if crashes is not None:
                crashes.close()

    def _do(self, number: int, check_bytes: bool) -> None:
        self.draw.seed(f"{self.seed}/{number}")
        if number == FINISH:
            self._finish()
            return
        self.at = number
        self._act(self.draw.choices(self._names, self._weights)[0])
        if check_bytes:
            for world in self.worlds:
                world.published.check()

    def _act(self, action: str) -> None:
        group = self.draw.choice(list(self.engines))
        engine = self.engines[group]
        match action:
            case "advance":
                self.draw.choice([engine, *[e for e in self.dying if e.ranks]]).advance()
            case "register":
                self._register(group, engine)
            case "lose" if self.dying:
                self._lose(self.draw.choice(self.dying))
            case "resume_stream":
                broken = [e for e in self.engines.values() if e.cut]
                if broken:
                    self.draw.choice(broken).resume_stream()
            case "get_on" if not (engine.stale or engine.cut):
                quiet(self.worlds, [*self.engines.values(), *self.dying])
                others = [*self.engines.values(), *self.dying]
                alone = [other for other in others if other.world is engine.world] == [engine]
                nobody_stands_still(engine, alone)
            case "rot" | "check" | "reset" | "pin" | "unpin" | "evict":
                self._bytes(action, engine)
            case "partition" | "heal":
                self._wire(cut=action == "partition")
            case "step" | "resend" | "export" | "break_stream" | "cut_stream" if not (engine.stale or engine.cut):
                self._says(action, engine)
            case _:
                self._act_beside(action, engine.world)

    def _says(self, action: str, engine: SimEngine) -> None:
        """A message of the engine's own; what waits for its prefix is often exported at once."""
        if action != "export":
            getattr(engine, action)()
        if action == "export" or (action == "step" and waits(engine) and self.draw.random() < 0.3):
            export(engine)

    def _act_beside(self, action: str, world: World) -> None:
        """What the mover, the source of pulls and the clock do."""
        draw = self.draw
        match action:
            case "plan" if world.flights:
                world.end_plan(draw.choice(list(world.flights)), draw.choice(PLAN_ENDS))
            case "lose_plan" if world.flights:
                world.lose_plan(draw.choice(list(world.flights)))
            case "pull" if world.pulls:
                self._pull(world, draw.choice(list(world.pulls)))
            case "tick":
                ttl = LIMITS.ticket_ttl_ns
                world.apply(Tick(), passes=draw.choice((*(1_000,) * 6, ttl // 2, 2 * ttl)))
            case "renew":
                for pull in list(world.pulls.values())[:2]:
                    self.net.ask(pull.ticket_id, RenewTickets((pull.ticket_id, "unknown")))
            case "late":
                world.land_late()
            case "mover":
                world.kill_mover()
            case "crash":
                assert world.crashes is not None
                world.crashes.arm(simulated(draw))

    def _bytes(self, action: str, engine: SimEngine) -> None:
        """A bit flips, some host copies are read again, or an operator keeps some content or has it forgotten."""
        world = engine.world
        if action == "rot":
            world.rot.spread(world)
        elif action == "reset":
            self._reset(world, engine.spec.name)
        elif action in ("pin", "unpin", "evict"):
            operate(action, world, engine.spec.name, self.draw)
        else:
            world.apply(CheckCopies(self.draw.randint(1, 20), self.draw.choice((0, 10**9))))

    def _reset(self, world: World, group: str) -> None:
        """An operator has everything forgotten that the group has cached."""
        assert isinstance(world.apply(Reset(group)), ResetDone)
        for chain in world.node.state.groups[group].chains:
            assert not (chain.table.live & chain.table.published).any(), "a reset left something that can be found"
        self.net.happened["reset"] += 1

    def _wire(self, *, cut: bool) -> None:
        """The network between the nodes."""
        if self.net.cut is not cut and len(self.worlds) > 1:
            self.net.cut = cut
            self.net.note("nodes cut off" if cut else "nodes joined")

    def _pull(self, world: World, plan_id: int) -> None:
        if self.draw.random() < 0.05:
            world.end_pull(plan_id, self.draw.choice([CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE]))
            return
        for _ in range(self.draw.randint(1, STAGES_AT_ONCE)):
            if plan_id in world.pulls:
                world.advance_pull(plan_id)

    def _register(self, group: str, engine: SimEngine) -> None:
        """A new process of the engine; the old one's may live on for a while."""
        if len(self.dying) > 2 or (not engine.stale and self.draw.random() < 0.5):
            return
        if not engine.stale and self.draw.random() < 0.3:
            engine.leave()
        else:
            engine.stale, engine.cut = True, False
            self.dying.append(engine)
        self.engines[group] = self._new_engine(engine.world, group)

    def _lose(self, engine: SimEngine) -> None:
        if engine.lose_rank():
            self.dying.remove(engine)
            engine.gone()

    def _finish(self) -> None:
        self._wire(cut=False)
        while self.dying:
            self._lose(self.draw.choice(self.dying))
        for engine in self.engines.values():
            engine.leave()
        for world in self.worlds:
            unpin_all(world)
            world.settle()
            world.kill_mover()
        for world in self.worlds:
            while world.flights:  # without another tick: each lets host copies be weighed again, and some are made anew
                world.end_plan(self.draw.choice(list(world.flights)))
            world.check_empty()

