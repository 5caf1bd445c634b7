"""What a memory group is made of: chains, page classes, pools and regions. Fixed at start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvmanager.core.checksums import PageSection, sections_of
from kvmanager.geometry import ShardGeometry, TokenOrder
from kvmanager.layout import KVFormat, KVLayout

BOUNCE = "bounce"
"""Tier of a pool of host memory that engines map instead of one that they may not."""


class Placement(StrEnum):
    """How a chain's pages relate to the ranks of its group."""

    SHARDED = "sharded"        # each rank holds its own tokens of a span
    REPLICATED = "replicated"  # every rank holds all tokens; the host holds them once


@dataclass(frozen=True)
class PageClass:
    """One kind of page of a chain.

    `device_regions[r]`, `host_regions[r]`: region ids by rank; `host_regions` empty: never leaves the device.
    `host_pool` is the pool's name, "" when there is none.
    """

    name: str
    layout: KVLayout
    device_pool: str
    device_regions: tuple[int, ...]
    host_pool: str = ""
    host_regions: tuple[int, ...] = ()

    @property
    def page_bytes(self) -> int:
        """Bytes from page to page on one rank."""
        return self.layout.page_bytes

    @cached_property
    def sections(self) -> tuple[PageSection, ...]:
        """Sections of a page that have a checksum each."""
        return sections_of(self.layout)


@dataclass(frozen=True)
class ChainSpec:
    """A KV group of a model: its pages, their token order and placement.

    `order`: token order of spans that a local engine fills. `imported_order`: order of spans that arrive by
    hand-off, which keep the source's order; the same as `order` when tokens are permuted on arrival.
    `ranks`: ranks of the pools.
    """

    name: str
    placement: Placement
    ranks: int
    page_rows: int
    order: TokenOrder
    imported_order: TokenOrder
    classes: tuple[PageClass, ...]

    def span_pages(self, order: TokenOrder) -> int:
        """Page indexes of one class that a span of this order takes."""
        if self.placement is Placement.REPLICATED:
            return order.segments
        assert order.segments % self.ranks == 0
        return order.segments // self.ranks

    def span_tokens(self, order: TokenOrder) -> int:
        """Tokens of a span of this order."""
        return order.segments * self.page_rows

    @cached_property
    def pool_names(self) -> tuple[tuple[str, str], ...]:
        """Of each class, its pool on the device and on the host; "" where there is none."""
        return tuple((c.device_pool, c.host_pool) for c in self.classes)

    @cached_property
    def class_tiers(self) -> tuple[tuple[int, int], ...]:
        """(class, tier) pairs that may hold pages."""
        return tuple((c, tier) for c, names in enumerate(self.pool_names) for tier, name in enumerate(names) if name)

    @cached_property
    def offloads(self) -> bool:
        """Whether some class can leave the device."""
        return any(c.host_pool for c in self.classes)

    @cached_property
    def widest(self) -> int:
        """Most page indexes a span takes."""
        return max(self.span_pages(self.order), self.span_pages(self.imported_order))


@dataclass(frozen=True)
class ExtentSpec:
    """A pool's part in a host region that it shares (`core.extents`). floor, ceiling: least and most extents it owns.

    Every rank has a region of `extents` extents, and an extent means the same place on all of them.
    """

    region: str
    ranks: int
    extents: int
    extent_bytes: int
    floor: int
    ceiling: int


@dataclass(frozen=True)
class PoolSpec:
    """A pool: `slabs` slabs on each of `ranks` ranks; `per_slab[c]` pages of class c fill one.

    `extents`: it owns only parts of the slabs, which change.
    """

    name: str
    tier: str
    ranks: int
    slabs: int
    slab_bytes: int
    per_slab: tuple[tuple[str, int], ...]
    extents: ExtentSpec | None = None


class Residency(StrEnum):
    """Where latent pages of running requests of a decode rank may lie."""

    HYBRID = "hybrid"            # in HBM; released from the tail on when it runs short
    ALWAYS_HOST = "always-host"  # on the host as soon as they are sealed and mirrored
    OFFLOAD_ONLY = "offload-only"  # in HBM: a request fits there or waits


@dataclass(frozen=True)
class SparseSpec:
    """HiSparse: where latent pages may live on the host alone.

    `hot_slabs`: slabs of one request's hot buffer. `tail_pages`: pages at the end that always stay resident.
    """

    latent_class: str
    hot_class: str
    hot_slabs: int
    tail_pages: int = 2
    residency: Residency = Residency.HYBRID


@dataclass(frozen=True)
class WorkspaceSpec:
    """Memory that each rank of a sharded group has for the full copies its steps compute from.

    pool: the first rank's, by which refusals name it. pages: of one rank, of `page_bytes`, for page_rows tokens each.
    """

    pool: str
    pages: int
    page_bytes: int

    def pages_needed(self, geometry: ShardGeometry, tokens: int) -> int:
        """Of one rank, for a step whose context ends with `tokens` tokens."""
        return -(-geometry.workspace_rows(tokens) // geometry.page_rows)


@dataclass(frozen=True)
class GroupSpec:
    """A shard group: the memory that one engine's ranks share.

    trust: whose engines may map it; the core does not look at it, but goes on from no journal with another one.
    one_holder: one engine at a time registers, and opens one request that takes every page: see `core.wholegroups`.
    scrub: pages that go from one tenant to another are overwritten: see `core.scrubbing`.
    workspace: of each rank; None: it has none here, and requests are as long as their pages allow.
    """

    name: str
    ranks: int
    page_rows: int
    kv_format: KVFormat
    chains: tuple[ChainSpec, ...]
    pools: tuple[PoolSpec, ...]
    sparse: SparseSpec | None = None
    trust: str = ""
    one_holder: bool = False
    scrub: bool = False
    workspace: WorkspaceSpec | None = None

    @property
    def geometry(self) -> ShardGeometry:
        """Of a sharded group."""
        return ShardGeometry(self.ranks, self.page_rows, self.chains[0].order.interleave)

    @cached_property
    def swaps(self) -> bool:
        """Whether kernels of running requests read rows of the host tier."""
        return self.sparse is not None and self.sparse.residency is not Residency.OFFLOAD_ONLY

    def floats(self, page_class: str) -> bool:
        """Whether pages of the class may lie on the host alone while a request that holds them runs."""
        return self.sparse is not None and self.swaps and page_class == self.sparse.latent_class

    @property
    def cache_only(self) -> bool:
        """Whether engines of the group have memory of their own: all pools are host memory, filled and read by leases.

        What the core calls the device tier is then the host pool, which the engines' workers map, or in its place their
        bounce region (`core.bounce`).
        """
        return all(pool.tier in ("host", BOUNCE) for pool in self.pools)


class Inclusion(StrEnum):
    """Whether a span that came back to the device keeps its place on the host."""

    INCLUSIVE = "inclusive"  # it does
    EXCLUSIVE = "exclusive"  # its host copy is the first to go
    AS_NEEDED = "as-needed"  # the first to go if the host pool was nearly full when it came back

    def redundant(self, free: int, slabs: int) -> bool:
        """Whether a host copy is redundant once its span is on the device, in a pool with `free` of `slabs` free."""
        nearly_full = free * NEARLY_FULL_SHARE < slabs
        return self is Inclusion.EXCLUSIVE or (self is Inclusion.AS_NEEDED and nearly_full)


NEARLY_FULL_SHARE = 16
"""A pool is nearly full when less than one part in so many is free."""


@dataclass(frozen=True)
class MissCosts:
    """Seconds a token that is asked for and not on the device. Only their ratio matters to who goes first.

    The defaults are GLM-5.3 on eight H200s: 54,728 B over eight PCIe links of 54.8 GB/s, and a node that computes
    4,800 tokens a second.
    """

    reload_s: float = 54_728 / 8 / 54.8e9
    prefill_s: float = 1 / 4_800


@dataclass(frozen=True)
class TenantSpec:
    """A tenant's part of every pool, as shares of its capacity (0 to 1); see `core.tenants`.

    priority: a higher one is served first where both wait, and gives up its cached pages later.
    """

    name: str
    floor: float = 0.0
    ceiling: float = 1.0
    priority: int = 0


@dataclass(frozen=True)
class Limits:
    """Every limit of the core; the wire states them in RegisterReply.

    plans_in_flight: host copies in flight, a chain. plans_beside_onboards: the same while a request waits for its
    bytes, so that they have the link. writeback_tries: how often a span's host copy is tried in a row.
    reconsidered_spans: how many spans that the host had no room for are ranked again on a tick.
    checksums: of how many spans one has its host copy summed up; 1: all, 0: none.
    return_path: whether decode groups give tickets too, so that KV made there can go back to a prefill node.
    export_from_host: whether a request whose prefix is still being onboarded gives tickets, which name host copies.
    clean_share: of a device pool, what should be free or have a host copy while host room is short.
    """

    requests_per_step: int = 4096
    stored_replies: int = 64
    unseen_notices: int = 1024
    plans_in_flight: int = 8
    plans_beside_onboards: int = 1
    writeback_tries: int = 3
    clean_share: float = 0.25
    reconsidered_spans: int = 256
    checksums: int = 0
    inclusion: Inclusion = Inclusion.AS_NEEDED
    miss_costs: MissCosts = MissCosts()
    batch_spans: int = 32
    growth_cap_tokens: int = 65536
    overcommit: float = 1.0
    ticket_ttl_ns: int = 30_000_000_000
    ticket_grace_ns: int = 5_000_000_000
    pull_deadline_ns: int = 20_000_000_000
    return_path: bool = False
    export_from_host: bool = False
    retry_after_ns: int = 20_000_000
    fence_after_ns: int = 30_000_000_000
    stall_after_ns: int = 120_000_000_000
    session_ttl_ns: int = 600_000_000_000
    claim_hold_ns: int = 100_000_000
    tenants: tuple[TenantSpec, ...] = ()
