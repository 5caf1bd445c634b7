"""What operators do to cached prefixes: keep them, or have them forgotten.

A pin keeps a path of spans findable, as a stand-in does for a request: on one tier at least, not on a certain one. It
takes nothing that was promised, and ends by itself only where its content is lost (a reset, a bad copy).
"""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import promises_hold
from kvmanager.core.group import Chain, Group
from kvmanager.core.operatorevents import Evicted, EvictPool, EvictPrefix, EvictTenant, Loss, Pinned, PinPrefix
from kvmanager.core.reclaim import evictable
from kvmanager.core.rows import BoolArray, RowArray, any_true
from kvmanager.core.spans import NO_SPAN
from kvmanager.core.state import OperatorPin, State
from kvmanager.errors import InvalidArgument, LimitExceeded, PoolExhausted, UnknownLease

PINS_MAX = 256
NAME_MAX = 64
"""Characters of a pin's id."""


def holding(chain: Chain, key: bytes) -> RowArray:
    """Findable spans that have a segment with this key, in whatever namespace; int64, ascending."""
    table = chain.table
    rows = np.flatnonzero(table.live & table.published)
    if len(rows) == 0:
        return rows
    words = chain.index.key_bytes // 8
    widest = int(table.valid[rows].max())
    keys = table.keys.words(rows, widest * words).reshape(len(rows), widest, words)
    same = (keys == np.frombuffer(key, np.uint64)).all(axis=2)
    same &= np.arange(widest) < table.valid[rows][:, None]
    found: RowArray = rows[same.any(axis=1)]
    return found


def path(chain: Chain, row: int) -> RowArray:
    """The spans from the root to `row`; int64."""
    rows = [row]
    while (parent := int(chain.table.parent[rows[-1]])) != NO_SPAN:
        rows.append(parent)
    return np.asarray(rows[::-1], np.int64)


def pin(state: State, event: PinPrefix) -> Pinned:
    """Keeps the prefix that ends with the key's span. Raises InvalidArgument, LimitExceeded, or PoolExhausted.

    A span that is not full yet is left out: a running request may still replace it.
    """
    group = _group(state, event.group)
    if not 1 <= len(event.pin_id) <= NAME_MAX or event.pin_id in state.pins:
        raise InvalidArgument(f"pin id {event.pin_id!r} must be new and have 1 to {NAME_MAX} characters")
    if len(state.pins) >= PINS_MAX:
        raise LimitExceeded(f"{PINS_MAX} prefixes are pinned; take some away first (kvmanager unpin)")
    kept = OperatorPin(event.pin_id, event.group, event.key, state.now, _rows_to_pin(group, event.key))
    tokens = pin_tokens(group, kept)
    for number, rows in kept.rows:
        group.chains[number].table.pin(rows)
        group.chains[number].table.anchor(rows)
    if not promises_hold(group):
        _release(group, kept)
        raise PoolExhausted(f"pinning {tokens} tokens would take what running requests of {event.group} were promised")
    state.pins[event.pin_id] = kept
    return Pinned(event.pin_id, _spans(kept), tokens)


def _rows_to_pin(group: Group, key: bytes) -> list[tuple[int, RowArray]]:
    """(chain index, rows) of every path to the key, without spans that are still being filled."""
    held: list[tuple[int, RowArray]] = []
    for number, chain in enumerate(group.chains):
        paths = [path(chain, row) for row in holding(chain, _checked(group, key)).tolist()]
        rows = np.unique(np.concatenate(paths)) if paths else np.empty(0, np.int64)
        rows = rows[chain.table.valid[rows] == chain.table.segments[rows]]
        if len(rows):
            held.append((number, rows))
    if not held:
        raise InvalidArgument(f"group {group.spec.name} has no full cached span up to key {key.hex()}")
    return held


def unpin(state: State, pin_id: str) -> Pinned:
    """Takes a pin away. Raises UnknownLease."""
    kept = state.pins.pop(pin_id, None)
    if kept is None:
        raise UnknownLease(f"no pin {pin_id!r}; there are {', '.join(sorted(state.pins)) or 'none'}")
    group = state.groups[kept.group]
    done = Pinned(pin_id, _spans(kept), pin_tokens(group, kept))
    _release(group, kept)
    group.unblock()
    return done


def _release(group: Group, kept: OperatorPin) -> None:
    for number, rows in kept.rows:
        group.chains[number].table.unanchor(rows)
        group.chains[number].unpin(rows)


def _spans(kept: OperatorPin) -> int:
    return sum(len(rows) for _, rows in kept.rows)


def pin_tokens(group: Group, kept: OperatorPin) -> int:
    """Tokens that it keeps, of the chain that has most."""
    tokens = [int(group.chains[n].table.valid[rows].sum()) * group.spec.page_rows for n, rows in kept.rows]
    return max(tokens, default=0)


def evict_prefix(state: State, event: EvictPrefix) -> Evicted:
    """Forgets what begins with the key's segment, as far as nobody uses it."""
    group = _group(state, event.group)
    key = _checked(group, event.key)
    wanted = []
    for chain in group.chains:
        marked = np.zeros(len(chain.table.live), bool)
        marked[holding(chain, key)] = True
        wanted.append(chain.table.below(marked))
    if not any(map(any_true, wanted)):
        raise InvalidArgument(f"group {event.group} has cached nothing with key {event.key.hex()}")
    return _evict(state, group, wanted)


def evict_tenant(state: State, event: EvictTenant) -> Evicted:
    """Forgets a tenant's cached spans, its floor or not."""
    group = _group(state, event.group)
    number = state.tenants.numbers.get(event.tenant)
    if number is None:
        raise InvalidArgument(f"no tenant {event.tenant!r}; known are {', '.join(sorted(state.tenants.numbers))}")
    owned = [chain.table.published & (state.tenants.of(chain.table.namespace) == number) for chain in group.chains]
    return _evict(state, group, owned)


def evict_pool(state: State, event: EvictPool) -> Evicted:
    """The policy's victims go until so many slabs are free. held_spans: of those left that hold pages of the group."""
    group = _group(state, event.group)
    pool = group.pools.get(event.pool)
    if pool is None:
        raise InvalidArgument(f"no pool {event.pool!r} in {event.group}; it has {', '.join(sorted(group.pools))}")
    if not 0 < event.free_slabs <= pool.slabs:
        raise InvalidArgument(f"{event.free_slabs} slabs outside 1..{pool.slabs} of pool {event.pool}")
    before = state.counters["eviction"]
    state.reclaimers[event.group].trim(pool, event.free_slabs)
    group.unblock()
    left = sum(int((chain.table.live & chain.table.published).sum()) for chain in group.chains)
    return Evicted(state.counters["eviction"] - before, left)


def _evict(state: State, group: Group, wanted: list[BoolArray]) -> Evicted:
    """wanted: by chain, bool[rows]."""
    forgotten = held = 0
    for chain, marked in zip(group.chains, wanted, strict=True):
        marked = marked & chain.table.live & chain.table.published
        rows = np.flatnonzero(marked & evictable(chain))
        rows = rows[np.argsort(-chain.table.first_token[rows], kind="stable")]  # children before their parents
        state.reclaimers[group.spec.name].evict(chain, rows, why=Loss.OPERATOR)
        forgotten += len(rows)
        held += int(marked.sum()) - len(rows)
    group.unblock()
    return Evicted(forgotten, held)


def _group(state: State, name: str) -> Group:
    group = state.groups.get(name)
    if group is None:
        raise InvalidArgument(f"no group {name!r} on this node; it has {', '.join(sorted(state.groups))}")
    return group


def _checked(group: Group, key: bytes) -> bytes:
    if len(key) != group.key_bytes:
        raise InvalidArgument(f"a key of {len(key)} bytes; keys of {group.spec.name} have {group.key_bytes}")
    return key
