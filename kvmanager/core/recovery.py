"""After the death of a mover or of the daemon: what was in flight ends, or stays out of reach until it has ended."""

from __future__ import annotations

from kvmanager.core.endings import plan_ended
from kvmanager.core.events import CopyOutcome, Recovered
from kvmanager.core.spans import HOST
from kvmanager.core.state import CopyJob, PullJob, State
from kvmanager.errors import KVError, TransferFailed


def mover_gone(state: State) -> None:
    """The mover's process is dead: nothing it had in flight can land any more."""
    _cancel(state, list(state.jobs), TransferFailed("the mover died; the copy did not complete"))
    for group, pool, page_class, pages in state.quarantine:
        state.groups[group].pools[pool].give(page_class, pages)
    state.quarantine.clear()
    state.mover = 0
    for group_now in state.groups.values():
        group_now.unblock()


def _cancel(state: State, plans: list[int], error: KVError) -> None:
    """Ends plans that no process carries: what their targets hold is not known, and nothing of it is published."""
    jobs = [(plan_id, state.jobs[plan_id]) for plan_id in plans]
    for plan_id, job in jobs:
        plan_ended(state, plan_id, CopyOutcome.CANCELLED, error)
        if isinstance(job, CopyJob) and job.target_tier == HOST:
            # Nothing was wrong with these copies: they are wanted as before.
            wanting = state.groups[job.group]
            wanting.chains[job.chain].table.failures[job.rows] = 0
            wanting.writeback[job.chain].extend(job.rows)


def recovered(state: State, event: Recovered) -> None:
    """A new daemon goes on from here: nobody has a stream, and only what its mover carries is in flight.

    Plans that were decided on and never sent end as cancelled. A pull that is still carried ends as failed, however
    its bytes came: who would have asked the source whether they are still the right ones died with the old daemon.
    """
    for engine in state.all_engines():
        # Also where it was suspect before: that it is to be ended may not have been heard.
        engine.suspect, engine.suspect_ns, engine.fenced, engine.stalled = True, state.now, False, False
    state.checks.clear()
    if event.incarnation != state.mover:
        mover_gone(state)
        state.mover = event.incarnation
        return
    known = {state.job_id(work_id) for work_id in event.known_plans}
    unknown = [plan_id for plan_id in state.jobs if plan_id not in known]
    _cancel(state, unknown, TransferFailed("the daemon restarted before the copy began; ask again"))
    for job in state.jobs.values():
        if isinstance(job, PullJob):
            job.orphaned = True
    for group in state.groups.values():
        group.unblock()
