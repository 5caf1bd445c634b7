"""An executor that moves bytes when told to: for tests, the simulator and dry runs of a daemon.

Left alone it ends each plan after a seeded number of polls, so completions come in another order than
submissions; while a more urgent plan is drawn too, a plan that is due waits, for `FAIR_TURNS` polls at most. A test
takes a plan over with `hold` (or all later ones with `hold_submissions`) and ends it with `finish`, `fail` or `lose`.

    drawn ──(its poll comes)──► DONE, or FAILED with `fail_share`, or lost with `lose_share`
    held  ──finish──► DONE   ──fail──► FAILED   ──cancel──► CANCELLED
    lost  (never ends: a hung mover)   ──close──► UNKNOWN_FATE
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from kvmanager.core.checksums import SumArray
from kvmanager.core.plans import CopyPlan
from kvmanager.errors import Draining, InvalidArgument, KVError, TransferFailed
from kvmanager.transport.checksums import sum_pages
from kvmanager.transport.cpu import do_piece
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.turns import FAIR_TURNS


class _State(Enum):
    DRAWN = auto()
    HELD = auto()
    LOST = auto()
    ENDED = auto()


@dataclass
class _Plan:
    plan: CopyPlan
    state: _State
    due_poll: int
    fate: _State | Outcome
    completion: Completion | None = None


class FakeExecutor:
    """See the module. With `regions`, a plan that finishes really moves its bytes; without, none is touched.

    `delay_polls`: least and most polls before a plan ends by itself (0: in the next one).
    `fail_share`, `lose_share`: probabilities of the other two ends. `corrupt_share`: of those that end DONE with one
    bit of a target flipped before sums are made; their ids are in `corrupted`. Sums need `regions`.
    """

    def __init__(
        self,
        seed: int,
        regions: RegionMap | None = None,
        *,
        delay_polls: tuple[int, int] = (0, 3),
        fail_share: float = 0.0,
        lose_share: float = 0.0,
        corrupt_share: float = 0.0,
    ) -> None:
        self._random = random.Random(seed)
        self._regions = regions
        self._delay_polls = delay_polls
        self._fail_share = fail_share
        self._lose_share = lose_share
        self._corrupt_share = corrupt_share
        self.corrupted: list[int] = []
        self._plans: dict[int, _Plan] = {}
        self._polls = 0
        self._first_state = _State.DRAWN
        self._closed = False

    def submit(self, plan: CopyPlan) -> None:
        """See `Executor.submit`."""
        if self._closed:
            raise Draining(f"plan {plan.plan_id}: this executor is closed")
        if plan.plan_id in self._plans:
            raise InvalidArgument(f"plan {plan.plan_id} is outstanding already")
        due = self._polls + 1 + self._random.randint(*self._delay_polls)
        entry = self._plans[plan.plan_id] = _Plan(plan, self._first_state, due, self._draw_fate())
        if self._regions is not None:
            try:
                self._regions.check(plan)
            except InvalidArgument as error:
                self._end(entry, Outcome.FAILED, error)

    def _draw_fate(self) -> _State | Outcome:
        draw = self._random.random()
        if draw < self._fail_share:
            return Outcome.FAILED
        return _State.LOST if draw < self._fail_share + self._lose_share else Outcome.DONE

    def poll(self) -> list[Completion]:
        """See `Executor.poll`. Completions of one poll come in random order."""
        self._polls += 1
        drawn = [entry for entry in self._plans.values() if entry.state is _State.DRAWN]
        first = min((entry.plan.urgency for entry in drawn), default=None)
        for entry in drawn:
            waited = self._polls - entry.due_poll
            if waited >= 0 and (entry.plan.urgency == first or waited >= FAIR_TURNS):
                self._meet_fate(entry)
        ended = [entry.completion for entry in self._plans.values() if entry.completion is not None]
        for completion in ended:
            del self._plans[completion.plan_id]
        self._random.shuffle(ended)
        return ended

    def _meet_fate(self, entry: _Plan) -> None:
        if entry.fate is _State.LOST:
            entry.state = _State.LOST
        elif entry.fate is Outcome.FAILED:
            self._end(entry, Outcome.FAILED, TransferFailed(f"plan {entry.plan.plan_id}: drawn to fail"))
        else:
            self._move(entry)

    def _move(self, entry: _Plan) -> None:
        sums = None
        if self._regions is not None:
            for piece in entry.plan.pieces():
                do_piece(self._regions, entry.plan.purpose, piece)
            if entry.plan.copies and self._random.random() < self._corrupt_share:
                self._corrupt(entry.plan)
            if entry.plan.sums is not None:
                sums = sum_pages(self._regions, entry.plan.sums)
        self._end(entry, Outcome.DONE, None, sums)

    def _corrupt(self, plan: CopyPlan) -> None:
        """Flips one bit of what was written."""
        assert self._regions is not None
        copies = self._random.choice(list(plan.pieces()))
        at = int(self._random.choice(copies.target_offsets.tolist())) + self._random.randrange(copies.row_bytes)
        self._regions[copies.target_region][at] ^= np.uint8(1 << self._random.randrange(8))
        self.corrupted.append(plan.plan_id)

    @staticmethod
    def _end(entry: _Plan, outcome: Outcome, error: KVError | None, sums: SumArray | None = None) -> None:
        moved = entry.plan.total_bytes if outcome is Outcome.DONE else 0
        entry.state = _State.ENDED
        entry.completion = Completion(entry.plan.plan_id, outcome, moved, 0, error, sums)

    def wait_ns(self) -> int:
        """See `Executor.wait_ns`."""
        return 0

    def cancel(self, plan_id: int) -> None:
        """See `Executor.cancel`. A lost plan stays lost."""
        entry = self._plans.get(plan_id)
        if entry is not None and entry.state in (_State.DRAWN, _State.HELD):
            self._end(entry, Outcome.CANCELLED, None)

    def outstanding(self) -> list[int]:
        """See `Executor.outstanding`."""
        return list(self._plans)

    def close(self) -> None:
        """See `Executor.close`. Lost plans end as UNKNOWN_FATE, others as CANCELLED."""
        self._closed = True
        for plan_id, entry in self._plans.items():
            if entry.state is _State.LOST:
                self._end(entry, Outcome.UNKNOWN_FATE, TransferFailed(f"plan {plan_id} was lost"))
            else:
                self.cancel(plan_id)

    # ------------------------------------------------------------------------------ a test's hands

    def hold_submissions(self) -> None:
        """Plans submitted from now on are held until the test ends them."""
        self._first_state = _State.HELD

    def draw_submissions(self) -> None:
        """Plans submitted from now on end by themselves again."""
        self._first_state = _State.DRAWN

    def hold(self, plan_id: int) -> None:
        """Keeps a plan from ending by itself."""
        self._waiting(plan_id).state = _State.HELD

    def finish(self, plan_id: int) -> None:
        """Moves the plan's bytes now; the next poll says DONE."""
        self._move(self._waiting(plan_id))

    def fail(self, plan_id: int, error: KVError | None = None) -> None:
        """Ends the plan without a byte moved; the next poll says FAILED."""
        self._end(self._waiting(plan_id), Outcome.FAILED, error or TransferFailed(f"plan {plan_id} was made to fail"))

    def lose(self, plan_id: int) -> None:
        """The plan never ends: what a mover looks like that hangs."""
        self._waiting(plan_id).state = _State.LOST

    def plan(self, plan_id: int) -> CopyPlan:
        """An outstanding plan as submitted."""
        return self._plans[plan_id].plan

    def _waiting(self, plan_id: int) -> _Plan:
        entry = self._plans[plan_id]
        assert entry.state is not _State.ENDED, f"plan {plan_id} has ended: {entry.completion}"
        return entry
