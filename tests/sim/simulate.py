"""`simulate(kind, seed, events)`: a seeded history of one small world, checked after every event."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from kvmanager.core.events import CopyOutcome, RenewTickets, Tick
from kvmanager.core.eviction import POLICIES, Policy
from kvmanager.core.spec import GroupSpec
from kvmanager.geometry import SEQUENTIAL
from tests.sim.content import Text
from tests.sim.engine import SimEngine, pick
from tests.sim.harness import SimReport, World
from tests.sim.worlds import LIMITS, Regions, hisparse, sharded, two_chains

KINDS: dict[str, Callable[[Regions, random.Random], list[GroupSpec]]] = {
    "sharded": lambda r, d: [sharded(r, "main", d.randint(8, 16), d.choice((8, 20, 50, 80)))],
    "two-chains": lambda r, d: [two_chains(r, "main", d.randint(12, 20), d.choice((6, 12, 40, 90)))],
    "handoff": lambda r, d: [
        sharded(r, "prefill", d.randint(12, 20), d.randint(6, 20)),
        hisparse(r, "keep", d.randint(40, 90), d.randint(60, 160)),
        hisparse(r, "permute", d.randint(40, 90), d.randint(60, 160), SEQUENTIAL),
    ],
}
ACTIONS = {
    "step": 34, "advance": 34, "plan": 24, "pull": 14, "resend": 2, "export": 6, "tick": 3, "renew": 1,
    "late": 1, "break_stream": 0.3, "lose": 5, "register": 0.6, "mover": 0.2,
}  # fmt: skip
MORE = {"handoff": {"export": 20, "pull": 40}}
PLAN_ENDS = [CopyOutcome.DONE] * 17 + [CopyOutcome.FAILED, CopyOutcome.CANCELLED, CopyOutcome.UNKNOWN_FATE]


def policy_of(seed: int) -> Policy:
    """Every second history ranks by return rate."""
    return POLICIES["return-rate" if seed % 2 else "lru"]


class Simulation:
    """One world with its engines."""

    def __init__(self, kind: str, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(f"{kind}/{seed}")
        self.actions = {**ACTIONS, **MORE.get(kind, {})}
        regions = Regions({})
        specs = KINDS[kind](regions, self.draw)
        self.world = World(specs, regions.sizes, LIMITS, self.draw, policy_of(seed))
        self.texts: list[Text] = []
        self.tickets: deque = deque(maxlen=6)
        self.engines = {spec.name: self._new_engine(spec.name) for spec in specs}
        self.dying: list[SimEngine] = []

    def _new_engine(self, group: str) -> SimEngine:
        return SimEngine(self.world, group, self.texts, self.tickets)

    def run(self, events: int) -> SimReport:
        for number in range(events):
            self._act(pick(self.draw, self.actions))
            if number % 8 == 0:
                self.world.check_published()
        self._finish()
        return SimReport(self.seed, events, dict(self.world.node.state.counters), self.world.happened)

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
            case "step" | "resend" | "export" | "break_stream" if not engine.stale:
                getattr(engine, action)()
            case _:
                self._act_beside(action)

    def _act_beside(self, action: str) -> None:
        """What the mover, the source of pulls and the clock do."""
        world, draw = self.world, self.draw
        match action:
            case "plan" if world.flights:
                world.end_plan(draw.choice(list(world.flights)), draw.choice(PLAN_ENDS))
            case "pull" if world.pulls:
                self._pull(draw.choice(list(world.pulls)))
            case "tick":
                ttl = LIMITS.ticket_ttl_ns
                world.apply(Tick(), passes=draw.choice((*(1_000,) * 6, ttl // 2, 2 * ttl)))
            case "renew":
                world.apply(RenewTickets(tuple(world.node.state.tickets)[:2]))
            case "late":
                world.land_late()
            case "mover":
                world.kill_mover()

    def _pull(self, plan_id: int) -> None:
        if self.draw.random() < 0.05:
            self.world.end_pull(plan_id, self.draw.choice([CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE]))
        else:
            self.world.advance_pull(plan_id)

    def _register(self, group: str, engine: SimEngine) -> None:
        """A new process of the engine; the old one's may live on for a while."""
        if len(self.dying) > 2 or (not engine.stale and self.draw.random() < 0.5):
            return
        if not engine.stale and self.draw.random() < 0.3:
            engine.leave()
        else:
            engine.stale = True
            self.dying.append(engine)
        self.engines[group] = self._new_engine(group)

    def _lose(self, engine: SimEngine) -> None:
        if engine.lose_rank():
            self.dying.remove(engine)
            engine.gone()

    def _finish(self) -> None:
        """Everybody leaves, all plans end, all leases expire: nothing may be left."""
        while self.dying:
            self._lose(self.draw.choice(self.dying))
        for engine in self.engines.values():
            engine.leave()
        self.world.settle()
        self.world.kill_mover()
        while self.world.flights:
            self.world.settle()
        self.world.check_empty()


def simulate(kind: str, seed: int, events: int) -> SimReport:
    """Runs one history; a failure carries the seed and the last events."""
    simulation = Simulation(kind, seed)
    try:
        return simulation.run(events)
    except Exception as error:
        story = "\n".join(simulation.world.story)
        raise AssertionError(f"simulate({kind!r}, {seed}, {events}): {error!r}\nstory:\n{story}") from error
