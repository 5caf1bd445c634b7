"""Copies by the GPU's copy engines: the executor of a mover for one GPU.

A plan's pieces are queued into one stream a direction, at most `WINDOW_BYTES` ahead, so that a cancelled plan
stops soon and plans take turns. An event behind each piece tells when its bytes have landed; a plan ends only
when all its pieces have. So a cancelled plan is quarantined until its last byte is there, by construction.
Host memory must be registered (`kvmanager.transport.pinned`). Streams and events are made once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvmanager.allocators.cuda_driver import DeviceContext, call, driver
from kvmanager.core.plans import CopyPlan, StridedCopies
from kvmanager.errors import DeviceError, KVError, TransferFailed
from kvmanager.killpoints import reach
from kvmanager.transport.active_plans import ActivePlan, ActivePlans
from kvmanager.transport.cuda_copies import CudaCopies, stacked
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.runs import slices
from kvmanager.units import MIB

PIECE_BYTES: Final = 32 * MIB
PIECE_RUNS: Final = 65_536
WINDOW_BYTES: Final = 160 * MIB
"""Queued at one time in one direction: about 3 ms of a PCIe gen5 link, more than a poll's pause."""
WINDOW_PIECES: Final = 32
_LANES: Final = ((False, False), (False, True), (True, False), (True, True))
"""(source on the GPU, target on the GPU)."""


@dataclass(kw_only=True)
class _Active(ActivePlan):
    """`pending`: lanes on which some of it is still to be issued. `in_flight`: pieces whose event has not passed."""

    pending: int = 0
    in_flight: int = 0
    started_ns: int = 0
    unknown: KVError | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    active: _Active
    size_bytes: int
    event: Any


class _Lane:
    """One direction: its stream, whose turn it is, and what is in flight in order."""

    def __init__(self, events: int) -> None:
        module = driver()
        self.stream = call("cuStreamCreate", module.CUstream_flags.CU_STREAM_NON_BLOCKING)
        flags = module.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.events = [call("cuEventCreate", flags) for _ in range(events)]
        self.turns: deque[tuple[_Active, Iterator[StridedCopies]]] = deque()
        self.pieces: deque[_Piece] = deque()
        self.queued_bytes = 0

    def has_room(self) -> bool:
        return bool(self.events) and self.queued_bytes < WINDOW_BYTES

    def close(self) -> None:
        for event in self.events:
            call("cuEventDestroy", event)
        self.events.clear()
        call("cuStreamDestroy", self.stream)


class CudaExecutor(ActivePlans[_Active]):
    """Plans in turn, a piece each, by the copy engines of one GPU (see `Executor`)."""

    def __init__(
        self, regions: RegionMap, device: str, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        """`device`: "cuda:N". Its context becomes current in this thread, which is the only one to use this.

        Raises DeviceError.
        """
        super().__init__(regions)
        self._clock_ns = clock_ns
        context = DeviceContext(device)
        self._copies = CudaCopies(regions, context.ordinal)
        self._not_ready = int(driver().CUresult.CUDA_ERROR_NOT_READY)
        self._lanes = {key: _Lane(WINDOW_PIECES) for key in _LANES}
        self._over: list[_Active] = []
        self.broken: DeviceError | None = None
        """Why the GPU's context is of no use any more: only a new process gets another."""

    def submit(self, plan: CopyPlan) -> None:
        """See `Executor.submit`. Bounds of the whole plan are checked before a byte moves."""
        active = _Active(plan=plan)
        self._take(active)
        if active.ended is None and self.broken is not None:
            active.ended = (Outcome.FAILED, _failure(active, self.broken))
        if active.ended is None:
            by_lane: dict[tuple[bool, bool], list[StridedCopies]] = {}
            for copies in plan.copies:
                by_lane.setdefault(self._lane_of(copies), []).append(copies)
            for key, sets in by_lane.items():
                active.pending += 1
                self._lanes[key].turns.append((active, _pieces(sets)))
        self._settle(active)

    def _lane_of(self, copies: StridedCopies) -> tuple[bool, bool]:
        source, target = self._regions.find(copies.source_region), self._regions.find(copies.target_region)
        return source.array is None, target.array is None

    def poll(self) -> list[Completion]:
        """See `Executor.poll`. Waits for nothing."""
        for lane in self._lanes.values():
            self._retire(lane)
            self._fill(lane)
        over, self._over = self._over, []
        return [self._end(active) for active in over]

    def cancel(self, plan_id: int) -> None:
        """See `Executor.cancel`. Pieces in flight go on; the plan ends after them."""
        super().cancel(plan_id)
        active = self._active.get(plan_id)
        if active is not None and active.pending:
            self._drop_turns(active)
            self._settle(active)

    def idle(self) -> bool:
        """Whether `poll` can do nothing until a copy has landed: the caller may sleep about a millisecond."""
        return not self._over and not any(lane.turns and lane.has_room() for lane in self._lanes.values())

    def release(self) -> None:
        """Gives streams and events back, after `close` and the last completion. Raises DeviceError."""
        assert not self._active, f"plans {self.outstanding()} are outstanding"
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    def _settle(self, active: _Active) -> None:
        """Ends a plan of which nothing is to be issued and nothing in flight; once."""
        if active.pending or active.in_flight:
            return
        if active.unknown is not None:
            active.ended = (Outcome.UNKNOWN_FATE, active.unknown)
        elif active.ended is None:
            assert active.moved_bytes == active.plan.total_bytes
            active.ended = (Outcome.DONE, None)
        if active.started_ns:
            active.busy_ns = self._clock_ns() - active.started_ns
        self._over.append(active)

    def _retire(self, lane: _Lane) -> None:
        """Takes off what has landed. An event that fails means a broken context: nothing says what has landed."""
        while lane.pieces:
            (status,) = driver().cuEventQuery(lane.pieces[0].event)
            if int(status) == self._not_ready:
                return
            piece = lane.pieces.popleft()
            lane.events.append(piece.event)
            lane.queued_bytes -= piece.size_bytes
            piece.active.in_flight -= 1
            if int(status) == 0:
                piece.active.moved_bytes += piece.size_bytes
                if piece.active.moved_bytes < piece.active.plan.total_bytes:
                    reach("mover.plan.half_copied")
            else:
                self._break(piece.active, DeviceError(f"cuEventQuery: {status.name}"))
            self._settle(piece.active)

    def _fill(self, lane: _Lane) -> None:
        while lane.turns and lane.has_room():
            active, work = lane.turns.popleft()
            piece = next(work, None)
            if piece is None:
                active.pending -= 1
                self._settle(active)
                continue
            lane.turns.append((active, work))
            active.started_ns = active.started_ns or self._clock_ns()
            size_bytes = piece.total_bytes
            try:
                self._copies.issue(piece, int(lane.stream))
            except DeviceError as error:
                # Some of it may be queued all the same: the event behind it tells when that has landed.
                size_bytes = 0
                active.ended = active.ended or (Outcome.FAILED, _failure(active, error))
                self._drop_turns(active)
            self._mark(lane, active, size_bytes)

    def _mark(self, lane: _Lane, active: _Active, size_bytes: int) -> None:
        """Puts an event behind what was just queued."""
        event = lane.events.pop()
        active.in_flight += 1
        try:
            call("cuEventRecord", event, lane.stream)
        except DeviceError as error:
            lane.events.append(event)
            active.in_flight -= 1
            self._break(active, error)
            self._drop_turns(active)
            self._settle(active)
            return
        lane.queued_bytes += size_bytes
        lane.pieces.append(_Piece(active, size_bytes, event))

    def _drop_turns(self, active: _Active) -> None:
        for lane in self._lanes.values():
            kept = [turn for turn in lane.turns if turn[0] is not active]
            active.pending -= len(lane.turns) - len(kept)
            lane.turns = deque(kept)

    def _break(self, active: _Active, error: DeviceError) -> None:
        self.broken = self.broken or error
        active.unknown = _failure(active, error)


def _failure(active: _Active, error: DeviceError) -> TransferFailed:
    return TransferFailed(f"plan {active.plan.plan_id}: {error}")


def _pieces(sets: list[StridedCopies]) -> Iterator[StridedCopies]:
    for copies in stacked(sets):
        yield from slices(copies, PIECE_BYTES, PIECE_RUNS)
