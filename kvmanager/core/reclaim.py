"""Making room: dropping clean copies, then evicting leaves. Nothing pinned or in flight is a victim."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import PageArray
from kvmanager.core.eviction import Candidates
from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import Pool
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, CopyState

BoolArray = npt.NDArray[np.bool_]
Fits = Callable[[], bool]


def idle(chain: Chain) -> BoolArray:
    """Spans that may lose pages now: published, unpinned, no plan on them (bool[rows])."""
    table = chain.table
    rows: BoolArray = table.live & table.published & (table.pins == 0) & (table.busy == 0)
    return rows


def evictable(chain: Chain) -> BoolArray:
    """Idle spans whose descendants are all idle too, so that leaf-first eviction can reach them (bool[rows])."""
    table = chain.table
    free: BoolArray = idle(chain)
    held = np.flatnonzero(table.live & table.published & ~free)
    # Upwards from held spans, level by level; a request holds its whole path, so one level is the rule.
    while len(held):
        parents = table.parent[held]
        above = np.zeros(len(free), bool)
        above[parents[parents != NO_SPAN]] = True
        held = np.flatnonzero(above & free)
        free[held] = False
    return free


def clean(chain: Chain, page_class: int) -> BoolArray:
    """Spans whose device copy of a class has a complete host copy beside it (bool[rows])."""
    copies = chain.table.copies[page_class]
    both: BoolArray = (copies[DEVICE] == CopyState.READY) & (copies[HOST] == CopyState.READY)
    return both


def _in_pool(chain: Chain, pool: Pool) -> list[tuple[int, int]]:
    """(class, tier) pairs whose pages come from the pool."""
    pairs = [(c, DEVICE) for c in range(len(chain.spec.classes))]
    pairs += [(c, HOST) for c in range(len(chain.spec.classes)) if chain.has_host(c)]
    return [(c, tier) for c, tier in pairs if chain.pool(c, tier) is pool]


def reclaimable_slabs(group: Group, pool: Pool) -> int:
    """Slabs that `make_room` could free now: all their pages belong to spans that may lose them."""
    counts: dict[str, npt.NDArray[np.int32]] = {}
    for chain in group.chains:
        table = chain.table
        may_go, may_drop = evictable(chain), idle(chain)
        for page_class, tier in _in_pool(chain, pool):
            name = chain.spec.classes[page_class].name
            rows = may_go & (table.copies[page_class, tier] == CopyState.READY)
            if tier == DEVICE and chain.has_host(page_class):
                rows |= may_drop & clean(chain, page_class)
            pages = table.pages[page_class, tier, rows].ravel()
            slabs = pages[pages != NO_PAGE] // pool.per_slab(name)
            counts.setdefault(name, np.zeros(pool.slabs, np.int32))
            np.add.at(counts[name], slabs, 1)
    total = 0
    for name, count in counts.items():
        used = pool.used_in_slabs(name)
        total += int(((used > 0) & (count == used)).sum())
    return total


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
    below = np.flatnonzero(above >= 0)
    moved = False
    while True:
        early = below[place[above[below]] < place[below]]
        if len(early) == 0:
            break
        moved = True
        np.maximum.at(place, above[early], place[early] + 0.5 / len(rows))
    return np.argsort(place, kind="stable") if moved else order


class Reclaimer:
    """Frees pages for a want, counting what it forgets."""

    def __init__(self, group: Group, counters: dict[str, int], now: Callable[[], int]) -> None:
        """`now`: the time of the event being handled, ns."""
        self._group = group
        self._counters = counters
        self._now = now

    def take(self, pool: Pool, page_class: str, count: int) -> PageArray | None:
        """`count` reserved pages, reclaiming as needed; None when even that is not enough."""
        if count and not self.make_room(pool, {page_class: count}):
            return None
        return pool.take(page_class, count)

    def make_room(self, pool: Pool, wants: Mapping[str, int]) -> bool:
        """Reclaims until the wants fit: clean device copies first, then leaves, least recently used first."""

        def fits() -> bool:
            return pool.slabs_needed(wants) <= pool.free_slabs

        if fits():
            return True
        if pool.slabs_needed(wants) > pool.free_slabs + reclaimable_slabs(self._group, pool):
            return False  # forgetting all that may be forgotten would not help, so nothing is
        for chain in self._group.chains:
            if self._drop_clean(chain, pool, fits):
                return True
        return any(self._evict_leaves(chain, pool, fits) for chain in self._group.chains)

    def trim(self, pool: Pool, free_slabs: int) -> None:
        """Frees until `free_slabs` slabs are free, or nothing more may go."""

        def fits() -> bool:
            return pool.free_slabs >= free_slabs

        if fits():
            return
        for chain in self._group.chains:
            if self._drop_clean(chain, pool, fits) or self._evict_leaves(chain, pool, fits):
                return

    def _ordered(self, chain: Chain, rows: BoolArray) -> list[int]:
        """The rows as the policy ranks them, first victim first."""
        index, table = np.flatnonzero(rows), chain.table
        owner = table.owner[index]
        numbers, which = np.unique(owner, return_inverse=True)
        rate = self._group.sessions.indexes(numbers, self._now())[which.reshape(-1)]
        candidates = Candidates(table.last_used[index], table.first_token[index], owner, table.dead[index], rate)
        order = children_first(self._group.policy(candidates), index, table.parent)
        ranked: list[int] = index[order].tolist()
        return ranked

    def _drop_clean(self, chain: Chain, pool: Pool, fits: Fits) -> bool:
        for page_class, tier in _in_pool(chain, pool):
            if tier != DEVICE or not chain.has_host(page_class):
                continue
            for row in self._ordered(chain, idle(chain) & clean(chain, page_class)):
                chain.free_copy(page_class, DEVICE, row)
                self._counters["reclaim"] += 1
                if fits():
                    return True
        return False

    def _evict_leaves(self, chain: Chain, pool: Pool, fits: Fits) -> bool:
        table = chain.table
        held = np.zeros(len(table.live), bool)
        for page_class, tier in _in_pool(chain, pool):
            held |= table.copies[page_class, tier] == CopyState.READY
        # A leaf without pages here may stand before a parent that has some.
        rows = evictable(chain)
        below = self._leads_to(chain, rows & held, rows)
        for row in self._ordered(chain, below):
            if table.children[row] == 0:
                self.evict(chain, row)
                if fits():
                    return True
        return False

    def _leads_to(self, chain: Chain, wanted: BoolArray, rows: BoolArray) -> BoolArray:
        """`wanted` spans and the evictable spans below them."""
        # Pointer doubling: `ahead[row]` is 1, 2, 4, ... steps towards the root; the last entry stands for "none".
        none = len(rows)
        ahead = np.append(np.where(chain.table.parent == NO_SPAN, none, chain.table.parent), none)
        marked = np.append(wanted, False)
        while (ahead != none).any():
            marked |= marked[ahead]
            ahead = ahead[ahead]
        return marked[:none] & rows

    def evict(self, chain: Chain, row: int) -> None:
        """Forgets an idle leaf: all its copies on all shards together."""
        assert idle(chain)[row]
        chain.index.unpublish(row)
        chain.free_span(row)
        self._counters["eviction"] += 1
