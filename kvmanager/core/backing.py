"""What stands behind promises where tenants have floors. All counts in slabs.

A tenant's cached spans below its floor can be had by nobody else, so they stand behind its own promises and nobody
else's. What goes beyond them must be free, or reclaimable for anybody: `common`. Promises of all tenants can be kept
together, in whatever order they are called in, while the sum of what goes beyond is no more than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvmanager.core.group import Group
from kvmanager.core.pool import Pool
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.tenants import NOBODY, used_units


@dataclass(frozen=True)
class Backing:
    """common: free or reclaimable for anybody. own, promised: by tenant, what is reclaimable for it alone, and owed."""

    pool: Pool
    common: int
    own: dict[int, int]
    promised: Mapping[int, int]

    def beyond(self, more: int = 0, whose: int = NOBODY) -> int:
        """What promises take of `common`, less the overbooked; if tenant `whose` were promised `more` beside."""
        promised = dict(self.promised)
        promised[whose] = promised.get(whose, 0) + more
        total = sum(max(slabs - self.own.get(tenant, 0), 0) for tenant, slabs in promised.items())
        return total - self.pool.overbooked_slabs

    def of_others(self, tenant: int) -> int:
        """What promises of all but one tenant take of `common`."""
        mine = max(self.promised.get(tenant, 0) - self.own.get(tenant, 0), 0)
        return self.beyond() - mine


def backing(group: Group, pool: Pool, promised: Mapping[int, int] | None = None) -> Backing:
    """What stands behind the promises of a pool now. promised: by tenant; None: all that the pool has promised."""
    anybody = reclaimable_slabs(group, pool, NOBODY)
    floors = [number for number, spec in enumerate(group.tenants.specs) if spec.floor]
    own = {number: reclaimable_slabs(group, pool, number) - anybody for number in floors}
    return Backing(pool, pool.free_slabs + anybody, own, pool.promised_of if promised is None else promised)


def promise_holds(group: Group, pool: Pool, needed: int) -> bool:
    """The pool could give all that it owes, and `needed` slabs to the tenant that asks."""
    owed = pool.owed_slabs + needed
    if owed <= pool.free_slabs:
        return True
    if not group.tenants.has_floors:
        return owed <= pool.free_slabs + reclaimable_slabs(group, pool)
    behind = backing(group, pool)
    return behind.beyond(needed, group.asker) <= behind.common


def own_first(group: Group, pool: Pool, tenant: int, needed: int) -> int:
    """How many slabs of its own cached spans a tenant gives up before it takes `needed` slabs.

    Below its floor it makes nothing reclaimable for others by what it takes; so it may not take what is free while
    others were promised that, as long as it has cached spans that they can't have.
    """
    if pool.promised_slabs + needed <= pool.free_slabs or not group.tenants.specs[tenant].floor:
        return 0
    behind = backing(group, pool)
    below = max(0, group.tenants.floor_units(tenant, pool) - used_units(group, pool, tenant))
    spare = behind.common - behind.of_others(tenant)
    if min(needed, -(-below // pool.units_per_slab)) <= spare:
        return 0
    return min(needed, needed - spare, behind.own.get(tenant, 0))
