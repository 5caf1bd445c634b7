"""Write-back gives way: a refused request gets the device pages that copies in flight keep from being reclaimed.

A plan that was asked to end may have begun all the same. Its pages stay out of reach until it has ended, however it
does (cancel is quarantine); then they are candidates like all others.
"""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import CancelPlan
from kvmanager.core.group import Group
from kvmanager.core.pool import Pool
from kvmanager.core.spans import DEVICE, HOST
from kvmanager.core.state import CopyJob, State


def give_way(state: State, group: Group, pool: Pool, lacking: int) -> None:
    """Cancels the newest host copies that alone keep `lacking` slabs of a device pool; none where that is too few."""
    if pool.tier == "host" or lacking <= 0:
        return
    kept = _kept_by_writeback(state, group, pool)
    if sum(kept.values()) < lacking:
        return  # it would not help: somebody else holds what is missing
    for plan_id in sorted(kept, reverse=True):
        job = state.jobs[plan_id]
        assert isinstance(job, CopyJob)
        lacking -= kept[plan_id]
        if not job.gives_way:
            job.gives_way = True
            state.effects.append(CancelPlan(plan_id))
        if lacking <= 0:
            return


def _kept_by_writeback(state: State, group: Group, pool: Pool) -> dict[int, int]:
    """Slabs of the pool that only a host copy in flight keeps, by plan."""
    kept: dict[int, int] = {}
    for plan_id, job in state.jobs.items():
        if not isinstance(job, CopyJob) or job.group != group.spec.name or job.target_tier != HOST:
            continue
        chain = group.chains[job.chain]
        if chain.pool(job.page_class, DEVICE) is not pool:
            continue
        table, rows = chain.table, np.asarray(job.rows, np.int64)
        idle = rows[table.published[rows] & (table.pins[rows] == 0) & (table.busy[rows] == 1)]
        slabs = int(chain.widths(idle).sum()) // pool.per_slab(chain.page_class(job.page_class).name)
        if slabs:
            kept[plan_id] = slabs
    return kept
