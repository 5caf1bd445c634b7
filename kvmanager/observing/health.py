"""Health is progress: for each part what it has still to do, and since when nothing of that was done.

`Health.judge` is told what was seen and when; nothing here reads a clock or waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvmanager.configuration.operationsconfig import HealthSection
from kvmanager.core import leases
from kvmanager.core.node import Node
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.spans import HOST
from kvmanager.core.state import CopyJob
from kvmanager.units import SECOND_NS


@dataclass(frozen=True)
class PoolVitals:
    """room: slabs free or reclaimable now. wanted: the fewest that a refused request asked for; 0: none was refused."""

    room: int
    wanted: int


@dataclass(frozen=True)
class JobVitals:
    """A background job. waiting: whether it has something to do that it could do now. done: a count that rises."""

    waiting: bool
    done: int


@dataclass(frozen=True)
class Vitals:
    """One look at the core. plans: ids under way. admitted: a count of requests. overdue_ns: oldest ticket or lease."""

    pools: Mapping[str, PoolVitals]
    jobs: Mapping[str, JobVitals]
    plans: frozenset[int]
    admitted: int
    overdue_ns: int


@dataclass(frozen=True)
class Sight:
    """What was seen at `now`, ns. vitals: None when the core did not answer in time. ages: ns."""

    now: int
    vitals: Vitals | None
    tick_age_ns: int
    pong_age_ns: int


@dataclass(frozen=True)
class Tellers:
    """The threads that tell others what the core did. history: None where none is kept. streams: by name."""

    history: JobVitals | None
    streams: Mapping[str, JobVitals]


def vitals(node: Node, now: int) -> Vitals:
    """In the core."""
    state = node.state
    pools = {}
    jobs = {}
    for group in state.groups.values():
        for pool in group.pools.values():
            claimed = [claim.slabs[pool.name] for claim in group.claims.values() if claim.slabs.get(pool.name)]
            wanted = min(claimed, default=0)
            room = pool.free_slabs + reclaimable_slabs(group, pool) if wanted else pool.free_slabs
            pools[pool.name] = PoolVitals(room, wanted)
        running = any(
            isinstance(job, CopyJob) and job.group == group.spec.name and job.target_tier == HOST
            for job in state.jobs.values()
        )
        queued = any(len(queue) and number not in group.blocked for number, queue in enumerate(group.writeback))
        done = ("offload", "mirror", "writeback_bypass", "writeback_given_up", "writeback_retry", "writeback_cancelled")
        jobs[f"writeback of {group.spec.name}"] = JobVitals(
            queued and not running, sum(state.counters[name] for name in done)
        )
    ends = [*(ticket.expires_ns for ticket in state.tickets.values()), *leases.ends_ns(state)]
    return Vitals(
        pools,
        jobs,
        frozenset(state.jobs),
        state.counters["request"] - state.counters["refusal"],
        now - min(ends, default=now),
    )


@dataclass
class _Still:
    """Since when a count has not moved while there was something to do."""

    since: int
    mark: object

    def stands_ns(self, now: int, mark: object, waiting: bool) -> int:
        """How long by now."""
        if not waiting or mark != self.mark:
            self.since, self.mark = now, mark
        return now - self.since


@dataclass
class Health:
    """Judges one look after the other. grace_ns: added where a lease's end is due, for the time between ticks."""

    limits: HealthSection
    lease_grace_ns: int
    _still: dict[str, _Still] = field(default_factory=dict)
    _plans: frozenset[int] = frozenset()
    _plans_moved: int = 0

    def judge(self, sight: Sight) -> dict[str, str]:
        """Part -> what is wrong with it; empty when all is well. Parts are `core`, `mover`, `pool NAME`, job names."""
        return dict(self._problems(sight))

    def late(self, now: int, seen: Tellers) -> dict[str, str]:
        """Each part that the node can serve without -> what is wrong with it, "" when it is well.

        Parts are `history` and the streams' names.
        """
        parts = {name: self._idle(name, now, job, self.limits.events_ns) for name, job in seen.streams.items()}
        if seen.history is not None:
            parts["history"] = self._idle("history", now, seen.history, self.limits.history_ns)
        return parts

    def _problems(self, sight: Sight) -> Iterator[tuple[str, str]]:
        limits = self.limits
        if sight.vitals is None:
            yield "core", f"did not answer within {limits.core_ms} ms"
        elif sight.tick_age_ns > limits.core_ns:
            yield "core", f"has not ticked for {_seconds(sight.tick_age_ns)}"
        if sight.pong_age_ns > limits.mover_ns:
            yield "mover", f"has not answered a ping for {_seconds(sight.pong_age_ns)}"
        if sight.vitals is not None:
            yield from self._stalled(sight.now, sight.vitals)

    def _stalled(self, now: int, seen: Vitals) -> Iterator[tuple[str, str]]:
        limits = self.limits
        if not self._plans or not self._plans <= seen.plans:  # some plan ended
            self._plans_moved = now
        self._plans = seen.plans
        if now - self._plans_moved > limits.copy_ns:
            yield "mover", f"{len(seen.plans)} plans under way and none ended for {_seconds(now - self._plans_moved)}"
        for name, pool in seen.pools.items():
            short = 0 < pool.wanted > pool.room
            stands = self._stands(f"pool {name}", now, seen.admitted, short)
            if stands > limits.evict_ns:
                text = f"{pool.room} slabs free or reclaimable, {pool.wanted} asked for, nobody admitted"
                yield f"pool {name}", f"{text} for {_seconds(stands)}"
        for name, job in seen.jobs.items():
            if why := self._idle(name, now, job, limits.job_ns):
                yield name, why
        if seen.overdue_ns > self.lease_grace_ns + limits.job_ns:
            yield "lease expiry", f"a ticket or lease is overdue for {_seconds(seen.overdue_ns)}"

    def _idle(self, name: str, now: int, job: JobVitals, most_ns: int) -> str:
        stands = self._stands(name, now, job.done, job.waiting)
        return f"has work and did none for {_seconds(stands)}" if stands > most_ns else ""

    def _stands(self, name: str, now: int, mark: object, waiting: bool) -> int:
        return self._still.setdefault(name, _Still(now, mark)).stands_ns(now, mark, waiting)


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / SECOND_NS:.1f} s"
