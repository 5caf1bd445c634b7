"""The one engine of a replay: it hands the core one event after the other, at the recording's times."""

from __future__ import annotations

from kvmanager.core.events import (
    Attached,
    AttachRank,
    Close,
    Effect,
    Event,
    Notified,
    Open,
    Progress,
    Registered,
    RegisterEngine,
    Replied,
    Step,
    StepDone,
    SubmitPlan,
    Tick,
    TimelinesRead,
    TurnEnded,
)
from kvmanager.core.eviction import POLICIES
from kvmanager.core.node import Node
from kvmanager.core.plans import CopyPlan
from kvmanager.core.spec import GroupSpec, Limits
from kvmanager.errors import KVError
from kvmanager.replay.stream import BLOCK_TOKENS, Request
from kvmanager.units import SECOND_NS

ENGINE = "replay"


class ReplayEngine:
    """Registered with all its ranks in the group of `spec`; what runs a request is up to who drives it."""

    def __init__(self, spec: GroupSpec, limits: Limits, policy: str) -> None:
        self.node = Node([spec], limits, policy=POLICIES[policy])
        self.plans: list[CopyPlan] = []  # asked for and not ended
        self._now = 0
        self._number = 0
        self._seen = 0
        fingerprints = (spec.chains[0].classes[0].layout.fingerprint,)
        registered = self._ask(RegisterEngine(ENGINE, spec.name, b"replay", 16, BLOCK_TOKENS, fingerprints, spec.ranks))
        assert isinstance(registered, Registered)
        self._epoch = registered.epoch
        self._attaches = []
        for rank in range(spec.ranks):
            attached = self._ask(AttachRank(ENGINE, self._epoch, rank, rank))
            assert isinstance(attached, Attached)
            self._attaches.append(attached.attach_id)

    def at(self, moment_s: float) -> None:
        """Time goes on; it never goes back."""
        self._now = max(self._now, int(moment_s * SECOND_NS))

    def tick(self) -> None:
        """What happens with time alone."""
        self.apply(Tick())

    def apply(self, event: Event) -> list[Effect]:
        """Hands an event to the core; notes the plans it asks for and the notices it gives."""
        effects = self.node.apply(event, self._now)
        self.plans += [effect.plan for effect in effects if isinstance(effect, SubmitPlan)]
        self._seen += sum(isinstance(effect, Notified) for effect in effects)
        return effects

    def _ask(self, event: Event) -> object:
        answer = self.apply(event)[0]
        assert isinstance(answer, Replied)
        if isinstance(answer.answer, KVError):
            raise answer.answer
        return answer.answer

    def step(
        self,
        opens: tuple[Open, ...] = (),
        progress: tuple[Progress, ...] = (),
        closes: tuple[Close, ...] = (),
        turn_ends: tuple[TurnEnded, ...] = (),
    ) -> StepDone:
        """One message, and the proof that the work before it is done."""
        self._number += 1
        fence = dict.fromkeys(self._attaches, self._number)
        self.apply(TimelinesRead(fence))
        done = self._ask(
            Step(ENGINE, self._epoch, self._number, self._seen, fence, progress, opens, closes, turn_ends)
        )
        assert isinstance(done, StepDone)
        return done

    def turn_ends(self, request: Request) -> None:
        """The request's answer is complete: its session is idle, or over."""
        if request.session_id:
            self.step(turn_ends=(TurnEnded(request.session_id, request.stop_reason, request.last),))
