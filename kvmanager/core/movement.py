"""Plans for spans: write-back (offload, mirror), onboard, copy-on-write; and what their ends mean."""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import CopyOutcome, Opened, RequestFailed, SubmitPlan
from kvmanager.core.group import Chain, Group
from kvmanager.core.plans import CopyPlan, Purpose, Rows, StridedCopies, copy_rows, copy_whole_pages
from kvmanager.core.pool import PageState
from kvmanager.core.request import Phase, Request
from kvmanager.core.settle import publish
from kvmanager.core.spans import DEVICE, HOST, NO_SPAN, CopyState
from kvmanager.core.spec import Placement
from kvmanager.core.state import CopyJob, PullJob, State, concat, ended_well
from kvmanager.errors import KVError, TransferFailed
from kvmanager.geometry import Int64Array


def between_tiers(chain: Chain, page_class: int, source_tier: int, pages: tuple[Int64Array, Int64Array]) -> tuple[
    StridedCopies, ...
]:
    """Whole-page copies device -> host or back. `pages`: (source pages, target pages).

    Sharded: rank r to its own host share. Replicated: host page i lies in share i mod N, written by that
    rank, read back by all.
    """
    c = chain.page_class(page_class)
    device, host = (pages[0], pages[1]) if source_tier == DEVICE else (pages[1], pages[0])
    if chain.spec.placement is Placement.SHARDED:
        if source_tier == DEVICE:
            return copy_whole_pages(c.page_bytes, c.device_regions, device, c.host_regions, host)
        return copy_whole_pages(c.page_bytes, c.host_regions, host, c.device_regions, device)
    ranks = len(c.device_regions)
    copies: list[StridedCopies] = []
    for share in range(ranks):
        mine = host % ranks == share
        if not mine.any():
            continue
        on_device, in_share = device[mine], host[mine] // ranks
        if source_tier == DEVICE:
            copies += copy_whole_pages(
                c.page_bytes, [c.device_regions[share]], on_device, [c.host_regions[share]], in_share
            )
            continue
        for region in c.device_regions:
            copies += copy_whole_pages(c.page_bytes, [c.host_regions[share]], in_share, [region], on_device)
    return tuple(copies)


def span_rows(chain: Chain, page_class: int, tier: int, row: int, tokens: int) -> Rows:
    """Where the first `tokens` tokens of a span lie, one entry a token (rank 0's copy of a replicated span)."""
    spec = chain.spec
    page, slot = chain.table.order(row).place(np.arange(tokens, dtype=np.int64))
    pages = chain.table.pages[page_class, tier, row]
    c = chain.page_class(page_class)
    regions = np.asarray(c.device_regions if tier == DEVICE else c.host_regions, np.int32)
    if spec.placement is Placement.REPLICATED:
        return Rows(np.full(tokens, regions[0], np.int32), pages[page], slot)
    return Rows(regions[page % spec.ranks], pages[page // spec.ranks], slot)


def copy_on_write(state: State, chain: Chain, donor: int, row: int, tokens: int) -> CopyPlan:
    """Copies slots [0, tokens) of the donor into a new span, for the worker to run before its first write."""
    copies: list[StridedCopies] = []
    for c, page_class in enumerate(chain.spec.classes):
        source, target = (span_rows(chain, c, DEVICE, r, tokens) for r in (donor, row))
        regions = page_class.device_regions if chain.spec.placement is Placement.REPLICATED else (None,)
        for region in regions:
            if region is not None:
                everywhere = np.full(tokens, region, np.int32)
                source, target = Rows(everywhere, source.page, source.slot), Rows(everywhere, target.page, target.slot)
            copies += copy_rows(page_class.layout, page_class.layout, source, target)
    return CopyPlan(state.new_plan_id(), Purpose.COPY_ON_WRITE, tuple(copies))


# ------------------------------------------------------------------------------- write-back


def pump_writeback(state: State, group: Group) -> None:
    """Submits host copies for committed spans, oldest first, within the plans-in-flight limit."""
    while group.writeback and not group.host_blocked and _in_flight(state, group) < state.limits.plans_in_flight:
        chain_number, rows = _next_batch(state, group)
        if rows:
            _submit_writeback(state, group, chain_number, rows)


def _in_flight(state: State, group: Group) -> int:
    return sum(isinstance(j, CopyJob) and j.group == group.spec.name and j.target_tier == HOST for j in state.jobs.values())


def _next_batch(state: State, group: Group) -> tuple[int, list[int]]:
    """Up to a batch of rows of one chain that still want a host copy and got pages for it."""
    rows: list[int] = []
    chain_number = group.writeback[0][0]
    chain = group.chains[chain_number]
    while group.writeback and group.writeback[0][0] == chain_number and len(rows) < state.limits.batch_spans:
        row = group.writeback[0][1]
        if _wants_host_copy(chain, row):
            if not _take_host_pages(state, group, chain, row):
                group.host_blocked = True
                break
            rows.append(row)
        group.writeback.popleft()
    return chain_number, rows


def _wants_host_copy(chain: Chain, row: int) -> bool:
    table = chain.table
    return bool(table.live[row] and table.valid[row] > 0 and table.busy[row] == 0) and any(
        table.copies[c, DEVICE, row] == CopyState.READY and table.copies[c, HOST, row] == CopyState.ABSENT
        for c in range(table.classes)
        if chain.has_host(c)
    )


def _take_host_pages(state: State, group: Group, chain: Chain, row: int) -> bool:
    for c in range(chain.table.classes):
        if not chain.has_host(c) or chain.table.copies[c, HOST, row] != CopyState.ABSENT:
            continue
        # A span being written back must not be evicted to make room for itself.
        chain.table.busy[row] += 1
        pages = state.reclaimers[group.spec.name].take(
            chain.pool(c, HOST), chain.page_class(c).name, chain.spec.span_pages(chain.table.order(row))
        )
        chain.table.busy[row] -= 1
        if pages is None:
            return False
        chain.put(c, HOST, row, pages)
    # From here on it is in flight: later victims of this batch must not take it.
    chain.table.busy[row] += 1
    return True


def _submit_writeback(state: State, group: Group, chain_number: int, rows: list[int]) -> None:
    chain = group.chains[chain_number]
    for c in range(chain.table.classes):
        if not chain.has_host(c):
            continue
        source = concat([chain.table.page_list(c, DEVICE, row) for row in rows])
        target = concat([chain.table.page_list(c, HOST, row) for row in rows])
        purpose = Purpose.MIRROR if group.spec.sparse else Purpose.OFFLOAD
        plan = CopyPlan(state.new_plan_id(), purpose, between_tiers(chain, c, DEVICE, (source, target)))
        state.jobs[plan.plan_id] = CopyJob(group.spec.name, chain_number, c, rows, HOST)
        state.effects.append(SubmitPlan(plan))


# ---------------------------------------------------------------------------------- onboard


def onboard(
    state: State, group: Group, chain_number: int, page_class: int, pairs: list[tuple[int, int]]
) -> CopyJob:
    """Host to device for (source row, target row) pairs; the same row twice: the span itself.

    The target rows have FILLING device copies already. Every row named is busy until the plan ends.
    """
    chain = group.chains[chain_number]
    source = concat([chain.table.page_list(page_class, HOST, s) for s, _ in pairs])
    target = concat([chain.table.page_list(page_class, DEVICE, t) for _, t in pairs])
    plan = CopyPlan(state.new_plan_id(), Purpose.ONBOARD, between_tiers(chain, page_class, HOST, (source, target)))
    rows = [t for _, t in pairs]
    donors = [s for s, t in pairs if s != t]
    chain.table.busy[np.asarray([*rows, *donors], np.int64)] += 1
    job = CopyJob(group.spec.name, chain_number, page_class, rows, DEVICE, donors)
    state.jobs[plan.plan_id] = job
    state.effects.append(SubmitPlan(plan))
    return job


def onboard_in_flight(state: State, group: Group, chain_number: int, row: int) -> tuple[int, CopyJob] | None:
    """The plan that brings a span's device copy, if one is under way."""
    for plan_id, job in state.jobs.items():
        if (
            isinstance(job, CopyJob)
            and (job.group, job.chain, job.target_tier) == (group.spec.name, chain_number, DEVICE)
            and row in job.rows
        ):
            return plan_id, job
    return None


# -------------------------------------------------------------------------------- plan ends


def plan_ended(state: State, plan_id: int, outcome: CopyOutcome, error: KVError | None) -> None:
    """Applies the end of a plan. Ids that are not known (an earlier boot, a second report) change nothing."""
    job = state.jobs.pop(plan_id, None)
    if job is None:
        return
    if not ended_well(outcome):
        state.counters["failed_plan"] += 1
    if isinstance(job, PullJob):
        _pull_ended(state, job, outcome, error)
    elif job.target_tier == HOST:
        _writeback_ended(state, job, outcome)
    else:
        _onboard_ended(state, plan_id, job, outcome, error)
    state.groups[job.group].host_blocked = False


def _lose_copy(state: State, group: Group, chain: Chain, key: tuple[int, int, int], outcome: CopyOutcome) -> None:
    """Takes a copy that did not arrive away from its span: freed when nothing can write it any more."""
    page_class, tier, row = key
    if outcome is CopyOutcome.UNKNOWN_FATE:
        state.quarantine_pages(group, chain, page_class, tier, row)
    else:
        chain.free_copy(page_class, tier, row)


def _writeback_ended(state: State, job: CopyJob, outcome: CopyOutcome) -> None:
    group = state.groups[job.group]
    chain = group.chains[job.chain]
    for row in job.rows:
        chain.table.busy[row] -= 1
        if ended_well(outcome):
            chain.set_state(job.page_class, HOST, row, CopyState.READY, PageState.READY)
            _mark_dirty(state, group, job.chain, row)
        else:
            _lose_copy(state, group, chain, (job.page_class, HOST, row), outcome)
        chain.release_if_unused(row)
    if ended_well(outcome):
        state.counters["mirror" if group.spec.sparse else "offload"] += len(job.rows)


def _mark_dirty(state: State, group: Group, chain_number: int, row: int) -> None:
    """The residency of a span changed: every request that holds it must tell its worker."""
    for engine in state.all_engines():
        if engine.group != group.spec.name:
            continue
        for request in engine.requests.values():
            rows = request.chains[chain_number].rows
            if row in rows:
                request.dirty.add((chain_number, rows.index(row)))


def _onboard_ended(state: State, plan_id: int, job: CopyJob, outcome: CopyOutcome, error: KVError | None) -> None:
    group = state.groups[job.group]
    chain = group.chains[job.chain]
    chain.table.busy[np.asarray([*job.rows, *job.extra], np.int64)] -= 1
    for row in job.rows:
        if not ended_well(outcome):
            _lose_copy(state, group, chain, (job.page_class, DEVICE, row), outcome)
        elif chain.table.published[row]:
            chain.set_state(job.page_class, DEVICE, row, CopyState.READY, PageState.READY)
        # An unpublished target is a request's own span: it goes on filling it.
    if ended_well(outcome):
        state.counters["onboard"] += len(job.rows)
    else:
        # A host copy that can't be loaded is not offered again.
        for row in [*job.rows, *job.extra]:
            condemn(chain, row)
    for who in job.waiters:
        request = state.find(who)
        if request is not None and plan_id in request.waiting_on:
            request.waiting_on.discard(plan_id)
            if ended_well(outcome):
                _wake(state, request)
            else:
                refuse_waiting(state, request, error or TransferFailed("onboard failed; the prefix is recomputed"))
    for row in [*job.rows, *job.extra]:
        chain.release_if_unused(row)


def condemn(chain: Chain, row: int) -> None:
    """Takes a span and all below it out of the index; pages go when nobody holds them."""
    if not chain.table.live[row] or not chain.table.published[row]:
        return
    for child in [*chain.index.descendants(row), row]:
        chain.index.unpublish(child)
        chain.release_if_unused(child)


def _pull_ended(state: State, job: PullJob, outcome: CopyOutcome, error: KVError | None) -> None:
    group = state.groups[job.group]
    chain = group.chains[job.chain]
    for row in job.rows:
        chain.table.busy[row] -= 1
        for c in range(chain.table.classes):
            for tier in (DEVICE, HOST):
                if chain.table.copies[c, tier, row] != CopyState.FILLING:
                    continue
                if not ended_well(outcome):
                    _lose_copy(state, group, chain, (c, tier, row), outcome)
                elif tier == HOST:
                    chain.set_state(c, HOST, row, CopyState.READY, PageState.READY)
    request = state.find(job.waiter)
    if ended_well(outcome):
        state.counters["handoff"] += 1
    if request is not None and request.phase is Phase.WAITING:
        request.waiting_on.clear()
        if ended_well(outcome):
            request.fenced_tokens = request.committed_tokens = job.ticket.committed_tokens
            publish(state, request)
            _wake(state, request)
        else:
            refuse_waiting(state, request, error or TransferFailed("the hand-off failed; ask for a new ticket"))
    for row in job.rows:
        chain.release_if_unused(row)


def _wake(state: State, request: Request) -> None:
    """A waiting request has all its bytes: tell its engine, with complete tables."""
    if request.waiting_on or request.phase is not Phase.WAITING:
        return
    request.phase = Phase.RUNNING
    request.dirty.clear()
    engine = state.any_engine(request.engine, request.epoch)
    assert engine is not None
    state.notify(engine, ready=opened(request, "runnable"))


def opened(request: Request, name: str) -> Opened:
    """The complete answer for a request in its present state."""
    hot = request.hot if len(request.hot) else None
    return Opened(request.request_id, name, request.cached_tokens, request.tables(), request.worker_plans, hot)


def refuse_waiting(state: State, request: Request, error: KVError) -> None:
    """Ends a waiting request: its engine is told, everything it held is given back."""
    engine = state.any_engine(request.engine, request.epoch)
    assert engine is not None
    drop_request(state, request)
    state.notify(engine, ready=Opened(request.request_id, "refused", error=error))
    state.counters["refusal"] += 1


def drop_request(state: State, request: Request) -> None:
    """Gives back all that a request holds, at once: no work of its engine may touch its pages any more."""
    engine = state.any_engine(request.engine, request.epoch)
    assert engine is not None
    group = state.groups[engine.group]
    for pool, slabs in request.promised.items():
        group.pools[pool].promised_slabs -= slabs
    request.promised = {}
    if len(request.hot):
        assert group.spec.sparse is not None
        device_pool = group.chains[0].pool(0, DEVICE)
        device_pool.give(group.spec.sparse.hot_class, request.hot)
        request.hot = np.empty(0, np.int64)
    del engine.requests[request.request_id]
    for part in request.chains:
        part.chain.unpin([*reversed(part.rows), *part.anchors])
        part.rows, part.anchors, part.anchor = [], [], NO_SPAN
    for number, row in request.donors:
        group.chains[number].unpin([row])
    request.donors = []
    group.host_blocked = False


def fail_request(state: State, request: Request, error: KVError) -> None:
    """Tells the engine that something of a running request failed."""
    engine = state.any_engine(request.engine, request.epoch)
    assert engine is not None
    state.notify(engine, failed=RequestFailed(request.request_id, error))
