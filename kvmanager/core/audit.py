"""Invariants across structures, in one place. A failure carries the story of what disagrees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.request import Phase
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, CopyState
from kvmanager.core.state import CopyJob, FenceEntry, State
from kvmanager.errors import InvariantViolation


def _check(condition: bool, story: str) -> None:
    if not condition:
        raise InvariantViolation(story)


def ledger_holds(pool: Pool) -> bool:
    """The six states sum to capacity and none is negative. Cheap: counters only."""
    account = pool.account()
    return sum(account.values()) == pool.capacity_bytes and min(account.values()) >= 0


def audit(state: State) -> None:
    """Checks everything. Raises InvariantViolation."""
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


class _Owners:
    """Pages that something owns: pool -> class -> page indexes, one entry an owner."""

    def __init__(self) -> None:
        self.by_pool: dict[str, dict[str, list[int]]] = {}

    def add(self, pool: str, page_class: str, pages: npt.NDArray[np.int64]) -> None:
        """One more owner of these pages."""
        self.by_pool.setdefault(pool, {}).setdefault(page_class, []).extend(pages.tolist())


def _owned_pages(state: State, group: Group) -> dict[str, dict[str, list[int]]]:
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
            _check(bool((states == PageState.QUARANTINED).all()), f"{pool}: quarantined pages {pages} are in use")
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


def _audit_pool(pool: Pool, owned: dict[str, list[int]]) -> None:
    _check(ledger_holds(pool), f"{pool.name}: states sum to {pool.account()} of {pool.capacity_bytes}")
    for name, space in pool.spaces.items():
        pages = owned.get(name, [])
        twice = [page for page, count in Counter(pages).items() if count > 1]
        _check(not twice, f"{space.name}: pages {twice[:5]} have two owners")
        taken = np.flatnonzero(space.state != PageState.FREE).tolist()
        _check(
            sorted(pages) == taken,
            f"{space.name}: owned by nobody {sorted(set(taken) - set(pages))[:5]}, "
            f"owned but free {sorted(set(pages) - set(taken))[:5]}",
        )
        counts = np.bincount(space.state, minlength=len(PageState)).tolist()
        _check(counts == space.counts, f"{space.name}: counters {space.counts}, pages say {counts}")
        used = np.bincount(np.asarray(taken, np.int64) // pool.per_slab(name), minlength=pool.slabs)
        _check(bool((used == pool.used_in_slabs(name)).all()), f"{space.name}: slab use differs from page states")


def _audit_promises(state: State, group: Group) -> None:
    for pool in group.pools.values():
        promised = sum(request.promised.get(pool.name, 0) for request in state.holders(group.spec.name))
        _check(promised == pool.promised_slabs, f"{pool.name}: promised {pool.promised_slabs}, requests say {promised}")


def _audit_spans(group: Group, chain: Chain) -> None:
    table = chain.table
    for row in chain.table:
        story = f"{group.spec.name}/{chain.spec.name} span {row}"
        _check(0 <= table.valid[row] <= table.segments[row], f"{story}: {table.valid[row]} valid segments")
        _check(len(table.keys[row]) == table.valid[row] * group.key_bytes, f"{story}: keys do not cover its segments")
        width = chain.spec.span_pages(table.order(row))
        for c in range(table.classes):
            for tier in (DEVICE, HOST):
                pages = table.pages[c, tier, row]
                held = int((pages != NO_PAGE).sum())
                present = table.copies[c, tier, row] != CopyState.ABSENT
                _check(held == (width if present else 0), f"{story}: class {c} tier {tier} has {held} pages of {width}")
                if table.copies[c, tier, row] == CopyState.READY:
                    name = chain.spec.classes[c].name
                    states = chain.pool(c, tier).spaces[name].state[pages[pages != NO_PAGE]]
                    _check(bool((states == PageState.READY).all()), f"{story}: a ready copy on pages that are not")


def _audit_index(group: Group, chain: Chain) -> None:
    table, index = chain.table, chain.index
    children: Counter[int] = Counter()
    for row in chain.table:
        story = f"{group.spec.name}/{chain.spec.name} span {row}"
        if not table.published[row]:
            _check(table.pins[row] > 0 or table.busy[row] > 0, f"{story}: neither findable nor held: a leak")
            _check(table.children[row] == 0, f"{story}: children below a span that can't be found")
            continue
        namespace, keys = int(table.namespace[row]), table.keys[row]
        found = index.heads.get((namespace, keys[: group.key_bytes]), [])
        _check(found.count(row) == 1, f"{story}: published but not once among the heads")
        last = index.ends.get((namespace, keys[-group.key_bytes :]))
        _check(not table.full(row) or last == row, f"{story}: full and published, but row {last} stands for its key")
        absent = (table.copies[:, :, row] == CopyState.ABSENT).all(axis=1)
        _check(not absent.any(), f"{story}: findable, but class {int(np.argmax(absent))} is nowhere")
        parent = int(table.parent[row])
        if parent == NO_SPAN:
            continue
        children[parent] += 1
        _check(bool(table.published[parent]) and table.full(parent), f"{story}: its parent {parent} can't be found")
        _check(table.last_used[parent] >= table.last_used[row], f"{story}: used later than its parent {parent}")
    for row in chain.table:
        counted = int(table.children[row])
        _check(children[row] == counted, f"span {row}: {counted} children, {children[row]} found")
    named = [*(row for rows in index.heads.values() for row in rows), *index.ends.values()]
    _check(bool((table.live & table.published)[named].all()), "the index names a span that is not published")


def _audit_holders(state: State, group: Group, number: int, chain: Chain) -> None:
    pins, busy = _pins(state, group, number), _busy(state, group, number)
    table = chain.table
    for row in table:
        _check(pins[row] == table.pins[row], f"span {row}: {table.pins[row]} pins, holders account for {pins[row]}")
        _check(busy[row] == table.busy[row], f"span {row}: busy {table.busy[row]}, plans account for {busy[row]}")
        filling = (table.copies[:, HOST, row] == CopyState.FILLING).any()
        _check(not filling or busy[row] > 0, f"span {row}: its host copy is being filled by nobody")
    _check(set(pins) | set(busy) <= set(table), f"held spans that do not exist: {(set(pins) | set(busy)) - set(table)}")


def _pins(state: State, group: Group, number: int) -> Counter[int]:
    """Pins by row, as requests, fence entries and tickets account for them."""
    pins: Counter[int] = Counter()
    for request in state.holders(group.spec.name):
        pins.update(request.chains[number].rows)
        pins.update(request.chains[number].anchors)
        pins.update(row for chain_number, row in request.donors if chain_number == number)
    held = [rows for entry in _entries(state, group) for rows in entry.unpins]
    held += [rows for ticket in state.tickets.values() if ticket.group == group.spec.name for rows in ticket.rows]
    for chain_number, some in held:
        if chain_number == number:
            pins.update(some)
    return pins


def _busy(state: State, group: Group, number: int) -> Counter[int]:
    """Plans in flight by row."""
    busy: Counter[int] = Counter()
    for job in state.jobs.values():
        if (job.group, job.chain) == (group.spec.name, number):
            busy.update(job.rows)
            if isinstance(job, CopyJob):
                busy.update(job.extra)
    return busy


def _audit_requests(state: State, group: Group) -> None:
    for request in state.holders(group.spec.name):
        story = f"request {request.engine}/{request.epoch}/{request.request_id}"
        _check(request.waiting_on <= set(state.jobs), f"{story} waits for plans {request.waiting_on} that have ended")
        _check((request.phase is Phase.WAITING) == bool(request.waiting_on), f"{story} is {request.phase.value}")
        _check(request.fenced_tokens <= request.committed_tokens, f"{story}: fenced beyond what it committed")
        for part in request.chains:
            firsts = part.chain.table.first_token[np.asarray(part.rows, np.int64)].tolist()
            _check(firsts == sorted(set(firsts)), f"{story}: spans out of order, {firsts}")
