"""Plans that workers carry out themselves: copies on write, and zeros over pages that were another tenant's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmanager.core.events import Grown
from kvmanager.core.plans import CopyPlan
from tests.sim.worker import CopyOp, RowsOp, SimRequest

if TYPE_CHECKING:
    from tests.sim.engine import SimEngine

Work = list[list[RowsOp | CopyOp]]
"""Operations by rank."""


def run(engine: SimEngine, request: SimRequest, plans: tuple[CopyPlan, ...], work: Work) -> None:
    """Appends each rank's part."""
    for plan in plans:
        for rank, ops in zip(engine.ranks, work, strict=True):
            mine = [c for c in plan.pieces() if engine.rank_of(c.target_region) == rank.number]
            what = f"{plan.purpose.value} of {request.request_id}"
            ops.append(CopyOp(what, mine, engine.world.claims(mine), plan.purpose))


def clear(engine: SimEngine, grown: Grown) -> None:
    """What comes with grown pages, launched at once: the next message may give them back."""
    if not grown.worker_plans:
        return
    engine.world.happened["cleared by the worker"] += 1
    engine.value += 1
    work: Work = [[] for _ in engine.ranks]
    run(engine, engine.requests[grown.request_id], grown.worker_plans, work)
    for rank, ops in zip(engine.ranks, work, strict=True):
        rank.queue.append((engine.value, ops))
