"""What every executor of copy plans does, and the regions that plans name.

Life of a plan: `submit` -> outstanding -> exactly one `Completion` out of `poll`. The bytes of a plan
that ended DONE have all arrived; FAILED and CANCELLED have moved some or none, and no more will
follow; UNKNOWN_FATE means that bytes may still arrive, so the pages stay quarantined until the
process that executes is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmanager.core.checksums import PageSections, SumArray
from kvmanager.core.plans import CopyPlan, PagedCopies
from kvmanager.errors import InvalidArgument, KVError
from kvmanager.transport.paths import PathRates
from kvmanager.transport.runs import paged_bounds

ByteArray = npt.NDArray[np.uint8]


class Outcome(StrEnum):
    """How a plan ended; the names are the wire's."""

    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN_FATE = "UNKNOWN_FATE"


@dataclass(frozen=True, slots=True)
class Completion:
    """The one terminal result of a plan. `moved_bytes` may be short unless DONE; `busy_ns`: time spent moving.

    `sums`: of a plan that is DONE and asked for them, uint64[pages, sections * SUM_WORDS].
    `path`: of a pull, what is known of the ways from its peer.
    """

    plan_id: int
    outcome: Outcome
    moved_bytes: int
    busy_ns: int
    error: KVError | None = None
    sums: SumArray | None = None
    path: PathRates | None = None


class Executor(Protocol):
    """Carries out plans of one process. One thread owns it; no call blocks for longer than one slice of work.

    Plans take turns by `Purpose.urgency`: a more urgent one overtakes all that is queued, piece by piece, and what
    is less urgent keeps a stated share of the turns (`transport.turns`). What has begun is never taken back.
    """

    def submit(self, plan: CopyPlan) -> None:
        """Takes a plan. What is wrong with the plan itself comes back as its FAILED completion.

        Raises InvalidArgument when a plan of this id is outstanding (its completion would be ambiguous),
        Draining after `close`.
        """

    def poll(self) -> list[Completion]:
        """Moves some bytes and returns what ended since the last call. May be called after `close`."""

    def wait_ns(self) -> int:
        """How long `poll` can start nothing because links are at their rates (`transport.pacing`); 0: poll now."""

    def cancel(self, plan_id: int) -> None:
        """Starts nothing more of a plan; its terminal result still comes.

        An id that is not outstanding is ignored: its completion is on the way.
        """

    def outstanding(self) -> list[int]:
        """Ids whose completion `poll` has not returned, in the order of submission."""

    def close(self) -> None:
        """Starts nothing more: every outstanding plan gets its terminal result, at the latest at its deadline."""


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """Where a region lies in this process, in bytes. `array`: its bytes, None for GPU memory.

    `chunk_bounds`: offsets that no copy may cross, ascending.
    """

    address: int
    size_bytes: int
    array: ByteArray | None
    chunk_bounds: tuple[int, ...] = ()


class RegionMap:
    """The memory behind region ids. Arrays are one-dimensional, contiguous, writable uint8."""

    def __init__(self) -> None:
        self._mapped: dict[int, MappedRegion] = {}

    def __contains__(self, region_id: int) -> bool:
        return region_id in self._mapped

    def add(self, region_id: int, array: ByteArray, chunk_bounds: tuple[int, ...] = ()) -> None:
        """Adds a region of host memory. Raises InvalidArgument when the id is taken."""
        assert array.dtype == np.uint8
        assert array.ndim == 1
        assert array.flags.c_contiguous
        assert array.flags.writeable
        self._add(region_id, MappedRegion(int(array.ctypes.data), len(array), array, chunk_bounds))

    def add_gpu(self, region_id: int, address: int, size_bytes: int) -> None:
        """Adds a region of GPU memory, mapped at `address`. Raises InvalidArgument when the id is taken."""
        self._add(region_id, MappedRegion(address, size_bytes, None))

    def _add(self, region_id: int, mapped: MappedRegion) -> None:
        if region_id in self._mapped:
            raise InvalidArgument(f"region {region_id} is mapped already")
        self._mapped[region_id] = mapped

    def find(self, region_id: int) -> MappedRegion:
        """Where the region lies. Raises InvalidArgument for an unknown id."""
        mapped = self._mapped.get(region_id)
        if mapped is None:
            raise InvalidArgument(f"region {region_id} is not mapped here: {sorted(self._mapped)} are")
        return mapped

    def __getitem__(self, region_id: int) -> ByteArray:
        """The bytes of a region of host memory. Raises InvalidArgument for an unknown id, or GPU memory."""
        array = self.find(region_id).array
        if array is None:
            raise InvalidArgument(f"region {region_id} is GPU memory: the CPU can't reach it")
        return array

    def address(self, region_id: int) -> int:
        """Where the region begins in this process. Raises InvalidArgument for an unknown id."""
        return self.find(region_id).address

    def size(self, region_id: int) -> int:
        """Bytes of the region. Raises InvalidArgument for an unknown id."""
        return self.find(region_id).size_bytes

    def own_part(self, plan: CopyPlan) -> CopyPlan:
        """The copies of a plan that lie in these regions. Raises InvalidArgument for one with only one end in them."""
        for copies in plan.copies:
            if (copies.source_region in self) != (copies.target_region in self):
                raise InvalidArgument(
                    f"plan {plan.plan_id} copies from region {copies.source_region} to {copies.target_region}; "
                    "only one of them is mapped here"
                )
        return replace(plan, copies=tuple(copies for copies in plan.copies if copies.source_region in self))

    def check(self, plan: CopyPlan, source_sizes: Mapping[int, int] | None = None) -> None:
        """Raises InvalidArgument when any byte of the plan lies outside its region.

        Also when a pattern writes more bytes than its target region holds: some would be written twice.
        `source_sizes`: bytes of the source regions, by id, where they are not this process's.
        """
        for number, copies in enumerate(plan.copies):
            what = f"plan {plan.plan_id}, pattern {number}"
            if source_sizes is None:
                source_size = self.size(copies.source_region)
            elif copies.source_region in source_sizes:
                source_size = source_sizes[copies.source_region]
            else:
                raise InvalidArgument(f"{what}: source region {copies.source_region} is not the peer's")
            _check_copies(what, copies, source_size, self.size(copies.target_region))
        if plan.sums is not None:
            self._check_sums(f"plan {plan.plan_id}", plan.sums)

    def _check_sums(self, what: str, pages: PageSections) -> None:
        starts = [start for start, _ in pages.sections]
        ends = [start + size for start, size in pages.sections]
        if not starts or min(starts) < 0 or any(size <= 0 for _, size in pages.sections):
            raise InvalidArgument(f"{what}: sections {pages.sections} of a page to be summed up")
        for region_id in np.unique(pages.regions).tolist():
            mine = pages.offsets[pages.regions == region_id]
            low, high = int(mine.min()) + min(starts), int(mine.max()) + max(ends)
            if low < 0 or high > self.size(region_id):
                raise InvalidArgument(
                    f"{what}: bytes [{low}, {high}) to be summed up leave region {region_id} of "
                    f"{self.size(region_id)} bytes; nothing was copied"
                )


def _check_copies(what: str, c: PagedCopies, source_size: int, target_size: int) -> None:
    sides = (
        ("source", c.source_region, paged_bounds(c, 0), source_size),
        ("target", c.target_region, paged_bounds(c, 1), target_size),
    )
    for side, region_id, (low, high), size in sides:
        if low < 0 or high > size:
            raise InvalidArgument(
                f"{what}: {side} bytes [{low}, {high}) leave region {region_id} of {size} bytes; nothing was copied"
            )
    if c.total_bytes > target_size:
        raise InvalidArgument(
            f"{what}: {c.total_bytes} bytes into region {c.target_region} of {target_size}; nothing was copied"
        )
