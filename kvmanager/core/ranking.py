"""Who goes first among many spans, sorted only as far as somebody asks: an eviction costs what it evicts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmanager.core.eviction import Kinds, Policy
from kvmanager.core.return_rate import SessionBook
from kvmanager.core.rows import BoolArray, RowArray, any_true, places
from kvmanager.core.spans import NO_SPAN, SpanTable
from kvmanager.core.spec import MissCosts


def children_first(
    order: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], parent: npt.NDArray[np.int32]
) -> npt.NDArray[np.int64]:
    """The order, changed as little as needed so that no candidate comes before one below it.

    `order`: permutation of `rows`; `parent`: of every span. Policies rank by session, and sessions may meet on a
    path in ways that their labels don't show; then a parent waits for its child.
    """
    place = np.empty(len(rows))
    place[order] = np.arange(len(rows))
    where = np.full(len(parent) + 1, -1)
    where[rows] = np.arange(len(rows))
    above = where[parent[rows]]  # NO_SPAN reads the last entry: none
    below = places(above >= 0)
    moved = False
    while True:
        early = below[place[above[below]] < place[below]]
        if len(early) == 0:
            break
        moved = True
        np.maximum.at(place, above[early], place[early] + 0.5 / len(rows))
    return np.argsort(place, kind="stable") if moved else order


def numbered(values: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """(the distinct values, ascending; which of them each is)."""
    if len(values) and values.min() == values.max():
        return values[:1], np.zeros(len(values), np.int64)
    least = int(values.min(initial=0))
    spread = int(values.max(initial=0)) - least + 1
    if spread > 4 * len(values) + 1024:
        distinct, which = np.unique(values, return_inverse=True)
        return distinct, which.reshape(-1)
    offsets = values.astype(np.int64) - least
    occurs = np.zeros(spread, bool)
    occurs[offsets] = True
    return (places(occurs) + least).astype(np.int32), (np.cumsum(occurs) - 1)[offsets]


def policy_ranks(
    policy: Policy,
    sessions: SessionBook,
    costs: MissCosts,
    table: SpanTable,
    rows: RowArray,
    reloadable: BoolArray,
    now: int,
) -> npt.NDArray[np.int64]:
    """The policy's rank of each of the spans. `reloadable`: bool, one entry a span of `rows`. `now`: ns."""
    numbers, which = numbered(table.owner[rows])
    kind, place = numbered((which * 4 + table.dead[rows] * 2 + reloadable).astype(np.int32))
    owner, spared = kind >> 2, (kind & 1).astype(bool)
    rate = sessions.indexes(numbers, now)[owner]
    miss_s = np.where(spared, costs.reload_s, costs.prefill_s)
    ranked: npt.NDArray[np.int64] = policy(Kinds(numbers[owner], (kind & 2).astype(bool), rate, spared, miss_s))[place]
    return ranked


class Ranking:
    """Spans by rank, then least recently used, then deepest first; but children before their parents."""

    def __init__(
        self, table: SpanTable, rows: RowArray, rank: npt.NDArray[np.int64], parent: npt.NDArray[np.int32]
    ) -> None:
        """`rank`: from 0 on, one entry a span of `rows` (ascending). `parent`: of every span of the table."""
        self._rows, self._rank, self._parent = rows, rank, parent
        self._last_used, self._first_token = table.last_used[rows], table.first_token[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def first(self, count: int) -> RowArray:
        """The first `count` spans, or all; int64."""
        most = count
        while True:
            head = self._head(most)
            ready = self._rows[head] if len(head) == len(self) else self._without_waiting(head)
            if len(ready) >= count or len(head) == len(self):
                return ready[children_first(np.arange(len(ready)), ready, self._parent)][:count]
            most *= 4

    def _head(self, most: int) -> RowArray:
        """Places in `rows` of the first spans by rank, use and depth: `most` of them and what equals the last."""
        chosen = np.arange(len(self))
        if most < len(self):
            sizes = np.bincount(self._rank)
            upto = np.cumsum(sizes)
            edge = int(np.searchsorted(upto, most))
            lacking = most - int(upto[edge] - sizes[edge])
            some = places(self._rank == edge)
            if lacking < len(some):
                used = self._last_used[some]
                some = some[used <= np.partition(used, lacking)[lacking]]
            chosen = np.concatenate((places(self._rank < edge), some))
        keys = [key[chosen] for key in (self._last_used, self._rank)]
        # What is alike for all decides nothing, and sorting by it takes as long as by anything else.
        order = np.lexsort((-self._first_token[chosen], *(key for key in keys if any_true(key[1:] != key[:-1]))))
        return chosen[order]

    def _without_waiting(self, head: RowArray) -> RowArray:
        """The rows of the head that need not wait for a span behind it, in their order."""
        in_head = np.zeros(len(self._parent), bool)
        in_head[self._rows[head]] = True
        behind = np.ones(len(self), bool)
        behind[head] = False
        waiting = self._parent[self._rows[behind]]
        while True:
            waiting = waiting[waiting != NO_SPAN]
            waiting = waiting[in_head[waiting]]
            if len(waiting) == 0:
                break
            in_head[waiting] = False
            waiting = self._parent[waiting]
        rows = self._rows[head]
        return rows[in_head[rows]]
