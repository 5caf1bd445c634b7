"""What can be fetched, told as it changes: which segments are in which tier.

A segment is stored in a tier from the event on in which others can match it there (its fence has passed, a copy into it
has landed) and removed with the event that takes the content or its place in the index away, before anybody gets the
pages. What is told is the difference to what was told before, so a listener that begins with nothing hears everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvmanager.core.spans import ABSENT, DEVICE, HOST, NO_SPAN, READY, TOKEN_ID_BYTES
from kvmanager.core.spec import BOUNCE

if TYPE_CHECKING:
    from kvmanager.core.group import Chain
    from kvmanager.core.state import State


@dataclass(frozen=True)
class SegmentsStored:
    """Segments that follow each other can be fetched from a tier.

    keys: concatenated. parent: key of the segment before the first, empty at the root. first_segment: its position.
    tier: "device" or "host". token_ids: u32, those of the segments, or none. One key may be stored by several spans: it
    is gone when each has been removed.
    """

    group: str
    chain: int
    namespace: int
    tier: str
    keys: bytes
    parent: bytes
    first_segment: int
    token_ids: bytes = b""


@dataclass(frozen=True)
class SegmentsRemoved:
    """Segments that one span had in a tier can't be fetched there any more. keys: concatenated."""

    group: str
    chain: int
    namespace: int
    tier: str
    keys: bytes


KvEvent = SegmentsStored | SegmentsRemoved


@dataclass(frozen=True)
class _Told:
    """What was told of a span. segments: by tier, the leading ones."""

    namespace: int
    keys: bytes
    segments: tuple[int, int]


_NOTHING = _Told(0, b"", (0, 0))


def fetchable(chain: Chain, row: int) -> tuple[int, int]:
    """Leading segments of a span that others can fetch from the device and from the host.

    The device has what an engine still fills as far as it is valid; where a host copy is being loaded, the host has it.
    A span of several page classes whose parts lie apart, some on the device only, counts as one of the host.
    """
    table = chain.table
    if not table.published[row]:
        return 0, 0
    on_device = everything = True
    some_host = False
    for c in range(table.classes):
        device, host = int(table.copies[c, DEVICE, row]), int(table.copies[c, HOST, row])
        complete = device == READY or (device != ABSENT and host != READY)
        on_device &= complete
        everything &= complete or host == READY
        some_host |= host == READY
    valid = int(table.valid[row])
    if chain.pool(0, DEVICE).tier == BOUNCE:  # through it the pool is read: both are one place
        return 0, valid if everything else 0
    return valid if on_device else 0, valid if some_host and everything else 0


@dataclass
class Announcer:
    """Turns what an event touched into what is told. Not part of the state: a new one tells all anew."""

    groups: frozenset[str]
    _told: dict[tuple[str, int], dict[int, _Told]] = field(default_factory=dict)

    def begin(self, state: State) -> list[KvEvent]:
        """Everything that can be fetched now; afterwards `changes` tells what became different."""
        self._told.clear()
        for name in sorted(self.groups):
            for chain in state.groups[name].chains:
                chain.table.touched[:] = [np.flatnonzero(chain.table.published)]
        return self.changes(state)

    def changes(self, state: State) -> list[KvEvent]:
        """What the event just handled changed: removals, then what is stored, parents before their children."""
        removed: list[KvEvent] = []
        stored: list[KvEvent] = []
        for name in sorted(self.groups):
            for number, chain in enumerate(state.groups[name].chains):
                if chain.table.touched:
                    rows = _named(chain)
                    removed += self._removals(name, number, chain, rows)
                    stored += _joined(self._stores(name, number, chain, rows), chain.index.key_bytes)
        return removed + stored

    def _removals(self, group: str, number: int, chain: Chain, rows: list[int]) -> Iterator[SegmentsRemoved]:
        """What spans no longer have of what was told, which is noted; children before their parents."""
        told, width = self._told.setdefault((group, number), {}), chain.index.key_bytes
        for row in rows[::-1]:
            old = told.get(row)
            if old is None:
                continue
            # A row may hold another span by now.
            same = bool(chain.table.published[row]) and chain.table.keys[row].startswith(old.keys)
            same = same and int(chain.table.namespace[row]) == old.namespace
            now = fetchable(chain, row) if same else (0, 0)
            left = min(old.segments[0], now[0]), min(old.segments[1], now[1])
            for tier in (DEVICE, HOST):
                if left[tier] < old.segments[tier]:
                    keys = old.keys[left[tier] * width : old.segments[tier] * width]
                    yield SegmentsRemoved(group, number, old.namespace, _tier(chain, tier), keys)
            if any(left):
                told[row] = _Told(old.namespace, old.keys[: max(left) * width], left)
            else:
                del told[row]

    def _stores(self, group: str, number: int, chain: Chain, rows: list[int]) -> Iterator[SegmentsStored]:
        """What spans have beyond what was told, which is noted."""
        told, width, table = self._told.setdefault((group, number), {}), chain.index.key_bytes, chain.table
        for row in rows:
            now, old = fetchable(chain, row), told.get(row, _NOTHING)
            if now == old.segments:
                continue
            keys, namespace = bytes(table.keys[row][: max(now) * width]), int(table.namespace[row])
            first = int(table.first_token[row]) // chain.spec.page_rows
            for tier in (DEVICE, HOST):
                if now[tier] > old.segments[tier]:
                    at = old.segments[tier]
                    parent = keys[(at - 1) * width : at * width] if at else _last_key(chain, int(table.parent[row]))
                    more = keys[at * width : now[tier] * width]
                    where = group, number, namespace, _tier(chain, tier)
                    yield SegmentsStored(*where, more, parent, first + at, _ids_of(chain, row, at, now[tier]))
            told[row] = _Told(namespace, keys, now)


def _named(chain: Chain) -> list[int]:
    """The rows that were touched, in token order, and none is touched any more."""
    touched = chain.table.touched
    rows = np.unique(np.concatenate([np.atleast_1d(rows) for rows in touched]))
    touched.clear()
    ordered: list[int] = rows[np.argsort(chain.table.first_token[rows], kind="stable")].tolist()
    return ordered


def _ids_of(chain: Chain, row: int, start: int, stop: int) -> bytes:
    """Token ids of segments [start, stop) of a span; none where its engine gave none."""
    width = chain.spec.page_rows * TOKEN_ID_BYTES
    return chain.table.token_ids.get(row, b"")[start * width : stop * width]


def _last_key(chain: Chain, row: int) -> bytes:
    return b"" if row == NO_SPAN else bytes(chain.table.keys[row][-chain.index.key_bytes :])


def _tier(chain: Chain, tier: int) -> str:
    """What the pool behind a tier is: an engine with memory of its own has its device tier on the host."""
    return "host" if tier == HOST else chain.pool(0, DEVICE).tier


def _joined(stored: Iterator[SegmentsStored], width: int) -> list[SegmentsStored]:
    """The same with segments that follow each other in one. `width`: bytes of a key."""
    runs: list[list[SegmentsStored]] = []
    ends: dict[tuple[int, str, bytes], list[SegmentsStored]] = {}
    for each in stored:
        run = ends.pop((each.namespace, each.tier, each.parent), None)
        if run is None:
            run = []
            runs.append(run)
        run.append(each)
        ends[each.namespace, each.tier, each.keys[-width:]] = run
    return [_one(run) for run in runs]


def _one(run: list[SegmentsStored]) -> SegmentsStored:
    first = run[0]
    keys = b"".join(each.keys for each in run)
    return SegmentsStored(
        first.group, first.chain, first.namespace, first.tier, keys, first.parent, first.first_segment,
        b"".join(each.token_ids for each in run),
    )  # fmt: skip
