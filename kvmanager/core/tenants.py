"""Tenants: what each holds of a pool, what others may take of it, and how much it may hold.

Units are the pool's accounting units. A page counts for the tenant whose namespace its span has, once; so does a hot
buffer for its request's. Draining and quarantined pages count for nobody.

* floor: of a tenant's cached spans only what lies above its floor goes for others, least recently used first; and
  requests of others together never hold so much that the floor can't be had.
* ceiling: pages held and promised never pass it; a tenant at its ceiling gives up its own cached spans first.
* priority: of those above their floors the lowest gives first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmanager.core.spans import DEVICE, NO_PAGE, NO_SPAN, SpanTable
from kvmanager.core.spec import TenantSpec

if TYPE_CHECKING:
    from kvmanager.core.group import Chain, Group
    from kvmanager.core.pool import Pool

BoolArray = npt.NDArray[np.bool_]
NOBODY = -1


class Tenants:
    """Who the namespaces belong to. `numbers`: tenant by name; `of_namespace[n]`: tenant number of namespace n.

    limited: whether any tenant has a limit; without one nothing here is ever asked, and none comes later.
    """

    def __init__(self, specs: tuple[TenantSpec, ...]) -> None:
        self.specs = [replace(spec) for spec in specs]  # our own: the limits are stored apart
        self.numbers = {spec.name: number for number, spec in enumerate(specs)}
        self.of_namespace: list[int] = []
        self.limited = any((spec.floor, spec.ceiling, spec.priority) != (0.0, 1.0, 0) for spec in specs)

    @property
    def has_floors(self) -> bool:
        """Whether some spans can be had by one tenant alone."""
        return any(spec.floor for spec in self.specs)

    def name_namespace(self, namespace: int, tenant: str) -> None:
        """A namespace, numbered in the order of their first registration, is this tenant's."""
        number = self.numbers.setdefault(tenant, len(self.specs))
        if number == len(self.specs):
            self.specs.append(TenantSpec(tenant))
        if namespace == len(self.of_namespace):
            self.of_namespace.append(number)

    def name_of(self, namespace: int) -> str:
        """The tenant whose a namespace is."""
        return self.specs[self.of_namespace[namespace]].name

    def of(self, namespaces: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Tenant numbers of namespaces, int64."""
        found: npt.NDArray[np.int64] = np.asarray(self.of_namespace or [0], np.int64)[namespaces]
        return found

    def floor_units(self, tenant: int, pool: Pool) -> int:
        """What it keeps of a pool."""
        return int(self.specs[tenant].floor * pool.capacity_units)

    def ceiling_units(self, tenant: int, pool: Pool) -> int:
        """What it may hold of a pool."""
        return int(self.specs[tenant].ceiling * pool.capacity_units)

    def request_units(self, tenant: int, pool: Pool) -> int:
        """What its requests may hold and be promised: its ceiling, and the floors of the others left alone."""
        others = sum(self.floor_units(other, pool) for other in range(len(self.specs)) if other != tenant)
        return min(self.ceiling_units(tenant, pool), pool.capacity_units - others)


def span_units(
    chain: Chain,
    pool: Pool,
    rows: npt.NDArray[np.int64],
    loose: Mapping[tuple[int, int], BoolArray] | None = None,
) -> npt.NDArray[np.int64]:
    """Units of the pool that each span's pages take, int64[rows]. loose: only copies that it names are counted."""
    units = np.zeros(len(rows), np.int64)
    for c, tier in chain.spec.class_tiers:
        if chain.pool(c, tier) is pool:
            pages = (chain.table.pages[c, tier, rows] != NO_PAGE).sum(axis=1)
            if loose is not None:
                pages *= loose[c, tier][rows]
            units += pages * pool.spaces[chain.spec.classes[c].name].units
    return units


def used_units(group: Group, pool: Pool, tenant: int) -> int:
    """What a tenant holds of a pool."""
    total = 0
    for chain in group.chains:
        rows = chain.table.rows()
        total += int(span_units(chain, pool, rows[group.tenants.of(chain.table.namespace[rows]) == tenant]).sum())
    if group.spec.sparse is not None and pool is group.chains[0].pool(0, DEVICE):
        total += group.hot_slabs.get(tenant, 0) * pool.units_per_slab
    return total


@dataclass(frozen=True)
class Kept:
    """Spans that the tenant that asks can't have (bool[rows]): their copies in one pool, and the spans as a whole.

    A copy counts whether its span is idle or somebody relies on the other copy: who lets go of it changes nothing.
    """

    copies: BoolArray
    spans: BoolArray


def kept(
    group: Group, chain: Chain, asker: int, pools: Iterable[Pool], loose: Mapping[tuple[int, int], BoolArray]
) -> BoolArray:
    """Spans of which copies in these pools are not to be had for `asker`: others' below their floors (bool[rows]).

    loose: by (class, tier), spans whose copy may go now.
    """
    tenants = group.tenants
    table = chain.table
    keeps = np.zeros(len(table.live), bool)
    rows = np.flatnonzero(np.logical_or.reduce(list(loose.values())))
    owner = tenants.of(table.namespace[rows])
    for tenant in np.unique(owner).tolist():
        if tenant == asker or not tenants.specs[tenant].floor:
            continue
        mine = rows[owner == tenant]
        # Least recently used first, and of those used at one time the deepest first.
        mine = mine[np.lexsort((-table.first_token[mine], table.last_used[mine]))]
        for pool in pools:
            surplus = used_units(group, pool, tenant) - tenants.floor_units(tenant, pool)
            units = span_units(chain, pool, mine, loose)
            keeps[mine[(np.cumsum(units) > surplus) & (units > 0)]] = True
    return keeps


def with_ancestors(table: SpanTable, keeps: BoolArray) -> BoolArray:
    """The spans and all above them: a span that stays keeps what is above it, whichever pool that is in."""
    keeps = keeps.copy()
    at = np.flatnonzero(keeps)
    while len(at):
        above = np.unique(table.parent[at])
        at = above[(above != NO_SPAN) & ~keeps[above]]
        keeps[at] = True
    return keeps


def goes_last(group: Group, pool: Pool, namespaces: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Rank of each span among victims by its tenant: lowest priority first, those at or below their floor last."""
    tenants = group.tenants
    owner = tenants.of(namespaces)
    rank = np.zeros(len(owner), np.int64)
    order = sorted({spec.priority for spec in tenants.specs})
    for tenant in np.unique(owner).tolist():
        low = used_units(group, pool, tenant) <= tenants.floor_units(tenant, pool)
        rank[owner == tenant] = order.index(tenants.specs[tenant].priority) + (len(order) if low else 0)
    return rank
