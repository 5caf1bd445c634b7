"""Seeded histories of small worlds with real bytes; see `tests.sim.simulate`; `make sim` runs more of them."""

from collections import Counter

import numpy as np
import pytest

from kvmanager.core.node import Node
from tests.sim.shrink import simulate
from tests.sim.simulate import FINISH, Simulation, policy_of
from tests.sim.worlds import KINDS


@pytest.mark.parametrize("seed", range(20))
def test_short_history(seed: int) -> None:
    report = simulate(seed, 300)
    assert report.counters["step"] > 0


def test_the_short_histories_reach_what_they_are_for() -> None:
    """A simulator that stopped opening, onboarding or failing would find nothing: these must happen."""
    happened: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    for seed in range(100, 124):
        report = simulate(seed, 300)
        happened += report.happened
        counters += report.counters
    for name in ("runnable", "waiting", "refused", "resend", "plan failed", "plan unknown_fate", "export", "pull done",
                 "stream cut", "stream resumed", "nodes cut off", "message lost", "plan lost", "mover died",
                 "late bytes", "engine gone", "daemon died", "reset", "pin", "unpin", "evict",
                 "token ids told"):  # fmt: skip
        assert happened[name] > 0, (name, happened)
    for name in ("prefix_hit", "partial_span_reuse", "onboard", "offload", "mirror", "spill", "eviction", "reclaim",
                 "draft_truncation", "handoff", "expired_ticket", "quarantined_copy", "extent_move"):  # fmt: skip
        assert counters[name] > 0, (name, counters)


def test_leases_reach_what_they_are_for() -> None:
    happened: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    first = list(KINDS).index("caches")
    for seed in range(first + 10 * len(KINDS), first + 16 * len(KINDS), len(KINDS)):
        report = simulate(seed, 400)
        happened += report.happened
        counters += report.counters
    for name in ("leased", "reserved", "stored", "store given up", "load failed", "lease refused", "lease asked again",
                 "lease waits", "waited lease",
                 "daemon died", "engine gone", "stream resumed"):  # fmt: skip
        assert happened[name] > 0, (name, happened)
    for name in ("acquire", "store", "expired_lease", "failed_load", "handoff", "eviction", "onboard",
                 "offload"):  # fmt: skip
        assert counters[name] > 0, (name, counters)


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_same_events_same_effects(seed: int) -> None:
    """The events of a history, applied to other nodes, give the same effects one by one."""
    simulation = Simulation(seed)
    simulation.run(200)
    nodes = [Node(world.specs, world.limits, policy=policy_of(seed)) for world in simulation.worlds]
    for node in nodes:
        node.announce(frozenset(node.state.groups))
    entries = [entry for entry in simulation.net.story if not isinstance(entry, str)]
    assert len(entries) >= 200
    with np.printoptions(threshold=100_000):
        for entry in entries:
            again = nodes[entry.node].apply(entry.event, entry.now)
            assert repr(again) == repr(entry.effects), entry.event


@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_a_recovered_core_goes_on_with_no_difference(seed: int) -> None:
    """The same history, once with its cores, once with others from their journals before every fifth action."""
    stories = []
    for every in (0, 5):
        simulation = Simulation(seed)
        simulation._weights[simulation._names.index("crash")] = 0
        for number in [*range(150), FINISH]:
            if every and number % every == 0:
                for world in simulation.worlds:
                    world.crashes.replace()
            simulation._do(number, False)
        with np.printoptions(threshold=100_000):
            stories.append([repr(entry) for entry in simulation.net.story])
    assert stories[0] == stories[1]


@pytest.mark.parametrize(("seed", "events"), [(10_004, 600), (10_188, 600), (10_267, 1_000)])
def test_host_copies_come_to_an_end(seed: int, events: int) -> None:
    """Spans of two classes, of one request, and of two groups on one host region, pushed each other out for ever."""
    simulate(seed, events)
