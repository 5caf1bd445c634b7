"""The core: one function from (event, now) to effects. Everything else in this package serves it."""

from __future__ import annotations

from kvmanager.core import engines, leases, pins, recovery, tickets
from kvmanager.core.endings import plan_ended
from kvmanager.core.events import (
    READS,
    AcceptTicket,
    Attached,
    AttachRank,
    CheckCopies,
    CheckTicket,
    DetachRank,
    Drain,
    Effect,
    EngineGone,
    EngineResumed,
    EngineSuspect,
    Event,
    ExportRequestKV,
    MoverGone,
    MoverJoined,
    PlanEnded,
    Recovered,
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
from kvmanager.core.fences import moved, resolve_fences
from kvmanager.core.group import Group
from kvmanager.core.kvevents import Announcer, KvEvent
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, LeaseEvent, ReserveSpans
from kvmanager.core.operatorevents import (
    Cordon,
    EvictPool,
    EvictPrefix,
    EvictTenant,
    OperatorAnswer,
    OperatorEvent,
    PinPrefix,
    Reset,
    UnpinPrefix,
)
from kvmanager.core.reset import reset
from kvmanager.core.sessions import overdue, sweep
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.core.state import State
from kvmanager.core.steps import step
from kvmanager.core.verification import begin_checks
from kvmanager.core.writeback import pump_writeback, reconsider
from kvmanager.errors import KVError

_LATE = (engines.overdue, engines.lapsed, tickets.overdue, leases.overdue, overdue)
"""Whether time alone has made something due."""


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

    announcer: Announcer | None = None
    """Who is told what can be fetched; not part of the state, and nothing in the state depends on it."""

    @classmethod
    def of(cls, state: State) -> Node:
        """The machine that goes on from a stored state."""
        node = cls.__new__(cls)
        node.state = state
        return node

    def idle(self, event: Event, now: int) -> bool:
        """Whether the event would change nothing at `now` but the clock, and has no answer: it may be left out.

        False where that takes more than a glance.
        """
        state = self.state
        match event:
            case TimelinesRead():
                # Fences are looked at whenever one is added, or a value or a rank's life changes.
                known = state.timelines
                return all(value <= known.get(attach, value) for attach, value in event.values.items())
            case Tick():
                waiting = any(group.blocked or any(group.declined) for group in state.groups.values())
                late = any(is_late(state, now) for is_late in _LATE)
                return not (waiting or late)
        return False

    def apply(self, event: Event, now: int) -> list[Effect]:
        """Handles one event at `now` (ns, never less than before) and returns what is to be done, in order."""
        state = self.state
        assert now >= state.now
        unnoted = isinstance(event, READS) or self.idle(event, now)
        state.now = now
        state.effects = []
        try:
            answer = self._handle(event)
        except KVError as error:
            answer = Replied(error)
        # Not after an idle event or a read: time alone may rank spans anew, and such an event is in no journal.
        for group in state.groups.values() if not unnoted else ():
            pump_writeback(state, group)
        effects = state.effects
        state.effects = []
        return [*self._news(), *([] if answer is None else [answer]), *effects]

    def announce(self, groups: frozenset[str]) -> list[KvEvent]:
        """What can be fetched in these groups now; from here on each event's effects begin with what changed of it."""
        self.announcer = Announcer(groups)
        return self.announcer.begin(self.state)

    def _news(self) -> list[KvEvent]:
        news = [] if self.announcer is None else self.announcer.changes(self.state)
        for group in self.state.groups.values():
            for chain in group.chains:
                if chain.table.touched:
                    chain.table.touched.clear()
        return news

    def _handle(self, event: Event) -> Replied | None:
        state = self.state
        match event:
            case Step():
                return Replied(step(state, event))
            case TimelinesRead() | PlanEnded() | Tick():
                self._note(event)
                return None
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
            case AcquirePrefix() | ReserveSpans() | EndLease():
                return self._lease(event)
            case Reset() | PinPrefix() | UnpinPrefix() | EvictPrefix() | EvictTenant() | EvictPool() | Cordon():
                return Replied(self._operator(event))
            case _:
                self._note(event)
                return None

    def _operator(self, event: OperatorEvent) -> OperatorAnswer | None:
        state = self.state
        match event:
            case Reset():
                return reset(state, event)
            case PinPrefix():
                return pins.pin(state, event)
            case UnpinPrefix():
                return pins.unpin(state, event.pin_id)
            case EvictPrefix():
                return pins.evict_prefix(state, event)
            case EvictTenant():
                return pins.evict_tenant(state, event)
            case EvictPool():
                return pins.evict_pool(state, event)
            case Cordon():
                state.cordon = event.why
        return None

    def _lease(self, event: LeaseEvent) -> Replied:
        match event:
            case AcquirePrefix():
                return Replied(leases.acquire(self.state, event))
            case ReserveSpans():
                return Replied(leases.reserve(self.state, event))
            case EndLease():
                if event.seen:
                    self._timelines(event.seen)
                leases.end(self.state, event)
        return Replied(None)

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
                self._timelines(event.values)
            case PlanEnded():
                plan_ended(self.state, event.plan_id, event.outcome, event.error, event.sums)
            case EngineSuspect():
                engines.suspect(self.state, event.engine, event.epoch)
            case EngineGone():
                engines.engine_gone(self.state, event)
            case MoverGone() | MoverJoined() | Recovered() | CheckCopies():
                self._processes(event)
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

    def _processes(self, event: MoverGone | MoverJoined | Recovered | CheckCopies) -> None:
        """Movers and daemons end and begin, and look at what was there."""
        match event:
            case MoverGone():
                recovery.mover_gone(self.state)
            case MoverJoined():
                self.state.mover = event.incarnation
            case Recovered():
                recovery.recovered(self.state, event)
            case CheckCopies():
                begin_checks(self.state, event)

    def _tick(self) -> None:
        """Time passes: what is over ends without any new work."""
        tickets.expire(self.state)
        leases.expire(self.state)
        sweep(self.state)
        engines.fence_suspects(self.state)
        engines.expire_sessions(self.state)
        for group in self.state.groups.values():
            group.unblock()
            reconsider(self.state, group)

    def _timelines(self, values: dict[int, int]) -> None:
        state, known = self.state, self.state.timelines
        risen = {attach: value for attach, value in values.items() if value > known.get(attach, value)}
        engines = [engine for engine in state.all_engines() if engine.fences or engine.ended]
        for engine in engines if risen else ():
            if any(attach in risen for attach in engine.standing(known)):
                moved(state, engine)
        known.update(risen)
        for engine in engines:
            resolve_fences(state, engine)

    @property
    def fences_pending(self) -> bool:
        """Whether some timeline must be watched."""
        state = self.state
        for engine in state.engines.values():  # asked before and after each event: a plain loop, and no list
            if engine.fences:
                return True
        return bool(state.retired) and any(engine.fences for engine in state.retired.values())
