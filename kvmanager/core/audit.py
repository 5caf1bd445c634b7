"""Invariants across structures, in one place. A failure carries the story of what disagrees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.prefix import Run
from kvmanager.core.request import Phase
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, CopyState
from kvmanager.core.spec import Placement
from kvmanager.core.state import CopyJob, FenceEntry, State, concat
from kvmanager.errors import InvariantViolation
from kvmanager.geometry import Int64Array

_ABSENT, _FILLING, _READY = (int(state) for state in CopyState)
_PAGE_FREE, _PAGE_READY = int(PageState.FREE), int(PageState.READY)


def _check(condition: bool, story: str) -> None:
    if not condition:
        raise InvariantViolation(story)


def ledger_holds(pool: Pool) -> bool:
    """The six states sum to capacity and none is negative. Cheap: counters only."""
    account = pool.account()
    return sum(account.values()) == pool.capacity_bytes and min(account.values()) >= 0


def audit(state: State) -> None:
    """Checks everything. Raises InvariantViolation."""
    _audit_attaches(state)
    for group in state.groups.values():
        owned = _owned_pages(state, group)
        for pool in group.pools.values():
            _audit_pool(pool, owned.get(pool.name, {}))
        _audit_promises(state, group)
        _audit_requests(state, group)
        for number, chain in enumerate(group.chains):
            _audit_spans(group, chain)
            _audit_index(group, chain)
            _audit_holders(state, group, number, chain)


def _audit_attaches(state: State) -> None:
    """Timelines are known of attached ranks and of ended ones that a fence still names, of nobody else."""
    attached, ended, named = set(), set(), set()
    for engine in state.all_engines():
        attached |= set(engine.attaches)
        ended |= engine.ended
        named |= {attach_id for entry in engine.fences for attach_id in entry.fence}
    _check(set(state.timelines) == attached | ended, f"timelines of {sorted(state.timelines)}, attached {attached}")
    _check(state.dead_attaches == ended, f"dead attaches {state.dead_attaches}, engines say {ended}")
    _check(ended <= named <= attached | ended, f"fences name {named}; attached {attached}, ended {ended}")


class _Owners:
    """Pages that something owns: pool -> class -> arrays of page indexes, one entry an owner."""

    def __init__(self) -> None:
        self.by_pool: dict[str, dict[str, list[Int64Array]]] = {}

    def add(self, pool: str, page_class: str, pages: Int64Array) -> None:
        """One more owner of these pages."""
        self.by_pool.setdefault(pool, {}).setdefault(page_class, []).append(pages)


def _owned_pages(state: State, group: Group) -> dict[str, dict[str, list[Int64Array]]]:
    """Owned pages by pool and class: copies of spans, hot buffers, draining and quarantined pages."""
    owners = _Owners()
    for chain in group.chains:
        _own_copies(owners, chain)
    for request in state.holders(group.spec.name):
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
            if (states != PageState.QUARANTINED).any():
                raise InvariantViolation(f"{pool}: quarantined pages {pages} are in use")
    return owners.by_pool


def _own_copies(owners: _Owners, chain: Chain) -> None:
    rows = chain.table.rows()
    for c, page_class in enumerate(chain.spec.classes):
        for tier in (DEVICE, HOST) if chain.has_host(c) else (DEVICE,):
            pages = chain.table.pages[c, tier, rows].ravel()
            owners.add(chain.pool(c, tier).name, page_class.name, pages[pages != NO_PAGE])


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
        if (owners != taken).any():
            wrong = (owners > 1, taken & (owners == 0), ~taken & (owners > 0))
            twice, nobody, free = (np.flatnonzero(pages)[:5] for pages in wrong)
            raise InvariantViolation(
                f"{space.name}: pages {twice} have two owners, owned by nobody {nobody}, owned but free {free}"
            )
        counts = np.bincount(space.state, minlength=len(PageState)).tolist()
        _check(counts == space.counts, f"{space.name}: counters {space.counts}, pages say {counts}")
        used = taken.reshape(-1, pool.per_slab(name)).sum(axis=1)
        _check(bool((used == pool.used_in_slabs(name)).all()), f"{space.name}: slab use differs from page states")


def _audit_promises(state: State, group: Group) -> None:
    for pool in group.pools.values():
        promised = sum(request.promised.get(pool.name, 0) for request in state.holders(group.spec.name))
        _check(promised == pool.promised_slabs, f"{pool.name}: promised {pool.promised_slabs}, requests say {promised}")


def _audit_spans(group: Group, chain: Chain) -> None:
    table = chain.table
    rows = table.rows()
    where = f"{group.spec.name}/{chain.spec.name}"

    def each(holds: npt.NDArray[np.bool_], what: str) -> None:
        if not holds.all():
            raise InvariantViolation(f"{where} span {int(rows[np.argmin(holds)])}: {what}")

    valid = table.valid[rows]
    each((valid >= 0) & (valid <= table.segments[rows]), "more segments valid than it has")
    each(table.keys.lengths(rows) == valid.astype(np.int64) * group.key_bytes, "keys do not cover its segments")
    each((table.pins[rows] >= 0) & (table.busy[rows] >= 0), "negative pins or plans")
    uids = table.uids[rows]
    each(uids.max(axis=1, initial=0) < table.next_uid, "a uid that is still to be given")
    _check(len(np.unique(uids)) == uids.size, f"{where}: a uid was given twice")
    widths = table.segments[rows]
    if chain.spec.placement is Placement.SHARDED:
        widths = widths // chain.spec.ranks
    for c, page_class in enumerate(chain.spec.classes):
        for tier in (DEVICE, HOST):
            pages, copies = table.pages[c, tier, rows], table.copies[c, tier, rows]
            held = (pages != NO_PAGE).sum(axis=1)
            expected = np.where(copies != _ABSENT, widths, 0)
            each(held == expected, f"class {page_class.name} tier {tier} has other than its number of pages")
            if tier == HOST and not chain.has_host(c):
                continue
            ready = pages[copies == _READY].ravel()
            states = chain.pool(c, tier).spaces[page_class.name].state[ready[ready != NO_PAGE]]
            ready_too = bool((states == _PAGE_READY).all())
            _check(ready_too, f"{where} {page_class.name}: a ready copy on pages that are not ready")


def _audit_index(group: Group, chain: Chain) -> None:
    table = chain.table
    rows = table.rows()
    where = f"{group.spec.name}/{chain.spec.name}"
    published = table.published[rows]
    held = (table.pins[rows] > 0) | (table.busy[rows] > 0)
    leaked = rows[~published & ~held]
    if len(leaked):
        raise InvariantViolation(f"{where} spans {leaked[:5]}: neither findable nor held")
    nowhere = rows[published & (table.copies[:, :, rows] == _ABSENT).all(axis=1).any(axis=0)]
    if len(nowhere):
        raise InvariantViolation(f"{where} spans {nowhere[:5]}: findable, but some class of them is nowhere")
    found = rows[published]
    parents = table.parent[found]
    below, above = found[parents != NO_SPAN], parents[parents != NO_SPAN]
    _check(bool(table.published[above].all()), f"{where}: a span's parent can't be found")
    _check(bool((table.valid == table.segments)[above].all()), f"{where}: a span stands below one that is not full")
    _check(bool((table.last_used[above] >= table.last_used[below]).all()), f"{where}: used later than its parent")
    counted = np.bincount(above, minlength=len(table.live))
    _check(bool((counted == table.children)[rows].all()), f"{where}: children differ from what parents say")
    _audit_tables(chain, found.tolist(), where)


def _audit_tables(chain: Chain, published: list[int], where: str) -> None:
    """Every published span is in one run, at its place, below the span before it; every run is under its first key."""
    table, index = chain.table, chain.index
    held: list[int] = []
    texts: set[tuple[int, int, int, bytes]] = set()
    full_spans = 0
    for number, run in index.runs.items():
        _audit_run(chain, number, run, where)
        rows = run.rows[: run.spans].tolist()
        held += rows
        full = [row for row in rows if table.full(row)]
        full_spans += len(full)
        texts.update((int(table.parent[row]), run.namespace, run.segments, table.keys[row]) for row in full)
    _check(sorted(held) == published, f"{where}: runs hold other spans than the published ones")
    _check(len(texts) == full_spans, f"{where}: equal spans stand below one parent")
    _check(sum(map(len, index.heads.values())) == len(index.runs), f"{where}: heads name runs that are not there")
    _check(index.sizes == Counter(table.segments[published].tolist()), f"{where}: sizes differ from the spans'")


def _audit_run(chain: Chain, number: int, run: Run, where: str) -> None:
    """A run is a path of alike spans, where it says, and found by its first key."""
    table, index, rows = chain.table, chain.index, run.rows[: run.spans]
    _check(run.spans > 0, f"{where} run {number} is empty")
    _check(bool((table.run[rows] == number).all()), f"{where} run {number} holds spans of another")
    _check(bool((table.place[rows] == np.arange(run.spans)).all()), f"{where} run {number} has spans in other places")
    _check(int(table.parent[rows[0]]) == run.parent, f"{where} run {number} is not below the span it says")
    _check(bool((table.parent[rows[1:]] == rows[:-1]).all()), f"{where} run {number} is no path")
    alike = (table.segments[rows] == run.segments) & (table.namespace[rows] == run.namespace)
    _check(bool(alike.all()), f"{where} run {number} mixes sizes or namespaces")
    full = run.spans == 1 or bool((table.valid[rows] == run.segments).all())
    _check(full, f"{where} run {number} has spans that are not full")
    _check(run.at == index.end(run.parent), f"{where} run {number} starts where the span before it does not end")
    first = run.namespace, table.keys[int(rows[0])][: index.key_bytes]
    _check(index.heads.get(first, []).count(number) == 1, f"{where} run {number} is not under its first key")


def _audit_holders(state: State, group: Group, number: int, chain: Chain) -> None:
    table = chain.table
    held = {
        "pins": (_pins(state, group, number), table.pins),
        "anchors": (_anchors(state, group, number), table.anchored),
        "plans": (_busy(state, group, number), table.busy),
    }
    for name, (holders, kept) in held.items():
        counted = np.bincount(np.asarray(holders, np.int64), minlength=len(kept))
        wrong = np.flatnonzero(counted != np.where(table.live, kept, 0))
        if len(wrong):
            raise InvariantViolation(
                f"{chain.spec.name}: {name} of spans {wrong[:5]} are {kept[wrong][:5]}, their holders account for "
                f"{counted[wrong][:5]}"
            )
    rows = table.rows()
    apart = rows[table.redundant[rows] & (table.copies[:, :, rows] != _READY).any(axis=(0, 1))]
    if len(apart):
        raise InvariantViolation(f"{chain.spec.name} spans {apart[:5]}: redundant, but not complete in both tiers")
    filling = (table.copies[:, HOST, rows] == _FILLING).any(axis=0) & (table.busy[rows] == 0)
    if filling.any():
        raise InvariantViolation(f"{chain.spec.name} spans {rows[filling][:5]}: host copies are being filled by nobody")


def _anchors(state: State, group: Group, number: int) -> list[int]:
    """A row for each of its pins that needs none of its copies."""
    return [row for request in state.holders(group.spec.name) for row in request.chains[number].anchors]


def _pins(state: State, group: Group, number: int) -> list[int]:
    """A row for each of its pins, as requests, fence entries and tickets account for them."""
    pins: list[int] = []
    for request in state.holders(group.spec.name):
        pins += request.chains[number].rows
        pins += request.chains[number].anchors
        pins += [row for chain_number, row in request.donors if chain_number == number]
    held = [rows for entry in _entries(state, group) for rows in entry.unpins]
    held += [(chain, [row]) for entry in _entries(state, group) for _, chain, row in entry.truncated]
    held += [rows for ticket in state.tickets.values() if ticket.group == group.spec.name for rows in ticket.rows]
    for chain_number, some in held:
        if chain_number == number:
            pins += some
    return pins


def _busy(state: State, group: Group, number: int) -> list[int]:
    """A row for each plan in flight on it."""
    busy: list[int] = []
    for job in state.jobs.values():
        if (job.group, job.chain) == (group.spec.name, number):
            busy += job.rows
            if isinstance(job, CopyJob):
                busy += job.extra
    return busy


def _audit_requests(state: State, group: Group) -> None:
    for request in state.holders(group.spec.name):
        story = f"request {request.engine}/{request.epoch}/{request.request_id}"
        _check(request.waiting_on <= set(state.jobs), f"{story} waits for plans {request.waiting_on} that have ended")
        _check((request.phase is Phase.WAITING) == bool(request.waiting_on), f"{story} is {request.phase.value}")
        engine = state.engine_of(request)
        entries = [entry for waiting in (*engine.fences, engine.covered) for entry in waiting.truncated]
        listed = [(chain, row) for number, chain, row in entries if number == request.request_id]
        _check(sorted(listed) == sorted(request.truncated), f"{story}: gave up {request.truncated}, not {listed}")
        _check(request.fenced_tokens <= request.committed_tokens, f"{story}: fenced beyond what it committed")
        for part in request.chains:
            firsts = part.chain.table.first_token[part.rows.array].tolist()
            _check(firsts == sorted(set(firsts)), f"{story}: spans out of order, {firsts}")
