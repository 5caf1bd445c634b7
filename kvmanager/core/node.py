"""The core: one function from (event, now) to effects. Everything else in this package serves it."""

from __future__ import annotations

from kvmanager.core import engines, tickets
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
)
from kvmanager.core.fences import resolve_fences
from kvmanager.core.group import Group
from kvmanager.core.movement import plan_ended, pump_writeback
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.core.state import State
from kvmanager.core.steps import step
from kvmanager.errors import KVError, TransferFailed


class Node:
    """The state machine of one daemon. Single-threaded, deterministic: same events, same effects.

    A KVError raised while an event is handled becomes its reply and leaves the state as it was; anything else
    is our own mistake and must stop the daemon.
    """

    def __init__(self, groups: list[GroupSpec], limits: Limits, first_plan_id: int = 1) -> None:
        """`first_plan_id`: above every id of earlier boots, since movers outlive a daemon."""
        self.state = State([Group(spec) for spec in groups], limits)
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
        match event:
            case Step():
                return Replied(step(self.state, event))
            case RegisterEngine():
                return Replied(Registered(engines.register(self.state, event).epoch))
            case AttachRank():
                return Replied(Attached(engines.attach(self.state, event)))
            case EngineResumed():
                engines.resume(self.state, event.engine, event.epoch)
                return Replied(None)
            case ExportRequestKV():
                return Replied(tickets.export(self.state, event))
            case AcceptTicket():
                return Replied(tickets.accept(self.state, event))
            case RenewTickets():
                return Replied(tickets.renew(self.state, event))
            case CheckTicket():
                tickets.check(self.state, event)
                return Replied(None)
            case ReleaseTicket():
                tickets.release(self.state, event)
                return Replied(None)
            case DetachRank():
                engines.detach(self.state, event)
                return Replied(None)
            case _:
                self._note(event)
                return None

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
            case Tick():
                tickets.expire(self.state)
                for group in self.state.groups.values():
                    group.host_blocked = False
            case _:
                raise AssertionError(f"unhandled event {event!r}")

    def _timelines(self, event: TimelinesRead) -> None:
        known = self.state.timelines
        for attach_id, value in event.values.items():
            known[attach_id] = max(known.get(attach_id, 0), value)
        for engine in self.state.all_engines():
            resolve_fences(self.state, engine)

    def _mover_gone(self) -> None:
        """The mover's process is dead: nothing it had in flight can land any more."""
        error = TransferFailed("the mover died; the copy did not complete")
        for plan_id in list(self.state.jobs):
            plan_ended(self.state, plan_id, CopyOutcome.FAILED, error)
        for group, pool, page_class, pages in self.state.quarantine:
            self.state.groups[group].pools[pool].give(page_class, pages)
        self.state.quarantine.clear()

    @property
    def fences_pending(self) -> bool:
        """Whether some timeline must be watched."""
        return any(engine.fences for engine in self.state.all_engines())
