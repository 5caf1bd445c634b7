"""Write-back (offload, mirror): host copies for committed spans while they are still in device memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmanager.core.admission import promises_hold, update_promises
from kvmanager.core.events import SubmitPlan
from kvmanager.core.group import Chain, Group
from kvmanager.core.mirrors import lack, lacks_some, take_mirrors
from kvmanager.core.movement import between_tiers
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.pool import Want
from kvmanager.core.reclaim import NO_LOSSES, Losses, clean, droppable
from kvmanager.core.rows import BoolArray, RowArray, RowQueue
from kvmanager.core.spans import DEVICE, FILLING, HOST
from kvmanager.core.state import CopyJob, State
from kvmanager.core.tenants import NOBODY, used_units
from kvmanager.core.verification import copied_out


def pump_writeback(state: State, group: Group) -> None:
    """Submits host copies, in the order in which spans became ready, at the pace that `_most_in_flight` sets."""
    for number, queue in enumerate(group.writeback):
        if not (queue or group.unwritten[number]):
            continue
        if not queue:
            _write_coldest(state, group, number)
        if not queue or number in group.blocked:
            continue
        most = _most_in_flight(state, group)
        while queue and number not in group.blocked and _in_flight(state, group, number) < most:
            rows = _next_mirrors(state, group, number) if group.spec.swaps else []
            rows = rows or _next_batch(state, group, number)
            group.asker = NOBODY
            if rows:
                _submit(state, group, number, rows)
                update_promises(state, group)


def reconsider(state: State, group: Group) -> None:
    """Time has passed: a few of the spans that were worth less than what the host holds are ranked again."""
    for number, declined in enumerate(group.declined):
        for _ in range(min(len(declined), state.limits.reconsidered_spans)):
            group.writeback[number].append(declined.popleft())


def _write_coldest(state: State, group: Group, number: int) -> None:
    """Where too little of a device pool is free or clean, the coldest spans that the device alone holds are queued."""
    chain = group.chains[number]
    short = max(
        int(state.limits.clean_share * chain.pool(c, DEVICE).slabs) - _clean_slabs(chain, c)
        for c in range(chain.table.classes)
        if chain.has_host(c)
    )
    if chain.swaps:
        # A mirror that takes another's place makes nothing clean.
        room = min(chain.pool(c, HOST).free_slabs for c in range(chain.table.classes) if chain.has_host(c))
        short = min(short, room // chain.spec.widest)
    if short <= 0:
        return
    rows = np.unique(np.asarray(group.unwritten[number], np.int64))
    rows = rows[_want_host_copy(group, chain, rows)]
    coldest = state.reclaimers[group.spec.name].coldest(chain, rows, min(short, state.limits.batch_spans))
    group.writeback[number].extend(sorted(coldest.tolist(), key=lambda row: int(chain.table.first_token[row])))
    group.unwritten[number] = rows[~np.isin(rows, coldest)].tolist()
    state.counters["writeback_again"] += len(coldest)


def _clean_slabs(chain: Chain, page_class: int) -> int:
    """Slabs of the class's device pool that are free, or could be without forgetting anything."""
    pool = chain.pool(page_class, DEVICE)
    rows = clean(chain, page_class) if chain.swaps else droppable(chain, page_class, DEVICE)
    pages = int(chain.widths(np.flatnonzero(rows)).sum())
    return pool.free_slabs + pages // pool.per_slab(chain.page_class(page_class).name)


def _most_in_flight(state: State, group: Group) -> int:
    """Plans a chain may have in flight: few while a request waits for its bytes, which have the link first."""
    waited_for = any(
        isinstance(job, CopyJob) and job.group == group.spec.name and job.target_tier == DEVICE
        for job in state.jobs.values()
    )
    limits = state.limits
    return min(limits.plans_beside_onboards, limits.plans_in_flight) if waited_for else limits.plans_in_flight


def _in_flight(state: State, group: Group, number: int) -> int:
    return sum(
        isinstance(job, CopyJob) and (job.group, job.chain, job.target_tier) == (group.spec.name, number, HOST)
        for job in state.jobs.values()
    )


def _next_batch(state: State, group: Group, number: int) -> list[int]:
    """Up to a batch of spans that still want a host copy and got pages for it; each is busy from here on."""
    chain, queue = group.chains[number], group.writeback[number]
    most = state.limits.batch_spans
    while most:
        wanting, looked_at = _wanting(group, chain, queue, most)
        rows, over = _below_ceiling(group, chain, wanting)
        group.asker = _one_tenant(group, chain, rows)
        choice = _take_together(state, group, chain, rows)
        if choice is not None:
            _decline(state, group, number, [*over, *choice.declined])
            queue.take(looked_at)
            return choice.rows
        most = min(most, len(wanting)) // 2
    return _take_in_turn(state, group, number)


def _next_mirrors(state: State, group: Group, number: int) -> list[int]:
    """Spans that requests hold, of the first batch of the queue, that got pages; without room they are tried later."""
    chain, queue = group.chains[number], group.writeback[number]
    wanting, looked_at = _wanting(group, chain, queue, state.limits.batch_spans)
    held = [row for row in wanting if chain.table.pins[row]]
    if not held:
        return []
    queue.take(looked_at)
    queue.extend(row for row in wanting if not chain.table.pins[row])
    rows, _ = _below_ceiling(group, chain, held)
    group.asker = _one_tenant(group, chain, rows) if rows else NOBODY
    taken = take_mirrors(state, group, chain, rows)
    group.declined[number].extend(row for row in held if row not in taken)
    return taken


def _one_tenant(group: Group, chain: Chain, rows: list[int]) -> int:
    """The tenant of all of the spans; NOBODY where they are of several."""
    of_namespace = group.tenants.of_namespace or [0]
    owners = {of_namespace[namespace] for namespace in set(chain.table.namespace[rows].tolist())}
    return owners.pop() if len(owners) == 1 else NOBODY


def _wanting(group: Group, chain: Chain, queue: RowQueue, most: int) -> tuple[list[int], int]:
    """The first spans of the queue that want a host copy, and how many entries that took."""
    wanted: dict[int, None] = {}
    looked_at = 0
    while looked_at < len(queue) and len(wanted) < most:
        some = queue.peek(looked_at, most - len(wanted))
        looked_at += len(some)
        wanted.update(dict.fromkeys(some[_want_host_copy(group, chain, some)].tolist()))
    return list(wanted), looked_at


def _want_host_copy(group: Group, chain: Chain, rows: RowArray) -> BoolArray:
    """Which spans should have a host copy, could have one now, and have none (bool[rows])."""
    table = chain.table
    wants = table.live[rows] & (table.valid[rows] > 0)
    # A span that nobody can find is worth a host page only where a running request may be pushed out to it.
    if not group.spec.swaps:
        wants &= table.published[rows]
    wants |= table.live[rows] & _retracted(chain, rows)
    if table.classes > 1:
        wants &= table.busy[rows] == 0  # looked at again when the copy of another class has ended
    return wants & lacks_some(chain, rows)


def _retracted(chain: Chain, rows: RowArray) -> BoolArray:
    """Spans of requests that gave up their device pages, and of nobody else that uses them (bool[rows])."""
    table = chain.table
    gone: BoolArray = (table.anchored[rows] > 0) & (table.pins[rows] == table.anchored[rows])
    return gone


def _below_ceiling(group: Group, chain: Chain, spans: list[int]) -> tuple[list[int], list[int]]:
    """Spans whose host copies, each with those before it, fit under their tenant's ceiling, and the others."""
    if not group.tenants.limited:
        return spans, []
    rows = np.asarray(spans, np.int64)
    owner = group.tenants.of(chain.table.namespace[rows])
    fits = np.ones(len(rows), bool)
    for c in range(chain.table.classes):
        if not chain.has_host(c):
            continue
        pool = chain.pool(c, HOST)
        units = np.where(lack(chain, c, rows), chain.widths(rows) * pool.spaces[chain.page_class(c).name].units, 0)
        for tenant in np.unique(owner).tolist():
            room = group.tenants.ceiling_units(tenant, pool) - used_units(group, pool, tenant)
            mine = owner == tenant
            fits[mine] &= np.cumsum(units[mine]) <= room
    return rows[fits].tolist(), rows[~fits].tolist()


@dataclass(frozen=True)
class _Choice:
    """Which spans get host pages, and what that takes: `wants` pages by pool and class, and losses in one pool."""

    rows: list[int]
    declined: list[int]
    wants: dict[str, dict[str, int]]
    pool: str = ""
    losses: Losses = NO_LOSSES


def _choose(
    state: State, group: Group, chain: Chain, rows: list[int], lacks: list[BoolArray]
) -> _Choice | None:
    """Who of the spans is worth host pages; None where that takes more than one look, or there is no room.

    `lacks`: by class, which of them lack a host copy.
    """
    index = np.asarray(rows, np.int64)
    wants: dict[str, dict[str, int]] = {}
    for c, lacks_it in enumerate(lacks):
        lacking = index[lacks_it]
        if len(lacking):
            wants.setdefault(chain.pool(c, HOST).name, {})[chain.page_class(c).name] = int(chain.widths(lacking).sum())
    full = [name for name, pages in wants.items() if group.pools[name].lacking_slabs(Want(pages)) > 0]
    if not full:
        return _Choice(rows, [], wants)
    if len(wants) > 1:
        return None
    names = tuple(wants[full[0]])
    found = state.reclaimers[group.spec.name].room_for(chain, group.pools[full[0]], names, index)
    if found is None:
        return None
    worth, losses = found
    declined = index[~np.isin(index, worth)].tolist()
    pages = {full[0]: dict.fromkeys(names, int(chain.widths(worth).sum()))}
    return _Choice(worth.tolist(), declined, pages, full[0], losses)


def _decline(state: State, group: Group, number: int, rows: list[int]) -> None:
    """What the host holds is worth more than these: they are looked at again when time has passed."""
    group.declined[number].extend(rows)
    state.counters["writeback_bypass"] += len(rows)


def _take_together(state: State, group: Group, chain: Chain, rows: list[int]) -> _Choice | None:
    """Host pages for those of the spans that are worth them; None, and nothing done, when not all would fit."""
    if not rows:
        return _Choice([], [], {})
    table = chain.table
    index = np.asarray(rows, np.int64)
    lacks = [lack(chain, c, index) for c in range(table.classes)]
    idle_rows = bool(((table.pins[index] == 0) & (table.busy[index] == 0)).any())
    # In flight from here on: what is chosen must not rely on anything that this keeps in place, and an extent that
    # comes from another pool of the group takes none of these spans with it.
    for lacking in lacks:
        table.busy[index[lacking]] += 1
    _borrow(state, group, chain, index)
    choice = _choose(state, group, chain, rows, lacks)
    if choice is None or ((idle_rows or group.spec.swaps) and not promises_hold(group, choice.wants)):
        for lacking in lacks:
            table.busy[index[lacking]] -= 1
        return None
    taken = np.isin(index, np.asarray(choice.rows, np.int64))
    if len(choice.losses):
        state.reclaimers[group.spec.name].lose(chain, group.pools[choice.pool], choice.losses)
    for c, lacking in enumerate(lacks):
        table.busy[index[lacking & ~taken]] -= 1
        some = index[lacking & taken]
        if len(some):
            pages = chain.pool(c, HOST).take(chain.page_class(c).name, int(chain.widths(some).sum()))
            assert pages is not None
            chain.put_many(c, HOST, some, pages)
    return choice


def _borrow(state: State, group: Group, chain: Chain, rows: RowArray) -> None:
    """Where a host pool shares its region and lacks room for these spans, it may get more of it."""
    for c in range(chain.table.classes) if state.lenders else ():
        lacking = rows[lack(chain, c, rows)] if chain.has_host(c) else rows[:0]
        pool = chain.pool(c, HOST) if len(lacking) else None
        if pool is not None and pool.name in state.lenders:
            want = Want({chain.page_class(c).name: int(chain.widths(lacking).sum())})
            state.reclaimers[group.spec.name].borrow(pool, pool.lacking_slabs(want))


def _take_in_turn(state: State, group: Group, number: int) -> list[int]:
    """Host pages span by span, up to a batch, as far as there is room."""
    rows: list[int] = []
    chain, queue = group.chains[number], group.writeback[number]
    while queue and len(rows) < state.limits.batch_spans:
        first = queue.peek(0, 1)
        row = int(first[0])
        if _want_host_copy(group, chain, first)[0]:
            group.asker = _one_tenant(group, chain, [row])
            if _below_ceiling(group, chain, [row])[1]:
                _decline(state, group, number, [row])
                queue.take(1)
                continue
            if not _take_host_pages(state, group, chain, row):
                group.blocked.add(number)
                break
            rows.append(row)
        queue.take(1)
    return rows


def _take_host_pages(state: State, group: Group, chain: Chain, row: int) -> bool:
    """Host pages for every class that lacks them. False, and nothing done, when there is no room."""
    table = chain.table
    idle = table.pins[row] == 0 and table.busy[row] == 0
    # In flight from here on: neither this take nor a later one of the batch may evict it.
    table.busy[row] += 1
    classes = [c for c in range(table.classes) if lack(chain, c, np.asarray([row], np.int64))[0]]
    wants: dict[str, dict[str, int]] = {}
    for c in classes:
        wants.setdefault(chain.pool(c, HOST).name, {})[chain.page_class(c).name] = int(chain.widths([row])[0])
    if (idle or group.spec.swaps) and not promises_hold(group, wants):
        # What can be reclaimed was promised to somebody, and a span in flight can't be.
        table.busy[row] -= 1
        return False
    for c in classes:
        pages = state.reclaimers[group.spec.name].take(
            chain.pool(c, HOST), chain.page_class(c).name, chain.spec.span_pages(table.order(row))
        )
        if pages is None:
            for done in classes[: classes.index(c)]:
                chain.free_copy(done, HOST, row)
            table.busy[row] -= 1
            return False
        chain.put(c, HOST, row, pages)
    table.busy[row] += len(classes) - 1
    return True


def _submit(state: State, group: Group, number: int, rows: list[int]) -> None:
    """One plan a class, over the spans of the batch whose host copy of that class is new."""
    chain = group.chains[number]
    index = np.asarray(rows, np.int64)
    for c in range(chain.table.classes):
        new = index[chain.table.copies[c, HOST, index] == FILLING]
        if len(new) == 0:
            continue
        source, target = (chain.table.page_lists(c, tier, new) for tier in (DEVICE, HOST))
        purpose = _purpose(state, group, chain.pool(c, DEVICE).name)
        sums, asked = copied_out(state, chain, c, new.tolist())
        plan = CopyPlan(state.new_plan_id(), purpose, between_tiers(chain, c, DEVICE, (source, target)), sums)
        state.jobs[plan.plan_id] = CopyJob(
            group.spec.name, number, c, new.tolist(), HOST, since=state.now, asked=asked
        )
        state.effects.append(SubmitPlan(plan))


def _purpose(state: State, group: Group, device_pool: str) -> Purpose:
    """A spill where a request was refused for want of the pages that the copies leave, else what nobody waits for."""
    oldest = state.now - state.limits.claim_hold_ns
    if any(claim.slabs.get(device_pool) and claim.since >= oldest for claim in group.claims.values()):
        return Purpose.SPILL
    return Purpose.MIRROR if group.spec.sparse else Purpose.OFFLOAD
