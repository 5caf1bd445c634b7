"""What operators do in a history: they pin prefixes, take pins away, and have content forgotten."""

from __future__ import annotations

import random

import numpy as np

from kvmanager.core.operatorevents import (
    Evicted,
    EvictPool,
    EvictPrefix,
    EvictTenant,
    Pinned,
    PinPrefix,
    UnpinPrefix,
)
from kvmanager.errors import InvalidArgument, PoolExhausted, UnknownLease
from tests.sim.harness import World


def operate(action: str, world: World, group: str, draw: random.Random) -> None:
    """One call of an operator, on a prefix that is cached where there is one."""
    {"pin": _pin, "unpin": _unpin, "evict": _evict}[action](world, group, draw)


def _key(world: World, group: str, draw: random.Random) -> bytes | None:
    """A key of some findable span; None where nothing is cached."""
    of = world.node.state.groups[group]
    chain = draw.choice(of.chains)
    rows = np.flatnonzero(chain.table.live & chain.table.published)
    if len(rows) == 0:
        return None
    text = chain.table.keys[int(draw.choice(rows.tolist()))]
    at = draw.randrange(len(text) // of.key_bytes) * of.key_bytes
    return text[at : at + of.key_bytes]


def _pin(world: World, group: str, draw: random.Random) -> None:
    key = _key(world, group, draw)
    if key is None:
        return
    answer = world.apply(PinPrefix(f"pin {world.net.applied}", group, key))
    if isinstance(answer, Pinned):
        assert answer.spans > 0
        world.net.happened["pin"] += 1
    else:
        assert isinstance(answer, InvalidArgument | PoolExhausted), answer


def _unpin(world: World, group: str, draw: random.Random) -> None:
    pins = sorted(pin.pin_id for pin in world.node.state.pins.values() if pin.group == group)
    if pins:
        _done(world, UnpinPrefix(draw.choice(pins)), Pinned)
        world.net.happened["unpin"] += 1


def _evict(world: World, group: str, draw: random.Random) -> None:
    """By key, tenant or pool; what a pin keeps is found afterwards."""
    state = world.node.state
    key = _key(world, group, draw)
    pool = state.groups[group].pools[draw.choice(sorted(state.groups[group].pools))]
    ways = [
        EvictTenant(group, draw.choice(sorted(state.tenants.numbers))),
        *([EvictPool(group, pool.name, draw.randint(1, pool.slabs))] if pool.slabs else []),
        *([] if key is None else [EvictPrefix(group, key)]),
    ]
    kept = [(n, rows.copy()) for pin in state.pins.values() if pin.group == group for n, rows in pin.rows]
    _done(world, draw.choice(ways), Evicted)
    for number, rows in kept:
        assert world.node.state.groups[group].chains[number].table.published[rows].all(), "a pinned prefix was evicted"
    world.net.happened["evict"] += 1


def unpin_all(world: World) -> None:
    """No pin is left."""
    for pin in sorted(world.node.state.pins):
        _done(world, UnpinPrefix(pin), Pinned)
    assert not world.node.state.pins


def _done(world: World, event: UnpinPrefix | EvictPrefix | EvictTenant | EvictPool, done: type) -> None:
    """The call does what it says. Where the daemon died in it, the next one may have found it done in the journal."""
    daemon = world.node
    answer = world.apply(event)
    if not isinstance(answer, done):
        assert world.node is not daemon, answer
        assert isinstance(answer, InvalidArgument | UnknownLease), answer
