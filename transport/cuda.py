"""Copies by the GPU's copy engines: the executor of a mover for one GPU.

A plan's pieces are queued into two streams a direction, in each until `WINDOW_BYTES` are ahead, so that a cancelled
plan stops soon and plans take turns. An event behind each piece tells when its bytes have landed; a plan ends only
when all its pieces have. So a cancelled plan is quarantined until its last byte is there, by construction.
Short rows go by a small kernel (`kvmanager.transport.cuda_rows`), all else by the copy engines. Host memory must
be registered (`kvmanager.transport.pinned`). Streams and events are made once.
"""

from __future__ import annotations

import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvmanager.allocators.cuda_driver import DeviceContext, call, driver
from kvmanager.core.checksums import PageSections
from kvmanager.core.plans import Box, CopyPlan, PagedCopies, Purpose, StridedCopies
from kvmanager.errors import DeviceError, KVError, TransferFailed
from kvmanager.killpoints import reach
from kvmanager.transport.active_plans import ActivePlan, ActivePlans
from kvmanager.transport.cuda_checksums import SUM_BLOCKS, SumLane
from kvmanager.transport.cuda_copies import LONG_ROW_BYTES, CudaCopies
from kvmanager.transport.cuda_rows import BLOCKS, MAX_COPIES, MAX_EXTENTS, RowKernel
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.kernel_windows import PAUSE_NS, KernelWindows
from kvmanager.transport.pacing import Pacer
from kvmanager.transport.pinned import PinnedMemory
from kvmanager.transport.runs import slices
from kvmanager.transport.turns import Turns
from kvmanager.units import KIB, MIB

PIECE_RUNS: Final = 65_536
WINDOW_BYTES: Final = 160 * MIB
"""With so much queued in one direction no further piece is: 3 ms of a PCIe gen5 link, more than a poll's pause."""
WINDOW_PIECES: Final = 32
SMALL_COPY_BYTES: Final = 32 * KIB
"""Copies smaller than this each, in sets of some, are the kernel's. Measured on an H200 with permuted pages: short
rows alone by the kernel, 39 GB/s; nothing by it, 12; everything by it, 40 and more, but then a decode loop of another
process took 2.4 times as long, since two processes' kernels take turns."""
_LEAST_LAUNCH: Final = 16
BOUNCE_BYTES: Final = 8 * MIB
"""For runs within the GPU. A hand-off of 1,048,576 tokens whose indexer pages stay there, on an H200: by way of host
memory 54.0 GB/s in all, 0.978 of a plain copy, and a decode loop beside it 3 % slower; by the kernel in windows of 10
ms 55.5 and 11 %; by the driver as fast and 25 %, since each batch stops the loop's kernels for 0.4 ms as a kernel does.
"""
BOUNCE_PIECES: Final = 8
"""In flight, each in its own part of the buffer."""
INSIDE_BLOCKS: Final = 132
"""Of a launch that copies within the GPU: the sooner it is over the better, for others' kernels wait for it."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What only measuring can tell, with what was measured as default.

    run_piece_bytes: of one driver call for whole runs. Against one large copy down, up, and both ways, on an H200: 32
    MiB 0.970, 0.971, 0.979; 64 MiB 0.984, 0.973, 0.986; 128 MiB 0.984, 0.983, 0.987. A second stream a direction gained
    nothing.
    piece_bytes: of one call for other shapes. small_copy_bytes: copies smaller than this may go by the kernel.
    bounce_bytes: a piece of runs within the GPU that go by way of host memory, down and up; 0: by the kernel.
    sum_blocks: of a launch that sums pages up. kernel_pause_ns: between kernels' windows (see `KernelWindows`).
    """

    run_piece_bytes: int = 128 * MIB
    piece_bytes: int = 32 * MIB
    small_copy_bytes: int = SMALL_COPY_BYTES
    bounce_bytes: int = BOUNCE_BYTES
    sum_blocks: int = SUM_BLOCKS
    kernel_pause_ns: int = PAUSE_NS


DEFAULT_TUNING: Final = Tuning()
_DIRECTIONS: Final = ((False, False), (False, True), (True, False), (True, True))
"""(source on the GPU, target on the GPU)."""


@dataclass(kw_only=True)
class _Active(ActivePlan):
    """`pending`: parts of it that are still to be issued. `in_flight`: pieces whose event has not passed."""

    pending: int = 0
    in_flight: int = 0
    started_ns: int = 0
    unknown: KVError | None = None


@dataclass(frozen=True, slots=True)
class _Mark:
    """An event, and the number that it has among all of its kind."""

    number: int
    event: Any


@dataclass(frozen=True, slots=True)
class _Piece:
    active: _Active
    size_bytes: int
    mark: _Mark


Issue = Callable[[StridedCopies, int, int], object]
"""(copies, number of the mark behind them, stream)."""


class _Lane:
    """One stream of a direction: how it is fed, whose turn it is, and what is in flight in order."""

    def __init__(
        self, issue: Issue, first_mark: int, windows: KernelWindows | None = None, pieces: int = WINDOW_PIECES
    ) -> None:
        """`windows`: when it may be fed; None: always. `pieces`: in flight at most, each with a mark of its own."""
        module = driver()
        self.issue = issue
        self._windows = windows
        self.stream = call("cuStreamCreate", module.CUstream_flags.CU_STREAM_NON_BLOCKING)
        flags = module.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.marks = [_Mark(first_mark + n, call("cuEventCreate", flags)) for n in range(pieces)]
        self.turns: Turns[tuple[_Active, Iterator[StridedCopies]]] = Turns()
        self.pieces: deque[_Piece] = deque()
        self.queued_bytes = 0

    def has_room(self) -> bool:
        """For a piece more, now."""
        full = not self.marks or self.queued_bytes >= WINDOW_BYTES
        return not full and (self._windows is None or self._windows.open)

    def close(self) -> None:
        for mark in self.marks:
            call("cuEventDestroy", mark.event)
        self.marks.clear()
        call("cuStreamDestroy", self.stream)


class CudaExecutor(ActivePlans[_Active]):
    """Plans in turn by urgency, a piece each, by the copy engines of one GPU (see `Executor`)."""

    def __init__(
        self,
        regions: RegionMap,
        device: str,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        tuning: Tuning = DEFAULT_TUNING,
        pacer: Pacer | None = None,
    ) -> None:
        """`device`: "cuda:N". Its context becomes current in this thread, which is the only one to use this.

        Raises DeviceError.
        """
        super().__init__(regions)
        self._clock_ns = clock_ns
        self._pacer = pacer or Pacer()
        context = DeviceContext(device)
        self._copies = CudaCopies(regions, context.ordinal)
        self._not_ready = int(driver().CUresult.CUDA_ERROR_NOT_READY)
        self._tuning = tuning
        self._windows = KernelWindows(tuning.kernel_pause_ns, clock_ns)
        self._kernel = RowKernel(context.ordinal, len(_DIRECTIONS) * WINDOW_PIECES)
        self._engine_lanes = {key: _Lane(self._by_engine, 0) for key in _DIRECTIONS}
        self._kernel_lanes = {
            key: _Lane(self._by_kernel, number * WINDOW_PIECES, self._windows)
            for number, key in enumerate(_DIRECTIONS)
        }
        self._clear_lane = _Lane(self._by_zeros, 0)
        self._lanes = [*self._engine_lanes.values(), *self._kernel_lanes.values(), self._clear_lane]
        self._bounce: PinnedMemory | None = None  # made with its lane, when a plan needs it
        self._bounce_lane: _Lane | None = None
        self._down: list[Any] = []
        self._sum_lane: SumLane[_Active] | None = None  # made when a plan asks for sums
        self._ordinal = context.ordinal
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
            for copies in plan.copies:
                for box in copies.boxes if copies.pairs else ():
                    self._deal(active, copies, box)
        self._settle(active)

    def _deal(self, active: _Active, copies: PagedCopies, box: Box) -> None:
        """Puts a box at all its places into the turns of the lane that carries it fastest."""
        source, target = self._regions.find(copies.source_region), self._regions.find(copies.target_region)
        key = source.array is None, target.array is None
        small = box.total_bytes < self._tuning.small_copy_bytes and len(box.counts) <= MAX_EXTENTS
        active.pending += 1
        if active.plan.purpose is Purpose.SCRUB:
            sliced = _sliced(copies, box, self._tuning.run_piece_bytes, PIECE_RUNS)
            self._clear_lane.turns.put(active.plan.purpose, (active, sliced))
            return
        inside = all(key) and not box.counts and box.row_bytes >= LONG_ROW_BYTES
        if inside:
            lane = self._bouncing() if self._tuning.bounce_bytes else self._kernel_lanes[key]
            sliced = _sliced(copies, box, self._tuning.bounce_bytes or self._tuning.piece_bytes, MAX_COPIES)
            lane.turns.put(active.plan.purpose, (active, sliced))
            return
        if small and copies.pairs >= _LEAST_LAUNCH and any(key):
            lane, most_runs = self._kernel_lanes[key], MAX_COPIES * math.prod(box.counts)
        else:
            lane, most_runs = self._engine_lanes[key], PIECE_RUNS
        piece_bytes = self._tuning.piece_bytes if box.counts else self._tuning.run_piece_bytes
        lane.turns.put(active.plan.purpose, (active, _sliced(copies, box, piece_bytes, most_runs)))

    def _by_engine(self, copies: StridedCopies, _mark: int, stream: int) -> None:
        self._copies.issue(copies, stream)

    def _by_zeros(self, copies: StridedCopies, _mark: int, stream: int) -> None:
        self._copies.clear(copies, stream)

    def _bouncing(self) -> _Lane:
        """The lane of runs within the GPU. Raises DeviceError where there is no room for its buffer."""
        if self._bounce_lane is None:
            size_bytes = -(-BOUNCE_PIECES * self._tuning.bounce_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            self._bounce = PinnedMemory(np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8))
            flags = driver().CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._down = [call("cuEventCreate", flags) for _ in range(BOUNCE_PIECES)]
            self._bounce_lane = _Lane(self._by_bounce, 0, pieces=BOUNCE_PIECES)
            self._lanes.append(self._bounce_lane)
        return self._bounce_lane

    def _by_bounce(self, copies: StridedCopies, mark: int, stream: int) -> None:
        """Down behind all that goes down, into the mark's part of the buffer, which is free with it; then up.

        On a stream of its own what goes down would take turns with the rest: 40 GB/s in all, on an H200.
        """
        assert self._bounce is not None
        source, target = (self._regions.address(r) for r in (copies.source_region, copies.target_region))
        lengths = np.full(len(copies.source_offsets), copies.row_bytes, np.int64)
        begin = self._bounce.address + mark * self._tuning.bounce_bytes
        between = begin + np.arange(len(lengths), dtype=np.int64) * copies.row_bytes
        down = self._engine_lanes[True, False].stream
        try:
            self._copies.runs(copies.source_offsets + source, between, lengths, int(down))
        finally:  # also what was queued before an error is waited for
            call("cuEventRecord", self._down[mark], down)
            call("cuStreamWaitEvent", driver().CUstream(stream), self._down[mark], 0)
        self._copies.runs(between, copies.target_offsets + target, lengths, stream)

    def _by_kernel(self, copies: StridedCopies, mark: int, stream: int) -> None:
        source, target = (self._regions.address(r) for r in (copies.source_region, copies.target_region))
        inside = all(self._regions.find(r).array is None for r in (copies.source_region, copies.target_region))
        self._windows.launched()
        self._kernel.launch(copies, source, target, mark, stream, INSIDE_BLOCKS if inside else BLOCKS)

    def poll(self) -> list[Completion]:
        """See `Executor.poll`. Waits for nothing."""
        self._windows.begin_pass()
        for lane in self._lanes:
            self._retire(lane)
            self._fill(lane)
        if self._sum_lane is not None:
            self._take_sums(self._sum_lane)
        self._windows.end_pass()
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
        """Whether `poll` can do nothing until a copy has landed or a link has room: sleep about a millisecond."""
        summing = self._sum_lane is not None and self._sum_lane.may_launch
        return not self._over and not summing and not any(self._may_start(lane) for lane in self._lanes)

    def wait_ns(self) -> int:
        """See `Executor.wait_ns`; 0 while copies are in flight, whose end only `poll` sees."""
        waiting = {purpose for lane in self._lanes for purpose in lane.turns.purposes}
        summing = self._sum_lane is not None and self._sum_lane.busy
        if self._over or not waiting or summing or any(lane.pieces for lane in self._lanes):
            return 0
        return min(self._pacer.wait_ns(purpose) for purpose in waiting)

    def _may_start(self, lane: _Lane) -> list[Purpose]:
        """Purposes of what may go into the lane now."""
        return [p for p in lane.turns.purposes if not self._pacer.wait_ns(p)] if lane.has_room() else []

    def release(self) -> None:
        """Gives streams and events back, after `close` and the last completion. Raises DeviceError."""
        assert not self._active, f"plans {self.outstanding()} are outstanding"
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        self._kernel.close()
        for event in self._down:
            call("cuEventDestroy", event)
        if self._bounce is not None:
            self._bounce.close()
        if self._sum_lane is not None:
            self._sum_lane.close()

    def _settle(self, active: _Active) -> None:
        """Ends a plan of which nothing is to be issued and nothing in flight; once."""
        if active.pending or active.in_flight:
            return
        if active.unknown is not None:
            active.ended = (Outcome.UNKNOWN_FATE, active.unknown)
        elif active.ended is None:
            assert active.moved_bytes == active.plan.total_bytes
            if active.plan.sums is not None and active.sums is None:
                self._sum_up(active, active.plan.sums)
                return
            active.ended = (Outcome.DONE, None)
        if active.started_ns:
            active.busy_ns = self._clock_ns() - active.started_ns
        self._over.append(active)

    def _sum_up(self, active: _Active, pages: PageSections) -> None:
        """All its bytes have landed: what it asked to be summed up comes next."""
        active.pending += 1
        try:
            if self._sum_lane is None:
                self._sum_lane = SumLane(self._regions, self._ordinal, self._tuning.sum_blocks, self._windows)
        except DeviceError as error:
            active.pending -= 1
            active.ended = (Outcome.FAILED, _failure(active, error))
            self._over.append(active)
            return
        self._sum_lane.put(active, pages)

    def _take_sums(self, lane: SumLane[_Active]) -> None:
        for active, found in lane.poll():
            active.pending -= 1
            if isinstance(found, DeviceError):
                self._break(active, found)
            else:
                active.sums = found
            self._settle(active)

    def _retire(self, lane: _Lane) -> None:
        """Takes off what has landed. An event that fails means a broken context: nothing says what has landed."""
        while lane.pieces:
            (status,) = driver().cuEventQuery(lane.pieces[0].mark.event)
            if int(status) == self._not_ready:
                return
            piece = lane.pieces.popleft()
            lane.marks.append(piece.mark)
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
        while may_start := self._may_start(lane):
            purpose, (active, work) = lane.turns.take(may_start)
            piece = next(work, None)
            if piece is None:
                active.pending -= 1
                self._settle(active)
                continue
            lane.turns.put(purpose, (active, work))
            active.started_ns = active.started_ns or self._clock_ns()
            size_bytes = piece.total_bytes
            try:
                lane.issue(piece, lane.marks[-1].number, int(lane.stream))
            except DeviceError as error:
                # Some of it may be queued all the same: the event behind it tells when that has landed.
                size_bytes = 0
                active.ended = active.ended or (Outcome.FAILED, _failure(active, error))
                self._drop_turns(active)
            self._pacer.spend(purpose, size_bytes)
            self._mark(lane, active, size_bytes)

    def _mark(self, lane: _Lane, active: _Active, size_bytes: int) -> None:
        """Puts an event behind what was just queued."""
        mark = lane.marks.pop()
        active.in_flight += 1
        try:
            call("cuEventRecord", mark.event, lane.stream)
        except DeviceError as error:
            lane.marks.append(mark)
            active.in_flight -= 1
            self._break(active, error)
            self._drop_turns(active)
            self._settle(active)
            return
        lane.queued_bytes += size_bytes
        lane.pieces.append(_Piece(active, size_bytes, mark))

    def _drop_turns(self, active: _Active) -> None:
        for lane in self._lanes:
            active.pending -= lane.turns.drop(lambda turn: turn[0] is active)

    def _break(self, active: _Active, error: DeviceError) -> None:
        self.broken = self.broken or error
        active.unknown = _failure(active, error)


def _sliced(copies: PagedCopies, box: Box, piece_bytes: int, most_runs: int) -> Iterator[StridedCopies]:
    """Pieces for one call each, written out when their turn comes."""
    for piece in copies.pieces(box):
        yield from slices(piece, piece_bytes, most_runs)


def _failure(active: _Active, error: DeviceError) -> TransferFailed:
    return TransferFailed(f"plan {active.plan.plan_id}: {error}")
