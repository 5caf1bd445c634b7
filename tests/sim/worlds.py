"""Small memory groups for the simulator, built by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvmanager.configuration.hostregions import HostRegion, in_extents
from kvmanager.core.spec import (
    BOUNCE,
    ChainSpec,
    GroupSpec,
    Limits,
    PageClass,
    Placement,
    PoolSpec,
    Residency,
    SparseSpec,
    TenantSpec,
)
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import KVFormat, indexer_layout, latent_layout, native_layout, plain_format, plain_layout
from tests.sim.content import PAGE_ROWS

FORMAT = KVFormat("sim", ((0,), (1, 2, 3)), latent_row_bytes=8, index_value_bytes=8, index_scale_bytes=4)
DRAFT = KVFormat("sim-draft", ((4,),), latent_row_bytes=8, index_value_bytes=8, index_scale_bytes=4)
PLAIN = plain_format("float32", 2, 1, 8)
RANKS = 8
SOURCE_ORDER = TokenOrder(RANKS, 1)
LIMITS = Limits(
    plans_in_flight=3,
    batch_spans=4,
    growth_cap_tokens=256,
    ticket_ttl_ns=1_000_000,
    ticket_grace_ns=200_000,
    pull_deadline_ns=400_000,
    stored_replies=4,
    claim_hold_ns=20_000,
    checksums=1,
    export_from_host=True,
)


@dataclass
class Regions:
    """Numbers regions and notes their sizes."""

    sizes: dict[int, int]

    def add(self, count: int, size: int) -> tuple[int, ...]:
        first = len(self.sizes) + 1
        self.sizes.update({first + i: size for i in range(count)})
        return tuple(range(first, first + count))


def sharded(regions: Regions, name: str, pages: int, host_pages: int, ranks: int = RANKS) -> GroupSpec:
    """Like a DCP engine's group: one chain, one page index on all ranks."""
    chain, pools = _main(regions, name, pages, host_pages, ranks)
    return GroupSpec(name, ranks, PAGE_ROWS, FORMAT, (chain,), pools)


def _main(
    regions: Regions, name: str, pages: int, host_pages: int, ranks: int
) -> tuple[ChainSpec, tuple[PoolSpec, ...]]:
    layout = native_layout(FORMAT, PAGE_ROWS)
    device, host = (regions.add(ranks, n * layout.page_bytes) for n in (pages, host_pages))
    hbm, ram = f"{name}/hbm", f"{name}/host"
    page_class = PageClass("kv", layout, hbm, device, ram, host)
    order = TokenOrder(ranks, 1)
    chain = ChainSpec("main", Placement.SHARDED, ranks, PAGE_ROWS, order, order, (page_class,))
    one = (("kv", 1),)
    return chain, (
        PoolSpec(hbm, "device", ranks, pages, layout.page_bytes, one),
        PoolSpec(ram, "host", ranks, host_pages, layout.page_bytes, one),
    )


def two_chains(regions: Regions, name: str, pages: int, host_pages: int, ranks: int = 4) -> GroupSpec:
    """A sharded main chain and a draft chain that every rank holds in full."""
    main, pools = _main(regions, name, pages, host_pages, ranks)
    layout = native_layout(DRAFT, PAGE_ROWS)
    drafts, host_drafts = pages * ranks, host_pages * ranks // 2
    device = regions.add(ranks, drafts * layout.page_bytes)
    host = regions.add(ranks, -(-host_drafts // ranks) * layout.page_bytes)
    hbm, ram = f"{name}/draft-hbm", f"{name}/draft-host"
    page_class = PageClass("draft", layout, hbm, device, ram, host)
    chain = ChainSpec("draft", Placement.REPLICATED, ranks, PAGE_ROWS, SEQUENTIAL, SEQUENTIAL, (page_class,))
    one = (("draft", 1),)
    more = (
        PoolSpec(hbm, "device", ranks, drafts, layout.page_bytes, one),
        PoolSpec(ram, "host", 1, host_drafts, layout.page_bytes, one),
    )
    return GroupSpec(name, ranks, PAGE_ROWS, FORMAT, (main, chain), pools + more)


def replicated(
    regions: Regions, name: str, pages: int, host_pages: int, ranks: int, kv_format: KVFormat = FORMAT
) -> GroupSpec:
    """Like a TP or PCP engine's group: every rank holds all tokens, the host holds them once."""
    layout = native_layout(kv_format, PAGE_ROWS)
    device = regions.add(ranks, pages * layout.page_bytes)
    host = regions.add(ranks, -(-host_pages // ranks) * layout.page_bytes)
    hbm, ram = f"{name}/hbm", f"{name}/host"
    page_class = PageClass("kv", layout, hbm, device, ram, host)
    chain = ChainSpec("main", Placement.REPLICATED, ranks, PAGE_ROWS, SEQUENTIAL, SEQUENTIAL, (page_class,))
    one = (("kv", 1),)
    pools = (
        PoolSpec(hbm, "device", ranks, pages, layout.page_bytes, one),
        PoolSpec(ram, "host", 1, host_pages, layout.page_bytes, one),
    )
    return GroupSpec(name, ranks, PAGE_ROWS, kv_format, (chain,), pools)


def cache(regions: Regions, name: str, pages: int, ranks: int) -> GroupSpec:
    """Host memory that engines with memory of their own read and fill by leases."""
    layout = plain_layout(PLAIN, PAGE_ROWS)
    kv = PageClass("kv", layout, f"{name}/host", regions.add(ranks, pages * layout.page_bytes))
    chain = ChainSpec("main", Placement.REPLICATED, ranks, PAGE_ROWS, SEQUENTIAL, SEQUENTIAL, (kv,))
    pool = PoolSpec(f"{name}/host", "host", ranks, pages, layout.page_bytes, (("kv", 1),))
    return GroupSpec(name, ranks, PAGE_ROWS, PLAIN, (chain,), (pool,))


def bounced(regions: Regions, name: str, bounce_pages: int, pages: int, ranks: int) -> GroupSpec:
    """A cache whose engines map a bounce region of their own in place of the pool."""
    layout = plain_layout(PLAIN, PAGE_ROWS)
    bounce, host = (regions.add(ranks, n * layout.page_bytes) for n in (bounce_pages, pages))
    kv = PageClass("kv", layout, f"{name}/bounce", bounce, f"{name}/host", host)
    chain = ChainSpec("main", Placement.SHARDED, 1, PAGE_ROWS, SEQUENTIAL, SEQUENTIAL, (kv,))
    one = (("kv", 1),)
    pools = (
        PoolSpec(f"{name}/bounce", BOUNCE, ranks, bounce_pages, layout.page_bytes, one),
        PoolSpec(f"{name}/host", "host", ranks, pages, layout.page_bytes, one),
    )
    return GroupSpec(name, ranks, PAGE_ROWS, PLAIN, (chain,), pools)


def hisparse(
    regions: Regions, name: str, slabs: int, host_pages: int, arrival: TokenOrder = SOURCE_ORDER, hot: int = 2,
    residency: Residency = Residency.HYBRID, offload: int | None = 0,
) -> GroupSpec:  # fmt: skip
    """A decode rank: latent, indexer and hot pages share slabs, and so do latents and indexers on the host.

    `offload`: slabs for indexers alone, beside `host_pages` for latents alone (a strict split); 0: one region; None:
    two pools of whole pages, as in a region that others share.
    """
    latents, indexers = latent_layout(FORMAT, PAGE_ROWS), indexer_layout(FORMAT, PAGE_ROWS)
    slab = FORMAT.slab_bytes(PAGE_ROWS)
    device, host = regions.add(1, slabs * slab), regions.add(1, host_pages * slab)
    hbm, ram = f"{name}/hbm", f"{name}/host"
    latent, indexer = ("latent", 1), ("indexer", slab // indexers.page_bytes)
    pools = [PoolSpec(hbm, "device", 1, slabs, slab, (latent, indexer, ("hot", 1)))]
    second, where = ram, host
    if offload == 0:
        pools.append(PoolSpec(ram, "host", 1, host_pages, slab, (latent, indexer)))
    else:
        second = f"{name}/offload"
        pools.append(PoolSpec(ram, "host", 1, host_pages, slab, (latent,)))
    if offload is None:
        pools.append(PoolSpec(second, "host", 1, host_pages, indexers.page_bytes, (("indexer", 1),)))
    elif offload:
        where = regions.add(1, offload * slab)
        pools.append(PoolSpec(second, "host", 1, offload, slab, (indexer,)))
    classes = (
        PageClass("latent", latents, hbm, device, ram, host),
        PageClass("indexer", indexers, hbm, device, second, where),
    )
    chain = ChainSpec("main", Placement.SHARDED, 1, PAGE_ROWS, SEQUENTIAL, arrival, classes)
    sparse = SparseSpec("latent", "hot", hot, residency=residency)
    return GroupSpec(name, 1, PAGE_ROWS, FORMAT, (chain,), tuple(pools), sparse)


def sharing(
    regions: Regions, groups: list[GroupSpec], extents: int, extent_bytes: int, limits: list[tuple[int, int]]
) -> list[GroupSpec]:
    """The same groups with their host pools in one region a rank. `limits`: (floor, ceiling) in extents, by group."""
    ranks = groups[0].ranks
    shared = regions.add(ranks, extents * extent_bytes)
    made = []
    for group, (floor, ceiling) in zip(groups, limits, strict=True):
        (chain,) = group.chains
        classes = tuple(replace(c, host_regions=shared) for c in chain.classes)
        cut = in_extents(group, HostRegion("ram", ranks, extents, extent_bytes), floor, ceiling)
        made.append(replace(cut, chains=(replace(chain, classes=classes),)))
    return made


Nodes = list[list[GroupSpec]]


def _one_sharded(regions: Regions, draw: random.Random) -> Nodes:
    return [[sharded(regions, "main", draw.randint(8, 16), draw.choice((8, 20, 50, 80)))]]


def _two_chains(regions: Regions, draw: random.Random) -> Nodes:
    return [[two_chains(regions, "main", draw.randint(12, 20), draw.choice((6, 12, 40, 90)))]]


def _handoff(regions: Regions, draw: random.Random) -> Nodes:
    """A prefill node, and a decode node of two ranks: one keeps the token order, one permutes it."""
    source = sharded(regions, "prefill", draw.randint(12, 20), draw.randint(6, 20))
    keep = hisparse(regions, "keep", draw.randint(40, 90), draw.randint(60, 160))
    permute = hisparse(regions, "permute", draw.randint(40, 90), draw.randint(60, 160), SEQUENTIAL)
    return [[source], [keep, permute]]


def _many(regions: Regions, draw: random.Random) -> Nodes:
    """Six engines on three nodes; the one in the middle pulls from its own node, too."""
    pair, quad, other = (
        sharded(regions, name, draw.randint(16, 30), draw.randint(10, 40), ranks)
        for name, ranks in (("pair", 2), ("quad", 4), ("other", 2))
    )
    keep = hisparse(regions, "keep", draw.randint(30, 60), draw.randint(40, 100), TokenOrder(2, 1))
    permute = hisparse(regions, "permute", draw.randint(30, 60), draw.randint(40, 100), SEQUENTIAL)
    both = two_chains(regions, "both", draw.randint(12, 20), draw.choice((6, 12, 40)), 2)
    return [[pair, quad], [other, keep], [permute, both]]


def _overbooked(regions: Regions, draw: random.Random) -> Nodes:
    """Half as much again is promised as there is: growth may find nothing, and somebody must step back.

    On a decode rank also the hot buffer of a request is promised where there may be none.
    """
    if draw.random() < 0.5:
        kind = draw.choice(list(Residency))
        return [[hisparse(regions, "main", draw.randint(14, 40), draw.randint(20, 60), SEQUENTIAL, residency=kind)]]
    return [[sharded(regions, "main", draw.randint(8, 14), draw.choice((8, 20, 50)))]]


def _pressure(regions: Regions, draw: random.Random) -> Nodes:
    """Decode ranks with hardly more memory than a request or two needs, of all kinds of residency and host split."""
    source = sharded(regions, "prefill", draw.randint(12, 20), draw.randint(6, 20))
    arrivals = [SOURCE_ORDER, SEQUENTIAL, SEQUENTIAL]
    kinds = [Residency.HYBRID, draw.choice((Residency.HYBRID, Residency.ALWAYS_HOST)), draw.choice(list(Residency))]
    ranks = [
        hisparse(
            regions, f"rank{i}", draw.randint(18, 40), draw.randint(10, 50), arrival, residency=kind,
            offload=draw.choice((0, 0, 4)),
        )
        for i, (arrival, kind) in enumerate(zip(arrivals, kinds, strict=True))
    ]  # fmt: skip
    return [[source], ranks]


def _tenants(regions: Regions, draw: random.Random) -> Nodes:
    """Two engines of two tenants in one group: one has a floor, the other a ceiling and the higher priority.

    In half of them pages are scrubbed between the two.
    """
    group = sharded(regions, "main", draw.randint(10, 18), draw.choice((8, 20, 50)))
    return [[replace(group, scrub=draw.random() < 0.5)]]


def _shared(regions: Regions, draw: random.Random) -> Nodes:
    """Two models with pages of unlike sizes, one of them held once for all ranks, in one host region a rank."""
    large = sharded(regions, "large", draw.randint(8, 14), 0, 2)
    small = replicated(regions, "small", draw.randint(10, 20), 0, 2, DRAFT)
    extent = 3 * large.pools[0].slab_bytes + draw.choice((0, 8))
    extents = draw.randint(3, 6)
    limits = [(draw.choice((0, 0, 1)), draw.randint(extents - 1, extents)) for _ in range(2)]
    return [sharing(regions, [large, small], extents, extent, limits)]


def _shared_decode(regions: Regions, draw: random.Random) -> Nodes:
    """Two decode ranks whose latents and indexers are promised places in one host region."""
    groups = [hisparse(regions, name, draw.randint(30, 60), 1, SEQUENTIAL, offload=None) for name in ("left", "right")]
    extents = draw.randint(8, 14)
    limits = [(draw.randint(0, 2), draw.randint(extents - 2, extents)) for _ in range(2)]
    return [sharing(regions, groups, extents, 8 * groups[0].pools[1].slab_bytes, limits)]


def _caches(regions: Regions, draw: random.Random) -> Nodes:
    """Leases beside requests of sessions, which are handed over between two of the caches.

    In half of them two trust domains share a pool that only the mover maps.
    """
    if draw.random() < 0.5:
        left, right = (cache(regions, name, draw.randint(40, 110), 1) for name in ("left", "right"))
        return [[left, cache(regions, "wide", draw.randint(40, 110), 2)], [right]]
    ranks, extents = draw.choice((1, 2, 2)), draw.randint(12, 24)
    pair = [bounced(regions, name, draw.randint(8, 16), 0, ranks) for name in ("ours", "theirs")]
    limits = [(draw.choice((0, 0, 2)), draw.randint(extents - 2, extents)) for _ in pair]
    return [sharing(regions, pair, extents, 8 * pair[0].pools[1].slab_bytes, limits)]


KINDS: dict[str, Callable[[Regions, random.Random], Nodes]] = {
    "sharded": _one_sharded, "two-chains": _two_chains, "handoff": _handoff, "many": _many,
    "overbooked": _overbooked, "tenants": _tenants, "shared": _shared, "shared-decode": _shared_decode,
    "pressure": _pressure, "caches": _caches,
}  # fmt: skip
_TENANTS = (TenantSpec("a", floor=0.3), TenantSpec("b", ceiling=0.6, priority=1))
_OTHER_LIMITS: dict[str, dict[str, Any]] = {
    "overbooked": {"overcommit": 1.5},
    "tenants": {"tenants": _TENANTS},
}


def limits_of(kind: str) -> Limits:
    """Limits of the nodes of a world."""
    return replace(LIMITS, **_OTHER_LIMITS.get(kind, {}))


def kind_of(seed: int) -> str:
    """The world of a seed."""
    return list(KINDS)[seed % len(KINDS)]
