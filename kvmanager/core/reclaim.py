"""Making room: dropping clean copies, then evicting leaves. Nothing pinned or in flight is a victim."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import PageArray
from kvmanager.core.forgetting import forgot
from kvmanager.core.group import Chain, Group
from kvmanager.core.operatorevents import Forgot, Loss
from kvmanager.core.pool import Pool, Want
from kvmanager.core.ranking import Ranking, policy_ranks
from kvmanager.core.rows import BoolArray, RowArray, all_true, any_true, places
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, READY
from kvmanager.core.spec import MissCosts
from kvmanager.core.tenants import Kept, goes_last, kept, span_units, with_ancestors


def idle(chain: Chain) -> BoolArray:
    """Spans that may lose pages now: published, unpinned, no plan on them (bool[rows])."""
    table = chain.table
    rows: BoolArray = table.published & ((table.pins | table.busy) == 0)
    return rows


def evictable(chain: Chain) -> BoolArray:
    """Idle spans whose descendants are all idle too, so that leaf-first eviction can reach them (bool[rows])."""
    table = chain.table
    free: BoolArray = idle(chain)
    held = table.published ^ free
    parents = table.parent[held]
    if any_true(free[parents[parents != NO_SPAN]]):
        free &= ~_led_to(table.parent, held)
    return free


def _led_to(parent: npt.NDArray[np.int32], rows: BoolArray) -> BoolArray:
    """The rows and all that lead to them (bool[rows])."""
    # Pointer doubling: `ahead[row]` is 1, 2, 4, ... steps towards the root; the last entry stands for "none".
    none = len(rows)
    ahead = np.append(np.where(parent == NO_SPAN, none, parent), none)
    marked = np.append(rows, False)
    while any_true(ahead[marked] != none):
        marked[ahead[marked]] = True
        marked[none] = False
        ahead = ahead[ahead]
    return marked[:none]


def clean(chain: Chain, page_class: int) -> BoolArray:
    """Spans whose device copy of a class has a complete host copy beside it (bool[rows])."""
    copies = chain.table.copies[page_class]
    both: BoolArray = (copies[DEVICE] == READY) & (copies[HOST] == READY)
    return both


def in_use(chain: Chain) -> BoolArray:
    """Spans of which somebody uses a copy itself: the device copy where there is one, else the host's (bool[rows])."""
    held: BoolArray = chain.table.pins > chain.table.anchored
    return held


def droppable(chain: Chain, page_class: int, tier: int, leaves: BoolArray | None = None) -> BoolArray:
    """Spans whose copy of a class in this tier may go now, because the other tier has one too (bool[rows]).

    `leaves`: the chain's evictable spans, of one who has counted them.
    """
    if not chain.has_host(page_class):
        return np.zeros(len(chain.table.live), bool)
    table = chain.table
    rows: BoolArray = table.live & (table.busy == 0) & clean(chain, page_class)
    if tier == DEVICE:
        return rows & ~in_use(chain)
    # Where pages may lie on the host alone, a mirror that one request's pages have is promised to it while it stands
    # (`core.homes`); one that several rely on is promised to nobody, and stays.
    used = (table.pins == 1) & (table.anchored == 0) if chain.swaps else in_use(chain)
    # A device copy that could leave only because it is clean was counted on for promises: it stays clean.
    rows &= table.host_readers == 0
    return rows & (used | (evictable(chain) if leaves is None else leaves))


def _in_pool(chain: Chain, pool: Pool) -> list[tuple[int, int]]:
    """(class, tier) pairs whose pages come from the pool."""
    return [(c, tier) for c, tier in chain.spec.class_tiers if chain.pool(c, tier) is pool]


def _kept(group: Group, chain: Chain, pool: Pool, asker: int) -> Kept | None:
    """What the tenant that asks can't have; None where no tenant has a floor."""
    if not group.tenants.has_floors:
        return None
    free, leaves = idle(chain), evictable(chain)
    loose = {(c, tier): free | droppable(chain, c, tier, leaves) for c, tier in chain.spec.class_tiers}
    everywhere = kept(group, chain, asker, group.pools.values(), loose)
    return Kept(kept(group, chain, asker, [pool], loose), with_ancestors(chain.table, everywhere))


def reclaimable_slabs(group: Group, pool: Pool, asker: int | None = None) -> int:
    """Slabs that `make_room` could free now: all their pages belong to spans that may lose them.

    asker: the tenant that they are for (NOBODY: anybody); None: the one that the event being handled serves.
    """
    asker = group.asker if asker is None else asker
    counts: dict[str, npt.NDArray[np.int64]] = {}
    total = 0
    for chain in group.chains:
        table = chain.table
        pairs = _in_pool(chain, pool)
        if not pairs:
            continue
        may_go = evictable(chain)
        keeps = _kept(group, chain, pool, asker)
        for page_class, tier in pairs:
            name = chain.spec.classes[page_class].name
            rows = may_go & (table.copies[page_class, tier] == READY)
            if keeps is not None:
                rows &= ~keeps.spans
            if chain.has_host(page_class):
                drops = droppable(chain, page_class, tier, may_go)
                rows |= drops if keeps is None else drops & ~keeps.copies
            if pool.per_slab(name) == 1:
                total += int(chain.widths(places(rows)).sum())
                continue
            pages = table.pages[page_class, tier, rows].ravel()
            found = np.bincount(pages[pages != NO_PAGE] // pool.per_slab(name), minlength=pool.numbered_slabs)
            counts[name] = counts.get(name, 0) + found
    for name, count in counts.items():
        used = pool.used_in_slabs(name)
        total += int(((used > 0) & (count == used)).sum())
    return total


def can_lose(group: Group, chain: Chain, page_class: int, tier: int) -> BoolArray:
    """Spans that could give up their copy of a class in a tier now, dropped or forgotten (bool[rows])."""
    leaves = evictable(chain)
    drops = droppable(chain, page_class, tier, leaves)
    keeps = _kept(group, chain, chain.pool(page_class, tier), group.asker)
    return leaves | drops if keeps is None else (leaves & ~keeps.spans) | (drops & ~keeps.copies)


class Lender(Protocol):
    """Gets further slabs for a pool that shares a region (`core.lending`)."""

    def borrow(self, pool: Pool, lacking: int) -> None:
        """As many as it lacks, as far as that costs less than what the pool would lose itself."""
        ...


@dataclass(frozen=True)
class Losses:
    """Who gives up pages of a pool, first victim first (int64). A span that `stays` keeps what the other tier has."""

    rows: RowArray
    stays: BoolArray

    def first(self, count: int) -> Losses:
        """The first so many."""
        return Losses(self.rows[:count], self.stays[:count])

    def pick(self, keep: BoolArray) -> Losses:
        """Some of them, in the same order."""
        return Losses(self.rows[keep], self.stays[keep])

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class _RankedLosses:
    """Losses that are put in order only as far as they are asked for. stays: bool, over all spans."""

    ranking: Ranking
    stays: BoolArray

    def first(self, count: int) -> Losses:
        rows = self.ranking.first(count)
        return Losses(rows, self.stays[rows])

    def __len__(self) -> int:
        return len(self.ranking)


NO_LOSSES = Losses(np.empty(0, np.int64), np.empty(0, bool))


def _given(
    chain: Chain, pairs: list[tuple[int, int]], losses: Losses
) -> dict[str, tuple[PageArray, PageArray]]:
    """By class, (pages, which of the losses each belongs to), over all copies of these (class, tier) pairs."""
    given: dict[str, tuple[PageArray, PageArray]] = {}
    for page_class, tier in pairs:
        pages = chain.table.pages[page_class, tier, losses.rows]
        held = pages != NO_PAGE
        if len(pairs) > 1 and any_true(losses.stays):
            held &= (~losses.stays | droppable(chain, page_class, tier)[losses.rows])[:, None]
        given[chain.spec.classes[page_class].name] = (pages[held], np.nonzero(held)[0])
    return given


def _in_turn(chain: Chain, losses: Losses) -> Losses:
    """Without the spans that can't be forgotten when their turn comes: some span below them is still there."""
    table, ordered = chain.table, losses.rows
    turn = np.full(len(table.live), len(ordered), np.int64)
    turn[ordered] = np.arange(len(ordered))
    above = table.parent[ordered]
    before = (above != NO_SPAN) & (np.arange(len(ordered)) < turn[above]) & ~losses.stays
    gone = np.bincount(above[before], minlength=len(turn))
    late = ordered[(gone[ordered] < table.children[ordered]) & ~losses.stays]
    if len(late) == 0:
        return losses
    keeps = np.zeros(len(turn), bool)
    while len(late):
        keeps[late] = True
        late = np.unique(table.parent[late])
        late = late[late != NO_SPAN]
        late = late[~keeps[late]]
    return losses.pick(~keeps[ordered] | losses.stays)


class Reclaimer:
    """Frees pages for a want, counting what it forgets."""

    def __init__(
        self,
        group: Group,
        counters: dict[str, int],
        now: Callable[[], int],
        costs: MissCosts,
        tell: Callable[[Forgot], None],
    ) -> None:
        """`now`: the time of the event being handled, ns. `tell`: takes what is told of forgotten spans."""
        self._tell = tell
        self._costs = costs
        self._group = group
        self._counters = counters
        self._now = now
        self.lenders: Mapping[str, Lender] = {}
        """By pool; none for a pool that has its region for itself."""

    def take(self, pool: Pool, page_class: str, count: int) -> PageArray | None:
        """`count` reserved pages, reclaiming as needed; None when even that is not enough."""
        pages = pool.take(page_class, count, self._group.asker)
        if pages is None and self.make_room(pool, {page_class: count}):
            pages = pool.take(page_class, count, self._group.asker)
        return pages

    def make_room(self, pool: Pool, wants: Mapping[str, int]) -> bool:
        """Reclaims until the wants fit, in the order of the group's policy."""
        if pool.slabs_needed(wants) <= pool.free_slabs:
            return True
        want = Want(wants)
        lacking = pool.lacking_slabs(want)
        if self.borrow(pool, lacking):
            lacking = pool.lacking_slabs(want)
        if lacking <= 0:
            return True
        if lacking > reclaimable_slabs(self._group, pool):
            return False  # forgetting all that may be forgotten would not help, so nothing is
        return self._free(pool, want)

    def borrow(self, pool: Pool, lacking: int) -> bool:
        """Asks for further slabs where the pool shares a region; whether there was somebody to ask."""
        lender = self.lenders.get(pool.name)
        if lender is None or lacking <= 0:
            return False
        lender.borrow(pool, lacking)
        return True

    def losses_of(self, chain: Chain, page_class: int, rows: RowArray) -> Losses:
        """What is lost when these spans, all of which can, give up their host copies of a class."""
        stays = np.zeros(len(chain.table.live), bool)
        stays[rows] = droppable(chain, page_class, HOST)[rows]
        forgotten = np.zeros(len(stays), bool)
        forgotten[rows] = ~stays[rows]
        if forgotten.any():
            forgotten = self._leads_to(chain, forgotten, evictable(chain))
            stays &= ~forgotten
        every = np.flatnonzero(stays | forgotten)
        every = every[np.argsort(-chain.table.first_token[every], kind="stable")]  # children before their parents
        return Losses(every, stays[every])

    def trim(self, pool: Pool, free_slabs: int) -> None:
        """Frees until `free_slabs` slabs are free, or nothing more may go."""
        want = Want({}, free_slabs)
        if pool.lacking_slabs(want) > 0:
            self._free(pool, want)

    def _free(self, pool: Pool, want: Want) -> bool:
        """Takes what the policy names first until the want fits, sparing what two tiers hold; then without sparing."""
        chains = self._group.chains
        return any(self._give(chain, pool, want, spare=True) for chain in chains) or any(
            self._give(chain, pool, want, spare=False) for chain in chains
        )

    def _give(self, chain: Chain, pool: Pool, want: Want, *, spare: bool) -> bool:
        """One chain's part of `_free`; False when all it has was not enough."""
        candidates = self._losses(chain, pool) if spare else self._leaves(chain, pool)
        losses, enough = self._enough(chain, pool, want, candidates)
        self.lose(chain, pool, losses)
        return enough

    def _enough(
        self, chain: Chain, pool: Pool, want: Want, losses: Losses | _RankedLosses
    ) -> tuple[Losses, bool]:
        """As few of the losses as make the want fit, or all that can be had, and whether it fits then."""
        # As few as can do are looked at first: mostly they will, and the others may be ten thousands.
        lacking = pool.lacking_slabs(want)
        for some in (lacking, 4 * lacking, len(losses)):
            had = _in_turn(chain, losses.first(some))
            given = _given(chain, _in_pool(chain, pool), had)
            enough = pool.gives_until_fit(want, given, len(had))
            if enough <= len(had):
                return had.first(enough), True
        return had, False

    def _ranking(
        self, chain: Chain, rows: BoolArray, stays: BoolArray, reloadable: BoolArray, pool: Pool | None = None
    ) -> Ranking:
        """The rows as the policy ranks them, first victim first. All arguments are bool, over all spans.

        A span that `stays` in the other tier need not wait for those below it.
        """
        index, table, group = places(rows), chain.table, self._group
        rank = policy_ranks(group.policy, group.sessions, self._costs, table, index, reloadable[index], self._now())
        if pool is not None and group.tenants.limited:
            # Trees of two tenants share no span, so that children stay before their parents.
            rank += goes_last(group, pool, table.namespace[index]) * (rank.max(initial=0) + 1)
        parent = np.where(stays[table.parent], NO_SPAN, table.parent) if any_true(stays) else table.parent
        return Ranking(table, index, rank, parent)

    def _losses(self, chain: Chain, pool: Pool, newcomers: RowArray = NO_LOSSES.rows) -> Losses | _RankedLosses:
        """All that could give pages of the pool, in order; spans with a copy in the other tier lose only this one.

        On the host redundant copies go first, those first that will be on the device longest. `newcomers`: spans that
        ask for pages here, ranked among the others.
        """
        pairs = _in_pool(chain, pool)
        stays = np.zeros(len(chain.table.live), bool)
        for page_class, tier in pairs:
            stays |= droppable(chain, page_class, tier)
        keeps = _kept(self._group, chain, pool, self._group.asker)
        if keeps is not None:
            stays &= ~keeps.copies
        rows = stays | self._reachable(chain, pool)
        rows[newcomers] = True
        on_device = any(tier == DEVICE for _, tier in pairs)
        # What only the device holds besides will need its host copy again: it is no cheaper to lose than the last one.
        ranking = self._ranking(chain, rows, stays, stays if on_device else np.zeros(len(stays), bool), pool)
        redundant = chain.table.redundant & stays & rows
        if on_device or not any_true(redundant):
            return _RankedLosses(ranking, stays)
        ordered = ranking.first(len(ranking))
        first = redundant[ordered]
        ordered = np.concatenate((ordered[first][::-1], ordered[~first]))
        return Losses(ordered, stays[ordered])

    def _leaves(self, chain: Chain, pool: Pool) -> _RankedLosses:
        """All that could be forgotten for pages of the pool, in order."""
        rows = self._reachable(chain, pool)
        none = np.zeros(len(rows), bool)
        return _RankedLosses(self._ranking(chain, rows, none, none, pool), none)

    def give_back(self, pool: Pool, tenant: int, units: int) -> None:
        """A tenant's own cached spans go, in the policy's order, until it holds so many units of the pool less.

        Where the other tier has them, too, only these copies go.
        """
        for chain in self._group.chains:
            own = evictable(chain)
            own &= self._group.tenants.of(chain.table.namespace) == tenant
            for page_class, tier in _in_pool(chain, pool):
                spare = own & droppable(chain, page_class, tier)
                units = self._give_copies(chain, pool, page_class, tier, spare, units)
            none = np.zeros(len(own), bool)
            ordered = self._ranking(chain, own, none, none).first(int(own.sum()))
            given = span_units(chain, pool, ordered)
            # A parent without pages here may have to stay; children go with those that stand before one that has some.
            enough = int(np.searchsorted(np.cumsum(given), units)) + 1 if units > 0 else 0
            self.evict(chain, ordered[:enough], pool.name)
            units -= int(given[:enough].sum())

    def _give_copies(
        self, chain: Chain, pool: Pool, page_class: int, tier: int, rows: BoolArray, units: int
    ) -> int:
        """Frees copies of spans that the other tier has, until it is enough; returns the units still to be given."""
        if units <= 0 or not rows.any():
            return units
        none = np.zeros(len(rows), bool)
        ordered = self._ranking(chain, rows, rows, none).first(int(rows.sum()))
        each = pool.spaces[chain.spec.classes[page_class].name].units
        given = np.cumsum(chain.widths(ordered) * each)
        enough = int(np.searchsorted(given, units)) + 1
        gone = ordered[:enough]
        chain.free_copies(page_class, tier, gone)
        self._counters["reclaim" if tier == DEVICE else "host_reclaim"] += len(gone)
        return units - int(given[len(gone) - 1])

    def coldest(self, chain: Chain, rows: RowArray, count: int) -> RowArray:
        """Those of the spans, all on the device alone, that the policy names first."""
        some = np.zeros(len(chain.table.live), bool)
        none = some.copy()
        some[rows] = True
        return self._ranking(chain, some, none, none).first(count)

    def room_for(
        self, chain: Chain, pool: Pool, classes: Iterable[str], newcomers: RowArray
    ) -> tuple[RowArray, Losses] | None:
        """Which newcomers are worth pages of a pool, and what must go for them; None when nothing can be done.

        A newcomer is a candidate like any other: it gets no pages where that takes something that ranks above it.
        """
        if any(_in_pool(other, pool) for other in self._group.chains if other is not chain):
            return None
        all_ask = Want(dict.fromkeys(classes, int(chain.widths(newcomers).sum())))
        if pool.lacking_slabs(all_ask) > reclaimable_slabs(self._group, pool):
            return None  # whoever ranks first: it would not be enough
        losses = self._losses(chain, pool, newcomers)
        ranked = losses.first(len(losses))
        asks = np.isin(ranked.rows, newcomers)
        place = np.empty(len(chain.table.live), np.int64)
        place[ranked.rows] = np.arange(len(ranked))
        asking, others = ranked.rows[asks], ranked.pick(~asks)

        def losses_for(declined: int) -> tuple[Losses, bool]:
            want = Want(dict.fromkeys(classes, int(chain.widths(asking[declined:]).sum())))
            return self._enough(chain, pool, want, others) if pool.lacking_slabs(want) > 0 else (NO_LOSSES, True)

        if not losses_for(0)[1]:
            return None
        # The fewer ask, the fewer must go, and the higher ranks the least of those that ask.
        declined = bisect_left(
            range(len(asking)),
            True,
            key=lambda n: len(had := losses_for(n)[0].rows) == 0 or bool(place[had[-1]] < place[asking[n]]),
        )
        worth = newcomers[np.isin(newcomers, asking[declined:])]
        return worth, losses_for(declined)[0] if len(worth) else NO_LOSSES

    def lose(self, chain: Chain, pool: Pool, losses: Losses) -> None:
        """Takes the pages: copies of spans that stay, all copies of the others."""
        stays = losses.rows[losses.stays]
        for page_class, tier in _in_pool(chain, pool) if len(stays) else []:
            rows = stays[droppable(chain, page_class, tier)[stays]]
            if tier == HOST:
                number = self._group.chains.index(chain)
                redundant = chain.table.redundant[rows]
                again = redundant | in_use(chain)[rows] if chain.swaps else redundant
                self._group.unwritten[number].extend(rows[again].tolist())
                self._group.declined[number].extend(rows[~again].tolist())
            self._counters["reclaim" if tier == DEVICE else "host_reclaim"] += len(rows)
            chain.free_copies(page_class, tier, rows)
        forgotten = losses.rows[~losses.stays]
        self.evict(chain, forgotten, pool.name)
        if pool.tier == "host":
            self._counters["host_eviction"] += len(forgotten)

    def _reachable(self, chain: Chain, pool: Pool) -> BoolArray:
        """Evictable spans that hold pages of the pool or stand below one that does (bool[rows])."""
        table = chain.table
        held = np.zeros(len(table.live), bool)
        for page_class, tier in _in_pool(chain, pool):
            held |= table.copies[page_class, tier] == READY
        # A leaf without pages here may stand before a parent that has some.
        rows = evictable(chain)
        keeps = _kept(self._group, chain, pool, self._group.asker)
        if keeps is not None:
            rows &= ~keeps.spans
        return self._leads_to(chain, rows & held, rows)

    def _leads_to(self, chain: Chain, wanted: BoolArray, rows: BoolArray) -> BoolArray:
        """`wanted` spans and the evictable spans below them."""
        if not any_true(rows & ~wanted):
            return wanted
        return chain.table.below(wanted) & rows

    def evict(self, chain: Chain, rows: RowArray, pool: str = "", why: Loss = Loss.EVICTED) -> None:
        """Forgets idle spans, children before their parents: all their copies on all shards together.

        `pool`: where room is needed.
        """
        if len(rows) == 0:
            return
        table = chain.table
        assert all_true(table.live[rows] & table.published[rows]), "only what is published is evicted"
        assert not (table.pins[rows] | table.busy[rows]).any(), "a span in use is evicted"
        self._tell(forgot(chain, rows, why, pool))
        chain.index.unpublish_many(rows)
        chain.free_spans(rows)
        self._counters["eviction"] += len(rows)
