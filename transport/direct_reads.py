"""Reads that end in their final places: what a chunk consists of then, and several reads under one id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvmanager.errors import KVError
from kvmanager.transport.executor import Outcome
from kvmanager.transport.nixl import ReadResult, U64Array
from kvmanager.transport.ring import RingPull
from kvmanager.transport.runs import Runs, runs_of
from kvmanager.transport.turned_pages import Turn


class Reader(Protocol):
    """What reads from peers (`NixlReader`; `PackedReads`, which has `read_packed` besides)."""

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See `NixlReader.add_peer`."""

    def read(
        self, peer: str, addresses: U64Array, region_id: int, offsets: U64Array, lengths: U64Array, deadline_ns: int
    ) -> int:
        """See `NixlReader.read`."""

    def read_packed(
        self, peer: str, addresses: U64Array, region_id: int, offsets: U64Array, lengths: U64Array, deadline_ns: int,
        turn: Turn | None = None,
    ) -> int:  # fmt: skip
        """See `PackedReads.read_packed`."""

    def poll(self) -> list[ReadResult]:
        """See `NixlReader.poll`."""

    def settled(self) -> list[int]:
        """See `NixlReader.settled`."""


def final_places(ring: RingPull, chunk: int) -> list[Runs]:
    """The chunk's bytes as runs from the peer's addresses to where they belong, one `Runs` a target region."""
    pages, start = ring.chunk_addresses(chunk), ring.staging_range(chunk)[0]
    found: dict[int, list[Runs]] = {}
    for copies in ring.placed(chunk).copies:
        if copies.pairs:
            runs = _by_page(runs_of(copies), start, ring.page_bytes)
            page, at = np.divmod(runs.source - start, ring.page_bytes)
            runs = Runs(runs.source_region, runs.target_region, pages[page] + at, runs.target, runs.lengths)
            found.setdefault(runs.target_region, []).append(runs)
    return [
        Runs(
            parts[0].source_region,
            region,
            *(np.concatenate([getattr(part, side) for part in parts]) for side in ("source", "target", "lengths")),
        )
        for region, parts in found.items()
    ]


def _by_page(runs: Runs, start: int, page_bytes: int) -> Runs:
    """The same, none of them over two pages of staging: those lie apart at the peer."""
    begins, ends = runs.source - start, runs.source - start + runs.lengths
    first, last = begins // page_bytes, (ends - 1) // page_bytes
    pieces = last - first + 1
    which = np.repeat(np.arange(len(pieces)), pieces)
    page = first[which] + np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    low = np.maximum(begins[which], page * page_bytes)
    high = np.minimum(ends[which], (page + 1) * page_bytes)
    target = runs.target[which] + low - begins[which]
    return Runs(runs.source_region, runs.target_region, low + start, target, high - low)


@dataclass
class _Joined:
    """Reads that count as one. `left`: inner ids without a result; `late`: those of unknown fate."""

    left: set[int]
    late: set[int] = field(default_factory=set)
    moved_bytes: int = 0
    busy_ns: int = 0
    error: KVError | None = None

    def result(self, read_id: int) -> ReadResult:
        quiet = Outcome.DONE if self.error is None else Outcome.FAILED
        outcome = Outcome.UNKNOWN_FATE if self.late else quiet
        return ReadResult(read_id, outcome, self.moved_bytes, self.busy_ns, self.error)


class JoinedReads:
    """Reads of one agent, of which several may have one id and one result: that of them all, when all have ended."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._joined: dict[int, _Joined] = {}
        self._of_inner: dict[int, int] = {}
        self._next_id = 1

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See `NixlReader.add_peer`."""
        self._reader.add_peer(name, metadata)

    def read(
        self, peer: str, addresses: U64Array, region_id: int, offsets: U64Array, lengths: U64Array, deadline_ns: int
    ) -> int:
        """See `NixlReader.read`."""
        return self._join([self._reader.read(peer, addresses, region_id, offsets, lengths, deadline_ns)])

    def read_packed(
        self, peer: str, addresses: U64Array, region_id: int, offsets: U64Array, lengths: U64Array, deadline_ns: int,
        turn: Turn | None = None,
    ) -> int:  # fmt: skip
        """See `PackedReads.read_packed`."""
        inner = self._reader.read_packed(peer, addresses, region_id, offsets, lengths, deadline_ns, turn)
        return self._join([inner])

    def read_places(self, peer: str, places: Sequence[Runs], deadline_ns: int) -> int:
        """Reads runs from the peer's addresses, `source`, to their places in several regions."""
        inner = [
            self._reader.read(
                peer,
                runs.source.astype(np.uint64),
                runs.target_region,
                runs.target.astype(np.uint64),
                runs.lengths.astype(np.uint64),
                deadline_ns,
            )
            for runs in places
        ]
        return self._join(inner)

    def _join(self, inner: list[int]) -> int:
        read_id, self._next_id = self._next_id, self._next_id + 1
        self._joined[read_id] = _Joined(set(inner))
        self._of_inner.update(dict.fromkeys(inner, read_id))
        return read_id

    def poll(self) -> list[ReadResult]:
        """See `NixlReader.poll`."""
        ended = []
        for result in self._reader.poll():
            read_id = self._of_inner[result.read_id]
            joined = self._joined[read_id]
            joined.left.discard(result.read_id)
            joined.moved_bytes += result.moved_bytes
            joined.busy_ns += result.busy_ns
            joined.error = joined.error or result.error
            if result.outcome is Outcome.UNKNOWN_FATE:
                joined.late.add(result.read_id)
            else:
                del self._of_inner[result.read_id]
            if not joined.left:
                ended.append(joined.result(read_id))
                if not joined.late:
                    del self._joined[read_id]
        return ended

    def settled(self) -> list[int]:
        """See `NixlReader.settled`."""
        quiet = []
        for inner in self._reader.settled():
            read_id = self._of_inner.pop(inner)
            joined = self._joined[read_id]
            joined.late.discard(inner)
            if not joined.late and not joined.left:
                del self._joined[read_id]
                quiet.append(read_id)
        return quiet
