"""The core: one function from (event, now) to effects. Everything else in this package serves it."""

from __future__ import annotations

from kvmanager.core import engines, tickets
from kvmanager.core.endings import plan_ended
from kvmanager.core.events import (
    AcceptTicket,
    Attached,
    AttachRank,
    CheckTicket,
    CopyOutcome,
    DetachRank,
    Drain,
    Effect,
    EngineGone,
    EngineResumed,
    EngineSuspect,
    Event,
    ExportRequestKV,
    MoverGone,
    PlanEnded,
    Registered,
    RegisterEngine,
    ReleaseTicket,
    RenewTickets,
    Replied,
    Step,
    Tick,
    TimelinesRead,
    Trim,
)
from kvmanager.core.eviction import Policy, leaf_first_lru
from kvmanager.core.fences import resolve_fences
from kvmanager.core.group import Group
from kvmanager.core.sessions import sweep
from kvmanager.core.spans import HOST
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.core.state import CopyJob, State
from kvmanager.core.steps import step
from kvmanager.core.writeback import pump_writeback, reconsider
from kvmanager.errors import KVError, TransferFailed


class Node:
    """The state machine of one daemon. Single-threaded, deterministic: same events, same effects.

    A KVError raised while an event is handled becomes its reply and leaves the state as it was; anything else
    is our own mistake and must stop the daemon.
    """

    def __init__(
        self, groups: list[GroupSpec], limits: Limits, first_plan_id: int = 1, policy: Policy = leaf_first_lru
    ) -> None:
        """`first_plan_id`: above every id of earlier boots, since movers outlive a daemon. `policy`: who goes first."""
        self.state = State([Group(spec, policy) for spec in groups], limits)
        self.state.next_plan = first_plan_id

    def apply(self, event: Event, now: int) -> list[Effect]:
        """Handles one event at `now` (ns, never less than before) and returns what is to be done, in order."""
        state = self.state
        assert now >= state.now
        state.now = now
        state.effects = []
        try:
            answer = self._handle(event)
        except KVError as error:
            answer = Replied(error)
        for group in state.groups.values():
            pump_writeback(state, group)
        effects = state.effects
        state.effects = []
        return effects if answer is None else [answer, *effects]

    def _handle(self, event: Event) -> Replied | None:
        state = self.state
        match event:
            case Step():
                return Replied(step(state, event))
            case RegisterEngine():
                return Replied(Registered(engines.register(state, event).epoch))
            case AttachRank():
                return Replied(Attached(engines.attach(state, event)))
            case EngineResumed():
                engines.resume(state, event.engine, event.epoch)
                return Replied(None)
            case DetachRank():
                engines.detach(state, event)
                return Replied(None)
            case ExportRequestKV() | AcceptTicket() | RenewTickets() | CheckTicket() | ReleaseTicket():
                return self._ticket(event)
            case _:
                self._note(event)
                return None

    def _ticket(
        self, event: ExportRequestKV | AcceptTicket | RenewTickets | CheckTicket | ReleaseTicket
    ) -> Replied:
        state = self.state
        match event:
            case ExportRequestKV():
                return Replied(tickets.export(state, event))
            case AcceptTicket():
                return Replied(tickets.accept(state, event))
            case RenewTickets():
                return Replied(tickets.renew(state, event))
            case CheckTicket():
                tickets.check(state, event)
            case ReleaseTicket():
                tickets.release(state, event)
        return Replied(None)

    def _note(self, event: Event) -> None:
        """Events that nobody waits for an answer to."""
        match event:
            case TimelinesRead():
                self._timelines(event)
            case PlanEnded():
                plan_ended(self.state, event.plan_id, event.outcome, event.error)
            case EngineSuspect():
                engines.suspect(self.state, event.engine, event.epoch)
            case EngineGone():
                engines.engine_gone(self.state, event)
            case MoverGone():
                self._mover_gone()
            case Drain():
                for engine in self.state.engines.values():
                    self.state.notify(engine, draining=event.why)
            case Trim():
                pool = self.state.groups[event.group].pools[event.pool]
                self.state.reclaimers[event.group].trim(pool, event.free_slabs)
            case Tick():
                self._tick()
            case _:
                raise AssertionError(f"unhandled event {event!r}")

    def _tick(self) -> None:
        """Time passes: what is over ends without any new work."""
        tickets.expire(self.state)
        sweep(self.state)
        engines.fence_suspects(self.state)
        for group in self.state.groups.values():
            group.unblock()
            reconsider(self.state, group)

    def _timelines(self, event: TimelinesRead) -> None:
        known = self.state.timelines
        for attach_id, value in event.values.items():
            if attach_id in known:
                known[attach_id] = max(known[attach_id], value)
        for engine in self.state.all_engines():
            resolve_fences(self.state, engine)

    def _mover_gone(self) -> None:
        """The mover's process is dead: nothing it had in flight can land any more."""
        error = TransferFailed("the mover died; the copy did not complete")
        jobs = list(self.state.jobs.items())
        for plan_id, job in jobs:
            plan_ended(self.state, plan_id, CopyOutcome.CANCELLED, error)
            if isinstance(job, CopyJob) and job.target_tier == HOST:
                # Nothing was wrong with these copies: they are wanted as before.
                wanting = self.state.groups[job.group]
                wanting.chains[job.chain].table.failures[job.rows] = 0
                wanting.writeback[job.chain].extend(job.rows)
        for group, pool, page_class, pages in self.state.quarantine:
            self.state.groups[group].pools[pool].give(page_class, pages)
        self.state.quarantine.clear()
        for group_now in self.state.groups.values():
            group_now.unblock()

    @property
    def fences_pending(self) -> bool:
        """Whether some timeline must be watched."""
        return any(engine.fences for engine in self.state.all_engines())
