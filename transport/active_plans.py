"""Plans that an executor is carrying out: taken once, ended once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvmanager.core.checksums import SumArray
from kvmanager.core.plans import CopyPlan
from kvmanager.errors import Draining, InvalidArgument, KVError
from kvmanager.transport.executor import Completion, Outcome, RegionMap


@dataclass(kw_only=True)
class ActivePlan:
    """A plan being carried out. `ended`: set when no more of it will be started."""

    plan: CopyPlan
    moved_bytes: int = 0
    busy_ns: int = 0
    ended: tuple[Outcome, KVError | None] | None = None
    sums: SumArray | None = None


Active = TypeVar("Active", bound=ActivePlan)


class ActivePlans(Generic[Active]):
    """The part of an executor that keeps its plans; what it does with them is the subclass's (see `Executor`)."""

    def __init__(self, regions: RegionMap) -> None:
        self._regions = regions
        self._active: dict[int, Active] = {}
        self._closed = False

    def _take(self, active: Active, source_sizes: Mapping[int, int] | None = None) -> None:
        """Notes a plan; one that leaves its regions has ended before a byte moves.

        Raises InvalidArgument for an id that is outstanding, Draining after `close`.
        """
        plan = active.plan
        if self._closed:
            raise Draining(f"plan {plan.plan_id}: this executor is closed")
        if plan.plan_id in self._active:
            raise InvalidArgument(f"plan {plan.plan_id} is outstanding already")
        try:
            self._regions.check(plan, source_sizes)
        except InvalidArgument as error:
            active.ended = (Outcome.FAILED, error)
        self._active[plan.plan_id] = active

    def _end(self, active: Active) -> Completion:
        assert active.ended is not None
        del self._active[active.plan.plan_id]
        outcome, error = active.ended
        sums = active.sums if outcome is Outcome.DONE else None
        return Completion(active.plan.plan_id, outcome, active.moved_bytes, active.busy_ns, error, sums)

    def cancel(self, plan_id: int) -> None:
        """See `Executor.cancel`. A slice or read that has begun goes on to its end, or its deadline, first."""
        active = self._active.get(plan_id)
        if active is not None and active.ended is None:
            active.ended = (Outcome.CANCELLED, None)

    def __contains__(self, plan_id: int) -> bool:
        """Whether the plan is outstanding."""
        return plan_id in self._active

    def outstanding(self) -> list[int]:
        """See `Executor.outstanding`."""
        return list(self._active)

    def close(self) -> None:
        """See `Executor.close`: what is unfinished is CANCELLED. What the executor was given stays its owner's."""
        self._closed = True
        for plan_id in self._active:
            self.cancel(plan_id)
