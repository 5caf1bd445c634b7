"""What the scheduler's side tells the workers with each step, and what they report. Plain values: they are pickled."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoadOrder:
    """Copy cache pages into the engine's blocks, then report the request as received.

    pages[i] -> block_ids[i]. lost_block_ids: blocks of the request that nobody can fill. lease_id 0: nothing is leased.
    sums: page -> what it must add up to, of all ranks, where that is known.
    """

    request_id: str
    lease_id: int
    pages: list[int]
    block_ids: list[int]
    lost_block_ids: list[int]
    sums: dict[int, bytes] = field(default_factory=dict)


@dataclass
class SaveOrder:
    """Copy the engine's blocks into reserved pages at the end of this step: block_ids[i] -> pages[i].

    summed: pages of which checksums are made. kept: nobody writes the blocks until they are released, so that the copy
    may take its time.
    """

    lease_id: int
    pages: list[int]
    block_ids: list[int]
    summed: list[int] = field(default_factory=list)
    kept: bool = False


@dataclass
class Orders:
    """Of one step. epoch: of the engine's registration, 0: there is none. released: requests whose blocks may go."""

    epoch: int = 0
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


@dataclass
class Ended:
    """A copy ended: all work on the pages is over when the rank's timeline word has reached `value`.

    copies: how many pages it was ordered to copy. ok: their bytes are right. failed_pages: those that can't be read, or
    are not what was written; failure: why. sums: page -> its checksum on this rank, where it was to be made.
    """

    lease_id: int
    value: int
    copies: int
    ok: bool
    failed_pages: list[int] = field(default_factory=list)
    failure: str = ""
    sums: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Report:
    """What one rank has to say. attach_id: of its attach under `epoch`, 0 while there is none."""

    rank: int
    epoch: int
    attach_id: int
    ended: list[Ended] = field(default_factory=list)
