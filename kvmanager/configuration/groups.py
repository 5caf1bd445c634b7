"""From configuration to memory: the regions a node makes, and the groups of the core that live in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.groupsection import GroupSection
from kvmanager.configuration.hostregions import HostRegion, in_extents, limits_in, shared_host_regions
from kvmanager.configuration.workspaces import workspace_of
from kvmanager.core.spec import (
    BOUNCE,
    ChainSpec,
    GroupSpec,
    Inclusion,
    Limits,
    PageClass,
    Placement,
    PoolSpec,
    Residency,
    SparseSpec,
    TenantSpec,
)
from kvmanager.geometry import SEQUENTIAL
from kvmanager.layout import indexer_layout, latent_layout, native_layout, plain_layout
from kvmanager.transport.pinned import chunk_bounds
from kvmanager.units import MILLISECOND_NS
from kvmanager.wire import RegionInfo, RegionKind

TIMELINE_REGION = 1
STAGING_REGION = 2
FIRST_GROUP_REGION = 3
TIMELINE_WORDS = 4096
"""Timeline words of a node: one an attached rank, until its process is dead; a fresh one is zero."""


@dataclass(frozen=True)
class NodeMemory:
    """All regions of a node, in the order of their ids, and the groups that use them."""

    regions: tuple[RegionInfo, ...]
    groups: tuple[GroupSpec, ...]

    @property
    def timelines(self) -> dict[str, int]:
        """Trust domain -> the region of its engines' timeline words, which others can neither read nor raise."""
        regions = [region.region_id for region in self.regions if region.kind is RegionKind.TIMELINE]
        return dict(zip(trust_domains(self.groups), regions, strict=True))

    def region(self, region_id: int) -> RegionInfo:
        """The region of that id."""
        return self.regions[region_id - 1]


def trust_domains(groups: Iterable[GroupSpec | GroupSection]) -> list[str]:
    """Those that groups have, in a fixed order; one where there is no group."""
    return sorted({group.trust for group in groups}) or [""]


def plan_memory(config: NodeConfig) -> NodeMemory:
    """What a node with this configuration makes. Pure: nothing is allocated."""
    regions = [
        RegionInfo(TIMELINE_REGION, RegionKind.TIMELINE, TIMELINE_WORDS * 8, 8, 0, "timelines", config.node.device),
        RegionInfo(STAGING_REGION, RegionKind.STAGING, config.mover.staging_bytes, 1, 0, "staging", config.node.device),
    ]
    groups = []
    shared = shared_host_regions([section.host_share for section in config.groups])
    made: dict[str, tuple[int, ...]] = {}
    for section in config.groups:
        device = _regions(regions, section, RegionKind.DEVICE, section.hbm_units, config.node.device)
        bounce_units = section.bounce_bytes_per_rank // section.unit_bytes
        device += _regions(regions, section, RegionKind.HOST, bounce_units, config.node.device, BOUNCE)
        if section.host_region:
            region = shared[section.host_region]
            if region.name not in made:
                made[region.name] = _add_host_region(regions, region, config.node.device)
            group = _BUILDERS[section.kind](section, device, made[region.name])
            limits = limits_in(section.host_share, region.extents)
            groups.append(_as_configured(in_extents(group, region, *limits), section))
            continue
        own = section.host_units - section.offload_units
        host = _regions(regions, section, RegionKind.HOST, own, config.node.device)
        host += _regions(regions, section, RegionKind.HOST, section.offload_units, config.node.device, "offload")
        groups.append(_as_configured(_BUILDERS[section.kind](section, device, host), section))
    for _ in trust_domains(groups)[1:]:
        regions.append(replace(regions[0], region_id=len(regions) + 1))
    return NodeMemory(tuple(regions), tuple(groups))


def _as_configured(group: GroupSpec, section: GroupSection) -> GroupSpec:
    return replace(group, trust=section.trust, scrub=section.scrub, workspace=workspace_of(section))


def _regions(
    regions: list[RegionInfo], section: GroupSection, kind: RegionKind, units: int, device: str, of: str = ""
) -> tuple[int, ...]:
    """One region a rank, appended to `regions`; its size is whole units. `of`: last part of its pool's name."""
    if units == 0:
        return ()
    pool = f"{section.name}/{of}" if of else pool_name(section.name, kind)
    first = len(regions) + 1
    for rank in range(section.ranks):
        size = units * section.unit_bytes
        bounds = chunk_bounds(size, section.unit_bytes) if device != "cpu" and kind is RegionKind.HOST else ()
        region = RegionInfo(first + rank, kind, size, section.unit_bytes, rank, pool, device, bounds)
        regions.append(replace(region, rdma_capable=region.on_gpu))
    return tuple(range(first, first + section.ranks))


def _add_host_region(regions: list[RegionInfo], shared: HostRegion, device: str) -> tuple[int, ...]:
    """One region a rank that several groups share, appended to `regions`."""
    first = len(regions) + 1
    bounds = chunk_bounds(shared.size_bytes, shared.extent_bytes) if device != "cpu" else ()
    for rank in range(shared.ranks):
        regions.append(
            RegionInfo(
                first + rank, RegionKind.HOST, shared.size_bytes, shared.extent_bytes, rank, shared.name, device, bounds
            )
        )
    return tuple(range(first, first + shared.ranks))


def offload_pool_name(group: str) -> str:
    """`<group>/offload`: the host pool of indexer pages where the host is split strictly."""
    return f"{group}/offload"


def pool_name(group: str, kind: RegionKind) -> str:
    """`<group>/hbm` or `<group>/host`."""
    return f"{group}/{'hbm' if kind is RegionKind.DEVICE else 'host'}"


def _sharded(section: GroupSection, device: tuple[int, ...], host: tuple[int, ...]) -> GroupSpec:
    """One chain over all ranks, whole pages (latent and indexer sections together)."""
    hbm, offload = (pool_name(section.name, kind) for kind in (RegionKind.DEVICE, RegionKind.HOST))
    layout = native_layout(section.kv_format, section.page_rows)
    page_class = PageClass("kv", layout, hbm, device, offload if host else "", host)
    order = section.geometry.order
    chain = ChainSpec("main", Placement.SHARDED, section.ranks, section.page_rows, order, order, (page_class,))
    page = (("kv", 1),)
    pools = [PoolSpec(hbm, "device", section.ranks, section.hbm_units, section.unit_bytes, page)]
    if host:
        pools.append(PoolSpec(offload, "host", section.ranks, section.host_units, section.unit_bytes, page))
    return GroupSpec(section.name, section.ranks, section.page_rows, section.kv_format, (chain,), tuple(pools))


def _replicated(section: GroupSection, device: tuple[int, ...], host: tuple[int, ...]) -> GroupSpec:
    """One chain that every rank holds in full; its host pages are dealt out over the ranks' shares, each there once."""
    hbm, offload = (pool_name(section.name, kind) for kind in (RegionKind.DEVICE, RegionKind.HOST))
    layout = native_layout(section.kv_format, section.page_rows)
    page_class = PageClass("kv", layout, hbm, device, offload if host else "", host)
    chain = ChainSpec(
        "main", Placement.REPLICATED, section.ranks, section.page_rows, SEQUENTIAL, SEQUENTIAL, (page_class,)
    )
    page = (("kv", 1),)
    pools = [PoolSpec(hbm, "device", section.ranks, section.hbm_units, section.unit_bytes, page)]
    if host:
        pools.append(PoolSpec(offload, "host", 1, section.ranks * section.host_units, section.unit_bytes, page))
    return GroupSpec(section.name, section.ranks, section.page_rows, section.kv_format, (chain,), tuple(pools))


def _hisparse(section: GroupSection, device: tuple[int, ...], host: tuple[int, ...]) -> GroupSpec:
    """A decode rank: latent pages, indexer pages and hot rows share the HBM slabs, and latents and indexers the host's.

    With a strict split the host has a region and a pool for each of the two. Where it shares its host region with other
    groups, each of the two has a pool of extents in it.
    """
    hbm, mirror = (pool_name(section.name, kind) for kind in (RegionKind.DEVICE, RegionKind.HOST))
    apart = section.host_split == "strict" or bool(section.host_region)
    offload = offload_pool_name(section.name) if apart else mirror
    latents = latent_layout(section.kv_format, section.page_rows)
    indexers = indexer_layout(section.kv_format, section.page_rows)
    classes = (
        PageClass("latent", latents, hbm, device, mirror, host[:1]),
        PageClass("indexer", indexers, hbm, device, offload, host[-1:]),
    )
    chain = ChainSpec("main", Placement.SHARDED, 1, section.page_rows, SEQUENTIAL, section.arrival_order, classes)
    latent, indexer = ("latent", 1), ("indexer", section.unit_bytes // indexers.page_bytes)
    unit = section.unit_bytes
    pools = [PoolSpec(hbm, "device", 1, section.hbm_units, unit, (latent, indexer, ("hot", 1)))]
    if section.host_split == "strict":
        pools.append(PoolSpec(mirror, "host", 1, section.host_units - section.offload_units, unit, (latent,)))
        pools.append(PoolSpec(offload, "host", 1, section.offload_units, unit, (indexer,)))
    elif section.host_region:  # as many as the group's bytes hold, until they are numbered over the whole region
        pools.append(PoolSpec(mirror, "host", 1, section.host_units, unit, (latent,)))
        indexer_pages = section.host_bytes_per_rank // indexers.page_bytes
        pools.append(PoolSpec(offload, "host", 1, indexer_pages, indexers.page_bytes, (("indexer", 1),)))
    else:
        pools.append(PoolSpec(mirror, "host", 1, section.host_units, unit, (latent, indexer)))
    sparse = SparseSpec("latent", "hot", section.hot_slabs, residency=Residency(section.residency))
    return GroupSpec(section.name, 1, section.page_rows, section.kv_format, (chain,), tuple(pools), sparse)


def _cache(section: GroupSection, device: tuple[int, ...], host: tuple[int, ...]) -> GroupSpec:
    """Host memory that engines fill and read by leases; every rank keeps its own part of a page under one index.

    The core's device tier is this pool: there is nowhere for its pages to be offloaded to. `device`: a bounce region on
    each rank, which engines map instead; then it is that, and the pool is the host tier, each rank's part in its share.
    """
    pool = pool_name(section.name, RegionKind.HOST)
    layout = plain_layout(section.kv_format, section.page_rows)
    if device:
        return _bounced(section, PageClass("kv", layout, f"{section.name}/{BOUNCE}", device, pool, host))
    chain = ChainSpec(
        "main", Placement.REPLICATED, section.ranks, section.page_rows, SEQUENTIAL, SEQUENTIAL,
        (PageClass("kv", layout, pool, host),),
    )  # fmt: skip
    pools = (PoolSpec(pool, "host", section.ranks, section.host_units, section.unit_bytes, (("kv", 1),)),)
    return GroupSpec(section.name, section.ranks, section.page_rows, section.kv_format, (chain,), pools)


def _bounced(section: GroupSection, page_class: PageClass) -> GroupSpec:
    chain = ChainSpec("main", Placement.SHARDED, 1, section.page_rows, SEQUENTIAL, SEQUENTIAL, (page_class,))
    bounce_units, one = section.bounce_bytes_per_rank // section.unit_bytes, (("kv", 1),)
    pools = (
        PoolSpec(page_class.device_pool, BOUNCE, section.ranks, bounce_units, section.unit_bytes, one),
        PoolSpec(page_class.host_pool, "host", section.ranks, section.host_units, section.unit_bytes, one),
    )
    return GroupSpec(section.name, section.ranks, section.page_rows, section.kv_format, (chain,), pools)


def _engine(section: GroupSection, device: tuple[int, ...], host: tuple[int, ...]) -> GroupSpec:
    """Device memory of one engine, which lays its own blocks out in it: their number is ours, their places are not."""
    assert not host
    pool = pool_name(section.name, RegionKind.DEVICE)
    page_class = PageClass("kv", plain_layout(section.kv_format, section.page_rows), pool, device)
    chain = ChainSpec("main", Placement.SHARDED, 1, section.page_rows, SEQUENTIAL, SEQUENTIAL, (page_class,))
    pools = (PoolSpec(pool, "device", 1, section.hbm_units, section.unit_bytes, (("kv", 1),)),)
    return GroupSpec(
        section.name, 1, section.page_rows, section.kv_format, (chain,), pools, one_holder=True
    )


_BUILDERS = {
    "sharded": _sharded, "replicated": _replicated, "hisparse": _hisparse, "cache": _cache, "engine": _engine,
}  # fmt: skip


def core_limits(config: NodeConfig) -> Limits:
    """The core's limits as configured."""
    return Limits(
        plans_in_flight=config.offload.max_plans_in_flight,
        batch_spans=config.offload.batch_spans,
        inclusion=Inclusion(config.offload.inclusion),
        writeback_tries=config.offload.tries,
        checksums=1 if config.checksums.cover is None else config.checksums.cover,
        growth_cap_tokens=config.admission.growth_cap_tokens,
        overcommit=config.admission.overcommit,
        ticket_ttl_ns=config.lease.ticket_ttl_ns,
        ticket_grace_ns=config.lease.grace_ns,
        session_ttl_ns=config.lease.session_ttl_ns,
        tenants=tuple(TenantSpec(t.name, t.floor, t.ceiling, t.priority) for t in config.tenants),
        fence_after_ns=config.fence.after_ns,
        stall_after_ns=config.fence.stall_ms * MILLISECOND_NS,
        pull_deadline_ns=config.mover.pull_deadline_ns,
        return_path=config.mover.return_path,
        export_from_host=config.mover.exports_from_host(config.node.device),
    )
