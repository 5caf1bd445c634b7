"""Extents on the move: a pool that lacks room gets them from nobody, or from another pool that can do without.

In this order: extents of nobody; empty ones; then the coldest by the last use of the warmest span in them, whose
content is dropped or forgotten as its own group's reclaimer would do it. An extent can't move while a page in it is
filling, draining or quarantined, or belongs to a span that somebody uses or that a plan in flight reads. Nobody goes
below its floor, above its ceiling, or below what it has promised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.core.extents import NOBODY, PoolExtents, SharedRegion
from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.reclaim import Reclaimer, can_lose, reclaimable_slabs
from kvmanager.core.rows import RowArray
from kvmanager.core.spans import HOST, NO_PAGE

_NEVER = -1
"""Warmth of an extent without content."""


@dataclass(frozen=True)
class _Share:
    """A pool of the region, and how it sees the extents."""

    group: Group
    pool: Pool
    view: PoolExtents
    number: int

    def range_of(self, extent: int) -> tuple[int, int]:
        return int(self.view.first[extent]), int(self.view.end[extent])

    def places(self) -> list[tuple[Chain, int]]:
        """(chain, class) pairs whose host pages come from the pool."""
        return [
            (chain, c)
            for chain in self.group.chains
            for c in range(chain.table.classes)
            if chain.has_host(c) and chain.pool(c, HOST) is self.pool
        ]


@dataclass(frozen=True)
class _Contents:
    """Of each extent of the region, as one pool fills it: warmth int64 (ns, _NEVER: empty), stuck bool."""

    warmth: npt.NDArray[np.int64]
    stuck: npt.NDArray[np.bool_]


class Lending:
    """Moves extents between the pools of one region. It has no state of its own: made anew with a stored state."""

    def __init__(
        self,
        region: SharedRegion,
        groups: Mapping[str, Group],
        reclaimers: Mapping[str, Reclaimer],
        counters: dict[str, int],
        overcommit: float,
    ) -> None:
        self.region = region
        self._reclaimers = reclaimers
        self._counters = counters
        self._overcommit = overcommit
        self._shares: dict[str, _Share] = {}
        for name, group in groups.items():
            for spec in group.spec.pools:
                if spec.extents is not None and spec.extents.region == region.name:
                    number = region.number(spec.name)
                    self._shares[spec.name] = _Share(groups[name], group.pools[spec.name], PoolExtents.of(spec), number)
        for share in self._shares.values():
            most = region.most_extents(share.pool.name)
            share.pool.most_slabs = share.view.most_slabs(most)

    def carve(self) -> None:
        """At the start every pool gets its floor, and the rest is nobody's until it is asked for."""
        at = 0
        for share in self._shares.values():
            share.pool.hide(0, share.pool.numbered_slabs)
            for extent in range(at, at + self.region.floors[share.number]):
                self._give(extent, share)
            at += self.region.floors[share.number]

    def borrow(self, pool: Pool, lacking: int) -> None:
        """Extents for a pool that lacks so many slabs, as far as they cost less than what it would lose itself.

        Those of nobody and empty ones cost nothing; content of others goes where it is colder than the pool's own
        coldest extent, or where the pool itself has not enough to lose.
        """
        share = self._shares[pool.name]
        while lacking > 0:
            own = self._coldest_own(share) if lacking <= reclaimable_slabs(share.group, pool) else None
            extent = self._next(share, own)
            if extent is None:
                return
            lacking -= self._move(extent, share)

    def fetch(self, pool: Pool, lacking: int) -> bool:
        """Extents for a pool that lacks so many slabs for a promise; False, and nothing moved, where it is too few."""
        share = self._shares[pool.name]
        if self.available_slabs(pool) < lacking:
            return False
        while lacking > 0:
            extent = self._next(share, None)
            if extent is None:
                return False
            lacking -= self._move(extent, share)
        return True

    def available_slabs(self, pool: Pool) -> int:
        """Slabs that a pool could get from extents of nobody and of others."""
        share = self._shares[pool.name]
        gains = [int(share.view.slabs[extent]) for extent in self.region.unowned]
        for donor in self._shares.values():
            if donor is not share:
                gains += [int(share.view.slabs[extent]) for extent in self._spared(donor)]
        most = self._may_grow(share)
        return sum(sorted(gains)[:most]) if most > 0 else 0

    # ------------------------------------------------------------------------------- who gives what

    def _may_grow(self, share: _Share) -> int:
        """Extents that a pool may still get."""
        return self.region.most_extents(share.pool.name) - len(self.region.owned(share.pool.name))

    def _next(self, share: _Share, colder_than: int | None) -> int | None:
        """The extent that goes next, if one may: of nobody, else the coldest, empty or colder than that (ns)."""
        if self._may_grow(share) <= 0:
            return None
        if len(self.region.unowned):
            return int(self.region.unowned[0])
        found: list[tuple[int, int]] = []
        for donor in self._shares.values():
            if donor is not share:
                spared = self._spared(donor)
                found += [(warmth, extent) for extent, warmth in spared.items()]
        warmth, extent = min(found, default=(_NEVER, NOBODY))
        if extent == NOBODY or (colder_than is not None and warmth != _NEVER and warmth >= colder_than):
            return None
        return extent

    def _spared(self, donor: _Share) -> dict[int, int]:
        """Extents that a pool could give up together, the coldest first, and how warm each is (ns)."""
        owned = self.region.owned(donor.pool.name)
        most = len(owned) - self.region.floors[donor.number]
        if most <= 0:
            return {}
        contents = self._contents(donor)
        movable = owned[~contents.stuck[owned]]
        movable = movable[np.argsort(contents.warmth[movable], kind="stable")][:most]
        left = donor.pool.free_slabs + reclaimable_slabs(donor.group, donor.pool) - max(donor.pool.owed_slabs, 0)
        fits = np.cumsum(donor.view.slabs[movable]) <= left
        return {int(extent): int(contents.warmth[extent]) for extent in movable[fits]}

    def _coldest_own(self, share: _Share) -> int | None:
        """Warmth of the coldest of a pool's extents that it could empty; None where it has none."""
        owned = self.region.owned(share.pool.name)
        contents = self._contents(share)
        movable = owned[~contents.stuck[owned]]
        return int(contents.warmth[movable].min()) if len(movable) else None

    def _contents(self, share: _Share) -> _Contents:
        """What keeps each extent, and when it was last used."""
        (space,) = share.pool.spaces.values()
        warmth = np.full(self.region.extents, _NEVER, np.int64)
        stuck = np.zeros(self.region.extents, bool)
        moving = np.flatnonzero((space.state != PageState.FREE) & (space.state != PageState.READY))
        stuck[share.view.extent_of(moving)] = True
        for chain, c in share.places():
            rows, extents = self._where(share, chain, c)
            stuck[extents[~can_lose(share.group, chain, c, HOST)[rows]]] = True
            np.maximum.at(warmth, extents, chain.table.last_used[rows])
        return _Contents(warmth, stuck)

    @staticmethod
    def _where(share: _Share, chain: Chain, page_class: int) -> tuple[RowArray, npt.NDArray[np.int64]]:
        """(span, extent) for every host page of a class."""
        rows = chain.table.rows()
        pages = chain.table.pages[page_class, HOST, rows]
        held = pages != NO_PAGE
        return rows[np.nonzero(held)[0]], share.view.extent_of(pages[held])

    # ----------------------------------------------------------------------------------- the moves

    def _move(self, extent: int, share: _Share) -> int:
        """Makes an extent a pool's; how many slabs it is there."""
        owner = int(self.region.owner[extent])
        if owner != NOBODY:
            donor = self._shares[self.region.pools[owner]]
            self._empty(extent, donor)
            donor.pool.hide(*donor.range_of(extent))
            self._rebook(donor)
            self.region.moves += 1
            self._counters["extent_move"] += 1
        self._give(extent, share)
        return int(share.view.slabs[extent])

    def _give(self, extent: int, share: _Share) -> None:
        self.region.owner[extent] = share.number
        share.pool.show(*share.range_of(extent))
        self._rebook(share)

    def _rebook(self, share: _Share) -> None:
        share.pool.overbooked_slabs = int((self._overcommit - 1.0) * share.pool.slabs)

    def _empty(self, extent: int, donor: _Share) -> None:
        """Drops or forgets all that lies in an extent that is not stuck."""
        reclaimer = self._reclaimers[donor.group.spec.name]
        for chain, c in donor.places():
            rows, extents = self._where(donor, chain, c)
            inside = np.unique(rows[extents == extent])
            if len(inside):
                reclaimer.lose(chain, donor.pool, reclaimer.losses_of(chain, c, inside))
        assert donor.pool.is_free(*donor.range_of(extent)), f"extent {extent} of {self.region.name} is in use"
