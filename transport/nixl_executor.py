"""Copy plans as NIXL reads: source regions are a peer's, target regions are ours."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvmanager.core.plans import CopyPlan
from kvmanager.transport.active_plans import ActivePlan, ActivePlans
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.nixl import NixlReader, ReadResult
from kvmanager.transport.runs import Runs, runs_of
from kvmanager.transport.turns import Turns
from kvmanager.units import MIB, SECOND_NS

READ_BYTES: Final = 8 * MIB
"""Of one read (a single longer run goes alone): over loopback a read blocks the caller for its copy."""
READ_RUNS: Final = 1_024
READS_UNDER_WAY: Final = 8
"""At one time: a more urgent plan waits for no more than these."""
DEADLINE_NS: Final = 30 * SECOND_NS


@dataclass(kw_only=True)
class _Active(ActivePlan):
    """`reads`: what is left, `read_id`: the one under way. `deadline_ns` runs from the first read on."""

    reads: Iterator[Runs]
    deadline_ns: int | None = None
    read_id: int | None = None


class NixlExecutor(ActivePlans[_Active]):
    """Runs plans from the regions of one peer into regions of this process (see `Executor`).

    `addresses`: source region id -> (address in the peer, bytes). Each plan has `deadline_ns` from its first read on.
    """

    def __init__(
        self,
        reader: NixlReader,
        regions: RegionMap,
        peer: str,
        addresses: Mapping[int, tuple[int, int]],
        deadline_ns: int = DEADLINE_NS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(regions)
        self._reader = reader
        self._peer = peer
        self._addresses = addresses
        self._deadline_ns = deadline_ns
        self._clock_ns = clock_ns
        self._reading: dict[int, _Active] = {}
        self._turns: Turns[_Active] = Turns()

    def submit(self, plan: CopyPlan) -> None:
        """See `Executor.submit`."""
        active = _Active(plan=plan, reads=_reads(plan))
        self._take(active, self._source_sizes())
        if active.ended is None:
            self._turns.put(plan.purpose, active)

    def _source_sizes(self) -> dict[int, int]:
        return {region: size for region, (_, size) in self._addresses.items()}

    def poll(self) -> list[Completion]:
        """See `Executor.poll`: one read a plan, `READS_UNDER_WAY` in all."""
        for result in self._reader.poll():
            self._landed(result)
        while self._turns and len(self._reading) < READS_UNDER_WAY:
            _, active = self._turns.take(self._turns.purposes)
            if active.ended is None:
                self._start_next(active)
        ended = [a for a in self._active.values() if a.ended is not None and a.read_id is None]
        return [self._end(active) for active in ended]

    def wait_ns(self) -> int:
        """See `Executor.wait_ns`. Reads from a peer cross no link that is paced."""
        return 0

    def _start_next(self, active: _Active) -> None:
        runs = next(active.reads, None)
        if runs is None:
            active.ended = (Outcome.DONE, None)
            return
        if active.deadline_ns is None:
            active.deadline_ns = self._clock_ns() + self._deadline_ns
        base, _ = self._addresses[runs.source_region]
        active.read_id = self._reader.read(
            self._peer,
            (runs.source + base).astype(np.uint64),
            runs.target_region,
            runs.target.astype(np.uint64),
            runs.lengths.astype(np.uint64),
            active.deadline_ns,
        )
        self._reading[active.read_id] = active

    def _landed(self, result: ReadResult) -> None:
        active = self._reading.pop(result.read_id)
        active.read_id = None
        active.moved_bytes += result.moved_bytes
        active.busy_ns += result.busy_ns
        if result.outcome is not Outcome.DONE:
            active.ended = (result.outcome, result.error)
        if active.ended is None:
            self._turns.put(active.plan.purpose, active)


def _reads(plan: CopyPlan) -> Iterator[Runs]:
    """What is read at one time, worked out when its turn comes."""
    for copies in plan.copies:
        for part in copies.parts(READ_RUNS):
            yield from _in_groups(runs_of(part))


def _in_groups(runs: Runs) -> list[Runs]:
    """The runs in groups of at most `READ_RUNS` runs and about `READ_BYTES` bytes."""
    groups = np.maximum(np.cumsum(runs.lengths) // READ_BYTES, np.arange(len(runs.lengths)) // READ_RUNS)
    cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(runs.lengths)]
    return [
        Runs(runs.source_region, runs.target_region, runs.source[a:b], runs.target[a:b], runs.lengths[a:b])
        for a, b in itertools.pairwise(cuts)
        if a < b
    ]
