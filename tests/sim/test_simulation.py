"""Seeded histories of small worlds with real bytes; see `tests.sim.simulate`."""

import random
from collections import Counter

import pytest

from kvmanager.core.node import Node
from tests.sim.harness import fingerprint
from tests.sim.simulate import KINDS, Simulation, policy_of, simulate
from tests.sim.worlds import LIMITS, Regions

SHORT = [("sharded", seed, 250) for seed in range(7)]
SHORT += [("two-chains", seed, 150) for seed in range(4)]
SHORT += [("handoff", seed, 250) for seed in range(6)]


@pytest.mark.parametrize(("kind", "seed", "events"), SHORT)
def test_short_history(kind: str, seed: int, events: int) -> None:
    report = simulate(kind, seed, events)
    assert report.counters["step"] > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_long_history(kind: str, seed: int) -> None:
    simulate(kind, seed, 1500)


def test_the_short_histories_reach_what_they_are_for() -> None:
    """A simulator that stopped opening, onboarding or failing would find nothing: these must happen."""
    happened: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for kind, seeds in (("sharded", range(100, 106)), ("handoff", range(100, 110))):
        for seed in seeds:
            report = simulate(kind, seed, 250)
            happened += report.happened
            counters += Counter(report.counters)
    for name in ("runnable", "waiting", "refused", "resend", "plan failed", "plan unknown_fate", "export", "pull done"):
        assert happened[name] > 0, (name, happened)
    for name in ("prefix_hit", "partial_span_reuse", "onboard", "offload", "mirror", "spill", "eviction", "reclaim",
                 "draft_truncation", "handoff", "expired_ticket", "quarantined_copy"):  # fmt: skip
        assert counters[name] > 0, (name, counters)


@pytest.mark.parametrize("kind", KINDS)
def test_same_events_same_effects(kind: str) -> None:
    """The events of a history, applied to another node, give the same effects one by one."""
    simulation = Simulation(kind, 3)
    simulation.run(150)
    world = simulation.world
    specs = KINDS[kind](Regions({}), random.Random(f"{kind}/3"))
    node = Node(specs, LIMITS, policy=policy_of(3))
    again = [fingerprint(node.apply(event, now)) for event, now in world.recorded]
    assert again == world.outcomes
