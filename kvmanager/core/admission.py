"""Promises: what a request needs now, what it may need later, and whether every pool can give it.

A promise is a count of slabs, not pages. Each byte is counted once: what is taken leaves the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmanager.core.backing import backing, own_first, promise_holds
from kvmanager.core.giveway import give_way
from kvmanager.core.group import Claim, Group
from kvmanager.core.homes import Latents, latents_of
from kvmanager.core.pool import Pool
from kvmanager.core.reclaim import clean, evictable, idle, reclaimable_slabs
from kvmanager.core.refusal import exhausted
from kvmanager.core.request import Request
from kvmanager.core.spans import DEVICE, HOST
from kvmanager.core.spec import ChainSpec
from kvmanager.core.state import State
from kvmanager.core.tenants import span_units, used_units
from kvmanager.errors import PoolExhausted, QuotaExceeded
from kvmanager.geometry import SEQUENTIAL, TokenOrder


@dataclass
class Demand:
    """Of one pool: pages by class to be taken now, and slabs to be promised."""

    now: dict[str, int] = field(default_factory=dict)
    later_slabs: int = 0


class Demands:
    """Demands by pool name."""

    def __init__(self) -> None:
        self.by_pool: dict[str, Demand] = {}

    def of(self, pool: str) -> Demand:
        """The pool's demand, created empty."""
        return self.by_pool.setdefault(pool, Demand())

    def add_now(self, pool: str, page_class: str, pages: int) -> None:
        """Pages to be taken at once."""
        now = self.of(pool).now
        now[page_class] = now.get(page_class, 0) + pages


def own_order(group: Group, chain: ChainSpec) -> TokenOrder:
    """Order of the spans that an engine of the group fills itself."""
    return chain.order if group.spec.sparse is None else SEQUENTIAL


def growth_promise(group: Group, chain: ChainSpec, tokens: int) -> dict[str, int]:
    """Slabs by pool for `tokens` further tokens at the end of a chain, of classes that stay on the device."""
    promise: dict[str, int] = {}
    pages = growth_pages(group, chain, tokens)
    for page_class in chain.classes if pages else ():
        if group.spec.floats(page_class.name):
            continue
        pool = group.pools[page_class.device_pool]
        slabs = -(-pages // pool.per_slab(page_class.name))
        promise[pool.name] = promise.get(pool.name, 0) + slabs
    return promise


def growth_pages(group: Group, chain: ChainSpec, tokens: int) -> int:
    """Pages of one class that `tokens` further tokens at the end of a chain take."""
    order = own_order(group, chain)
    return -(-tokens // chain.span_tokens(order)) * chain.span_pages(order) if tokens > 0 else 0


def latent_growth(group: Group, request: Request) -> int:
    """Pages that a request of a decode rank was promised and has not got."""
    part = request.chains[0]
    return growth_pages(group, part.chain.spec, request.most_tokens - part.end_token)


def latent_promise(group: Group, latents: Latents, homed: int) -> dict[str, int]:
    """Slabs by pool for the latent pages of a request, of which `homed` are to stay in HBM."""
    sparse, chain = group.spec.sparse, group.chains[0]
    assert sparse is not None
    c = chain.page_class(group.class_index(chain, sparse.latent_class))
    return {
        c.host_pool: latents.host_slabs(homed),
        c.device_pool: latents.device_slabs(homed, sparse.tail_pages),
    }


def outstanding_promise(group: Group, request: Request) -> dict[str, int]:
    """What is still promised to a request: growth, on a decode rank its hot buffer and homes of latent pages.

    One that is retracted, or about to be, is owed the host pages that it lacks, and nothing else.
    """
    if request.retracted:
        return retract_promise(request)
    promise: dict[str, int] = {}
    for part in request.chains:
        growth = request.most_tokens - part.end_token
        if growth > 0:
            _add(promise, growth_promise(group, part.chain.spec, growth))
        if group.spec.swaps:
            assert group.spec.sparse is not None
            latents = latents_of(group, part, latent_growth(group, request))
            _add(promise, latent_promise(group, latents, request.homed_pages))
            if len(request.hot) == 0:
                _add(promise, {part.chain.pool(0, DEVICE).name: group.spec.sparse.hot_slabs})
    return promise


def _add(promise: dict[str, int], more: Mapping[str, int]) -> None:
    for pool, slabs in more.items():
        promise[pool] = promise.get(pool, 0) + slabs


def retract_promise(request: Request) -> dict[str, int]:
    """Slabs by host pool for the copies that a request needs to lie on the host as a whole."""
    promise: dict[str, int] = {}
    for part in request.chains:
        for c, page_class in enumerate(part.chain.spec.classes):
            pool = part.chain.pool(c, HOST)
            pages = int(part.chain.widths(part.chain.absent(c, HOST, part.rows.array)).sum())
            promise[pool.name] = promise.get(pool.name, 0) - (-pages // pool.per_slab(page_class.name))
    return promise


def update_promise(state: State, request: Request) -> None:
    """Brings the pools' promised counts up to date with what the request holds now.

    Of a sparse group a promise rises only as far as pages stand behind it: there, slabs come free by releases that
    depend on copies and fences, so the window of resident pages ahead of a request is renewed when they did.
    """
    group = state.groups[request.group]
    wanted = outstanding_promise(group, request)
    had, request.unbacked_slabs = request.promised, 0
    if not (wanted or had):
        return
    tenant = state.tenants.of_namespace[request.namespace]
    for pool, slabs in had.items():
        group.pools[pool].promise(tenant, -slabs)
    if group.spec.swaps or request.retracted:
        backed = {name: _backed(group, request, name, slabs, had.get(name, 0)) for name, slabs in wanted.items()}
        device = group.chains[0].pool(0, DEVICE).name
        request.unbacked_slabs = wanted.get(device, 0) - backed.get(device, 0)
        wanted = backed
    request.promised = wanted
    for pool, slabs in wanted.items():
        group.pools[pool].promise(tenant, slabs)


def _backed(group: Group, request: Request, name: str, wanted: int, had: int) -> int:
    """How much of `wanted` slabs can be promised beside what others were promised; never less than before."""
    pool = group.pools[name]
    if wanted <= had:
        return wanted
    room = pool.free_slabs - pool.owed_slabs
    if room < wanted:
        # What the request gave up itself goes back to nobody else while it drains.
        room += reclaimable_slabs(group, pool) + (len(request.truncated) if pool.tier == "device" else 0)
    return max(had, min(wanted, room))


def update_promises(state: State, group: Group, but: Request | None = None) -> None:
    """`update_promise` for every request of a decode rank: host copies of spans it holds came or went."""
    if group.spec.sparse is not None:
        for request in state.holders(group.spec.name):
            if request is not but:
                update_promise(state, request)


def check(
    state: State,
    group: Group,
    demands: Demands,
    request: Request,
    own: Mapping[str, int] | None = None,
    claim: Demands | None = None,
) -> None:
    """Makes room for what is asked now; PoolExhausted for the first pool that can't give it, and what comes later.

    `own`: pool -> slabs promised to the one who asks (a running request), which are not in its way; None: it asks to
    be admitted. Who was refused before and ranks higher goes first, for `claim_hold_ns`: a running request before
    one that asks to be admitted, then by the tenants' priorities. `claim`: what is held back for it, if that is less
    than all it asks for (a running request needs one more page to go on). The claim of one that never fits ends with
    that time, so a smaller one behind it waits no longer.

    While pages that fit some waiting request are free or reclaimable, one gets on: at the latest when every
    waiting request has asked once more after `claim_hold_ns`, since then no claim holds anything back and nothing
    but promises and limits is asked about. Tested by `tests.sim.standstill`.
    """
    who = (request.engine, request.epoch, request.request_id)
    tenant = state.tenants.of_namespace[request.namespace]
    rank = (1, -state.tenants.specs[tenant].priority) if own is None else (0, 0)
    try:
        for name, demand in demands.by_pool.items():
            pool = group.pools[name]
            needed = pool.slabs_needed(demand.now) + demand.later_slabs
            owed = pool.owed_slabs - (own or {}).get(name, 0)
            first = _claimed(state, group, name, rank, who)
            _check_pool(state, group, pool, (needed, demand.later_slabs), owed, first)
        if state.tenants.limited:
            _check_tenant(state, group, tenant, demands, own or {})
    except PoolExhausted as error:
        if error.retry_after_ns:
            _claim(state, group, who, rank, claim or demands)
        raise
    group.claims.pop(who, None)
    _make_room(state, group, demands, state.tenants.of_namespace[request.namespace])


def _claim(state: State, group: Group, who: tuple[str, int, int], rank: tuple[int, int], demands: Demands) -> None:
    """Notes that somebody waits; since when is the time of the first refusal."""
    since = group.claims[who].since if who in group.claims else state.now
    slabs = {name: group.pools[name].slabs_needed(d.now) + d.later_slabs for name, d in demands.by_pool.items()}
    group.claims[who] = Claim(slabs, rank, since)


def _claimed(state: State, group: Group, pool: str, rank: tuple[int, int], who: tuple[str, int, int]) -> int:
    """Slabs held back for those that were refused and rank higher; claims that are over are forgotten."""
    if not group.claims:
        return 0
    for old in [key for key, claim in group.claims.items() if state.now - claim.since > 2 * state.limits.claim_hold_ns]:
        del group.claims[old]
    return sum(
        claim.slabs.get(pool, 0)
        for key, claim in group.claims.items()
        if claim.rank < rank and key != who and state.now - claim.since <= state.limits.claim_hold_ns
    )


def unpromised(state: State, group: Group, pool: Pool, request: Request, wanted: int) -> int:
    """Slabs of a pool, as far as `wanted`, that a request which asks to be admitted could be promised."""
    if pool.name in state.lenders:
        return wanted  # it may borrow further slabs, or the request is refused
    who = (request.engine, request.epoch, request.request_id)
    tenant = state.tenants.of_namespace[request.namespace]
    rank = (1, -state.tenants.specs[tenant].priority)
    room = pool.free_slabs - pool.owed_slabs - _claimed(state, group, pool.name, rank, who)
    if room < wanted:
        room += reclaimable_slabs(group, pool)
    return max(0, min(wanted, room))


def _check_tenant(state: State, group: Group, tenant: int, demands: Demands, own: Mapping[str, int]) -> None:
    """Raises QuotaExceeded where a tenant would pass its ceiling or eat into others' floors; else makes it fit."""
    over: list[tuple[Pool, int]] = []
    for name, demand in demands.by_pool.items():
        pool = group.pools[name]
        unit = pool.units_per_slab
        needed = (pool.slabs_needed(demand.now) + demand.later_slabs - own.get(name, 0)) * unit
        used = used_units(group, pool, tenant)
        promised = sum(
            request.promised.get(name, 0)
            for request in state.holders(group.spec.name)
            if state.tenants.of_namespace[request.namespace] == tenant
        )
        held = used - _idle_units(group, pool, tenant) + promised * unit
        most = state.tenants.request_units(tenant, pool)
        if held + needed > most:
            name_ = state.tenants.specs[tenant].name
            raise QuotaExceeded(
                f"tenant {name_!r} may hold {most // unit} pages of pool {name} with its requests, it holds "
                f"{-(-held // unit)} and asks for {-(-needed // unit)}",
                pool=name,
                needed=-(-needed // unit),
                free=max(most - held, 0) // unit,
                holder=f"tenant {name_}",
                retry_after_ns=max(state.pace.request_ns, state.limits.retry_after_ns) if needed <= most else 0,
            )
        over.append((pool, used + promised * unit + needed - state.tenants.ceiling_units(tenant, pool)))
    for pool, units in over:
        if units > 0:
            state.reclaimers[group.spec.name].give_back(pool, tenant, units)


def _idle_units(group: Group, pool: Pool, tenant: int) -> int:
    """Units of the pool in cached spans of a tenant that can all be forgotten now."""
    total = 0
    for chain in group.chains:
        rows = np.flatnonzero(evictable(chain))
        rows = rows[group.tenants.of(chain.table.namespace[rows]) == tenant]
        total += int(span_units(chain, pool, rows).sum())
    return total


def check_now(
    state: State, group: Group, demands: Demands, request: Request, claim: Callable[[], Demands]
) -> None:
    """Makes room for what is promised already and asked now; PoolExhausted for the first pool that can't give it.

    It happens only where more is promised than there is (overcommit above 1.0). `claim`: as for `check`.
    """
    who = (request.engine, request.epoch, request.request_id)
    try:
        for name, demand in demands.by_pool.items():
            pool = group.pools[name]
            _check_pool(state, group, pool, (pool.slabs_needed(demand.now), 0), 0, 0)
    except PoolExhausted:
        _claim(state, group, who, (0, 0), claim())
        raise
    group.claims.pop(who, None)
    _make_room(state, group, demands, state.tenants.of_namespace[request.namespace])


def _make_room(state: State, group: Group, demands: Demands, tenant: int) -> None:
    """Makes room for all that is taken at once, before any of it is taken. Raises PoolExhausted where it does not fit.

    A slab that is partly used may be counted twice by `_check_pool`, as room for its class and as one that could
    be given to another. What fits is known here, when everything that must go has gone.
    """
    reclaimer = state.reclaimers[group.spec.name]
    for name, demand in demands.by_pool.items():
        pool = group.pools[name]
        own = own_first(group, pool, tenant, pool.slabs_needed(demand.now)) if demand.now else 0
        if own:
            reclaimer.give_back(pool, tenant, own * pool.units_per_slab)
        if demand.now and not reclaimer.make_room(pool, demand.now):
            raise exhausted(state, group, pool, pool.slabs_needed(demand.now), pool.free_slabs)


def _check_pool(
    state: State, group: Group, pool: Pool, demand: tuple[int, int], owed: int, first: int
) -> None:
    """`demand`: slabs needed in all, and those of them that are needed later.

    owed: slabs promised to others; below zero where less is promised than may be. first: those who go first wait for.
    """
    needed, later = demand
    if needed > pool.most_slabs:
        raise PoolExhausted(
            f"pool {pool.name} of {group.spec.name} has {pool.most_slabs} pages in all, the request needs {needed}: "
            "make the pool larger or the request shorter",
            pool=pool.name,
            needed=needed,
            free=pool.most_slabs,
        )

    # In all, with what others were promised, and now, whatever they were.
    least = first + max(needed + owed, needed - later)
    if pool.free_slabs >= least:
        return  # what could be reclaimed is counted over all spans, so only when it matters
    reachable = pool.free_slabs + reclaimable_slabs(group, pool)
    if group.tenants.has_floors and owed > 0:
        owed = _owed_beyond(group, pool, owed, reachable)
        least = first + max(needed + owed, needed - later)
    if reachable >= least:
        return
    lender, lacking = state.lenders.get(pool.name), needed + max(owed, -later) + first - reachable
    if lender is not None and lender.fetch(pool, lacking):
        return  # they are the pool's from now on, so that what is promised here nobody else can be promised
    give_way(state, group, pool, needed - max(reachable - max(owed, 0) - first, 0))
    raise exhausted(state, group, pool, needed, max(min(reachable, reachable - owed) - first, 0))


def _owed_beyond(group: Group, pool: Pool, owed: int, reachable: int) -> int:
    """What is owed to others than the one who asks, less what their tenants have for themselves alone."""
    behind = backing(group, pool)
    others = behind.of_others(group.asker)
    if others > behind.common:
        return reachable + others - behind.common  # some promise has nothing behind it: nobody gets anything
    return owed - (pool.owed_slabs - pool.promised_of.get(group.asker, 0) - others)


def check_workspace(group: Group, tokens: int) -> None:
    """Raises PoolExhausted where no step over a context of `tokens` tokens fits the ranks' workspace.

    One engine has it as a whole and one step at a time takes it, so nothing is promised there: it fits or never will.
    """
    workspace = group.spec.workspace
    if workspace is None:
        return
    needed = workspace.pages_needed(group.spec.geometry, tokens)
    if needed > workspace.pages:
        raise PoolExhausted(
            f"a step over {tokens} tokens of {group.spec.name} needs {needed} pages of workspace on each rank "
            f"({needed * workspace.page_bytes} bytes), {workspace.pool} has {workspace.pages} "
            f"({workspace.pages * workspace.page_bytes} bytes): make workspace_bytes_per_rank larger or the request "
            "shorter",
            pool=workspace.pool, needed=needed, free=workspace.pages,
        )  # fmt: skip


def promises_hold(group: Group, wants: Mapping[str, Mapping[str, int]] | None = None) -> bool:
    """Every pool could give now all that it owes, and the pages `wants[pool][class]` beside."""
    for name, pool in group.pools.items():
        if not promise_holds(group, pool, pool.slabs_needed((wants or {}).get(name, {}))):
            return False
    return True


@dataclass(frozen=True)
class NewSpans:
    """Spans to be added, in token order: parts of spans of one order, each with its first tokens, int64[n], n > 0."""

    parts: tuple[tuple[npt.NDArray[np.int64], TokenOrder], ...]

    def __len__(self) -> int:
        return sum([len(firsts) for firsts, _ in self.parts])

    def pages(self, chain: ChainSpec) -> int:
        """Page indexes of one class that all of them take."""
        return sum([len(firsts) * chain.span_pages(order) for firsts, order in self.parts])

    def end(self, chain: ChainSpec) -> int:
        """The position behind the last; there is one."""
        firsts, order = self.parts[-1]
        return int(firsts[-1]) + chain.span_tokens(order)

    def widths(self, chain: ChainSpec) -> list[int]:
        """Page indexes of one class that each takes."""
        return [pages for firsts, order in self.parts for pages in [chain.span_pages(order)] * len(firsts)]

    def ends(self, chain: ChainSpec) -> list[int]:
        """The position behind each."""
        return [end for firsts, order in self.parts for end in (firsts + chain.span_tokens(order)).tolist()]


def span_orders(chain: ChainSpec, start: int, imported_end: int, end: int, *, sparse: bool) -> NewSpans:
    """The new spans that cover positions [start, end).

    Positions below `imported_end` arrive by hand-off: they keep the source's order where a whole source span
    starts, and are permuted one page at a time up to there. What the engine writes itself is in its own order.
    """
    own = SEQUENTIAL if sparse else chain.order
    imported = chain.imported_order
    parts: list[tuple[npt.NDArray[np.int64], TokenOrder]] = []
    at = start
    while at < end:
        keeps = at < imported_end and at % chain.span_tokens(imported) == 0
        order = imported if keeps else own
        tokens = chain.span_tokens(order)
        # All alike up to the end of their kind; before a whole source span starts, one at a time.
        stop = min(imported_end, end) if keeps else end if at >= imported_end else at + 1
        firsts = np.arange(at, stop, tokens, dtype=np.int64)
        parts.append((firsts, order))
        at += len(firsts) * tokens
    return NewSpans(tuple(parts))


def device_slabs_free(group: Group, pool: Pool) -> int:
    """Slabs that are free, or hold nothing but clean copies of idle spans (no eviction needed)."""
    slabs = pool.free_slabs
    for chain in group.chains:
        for c, page_class in enumerate(chain.spec.classes):
            if chain.has_host(c) and chain.pool(c, DEVICE) is pool and pool.per_slab(page_class.name) == 1:
                rows = np.flatnonzero(idle(chain) & clean(chain, c))
                slabs += int(chain.widths(rows).sum())
    return slabs
