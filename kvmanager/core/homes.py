"""Homes of latent pages on a decode rank: each page that a request has or may get lies in HBM or on the host.

A request is promised a host page for each latent page that is not on the host alone yet, or, as far as the host is
short, HBM for it: its *homed* pages stay resident. So a resident page needs no host copy while HBM lasts, and what
is promised can be had in any order of growth, mirrors and releases:

* `need`: pages on the device whose home could be a host page: those without a host copy, and those whose mirror the
  request alone relies on. Such a mirror is reclaimable, so it counts once as room and once as promised. A mirror that
  several requests rely on is promised to nobody and stays. A mirror that a plan writes or reads is its own promise.
* host promise: need + growth - homed. Device promise: a window for growth, and homed pages that are not there yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import Pool
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.request import RequestChain
from kvmanager.core.rows import RowArray
from kvmanager.core.spans import ABSENT, DEVICE, FILLING, HOST, READY
from kvmanager.core.spec import ChainSpec


@dataclass(frozen=True)
class Latents:
    """Latent pages of one request. need: see above. resident: of those on the device, the ones no shared mirror backs.

    growth: pages it was promised and has not got.
    """

    need: int
    resident: int
    growth: int

    def host_slabs(self, homed: int) -> int:
        """What the host must promise."""
        return max(0, self.need + self.growth - homed)

    def device_slabs(self, homed: int, tail_pages: int) -> int:
        """What HBM must promise: older pages are released as new ones come, but the homed ones stay."""
        return min(self.growth, tail_pages + 1 + max(0, homed - self.resident))


def latent_class(group: Group) -> int:
    """Position of the class whose pages float."""
    assert group.spec.sparse is not None
    return group.class_index(group.chains[0], group.spec.sparse.latent_class)


def counted(chain: Chain, page_class: int, rows: RowArray) -> tuple[int, int]:
    """(need, resident) of spans that one request holds."""
    table, widths = chain.table, chain.widths(rows)
    device = table.copies[page_class, DEVICE, rows] != ABSENT
    host = table.copies[page_class, HOST, rows]
    backed = device & ((host != READY) | (table.pins[rows] == 1))
    stands = (host == FILLING) | ((host == READY) & (table.busy[rows] > 0))
    return int(widths[backed & ~stands].sum()), int(widths[backed].sum())


def latents_of(group: Group, part: RequestChain, growth: int) -> Latents:
    """Of a request with `growth` pages to come."""
    need, resident = counted(part.chain, latent_class(group), part.rows.array)
    return Latents(need, resident, growth)


def spare_slabs(group: Group, pool: Pool) -> int:
    """Slabs that are free or reclaimable and promised to nobody."""
    return pool.free_slabs + reclaimable_slabs(group, pool) - pool.owed_slabs


def whole_lacks(group: Group, tokens: int) -> int:
    """Slabs of host memory that a request of so many tokens lacks to be retracted as a whole, even alone."""
    lacks = 0
    if group.spec.sparse is None:
        return 0
    for pool in group.pools.values():
        if pool.tier == "host":
            lacks += max(0, sum(_filled(chain.spec, pool, tokens) for chain in group.chains) - pool.most_slabs)
    return lacks


def _filled(chain: ChainSpec, pool: Pool, tokens: int) -> int:
    """Slabs of a host pool that a chain of so many tokens fills."""
    pages = -(-tokens // chain.page_rows)
    return sum(-(-pages // pool.per_slab(c.name)) for c in chain.classes if c.host_pool == pool.name)


