"""A core and its engines without processes: events in, effects kept until whoever drives them has carried them out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvmanager.core.events import (
    Attached,
    AttachRank,
    Close,
    CopyOutcome,
    Event,
    Notice,
    Notified,
    Open,
    PlanEnded,
    Progress,
    Registered,
    RegisterEngine,
    Replied,
    StartPull,
    Step,
    StepDone,
    SubmitPlan,
    TimelinesRead,
    TurnEnded,
)
from kvmanager.core.eviction import POLICIES
from kvmanager.core.node import Node
from kvmanager.core.plans import CopyPlan
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.errors import KVError

KEY_BYTES = 16


@dataclass(frozen=True)
class Wanted:
    """Effects of one event that take time elsewhere: copies and pulls."""

    plans: tuple[CopyPlan, ...] = ()
    pulls: tuple[StartPull, ...] = ()


class VirtualNode:
    """One node's core. Regions only account; no copy is summed up.

    plans, pulls: asked for and not ended, by id. Time is what each call says, in ns, and never goes back.
    """

    def __init__(self, specs: Iterable[GroupSpec], limits: Limits, policy: str = "lru") -> None:
        self.core = Node(list(specs), replace(limits, checksums=0), policy=POLICIES[policy])
        self.plans: dict[int, CopyPlan] = {}
        self.pulls: dict[int, StartPull] = {}
        self._notices: dict[str, list[Notice]] = {}

    @property
    def counters(self) -> dict[str, int]:
        """The core's counters."""
        return self.core.state.counters

    def apply(self, event: Event, now: int) -> object:
        """One event; its answer. Raises the KVError that the core answers with."""
        answer: object = None
        for effect in self.core.apply(event, max(now, self.core.state.now)):
            match effect:
                case Replied():
                    answer = effect.answer
                case SubmitPlan():
                    self.plans[effect.plan.plan_id] = effect.plan
                case StartPull():
                    self.pulls[effect.plan_id] = effect
                case Notified():
                    self._notices.setdefault(effect.engine, []).append(effect.notice)
        if isinstance(answer, KVError):
            raise answer
        return answer

    def end(self, plan_id: int, now: int) -> None:
        """A copy or a pull is done."""
        self.plans.pop(plan_id, None)
        self.pulls.pop(plan_id, None)
        self.apply(PlanEnded(plan_id, CopyOutcome.DONE), now)

    def end_all(self, now: int) -> None:
        """All copies and pulls, and those that follow from them."""
        while self.plans or self.pulls:
            self.end(min([*self.plans, *self.pulls]), now)

    def notices(self, engine: str) -> list[Notice]:
        """What the engine was told since it was asked last."""
        return self._notices.pop(engine, [])


class VirtualEngine:
    """An engine with all its ranks attached. When it sends a message, the work before that is done."""

    def __init__(self, node: VirtualNode, spec: GroupSpec, now: int = 0) -> None:
        self.node, self.spec, self.name = node, spec, spec.name
        prints = tuple(c.layout.fingerprint for chain in spec.chains for c in chain.classes)
        event = RegisterEngine(self.name, spec.name, b"virtual", KEY_BYTES, spec.page_rows, prints, spec.ranks)
        registered = node.apply(event, now)
        assert isinstance(registered, Registered)
        self.epoch = registered.epoch
        self._attaches = []
        for rank in range(spec.ranks):
            attached = node.apply(AttachRank(self.name, self.epoch, rank, rank), now)
            assert isinstance(attached, Attached)
            self._attaches.append(attached.attach_id)
        self._number = self._seen = 0

    def step(
        self,
        now: int,
        opens: tuple[Open, ...] = (),
        progress: tuple[Progress, ...] = (),
        closes: tuple[Close, ...] = (),
        turn_ends: tuple[TurnEnded, ...] = (),
    ) -> StepDone:
        """One message, and the proof that the work before it is done."""
        self._number += 1
        fence = dict.fromkeys(self._attaches, self._number)
        self.node.apply(TimelinesRead(fence), now)
        done = self.node.apply(
            Step(self.name, self.epoch, self._number, self._seen, fence, progress, opens, closes, turn_ends), now
        )
        assert isinstance(done, StepDone)
        return done

    def notices(self) -> list[Notice]:
        """What it was told since it asked last; the next message says that it knows."""
        told = self.node.notices(self.name)
        self._seen += len(told)
        return told
