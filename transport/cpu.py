"""Copies by the CPU with numpy: the reference executor, and the one of machines without a GPU.

Source and target ranges of one plan must not overlap each other, nor target ranges themselves: the
order in which rows are copied is not defined.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from kvmanager.core.checksums import SUM_WORDS, PageSections
from kvmanager.core.plans import CopyPlan, Purpose, StridedCopies
from kvmanager.geometry import Int64Array
from kvmanager.killpoints import reach
from kvmanager.transport.active_plans import ActivePlan, ActivePlans
from kvmanager.transport.checksums import sum_one
from kvmanager.transport.executor import ByteArray, Completion, Outcome, RegionMap
from kvmanager.transport.pacing import Pacer
from kvmanager.transport.runs import slices
from kvmanager.transport.turns import Turns
from kvmanager.units import KIB, MIB

SLICE_BYTES: Final = 4 * MIB
SLICE_RUNS: Final = 16_384
"""A slice takes about a millisecond: 4 MiB at some GB/s, or 16,384 short rows at some 50 ns.

What is done between slices starts with cold caches, so small ones cost a tenth more.
"""
POLL_SLICES: Final = 2
_LEAST_SLICE: Final = 1 / 256
"""The least share of a slice that a piece counts as: its fixed cost of some microseconds."""
_LOOP_BYTES: Final = 4 * KIB
"""Copies at least this long go one by one: two microseconds each, and index arrays copy all of it twice."""
_LEAST_FOLDED: Final = 2
_ELEMENT_BYTES: Final = 256
"""Rows up to here are one element each to numpy."""
_LOOP_COPIES: Final = 4


@dataclass(kw_only=True)
class _Active(ActivePlan):
    """`work`: what is left. `summing`: sums up a page a step, after that, and says how many bytes that were."""

    work: Iterator[StridedCopies]
    total_bytes: int
    summing: Iterator[int] = field(default_factory=lambda: iter(()))


class CpuExecutor(ActivePlans[_Active]):
    """Plans in turn by urgency, a slice each, so a long one delays others by slices only (see `Executor`)."""

    def __init__(
        self,
        regions: RegionMap,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        pacer: Pacer | None = None,
    ) -> None:
        super().__init__(regions)
        self._clock_ns = clock_ns
        self._pacer = pacer or Pacer()
        self._turns: Turns[_Active] = Turns()
        self._over: list[_Active] = []  # they need no turn to end

    def submit(self, plan: CopyPlan) -> None:
        """See `Executor.submit`. Bounds of the whole plan are checked before a byte moves."""
        active = _Active(plan=plan, work=_work(plan), total_bytes=plan.total_bytes)
        if plan.sums is not None:
            active.summing = self._summing(active, plan.sums)
        self._take(active)
        if active.ended is None:
            self._turns.put(plan.purpose, active)
        else:
            self._over.append(active)

    def cancel(self, plan_id: int) -> None:
        """See `Executor.cancel`."""
        active = self._active.get(plan_id)
        super().cancel(plan_id)
        if active is not None:
            self._over += [active] * self._turns.drop(lambda waiting: waiting is active)

    def _summing(self, active: _Active, pages: PageSections) -> Iterator[int]:
        active.sums = np.empty((len(pages), len(pages.sections) * SUM_WORDS), np.uint64)
        for number in range(len(pages)):
            active.sums[number] = sum_one(self._regions, pages, number)
            yield pages.total_bytes // len(pages)

    def poll(self) -> list[Completion]:
        """See `Executor.poll`. Runs some `POLL_SLICES` slices in all, at most one a plan and turn."""
        left: float = POLL_SLICES
        while left > 0 and (may_start := self._may_start()):
            purpose, active = self._turns.take(may_start)
            left -= self._turn(active)
            if active.ended is None:
                self._turns.put(purpose, active)
            else:
                self._over.append(active)
        over, self._over = self._over, []
        return [self._end(active) for active in over]

    def _may_start(self) -> list[Purpose]:
        """Purposes of which something waits, and that their links have room for now."""
        return [purpose for purpose in self._turns.purposes if not self._pacer.wait_ns(purpose)]

    def wait_ns(self) -> int:
        """See `Executor.wait_ns`."""
        if self._over:
            return 0
        return min((self._pacer.wait_ns(purpose) for purpose in self._turns.purposes), default=0)

    def _turn(self, active: _Active) -> float:
        """Copies pieces of the plan until they make up a slice or none is left; returns the slices' worth spent."""
        spent, moved_before = _LEAST_SLICE, active.moved_bytes
        started = self._clock_ns()
        while spent < 1 and active.moved_bytes < active.total_bytes:
            piece = next(active.work)
            do_piece(self._regions, active.plan.purpose, piece)
            active.moved_bytes += piece.total_bytes
            if active.moved_bytes < active.total_bytes:
                reach("mover.plan.half_copied")
            spent += max(piece.total_bytes / SLICE_BYTES, piece.runs / SLICE_RUNS, _LEAST_SLICE)
        while (spent < 1 or active.sums is None) and active.moved_bytes == active.total_bytes and active.ended is None:
            summed_bytes = next(active.summing, 0)
            spent += summed_bytes / SLICE_BYTES
            if summed_bytes == 0:
                active.ended = (Outcome.DONE, None)
        active.busy_ns += self._clock_ns() - started
        self._pacer.spend(active.plan.purpose, active.moved_bytes - moved_before)
        return spent


def _work(plan: CopyPlan) -> Iterator[StridedCopies]:
    for piece in plan.pieces():
        yield from slices(folded(piece), SLICE_BYTES, SLICE_RUNS)


def folded(c: StridedCopies) -> StridedCopies:
    """The same, where rows of several copies lie side by side in the target as copies of more rows each.

    A permuted page is written from its first byte to its last then, instead of row by row with gaps: a fifth faster.
    """
    n, source, target = len(c.source_offsets), c.source_offsets, c.target_offsets
    if not c.counts or n < _LEAST_FOLDED:
        return c
    beside = np.flatnonzero(target[1:] - target[0] == c.row_bytes)
    if len(beside) == 0:
        return c
    apart, count = int(beside[0]) + 1, 1
    step = int(source[apart] - source[0])
    while (count + 1) * apart <= n and target[count * apart] == target[0] + count * c.row_bytes:
        count += 1
    if n % (apart * count):
        return c
    sources, targets = source.reshape(-1, count, apart), target.reshape(-1, count, apart)
    if (np.diff(sources, axis=1) != step).any() or (np.diff(targets, axis=1) != c.row_bytes).any():
        return c
    return replace(
        c,
        source_offsets=sources[:, 0].reshape(-1),
        target_offsets=targets[:, 0].reshape(-1),
        counts=(*c.counts, count),
        source_strides=(*c.source_strides, step),
        target_strides=(*c.target_strides, c.row_bytes),
    )


def do_piece(regions: RegionMap, purpose: Purpose, c: StridedCopies) -> None:
    """One set whose bounds were checked, copied, or zeros over its targets."""
    if purpose is Purpose.SCRUB:
        clear_piece(regions[c.target_region], c)
    else:
        copy_piece(regions[c.source_region], regions[c.target_region], c)


def clear_piece(target: ByteArray, c: StridedCopies) -> None:
    """Zeros over the targets of one set whose bounds were checked."""
    shape = (*c.counts, c.row_bytes)
    for end in c.target_offsets.tolist():
        _view(target, end, shape, c.target_strides)[...] = 0


def copy_piece(source: ByteArray, target: ByteArray, c: StridedCopies) -> None:
    """Copies one set whose bounds were checked, by the cheapest of three ways of addressing it."""
    n = len(c.source_offsets)
    each_bytes = math.prod(c.counts) * c.row_bytes
    if n <= _LOOP_COPIES or each_bytes >= _LOOP_BYTES:
        kind, shape, strides = np.dtype(f"V{c.row_bytes}"), c.counts, (c.source_strides, c.target_strides)
        if not c.counts or c.row_bytes > _ELEMENT_BYTES:
            kind, shape = np.dtype(np.uint8), (*shape, c.row_bytes)
            strides = (*c.source_strides, 1), (*c.target_strides, 1)
        for start, end in zip(c.source_offsets.tolist(), c.target_offsets.tolist(), strict=True):
            taken = np.ndarray(shape, kind, source, start, strides[0])
            np.ndarray(shape, kind, target, end, strides[1])[...] = taken
        return
    steps = _step(c.source_offsets), _step(c.target_offsets)
    if steps[0] is not None and steps[1] is not None:
        shape = (n, *c.counts, c.row_bytes)
        start, end = int(c.source_offsets[0]), int(c.target_offsets[0])
        _view(target, end, shape, (steps[1], *c.target_strides))[...] = _view(
            source, start, shape, (steps[0], *c.source_strides)
        )
        return
    rows = _windows(source, c, c.source_strides)[c.source_offsets]
    _windows(target, c, c.target_strides)[c.target_offsets] = rows


def _view(array: ByteArray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> ByteArray:
    """`array` seen from `offset` on; numpy itself refuses a view that leaves the array."""
    return np.ndarray(shape, np.uint8, array, offset, (*strides, 1))


def _step(offsets: Int64Array) -> int | None:
    """The common distance of offsets that lie evenly, else None."""
    steps = np.diff(offsets)
    return int(steps[0]) if (steps == steps[0]).all() else None


def _windows(array: ByteArray, c: StridedCopies, strides: tuple[int, ...]) -> ByteArray:
    """A view whose entry i is the copy at offset i, so that one index array gathers or scatters all.

    Entries near the ends would leave the region; the plan's bounds were checked, so none is touched.
    """
    shape = (len(array), *c.counts, c.row_bytes)
    return np.lib.stride_tricks.as_strided(array, shape, (1, *strides, 1))
