"""Scrubbing: a page that goes from one tenant to another is overwritten before the new one can read it.

Only in groups that ask for it. A request whose new pages may hold another tenant's bytes waits, as for an onboard,
while the mover writes zeros over them; a hand-off into them begins after that. Pages that a running request grows into
can't wait: the reply brings a plan with them, which the worker carries out before its first write (as copy-on-write).
What copies overwrite as a whole (onboards, mirrors, write-back) needs neither. A hot buffer is given in mid-run, too:
its worker gets the zeros with it (`core.zeros`).
"""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import CopyOutcome, SubmitPlan, TicketInfo
from kvmanager.core.group import Chain, Group
from kvmanager.core.lifecycle import refuse_waiting, wake
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.pulling import start_pull
from kvmanager.core.request import Phase, Request
from kvmanager.core.rows import RowArray
from kvmanager.core.spans import ABSENT, DEVICE, FILLING
from kvmanager.core.state import ScrubJob, State, ended_well
from kvmanager.core.zeros import unclean, zeros
from kvmanager.errors import KVError, TransferFailed


def scrub(state: State, group: Group, request: Request, ticket: TicketInfo | None = None) -> bool:
    """Has the pages of new spans overwritten where need be; the request waits then. Whether it does.

    `ticket`: what is pulled into them afterwards.
    """
    if not group.spec.scrub:
        return False
    who = (request.engine, request.epoch, request.request_id)
    for number, part in enumerate(request.chains):
        chain = part.chain
        new = part.rows.array[part.shared :]
        new = new[chain.table.busy[new] == 0]  # the others' pages come whole, from the host
        for c, tier in chain.spec.class_tiers:
            rows = new[chain.table.copies[c, tier, new] == FILLING]
            pages = unclean(chain, c, tier, rows)
            if len(pages) == 0:
                continue
            plan = CopyPlan(state.new_plan_id(), Purpose.SCRUB, zeros(chain, c, tier, pages))
            state.jobs[plan.plan_id] = ScrubJob(
                group.spec.name, number, c, tier, rows.tolist(), pages, who, ticket, state.now
            )
            request.waiting_on.add(plan.plan_id)
            state.effects.append(SubmitPlan(plan))
    # Afterwards: a span may wait for several plans.
    for plan_id in request.waiting_on:
        job = state.jobs[plan_id]
        if isinstance(job, ScrubJob):
            group.chains[job.chain].table.busy[np.asarray(job.rows, np.int64)] += 1
    return _waits_for_zeros(state, request)


def by_worker(state: State, chain: Chain, rows: RowArray) -> list[CopyPlan]:
    """Plans for the worker that is given these new spans at once: zeros over what others may have written there."""
    plans = []
    for c in range(chain.table.classes):
        pages = unclean(chain, c, DEVICE, rows)
        if len(pages):
            plans.append(CopyPlan(state.new_plan_id(), Purpose.SCRUB, zeros(chain, c, DEVICE, pages)))
    return plans


def scrub_ended(state: State, plan_id: int, job: ScrubJob, outcome: CopyOutcome, error: KVError | None) -> None:
    """The request goes on once all its pages are overwritten, or ends where they could not be."""
    group = state.groups[job.group]
    chain = group.chains[job.chain]
    rows = np.asarray(job.rows, np.int64)
    chain.table.busy[rows] -= 1
    if ended_well(outcome):
        _overwritten(group, chain, job.page_class, job.tier, rows)
        state.counters["scrubbed_page"] += len(job.pages)
    elif outcome is CopyOutcome.UNKNOWN_FATE:
        for row in job.rows:
            state.quarantine_pages(group, chain, job.page_class, job.tier, row)
    request = state.find(job.waiter)
    if request is not None and plan_id in request.waiting_on:
        request.waiting_on.discard(plan_id)
        if not ended_well(outcome):
            refuse_waiting(state, request, error or TransferFailed("the pages could not be overwritten; ask again"))
        elif not _waits_for_zeros(state, request):
            if job.ticket is not None:
                start_pull(state, request, job.ticket)
            wake(state, request)
    chain.release_unused(job.rows)


def whole_copy(state: State, chain: Chain, page_class: int, rows: RowArray) -> None:
    """Device pages of these spans were overwritten as a whole by a copy of their own content."""
    for group in state.groups.values():
        if group.spec.scrub and chain in group.chains and len(rows):
            _overwritten(group, chain, page_class, DEVICE, rows)


def _overwritten(group: Group, chain: Chain, page_class: int, tier: int, rows: RowArray) -> None:
    pool, name = chain.pool(page_class, tier), chain.page_class(page_class).name
    assert pool.writers is not None
    for row in rows[chain.table.copies[page_class, tier, rows] != ABSENT].tolist():
        tenant = group.tenants.of_namespace[int(chain.table.namespace[row])]
        pages = chain.table.page_list(page_class, tier, row)
        pool.writers.overwritten(pages, pool.spaces[name].units, tenant)


def _waits_for_zeros(state: State, request: Request) -> bool:
    assert request.phase is not Phase.CLOSING
    return any(isinstance(state.jobs[plan_id], ScrubJob) for plan_id in request.waiting_on)
