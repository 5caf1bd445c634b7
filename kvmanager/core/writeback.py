"""Write-back (offload, mirror): host copies for committed spans while they are still in device memory."""

from __future__ import annotations

from kvmanager.core.admission import promises_hold, update_promises
from kvmanager.core.events import SubmitPlan
from kvmanager.core.group import Chain, Group
from kvmanager.core.movement import between_tiers
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.state import CopyJob, State, concat


def pump_writeback(state: State, group: Group) -> None:
    """Submits host copies, in the order in which spans became ready, within the plans-in-flight limit of a chain."""
    for number, queue in enumerate(group.writeback):
        while queue and number not in group.blocked and _in_flight(state, group, number) < state.limits.plans_in_flight:
            rows = _next_batch(state, group, number)
            if rows:
                _submit(state, group, number, rows)
                update_promises(state, group)


def _in_flight(state: State, group: Group, number: int) -> int:
    return sum(
        isinstance(job, CopyJob) and (job.group, job.chain, job.target_tier) == (group.spec.name, number, HOST)
        for job in state.jobs.values()
    )


def _next_batch(state: State, group: Group, number: int) -> list[int]:
    """Up to a batch of spans that still want a host copy and got pages for it; each is busy from here on."""
    rows: list[int] = []
    chain, queue = group.chains[number], group.writeback[number]
    while queue and len(rows) < state.limits.batch_spans:
        if _wants_host_copy(group, chain, queue[0]):
            if not _take_host_pages(state, group, chain, queue[0]):
                group.blocked.add(number)
                break
            rows.append(queue[0])
        queue.popleft()
    return rows


def _wants_host_copy(group: Group, chain: Chain, row: int) -> bool:
    table = chain.table
    if not table.live[row] or table.valid[row] == 0:
        return False
    # A span that nobody can find is worth a host page only where a running request may be pushed out to it.
    if group.spec.sparse is None and not table.published[row]:
        return False
    return any(_lacks(chain, c, row) for c in range(table.classes))


def _lacks(chain: Chain, page_class: int, row: int) -> bool:
    """The class could have a host copy of the span, and has none."""
    copies = chain.table.copies[page_class, :, row]
    return bool(chain.has_host(page_class) and copies[DEVICE] == CopyState.READY and copies[HOST] == CopyState.ABSENT)


def _take_host_pages(state: State, group: Group, chain: Chain, row: int) -> bool:
    """Host pages for every class that lacks them. False, and nothing done, when there is no room."""
    table = chain.table
    idle = table.pins[row] == 0 and table.busy[row] == 0
    # In flight from here on: neither this take nor a later one of the batch may evict it.
    table.busy[row] += 1
    if idle and not promises_hold(group):
        # What can be reclaimed was promised to somebody, and a span in flight can't be.
        table.busy[row] -= 1
        return False
    classes = [c for c in range(table.classes) if _lacks(chain, c, row)]
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
    for c in range(chain.table.classes):
        new = [row for row in rows if chain.table.copies[c, HOST, row] == CopyState.FILLING]
        if not new:
            continue
        source = concat([chain.table.page_list(c, DEVICE, row) for row in new])
        target = concat([chain.table.page_list(c, HOST, row) for row in new])
        purpose = Purpose.MIRROR if group.spec.sparse else Purpose.OFFLOAD
        plan = CopyPlan(state.new_plan_id(), purpose, between_tiers(chain, c, DEVICE, (source, target)))
        state.jobs[plan.plan_id] = CopyJob(group.spec.name, number, c, new, HOST)
        state.effects.append(SubmitPlan(plan))
