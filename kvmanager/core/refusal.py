"""What a refused request is told: the pool, what it needs, what is free, who holds it, and when to ask again.

`needed` and `free` are slabs of the pool everywhere; in a pool with one page class a slab is a page.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.request import Phase, Request
from kvmanager.core.spans import DEVICE, NO_PAGE
from kvmanager.core.state import State
from kvmanager.core.tenants import NOBODY
from kvmanager.core.tickets import tenant_of
from kvmanager.errors import PoolExhausted

NAMED_HOLDERS = 3
OTHERS = "other tenants"


def exhausted(state: State, group: Group, pool: Pool, needed: int, free: int) -> PoolExhausted:
    """The refusal of `needed` slabs of a pool that has `free` to give; notes the deficit of a device pool."""
    if pool.tier == "device":
        group.deficit_slabs = max(group.deficit_slabs, needed - free)
    held = _held(state, group, pool)
    named = sorted(_merged(held), key=lambda entry: -entry[1])[:NAMED_HOLDERS]
    return PoolExhausted(
        f"pool {pool.name} of {group.spec.name} needs {needed} pages, {free} are free or reclaimable and not promised",
        pool=pool.name,
        needed=needed,
        free=free,
        holder=", ".join(f"{name} ({slabs} pages)" for name, slabs in named),
        retry_after_ns=_retry_after(state, group, pool, needed - free, held),
    )


def _merged(held: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """(holder, slabs): what other tenants hold is one entry, which names nobody."""
    slabs: dict[str, int] = {}
    for name, count, _ in held:
        slabs[name or OTHERS] = slabs.get(name or OTHERS, 0) + count
    return list(slabs.items())


def _held(state: State, group: Group, pool: Pool) -> list[tuple[str, int, int]]:
    """(holder, slabs of the pool it holds, ns until it may give them back), of requests and tickets.

    Those of other tenants than the one who asks have no name.
    """
    pace, least = state.pace, state.limits.retry_after_ns
    asker = state.tenants.specs[group.asker].name if group.asker != NOBODY else None
    found = []
    for request in state.holders(group.spec.name):
        slabs = sum(_slabs(part.chain, pool, part.rows) for part in request.chains) + _hot_slabs(group, pool, request)
        if request.phase is Phase.CLOSING:
            wait = pace.fence_ns
        else:
            wait = max(pace.request_ns - (state.now - request.since), pace.fence_ns)
        own = state.tenants.name_of(request.namespace) == asker
        found.append((f"{request.engine}/{request.request_id}" if own else "", slabs, max(wait, least)))
    for ticket in state.tickets.values():
        if ticket.group == group.spec.name:
            slabs = sum(_slabs(group.chains[number], pool, rows) for number, rows in ticket.rows)
            wait = ticket.expires_ns + state.limits.ticket_grace_ns - state.now
            own = tenant_of(state, ticket) == asker
            found.append((f"ticket {ticket.ticket_id}" if own else "", slabs, max(wait, least)))
    return [entry for entry in found if entry[1]]


def _slabs(chain: Chain, pool: Pool, rows: Iterable[int]) -> int:
    """Slabs that the spans' pages in the pool fill, rounded up by class."""
    index, slabs = np.fromiter(rows, np.int64), 0
    for c, tier in chain.spec.class_tiers:
        if chain.pool(c, tier) is pool:
            pages = int((chain.table.pages[c, tier, index] != NO_PAGE).sum())
            slabs += -(-pages // pool.per_slab(chain.spec.classes[c].name))
    return slabs


def _hot_slabs(group: Group, pool: Pool, request: Request) -> int:
    return len(request.hot) if len(request.hot) and group.chains[0].pool(0, DEVICE) is pool else 0


def _in_flight(group: Group, pool: Pool) -> int:
    """Slabs of spans that nothing but plans in flight keeps from being reclaimed."""
    slabs = 0
    for chain in group.chains:
        table = chain.table
        rows = np.flatnonzero(table.live & table.published & (table.pins == 0) & (table.busy > 0))
        slabs += _slabs(chain, pool, rows.tolist())
    return slabs


def _retry_after(state: State, group: Group, pool: Pool, lacking: int, held: list[tuple[str, int, int]]) -> int:
    """When enough slabs should have come back, ns from now.

    Draining pages come back with the next fence, those of plans in flight with their ends (both as long as such things
    took lately), tickets when lease and grace are over, requests when they are as old as requests get here.
    """
    least = state.limits.retry_after_ns
    draining = -(-pool.units(PageState.DRAINING) // pool.units_per_slab)
    sources = [(max(state.pace.fence_ns, least), draining)]
    if state.jobs:
        sources.append((max(state.pace.copy_ns, least), _in_flight(group, pool)))
    sources += [(wait, slabs) for _, slabs, wait in held]
    longest = least
    for wait, slabs in sorted(sources):
        longest, lacking = wait, lacking - slabs
        if lacking <= 0:
            break
    return longest
