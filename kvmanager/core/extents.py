"""Host regions that several pools share: cut into extents, each owned by one pool or by nobody.

A pool numbers the pages of the whole region, so that a page's place is its index times its bytes wherever it lies,
and uses those that lie wholly in extents it owns. Pools of other page sizes see the same bytes under other numbers.
What is left over at an extent's ends, less than two pages, is `unusable` as long as that pool owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from kvmanager.core.pool import PageState, Pool
from kvmanager.core.spec import ExtentSpec, PoolSpec
from kvmanager.errors import InvalidArgument

NOBODY = -1
_FREE = int(PageState.FREE)


@dataclass(frozen=True)
class PoolExtents:
    """How one pool sees the extents: pages [first[e], end[e]) lie wholly in extent e (int64[extents])."""

    first: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]

    @classmethod
    @cache
    def of(cls, pool: PoolSpec) -> PoolExtents:
        """Of a pool with extents. A pool over fewer ranks than the region deals its pages out over the shares."""
        spec = pool.extents
        assert spec is not None
        starts = np.arange(spec.extents + 1, dtype=np.int64) * spec.extent_bytes
        shares = spec.ranks // pool.ranks
        return cls(-(-starts[:-1] // pool.slab_bytes) * shares, starts[1:] // pool.slab_bytes * shares)

    def extent_of(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The extent that each of some owned pages lies in, int64."""
        return np.searchsorted(self.first, pages, side="right") - 1

    @property
    def slabs(self) -> npt.NDArray[np.int64]:
        """Pages in each extent, int64[extents]."""
        return self.end - self.first

    def most_slabs(self, extents: int) -> int:
        """Most pages in so many extents."""
        return int(np.sort(self.slabs)[::-1][:extents].sum())


class SharedRegion:
    """Who owns which extent. `owner`: number of the pool in `pools`, NOBODY; int16[extents].

    `moves`: from pool to pool, so far.
    """

    def __init__(self, pools: Sequence[PoolSpec]) -> None:
        """All pools of the region, in the order of the groups. Raises InvalidArgument where their shares do not fit."""
        specs = [_spec(pool) for pool in pools]
        one = specs[0]
        if {(s.region, s.ranks, s.extents, s.extent_bytes) for s in specs} != {
            (one.region, one.ranks, one.extents, one.extent_bytes)
        }:
            raise InvalidArgument(f"pools of region {one.region} differ in what they say of it: {specs}")
        if sum(s.floor for s in specs) > one.extents:
            raise InvalidArgument(f"region {one.region}: floors of {[s.floor for s in specs]} of {one.extents} extents")
        self.name, self.ranks, self.extents, self.extent_bytes = one.region, one.ranks, one.extents, one.extent_bytes
        self.pools = tuple(pool.name for pool in pools)
        self.floors = tuple(s.floor for s in specs)
        self.ceilings = tuple(s.ceiling for s in specs)
        self.owner: npt.NDArray[np.int16] = np.full(self.extents, NOBODY, np.int16)
        self.moves = 0

    def number(self, pool: str) -> int:
        """The pool's number in `owner`."""
        return self.pools.index(pool)

    def owned(self, pool: str) -> npt.NDArray[np.int64]:
        """Extents of a pool, ascending."""
        return np.flatnonzero(self.owner == self.number(pool))

    @property
    def unowned(self) -> npt.NDArray[np.int64]:
        """Extents of nobody, ascending."""
        return np.flatnonzero(self.owner == NOBODY)

    @property
    def capacity_bytes(self) -> int:
        """Bytes over all ranks."""
        return self.extents * self.extent_bytes * self.ranks

    def most_extents(self, pool: str) -> int:
        """As many as a pool can ever own: its ceiling, less what others' floors leave."""
        number = self.number(pool)
        return min(self.ceilings[number], self.extents - (sum(self.floors) - self.floors[number]))

    def account(self, pools: Mapping[str, Pool]) -> RegionAccount:
        """Bytes of the region over all ranks, by state."""
        states = dict.fromkeys(PageState, 0)
        usable = 0
        for name in self.pools:
            for state, size_bytes in pools[name].account().items():
                states[state] += size_bytes
            usable += pools[name].capacity_bytes
        unowned_bytes = len(self.unowned) * self.extent_bytes * self.ranks
        owned_bytes = self.capacity_bytes - unowned_bytes
        return RegionAccount(states, unowned_bytes, owned_bytes - usable)


def shared_regions(pools: Sequence[PoolSpec]) -> dict[str, SharedRegion]:
    """The regions that pools of a node share, by name. Raises InvalidArgument."""
    parts: dict[str, list[PoolSpec]] = {}
    for pool in pools:
        if pool.extents is not None:
            parts.setdefault(pool.extents.region, []).append(pool)
    return {name: SharedRegion(part) for name, part in parts.items()}


@dataclass(frozen=True)
class RegionAccount:
    """Bytes of a shared region over all ranks: in pools by state, in extents of nobody, and at ends of extents."""

    states: dict[PageState, int]
    unowned_bytes: int
    unusable_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them: the region's capacity."""
        return sum(self.states.values()) + self.unowned_bytes + self.unusable_bytes


def _spec(pool: PoolSpec) -> ExtentSpec:
    spec = pool.extents
    assert spec is not None
    if len(pool.per_slab) != 1 or pool.per_slab[0][1] != 1 or pool.tier != "host":
        raise InvalidArgument(f"pool {pool.name}: only host pools of one page class share a region")
    if spec.ranks % pool.ranks:
        raise InvalidArgument(f"pool {pool.name} of {pool.ranks} ranks in a region of {spec.ranks}")
    if not 0 <= spec.floor <= spec.ceiling <= spec.extents:
        limits = f"floor {spec.floor} and ceiling {spec.ceiling}"
        raise InvalidArgument(f"pool {pool.name}: {limits} of {spec.extents} extents")
    if spec.extent_bytes < 2 * pool.slab_bytes:
        raise InvalidArgument(f"pool {pool.name}: an extent of {spec.extent_bytes} bytes may hold no whole page")
    if pool.slabs != spec.extents * spec.extent_bytes // pool.slab_bytes * (spec.ranks // pool.ranks):
        raise InvalidArgument(f"pool {pool.name} numbers {pool.slabs} pages, not those of its region")
    return spec


def region_story(region: SharedRegion, pools: Mapping[str, Pool], views: Mapping[str, PoolExtents]) -> str:
    """What is wrong with a region's account; empty when all is well."""
    account = region.account(pools)
    if account.total_bytes != region.capacity_bytes or account.unusable_bytes < 0:
        return f"region {region.name}: {account} is not {region.capacity_bytes} bytes"
    for name, floor, ceiling in zip(region.pools, region.floors, region.ceilings, strict=True):
        pool, owned, view = pools[name], region.owned(name), views[name]
        if not floor <= len(owned) <= ceiling:
            return f"{name}: owns {len(owned)} extents; floor {floor}, ceiling {ceiling}"
        if pool.slabs != view.slabs[owned].sum():
            return f"{name}: has {pool.slabs} pages, its extents hold {view.slabs[owned].sum()}"
        (space,) = pool.spaces.values()
        taken = np.flatnonzero(space.state != _FREE)
        at = view.extent_of(taken)
        strays = taken[(taken >= view.end[at]) | ~np.isin(at, owned)]
        if len(strays):
            return f"{name}: pages {strays[:5]} are in use outside its extents {owned}"
        if pool.free_slabs != pool.slabs - len(taken):
            return f"{name}: {pool.free_slabs} of {pool.slabs} pages are free, {len(taken)} in use"
    return ""
