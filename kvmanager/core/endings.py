"""What the ends of plans and pulls mean for spans and for the requests that wait for them."""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import update_promises
from kvmanager.core.checksums import SumArray
from kvmanager.core.events import CopyOutcome
from kvmanager.core.forgetting import condemn
from kvmanager.core.group import Chain, Group
from kvmanager.core.lifecycle import refuse_waiting, wake
from kvmanager.core.mirrors import lacks_some
from kvmanager.core.operatorevents import Loss
from kvmanager.core.pool import PageState
from kvmanager.core.request import Phase
from kvmanager.core.scrubbing import scrub_ended, whole_copy
from kvmanager.core.settle import publish
from kvmanager.core.spans import ABSENT, DEVICE, FILLING, HOST, READY, CopyState
from kvmanager.core.state import CheckJob, CopyJob, PullJob, ScrubJob, State, ended_well
from kvmanager.core.verification import check_ended, differing, keep, take_out
from kvmanager.errors import ChecksumMismatch, KVError, TransferFailed
from kvmanager.geometry import Int64Array


def plan_ended(
    state: State, plan_id: int, outcome: CopyOutcome, error: KVError | None, sums: SumArray | None = None
) -> None:
    """Applies the end of a plan. Ids that are not known (an earlier boot, a second report) change nothing."""
    plan_id = state.job_id(plan_id)
    job = state.jobs.pop(plan_id, None)
    if job is None:
        return
    if isinstance(job, CopyJob) and job.asked is not None and ended_well(outcome) and sums is None:
        # A copy that can't be compared counts as one that did not arrive.
        outcome, error = CopyOutcome.FAILED, TransferFailed(f"plan {plan_id} ended without the sums it was asked for")
    gave_way = isinstance(job, CopyJob) and job.gives_way and outcome is CopyOutcome.CANCELLED
    if gave_way:
        state.counters["writeback_cancelled"] += 1
    elif not ended_well(outcome):
        state.counters["failed_plan"] += 1
    if isinstance(job, CopyJob):
        state.pace.note("copy_ns", state.now - job.since)
    if isinstance(job, PullJob):
        _pull_ended(state, plan_id, job, outcome, error)
    elif isinstance(job, CheckJob):
        check_ended(state, job, sums if ended_well(outcome) else None)
    elif isinstance(job, ScrubJob):
        scrub_ended(state, plan_id, job, outcome, error)
    elif job.target_tier == HOST:
        _writeback_ended(state, job, outcome, sums)
    else:
        _onboard_ended(state, plan_id, job, outcome, error, sums)
    group = state.groups[job.group]
    update_promises(state, group)
    group.unblock()


def _lose_copy(state: State, group: Group, chain: Chain, key: tuple[int, int, int], outcome: CopyOutcome) -> None:
    """Takes a copy that did not arrive away from its span: freed when nothing can write it any more."""
    page_class, tier, row = key
    if outcome is CopyOutcome.UNKNOWN_FATE:
        state.quarantine_pages(group, chain, page_class, tier, row)
    else:
        chain.free_copy(page_class, tier, row)


def _writeback_ended(state: State, job: CopyJob, outcome: CopyOutcome, sums: SumArray | None) -> None:
    group = state.groups[job.group]
    chain = group.chains[job.chain]
    index = np.asarray(job.rows, np.int64)
    chain.table.busy[index] -= 1
    if ended_well(outcome):
        chain.set_states(job.page_class, HOST, index, CopyState.READY, PageState.READY)
        chain.table.failures[index] = 0
        if job.asked is not None and sums is not None:
            keep(state, chain, job.page_class, job.asked, sums)
    else:
        for row in job.rows:
            _lose_copy(state, group, chain, (job.page_class, HOST, row), outcome)
    chain.release_unused(job.rows)
    if job.gives_way and outcome is CopyOutcome.CANCELLED:
        # Not at once: the request that needs their pages asks again first.
        group.declined[job.chain].extend(row for row in job.rows if chain.table.live[row])
    elif not ended_well(outcome):
        _try_again(state, group, job)
    if ended_well(outcome) and (not group.spec.swaps or group.spec.floats(chain.page_class(job.page_class).name)):
        state.counters["mirror" if group.spec.swaps else "offload"] += len(job.rows)
    if chain.table.classes > 1:
        # Only those that want a copy now: one that waited in the queue with all it needs would take it back from who
        # took it, at once, and they from one another without end. It is `declined` then, and tried as time passes.
        live = index[chain.table.live[index]]
        group.writeback[job.chain].extend(live[lacks_some(chain, live)])


def _try_again(state: State, group: Group, job: CopyJob) -> None:
    """Host copies that failed are wanted as before, a bounded number of times."""
    table = group.chains[job.chain].table
    rows = np.asarray(job.rows, np.int64)
    rows = rows[table.live[rows]]
    table.failures[rows] += 1
    again = table.failures[rows] < state.limits.writeback_tries
    group.writeback[job.chain].extend(rows[again].tolist())
    state.counters["writeback_retry"] += int(again.sum())
    state.counters["writeback_given_up"] += int((~again).sum())


def _onboard_ended(
    state: State, plan_id: int, job: CopyJob, outcome: CopyOutcome, error: KVError | None, sums: SumArray | None
) -> None:
    group = state.groups[job.group]
    chain = group.chains[job.chain]
    chain.table.busy[np.asarray([*job.rows, *job.extra], np.int64)] -= 1
    failure: KVError | None = None
    if ended_well(outcome):
        bad: list[int] = []
        if job.asked is not None and sums is not None:
            places, failure = differing(state, chain, job.page_class, job.asked, sums)
            bad = places.tolist()
        good = [row for place, row in enumerate(job.rows) if place not in bad]
        # An unpublished target is a request's own span: it goes on filling it.
        index = np.asarray(good, np.int64)
        whole_copy(state, chain, job.page_class, index)
        published = index[chain.table.published[index]]
        chain.set_states(job.page_class, DEVICE, published, CopyState.READY, PageState.READY)
        _settle_private(chain, job.page_class, index[~chain.table.published[index]])
        _mark_redundant(state, chain, job.page_class, published)
        state.counters["onboard"] += len(good)
        for place in bad:
            _lose_copy(state, group, chain, (job.page_class, DEVICE, job.rows[place]), outcome)
        if isinstance(failure, ChecksumMismatch):
            sources = [job.loaded_from[place] for place in bad]
            take_out(state, group, job.chain, job.page_class, sources, failure)
            for place in bad:
                condemn(state, chain, job.rows[place], Loss.BAD_COPY)
    else:
        failure = error or TransferFailed("onboard failed; the prefix is recomputed")
        for row in job.rows:
            _lose_copy(state, group, chain, (job.page_class, DEVICE, row), outcome)
        if outcome is not CopyOutcome.CANCELLED:
            # A host copy that can't be loaded is not offered again; one that nobody tried to load is.
            for row in [*job.rows, *job.extra]:
                condemn(state, chain, row, Loss.FAILED_LOAD)
    _answer_waiters(state, plan_id, job, failure)
    chain.release_unused([*job.rows, *job.extra])


def _settle_private(chain: Chain, page_class: int, rows: Int64Array) -> None:
    """Spans of a request alone that came back: a full one is final, one that it goes on filling has no host copy."""
    table = chain.table
    full = table.valid[rows] == table.segments[rows]
    chain.set_states(page_class, DEVICE, rows[full], CopyState.READY, PageState.READY)
    for row in rows[~full & (table.busy[rows] == 0)].tolist():
        for c in range(table.classes):
            if table.copies[c, HOST, row] != ABSENT:
                chain.free_copy(c, HOST, row)


def _mark_redundant(state: State, chain: Chain, page_class: int, rows: Int64Array) -> None:
    """Where capacity asks for it, a host copy whose span is back on the device is the first to make room."""
    pool = chain.pool(page_class, HOST)
    if state.limits.inclusion.redundant(pool.free_slabs, pool.slabs):
        complete = (chain.table.copies[:, :, rows] == READY).all(axis=(0, 1))
        chain.table.redundant[rows[complete]] = True


def _answer_waiters(state: State, plan_id: int, job: CopyJob, failure: KVError | None) -> None:
    for who in job.waiters:
        request = state.find(who)
        if request is None or plan_id not in request.waiting_on:
            continue  # it was aborted; its id may belong to another request by now
        request.waiting_on.discard(plan_id)
        if failure is None:
            wake(state, request)
        else:
            refuse_waiting(state, request, failure)


def _pull_ended(state: State, plan_id: int, job: PullJob, outcome: CopyOutcome, error: KVError | None) -> None:
    if job.orphaned and ended_well(outcome):
        outcome, error = CopyOutcome.FAILED, TransferFailed("the daemon restarted during the hand-off; ask again")
    group = state.groups[job.group]
    for number, rows in job.rows:
        chain, index = group.chains[number], np.asarray(rows, np.int64)
        chain.table.busy[index] -= 1
        for c in range(chain.table.classes):
            _land(state, group, chain, c, index, outcome)
    if ended_well(outcome):
        state.counters["handoff"] += 1
    if isinstance(error, ChecksumMismatch):
        state.counters["bad_pull"] += 1
    # The waiter may have been aborted and its id used again: only the one that waits for this plan goes on.
    request = state.find(job.waiter)
    if request is not None and plan_id in request.waiting_on:
        assert request.phase is Phase.WAITING
        request.waiting_on.discard(plan_id)
        if ended_well(outcome):
            request.fenced_tokens = request.committed_tokens = job.ticket.committed_tokens
            publish(state, request)
            wake(state, request)
        else:
            refuse_waiting(state, request, error or TransferFailed("the hand-off failed; ask for a new ticket"))
    for number, rows in job.rows:
        group.chains[number].release_unused(rows)


def _land(
    state: State, group: Group, chain: Chain, page_class: int, rows: Int64Array, outcome: CopyOutcome
) -> None:
    """Copies of pulled spans: host copies are complete, device copies go on being filled by their request."""
    copies = chain.table.copies[page_class]
    if ended_well(outcome):
        landed = rows[copies[HOST, rows] == FILLING]
        chain.set_states(page_class, HOST, landed, CopyState.READY, PageState.READY)
        return
    for tier in (DEVICE, HOST):
        for row in rows[copies[tier, rows] == FILLING].tolist():
            _lose_copy(state, group, chain, (page_class, tier, row), outcome)
