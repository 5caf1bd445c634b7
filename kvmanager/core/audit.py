"""Invariants across structures, in one place. A failure carries the story of what disagrees."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, CopyState
from kvmanager.core.state import CopyJob, State
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
            _audit_pool(group, pool, owned.get(pool.name, {}))
        _audit_promises(state, group)
        for number, chain in enumerate(group.chains):
            _audit_spans(group, chain)
            _audit_index(group, chain)
            _audit_holders(state, group, number, chain)


def _owned_pages(state: State, group: Group) -> dict[str, dict[str, list[int]]]:
    """Every page that something owns, by pool and class: copies of spans, hot buffers, draining and quarantined pages."""
    owned: dict[str, dict[str, list[int]]] = {}

    def own(pool: str, page_class: str, pages: list[int]) -> None:
        owned.setdefault(pool, {}).setdefault(page_class, []).extend(pages)

    for chain in group.chains:
        for c, page_class in enumerate(chain.spec.classes):
            for tier in (DEVICE, HOST) if chain.has_host(c) else (DEVICE,):
                for row in chain.table:
                    own(chain.pool(c, tier).name, page_class.name, chain.table.page_list(c, tier, row).tolist())
    for engine in state.all_engines():
        if engine.group != group.spec.name:
            continue
        for request in engine.requests.values():
            if len(request.hot):
                assert group.spec.sparse is not None
                own(group.chains[0].pool(0, DEVICE).name, group.spec.sparse.hot_class, request.hot.tolist())
        for entry in [*engine.fences, engine.covered]:
            for pool, name, pages in entry.frees:
                own(pool, name, pages.tolist())
    for name, pool, page_class_name, pages in state.quarantine:
        if name == group.spec.name:
            own(pool, page_class_name, pages.tolist())
    return owned


def _audit_pool(group: Group, pool: Pool, owned: dict[str, list[int]]) -> None:
    _check(ledger_holds(pool), f"{group.spec.name}/{pool.name}: states sum to {pool.account()} of {pool.capacity_bytes}")
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
        promised = sum(
            request.promised.get(pool.name, 0)
            for engine in state.all_engines()
            if engine.group == group.spec.name
            for request in engine.requests.values()
        )
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
        first, last = (int(table.namespace[row]), table.keys[row][: group.key_bytes]), index.ends.get(
            (int(table.namespace[row]), table.keys[row][-group.key_bytes :])
        )
        _check(row in index.heads.get(first, []), f"{story}: published but not among the heads")
        _check(not table.full(row) or last == row, f"{story}: full and published, but row {last} stands for its key")
        parent = int(table.parent[row])
        if parent == NO_SPAN:
            continue
        children[parent] += 1
        _check(bool(table.published[parent]) and table.full(parent), f"{story}: its parent {parent} can't be found")
        _check(table.last_used[parent] >= table.last_used[row], f"{story}: used later than its parent {parent}")
        _check(table.pins[row] == 0 or table.pins[parent] > 0, f"{story}: pinned below an unpinned parent {parent}")
    for row in chain.table:
        _check(children[row] == table.children[row], f"span {row}: {table.children[row]} children, found {children[row]}")
    for rows in index.heads.values():
        _check(all(table.live[r] and table.published[r] for r in rows), "the index names a span that is not published")


def _audit_holders(state: State, group: Group, number: int, chain: Chain) -> None:
    pins: Counter[int] = Counter()
    busy: Counter[int] = Counter()
    for engine in state.all_engines():
        if engine.group != group.spec.name:
            continue
        for request in engine.requests.values():
            part = request.chains[number]
            pins.update(part.rows)
            pins.update(part.anchors)
            pins.update(row for chain_number, row in request.donors if chain_number == number)
        for entry in [*engine.fences, engine.covered]:
            for chain_number, rows in entry.unpins:
                if chain_number == number:
                    pins.update(rows)
    for ticket in state.tickets.values():
        for chain_number, rows in ticket.rows:
            if ticket.group == group.spec.name and chain_number == number:
                pins.update(rows)
    for job in state.jobs.values():
        if job.group == group.spec.name and job.chain == number:
            busy.update(job.rows)
            if isinstance(job, CopyJob):
                busy.update(job.extra)
    table = chain.table
    for row in table:
        _check(pins[row] == table.pins[row], f"span {row}: {table.pins[row]} pins, holders account for {pins[row]}")
        _check(busy[row] == table.busy[row], f"span {row}: busy {table.busy[row]}, plans account for {busy[row]}")
    _check(set(pins) | set(busy) <= set(table), f"held spans that do not exist: {(set(pins) | set(busy)) - set(table)}")
