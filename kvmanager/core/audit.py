"""Invariants across structures, in one place. A failure carries the story of what disagrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kvmanager.core.admission import outstanding_promise
from kvmanager.core.backing import backing
from kvmanager.core.chainaudit import ChainAudit, Passed
from kvmanager.core.extents import PoolExtents, region_story
from kvmanager.core.group import Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.request import Phase, Request
from kvmanager.core.rows import all_true, any_true, places
from kvmanager.core.spans import DEVICE
from kvmanager.core.state import CopyJob, FenceEntry, PullJob, State, concat
from kvmanager.core.tenants import span_units
from kvmanager.errors import InvariantViolation
from kvmanager.geometry import Int64Array

_PAGE_FREE, _QUARANTINED = int(PageState.FREE), int(PageState.QUARANTINED)


def _check(condition: bool, story: str) -> None:
    if not condition:
        raise InvariantViolation(story)


def ledger_holds(pool: Pool) -> bool:
    """No state has less than nothing, and all but the free ones take no more than there is. Cheap: counters only."""
    taken = 0
    for space in pool.spaces.values():
        if min(space.counts) < 0:
            return False
        taken += (space.pages - space.counts[_PAGE_FREE]) * space.units
    return taken <= pool.capacity_units and all(sum(space.counts) == space.pages for space in pool.spaces.values())


def audit(state: State, passed: Passed | None = None) -> None:
    """Checks everything. Raises InvariantViolation.

    `passed`: given by one who audits a state again and again; what is byte for byte as it was when it last held is not
    looked at once more.
    """
    for _, check in checks(state, passed):
        check()


def checks(state: State, passed: Passed | None = None) -> Iterator[tuple[str, Callable[[], None]]]:
    """(what is checked, a function that raises InvariantViolation), for all that there is to check."""
    passed = {} if passed is None else passed
    yield "timelines and fences", partial(_audit_attaches, state)
    yield "shared regions", partial(_audit_regions, state)
    for name, group in state.groups.items():
        chains = [ChainAudit(chain, f"{name}/{chain.spec.name}") for chain in group.chains]
        requests = state.holders(name)
        yield f"ledger of {name}", partial(_ledger_unless_seen, state, group, chains, requests, passed)
        yield f"promises of {name}", partial(_audit_promises, state, group, requests)
        yield f"requests of {name}", partial(_audit_requests, state, requests)
        for number, chain_audit in enumerate(chains):
            yield from chain_audit.checks(passed)
            where = f"{name}/{group.chains[number].spec.name}"
            yield f"pins, leases and plans of {where}", partial(_audit_holders, state, group, number, requests)


def _ledger_unless_seen(
    state: State, group: Group, chains: list[ChainAudit], requests: list[Request], passed: Passed
) -> None:
    """`_audit_ledger`, unless all that it looks at is as it was when it last held."""
    key, seen = f"ledger of {group.spec.name}", _seen_of_ledger(state, group, requests)
    if passed.get(key) != seen:
        _audit_ledger(state, group, chains, requests)
        passed[key] = seen


def _seen_of_ledger(state: State, group: Group, requests: list[Request]) -> object:
    """All that `_audit_ledger` looks at, as values."""
    pools = [
        (pool.capacity_units, space.state.tobytes(), tuple(space.counts), pool.used_in_slabs(name).tobytes())
        for pool in group.pools.values()
        for name, space in pool.spaces.items()
    ]
    withheld = [(name, frozenset(pages)) for pool in group.pools.values() for name, pages in pool.withheld.items()]
    owned = [(chain.table.live.tobytes(), chain.table.pages.tobytes()) for chain in group.chains]
    hot = [request.hot.tobytes() for request in requests if len(request.hot)]
    frees = [(pool, name, pages.tobytes()) for entry in _entries(state, group) for pool, name, pages in entry.frees]
    kept = [(*where, pages.tobytes()) for *where, pages in state.quarantine]
    return pools, withheld, owned, hot, frees, kept


def _audit_ledger(state: State, group: Group, chains: list[ChainAudit], requests: list[Request]) -> None:
    """Every page that is not free has one owner, and the states of each pool sum to its capacity."""
    owned = _owned_pages(state, group, chains, requests)
    for pool in group.pools.values():
        _audit_pool(pool, owned.get(pool.name, {}))


def _audit_regions(state: State) -> None:
    """Every byte of a shared region is some pool's, nobody's, or left over at an extent's end."""
    for region in state.regions.values():
        pools = {name: pool for group in state.groups.values() for name, pool in group.pools.items()}
        specs = [spec for group in state.groups.values() for spec in group.spec.pools if spec.name in region.pools]
        story = region_story(region, pools, {spec.name: PoolExtents.of(spec) for spec in specs})
        _check(not story, story)


def _audit_attaches(state: State) -> None:
    """Timelines are known of attached ranks and of ended ones that a fence still names, of nobody else."""
    attached, ended, named = set(), set(), set()
    for engine in state.all_engines():
        attached |= set(engine.attaches)
        ended |= engine.ended
        named |= {attach_id for entry in engine.fences for attach_id in entry.fence}
    if set(state.timelines) != attached | ended:
        raise InvariantViolation(f"timelines of {sorted(state.timelines)}, attached {attached}, ended {ended}")
    _check(state.dead_attaches == ended, f"dead attaches {state.dead_attaches}, engines say {ended}")
    _check(ended <= named <= attached | ended, f"fences name {named}; attached {attached}, ended {ended}")


class _Owners:
    """Pages that something owns: pool -> class -> arrays of page indexes, one entry an owner."""

    def __init__(self) -> None:
        self.by_pool: dict[str, dict[str, list[Int64Array]]] = {}

    def add(self, pool: str, page_class: str, pages: Int64Array) -> None:
        """One more owner of these pages."""
        self.by_pool.setdefault(pool, {}).setdefault(page_class, []).append(pages)


def _owned_pages(
    state: State, group: Group, chains: list[ChainAudit], requests: list[Request]
) -> dict[str, dict[str, list[Int64Array]]]:
    """Owned pages by pool and class: copies of spans, hot buffers, draining and quarantined pages."""
    owners = _Owners()
    for chain, chain_audit in zip(group.chains, chains, strict=True):
        for page_class, tier, pages in chain_audit.owned():
            owners.add(chain.pool(page_class, tier).name, chain.spec.classes[page_class].name, pages)
    for request in requests:
        if len(request.hot):
            assert group.spec.sparse is not None
            owners.add(group.chains[0].pool(0, DEVICE).name, group.spec.sparse.hot_class, request.hot)
    for entry in _entries(state, group):
        for pool, name, pages in entry.frees:
            owners.add(pool, name, pages)
    for name, pool, page_class_name, pages in state.quarantine:
        if name == group.spec.name:
            owners.add(pool, page_class_name, pages)
            states = group.pools[pool].spaces[page_class_name].state[pages]
            if any_true(states != _QUARANTINED):
                raise InvariantViolation(f"{pool}: quarantined pages {pages} are in use")
    _own_withheld(owners, group)
    return owners.by_pool


def _own_withheld(owners: _Owners, group: Group) -> None:
    """Pages that lost their content and were given back: in quarantine as long as the memory lives."""
    for pool in group.pools.values():
        for name, withheld in pool.withheld.items():
            pages = np.fromiter(withheld, np.int64)
            owners.add(pool.name, name, pages)
            states = pool.spaces[name].state[pages]
            if any_true(states != _QUARANTINED):
                raise InvariantViolation(f"{pool.name}: withheld pages {pages} are in use")


def _entries(state: State, group: Group) -> list[FenceEntry]:
    """Everything that waits for a fence in the group."""
    engines = [engine for engine in state.all_engines() if engine.group == group.spec.name]
    return [entry for engine in engines for entry in [*engine.fences, engine.covered]]


def _audit_pool(pool: Pool, owned: dict[str, list[Int64Array]]) -> None:
    if not ledger_holds(pool):
        raise InvariantViolation(f"{pool.name}: states sum to {pool.account()} of {pool.capacity_bytes}")
    for name, space in pool.spaces.items():
        owners = np.bincount(concat(owned.get(name, [])), minlength=space.pages)
        taken = space.state != _PAGE_FREE
        if any_true(owners != taken):
            wrong = (owners > 1, taken & (owners == 0), ~taken & (owners > 0))
            twice, nobody, free = (np.flatnonzero(pages)[:5] for pages in wrong)
            raise InvariantViolation(
                f"{space.name}: pages {twice} have two owners, owned by nobody {nobody}, owned but free {free}"
            )
        counts = np.bincount(space.state, minlength=len(PageState)).tolist()
        if counts != space.counts:
            raise InvariantViolation(f"{space.name}: counters {space.counts}, pages say {counts}")
        used = taken.reshape(-1, pool.per_slab(name)).sum(axis=1) if pool.per_slab(name) > 1 else taken
        if not all_true(used == pool.used_in_slabs(name)):
            raise InvariantViolation(f"{space.name}: slab use differs from page states")


def _audit_promises(state: State, group: Group, requests: list[Request]) -> None:
    for pool in group.pools.values():
        promised = sum(request.promised.get(pool.name, 0) for request in requests)
        _check(promised == pool.promised_slabs, f"{pool.name}: promised {pool.promised_slabs}, requests say {promised}")
        story = f"{pool.name}: promised {promised}, by tenant {pool.promised_of}"
        _check(sum(pool.promised_of.values()) == promised, story)
        if group.tenants.has_floors and group.spec.sparse is None and not pool.withheld:
            _audit_backing(state, group, pool, requests)
    for request in requests if group.spec.sparse is None else ():
        owed = outstanding_promise(group, request)
        if request.promised != owed:
            raise InvariantViolation(f"request {request.request_id}: promised {request.promised}, it is owed {owed}")


def _audit_backing(state: State, group: Group, pool: Pool, requests: list[Request]) -> None:
    """Something stands behind every promise: what a request gave up and takes back itself, then `core.backing`."""
    if pool.owed_slabs <= pool.free_slabs:
        return
    promised: dict[int, int] = {}
    for request in requests:
        given_up = sum(
            int(span_units(group.chains[number], pool, np.asarray([row], np.int64))[0]) // pool.units_per_slab
            for number, row in request.truncated
        )
        tenant = state.tenants.of_namespace[request.namespace]
        promised[tenant] = promised.get(tenant, 0) + max(request.promised.get(pool.name, 0) - given_up, 0)
    behind = backing(group, pool, promised)
    if behind.beyond() > behind.common:
        raise InvariantViolation(
            f"{pool.name}: promises take {behind.beyond()} of {behind.common} slabs that are free or reclaimable for "
            f"anybody; promised by tenant {promised}, reclaimable for one alone {behind.own}"
        )


def _audit_holders(state: State, group: Group, number: int, requests: list[Request]) -> None:
    chain = group.chains[number]
    parts = [request.chains[number] for request in requests]
    anchors = [part.anchors.array for part in parts if len(part.anchors)]
    kept = [pin for pin in state.pins.values() if pin.group == group.spec.name]
    anchors += [rows for pin in kept for at, rows in pin.rows if at == number]
    pins = [*anchors, *(part.rows.array for part in parts), *_other_pins(state, group, number, requests)]
    anchors += [r.chains[number].rows.array for r in requests if r.phase is Phase.RETRACTED]
    anchors += [r.chains[number].rows.array[: r.chains[number].shared] for r in requests if r.anchored]
    for name, holders, counts in (
        ("pins", pins, chain.table.pins),
        ("anchors", anchors, chain.table.anchored),
        ("plans", _busy(state, group, number), chain.table.busy),
        ("readers on the host", _host_reads(state, group, number), chain.table.host_readers),
    ):
        counted = np.bincount(concat(holders), minlength=len(counts))
        wrong = places(counted != counts * chain.table.live)
        if len(wrong):
            raise InvariantViolation(
                f"{chain.spec.name}: {name} of spans {wrong[:5]} are {counts[wrong][:5]}, their holders account for "
                f"{counted[wrong][:5]}"
            )


def _other_pins(state: State, group: Group, number: int, requests: list[Request]) -> list[Int64Array]:
    """A row for each pin that no request's chain accounts for: of donors, fence entries and tickets."""
    held: list[tuple[int, Sequence[int]]] = [(at, [row]) for request in requests for at, row in request.donors]
    for entry in _entries(state, group):
        held += entry.unpins
        held += [(at, [row]) for _, at, row in entry.truncated]
    held += [rows for ticket in state.tickets.values() if ticket.group == group.spec.name for rows in ticket.rows]
    return [np.asarray(rows, np.int64) for at, rows in held if at == number]


def _host_reads(state: State, group: Group, number: int) -> list[Int64Array]:
    """A row for each ticket that is read from its host copy."""
    tickets = [ticket for ticket in state.tickets.values() if ticket.group == group.spec.name]
    named = [zip(ticket.rows, ticket.on_host, strict=True) for ticket in tickets]
    return [read.rows for pairs in named for (at, _), read in pairs if at == number]


def _busy(state: State, group: Group, number: int) -> list[Int64Array]:
    """A row for each plan in flight on it."""
    held: list[Sequence[int]] = []
    for job in state.jobs.values():
        if job.group != group.spec.name:
            continue
        if isinstance(job, PullJob):
            held += [rows for at, rows in job.rows if at == number]
        elif job.chain == number:
            held.append([*job.rows, *job.extra] if isinstance(job, CopyJob) else job.rows)
    return [np.asarray(rows, np.int64) for rows in held]


def _audit_requests(state: State, requests: list[Request]) -> None:
    for request in requests:
        story = f"request {request.engine}/{request.epoch}/{request.request_id}"
        _check(request.waiting_on <= state.jobs.keys(), f"{story} waits for plans {request.waiting_on} that have ended")
        _check((request.phase is Phase.WAITING) == bool(request.waiting_on), f"{story} is {request.phase.value}")
        engine = state.engine_of(request)
        entries = [entry for waiting in (*engine.fences, engine.covered) for entry in waiting.truncated]
        listed = [(chain, row) for number, chain, row in entries if number == request.request_id]
        _check(sorted(listed) == sorted(request.truncated), f"{story}: gave up {request.truncated}, not {listed}")
        _check(request.fenced_tokens <= request.committed_tokens, f"{story}: fenced beyond what it committed")
        for part in request.chains:
            firsts = part.chain.table.first_token[part.rows.array]
            if part.end_token != part.measured():
                raise InvariantViolation(f"{story}: pages up to {part.measured()}, not {part.end_token}")
            if not all_true(firsts[1:] > firsts[:-1]):
                raise InvariantViolation(f"{story}: spans out of order, {firsts}")
