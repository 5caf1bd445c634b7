"""Making room: dropping clean copies, then evicting leaves. Nothing pinned or in flight is a victim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import PageArray
from kvmanager.core.eviction import Candidates
from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import Pool, Want
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, CopyState

BoolArray = npt.NDArray[np.bool_]
RowArray = npt.NDArray[np.int64]


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
    counts: dict[str, npt.NDArray[np.int64]] = {}
    for chain in group.chains:
        table = chain.table
        may_go, may_drop = evictable(chain), idle(chain)
        for page_class, tier in _in_pool(chain, pool):
            name = chain.spec.classes[page_class].name
            rows = may_go & (table.copies[page_class, tier] == CopyState.READY)
            if tier == DEVICE and chain.has_host(page_class):
                rows |= may_drop & clean(chain, page_class)
            pages = table.pages[page_class, tier, rows].ravel()
            found = np.bincount(pages[pages != NO_PAGE] // pool.per_slab(name), minlength=pool.slabs)
            counts[name] = counts.get(name, 0) + found
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


@dataclass(frozen=True)
class Room:
    """How pages can be had: `wants` by pool and class, and the spans that must be evicted from `pool` for that."""

    wants: dict[str, dict[str, int]]
    pool: str
    victims: RowArray


def _given(chain: Chain, pairs: list[tuple[int, int]], rows: RowArray) -> dict[str, tuple[PageArray, PageArray]]:
    """By class, (pages, which of the rows each belongs to), over all copies of these (class, tier) pairs."""
    given: dict[str, tuple[PageArray, PageArray]] = {}
    for page_class, tier in pairs:
        pages = chain.table.pages[page_class, tier, rows]
        held = pages != NO_PAGE
        given[chain.spec.classes[page_class].name] = (pages[held], np.nonzero(held)[0])
    return given


def _leaves_in_turn(chain: Chain, ordered: RowArray) -> RowArray:
    """The spans that are leaves when their turn comes: all spans below them had theirs before."""
    table = chain.table
    turn = np.full(len(table.live), len(ordered), np.int64)
    turn[ordered] = np.arange(len(ordered))
    above = table.parent[ordered]
    before = (above != NO_SPAN) & (np.arange(len(ordered)) < turn[above])
    gone = np.bincount(above[before], minlength=len(turn))
    late = ordered[gone[ordered] < table.children[ordered]]
    if len(late) == 0:
        return ordered
    keeps = np.zeros(len(turn), bool)
    while len(late):
        keeps[late] = True
        late = np.unique(table.parent[late])
        late = late[late != NO_SPAN]
        late = late[~keeps[late]]
    return ordered[~keeps[ordered]]


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
        want = Want(wants)
        lacking = pool.lacking_slabs(want)
        if lacking <= 0:
            return True
        if lacking > reclaimable_slabs(self._group, pool):
            return False  # forgetting all that may be forgotten would not help, so nothing is
        return self._free(pool, want)

    def trim(self, pool: Pool, free_slabs: int) -> None:
        """Frees until `free_slabs` slabs are free, or nothing more may go."""
        want = Want({}, free_slabs)
        if pool.lacking_slabs(want) > 0:
            self._free(pool, want)

    def _free(self, pool: Pool, want: Want) -> bool:
        """Clean device copies of all chains, then leaves, until the want fits; False when all were not enough."""
        chains = self._group.chains
        return any(self._drop_clean(chain, pool, want) for chain in chains) or any(
            self._evict_leaves(chain, pool, want) for chain in chains
        )

    def _ordered(self, chain: Chain, rows: BoolArray) -> RowArray:
        """The rows as the policy ranks them, first victim first; int64."""
        index, table = np.flatnonzero(rows), chain.table
        owner = table.owner[index]
        numbers, which = np.unique(owner, return_inverse=True)
        rate = self._group.sessions.indexes(numbers, self._now())[which.reshape(-1)]
        candidates = Candidates(table.last_used[index], table.first_token[index], owner, table.dead[index], rate)
        order = children_first(self._group.policy(candidates), index, table.parent)
        ranked: RowArray = index[order]
        return ranked

    def _drop_clean(self, chain: Chain, pool: Pool, want: Want) -> bool:
        """Frees device copies that have a host copy beside them until the want fits; False when all were not enough."""
        for page_class, tier in _in_pool(chain, pool):
            if tier != DEVICE or not chain.has_host(page_class):
                continue
            rows = self._ordered(chain, idle(chain) & clean(chain, page_class))
            enough = pool.gives_until_fit(want, _given(chain, [(page_class, DEVICE)], rows), len(rows))
            chain.free_copies(page_class, DEVICE, rows[:enough])
            self._counters["reclaim"] += len(rows[:enough])
            if enough <= len(rows):
                return True
        return False

    def _evict_leaves(self, chain: Chain, pool: Pool, want: Want) -> bool:
        """Evicts leaf after leaf until the want fits; False when all were not enough."""
        victims, enough = self._leaves(chain, pool, want)
        self.evict(chain, victims)
        return enough

    def leaves_for(self, chain: Chain, pool: Pool, wants: Mapping[str, int]) -> RowArray | None:
        """The spans that `make_room` would evict; None when they are not enough, or other spans have a say."""
        if any(_in_pool(other, pool) for other in self._group.chains if other is not chain):
            return None
        victims, enough = self._leaves(chain, pool, Want(wants))
        return victims if enough else None

    def still_evictable(self, chain: Chain, room: Room) -> bool:
        """Whether nothing happened to the victims that would save one of them."""
        if len(room.victims) == 0:
            return True
        return bool(self._reachable(chain, self._group.pools[room.pool])[room.victims].all())

    def _leaves(self, chain: Chain, pool: Pool, want: Want) -> tuple[RowArray, bool]:
        """Spans to be evicted one after the other, in order, and whether the want fits then: as few as do, or all."""
        ordered = self._ordered(chain, self._reachable(chain, pool))
        # The first few are looked at alone: mostly they will do, and the others may be ten thousands.
        some = 2 * pool.lacking_slabs(want)
        for candidates in (ordered[:some], ordered):
            leaves = _leaves_in_turn(chain, candidates)
            given = _given(chain, _in_pool(chain, pool), leaves)
            enough = pool.gives_until_fit(want, given, len(leaves))
            if enough <= len(leaves):
                return leaves[:enough], True
        return leaves, False

    def _reachable(self, chain: Chain, pool: Pool) -> BoolArray:
        """Evictable spans that hold pages of the pool or stand below one that does (bool[rows])."""
        table = chain.table
        held = np.zeros(len(table.live), bool)
        for page_class, tier in _in_pool(chain, pool):
            held |= table.copies[page_class, tier] == CopyState.READY
        # A leaf without pages here may stand before a parent that has some.
        rows = evictable(chain)
        return self._leads_to(chain, rows & held, rows)

    def _leads_to(self, chain: Chain, wanted: BoolArray, rows: BoolArray) -> BoolArray:
        """`wanted` spans and the evictable spans below them."""
        if not (rows & ~wanted).any():
            return wanted
        # Pointer doubling: `ahead[row]` is 1, 2, 4, ... steps towards the root; the last entry stands for "none".
        none = len(rows)
        ahead = np.append(np.where(chain.table.parent == NO_SPAN, none, chain.table.parent), none)
        marked = np.append(wanted, False)
        while (ahead != none).any():
            marked |= marked[ahead]
            ahead = ahead[ahead]
        return marked[:none] & rows

    def evict(self, chain: Chain, rows: RowArray) -> None:
        """Forgets idle spans, children before their parents: all their copies on all shards together."""
        assert idle(chain)[rows].all()
        chain.index.unpublish_many(rows)
        chain.free_spans(rows)
        self._counters["eviction"] += len(rows)
