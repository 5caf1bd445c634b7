"""`[[group]]` of the configuration: one memory group, and what follows from its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.configvalues import Parser
from kvmanager.configuration.hostregions import HostShare
from kvmanager.core.spec import Residency
from kvmanager.geometry import SEQUENTIAL, ShardGeometry, TokenOrder
from kvmanager.layout import KVFormat, format_named


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSection:
    """`[[group]]`: one memory group.

    Shards of a DCP engine, equal copies on all its ranks, a HiSparse decode rank, a cache in host memory for engines
    with device memory of their own, or ("engine") device memory for one engine's own blocks. token_order to
    offload_bytes_per_rank hold only for kind "hisparse" (empty in the others). residency: where latents of running
    requests lie, see `core.spec.Residency`. host_split: "soft", latents and indexers share the host's slabs; "strict",
    indexers have `offload_bytes_per_rank` of it and latents the rest. Groups of one `host_region` share what their
    `host_bytes_per_rank` sum up to; host_floor, host_ceiling: shares of that (see `hostregions`).
    workspace_bytes_per_rank: see `workspaces`, which makes groups for it; those have the group's name as workspace_for.
    """

    name: str
    kind: str
    format: str
    ranks: int
    page_rows: int
    host_bytes_per_rank: int = 0
    hbm_bytes_per_rank: int = 0
    interleave: int = 1
    token_order: str = ""
    source_ranks: int = 0
    source_interleave: int = 0
    hot_rows: int = 0
    host_region: str = ""
    host_floor: float = 0.0
    host_ceiling: float = 1.0
    host_extent_bytes: int = 0
    residency: str = Residency.HYBRID
    host_split: str = "soft"
    offload_bytes_per_rank: int = 0
    trust: str = ""
    scrub: bool = False
    bounce_bytes_per_rank: int = 0
    workspace_bytes_per_rank: int = 0
    workspace_for: str = ""

    @property
    def kv_format(self) -> KVFormat:
        """The format that `format` names."""
        return format_named(self.format)

    @property
    def geometry(self) -> ShardGeometry:
        """Ranks, rows and interleave of the group's own pool."""
        return ShardGeometry(self.ranks, self.page_rows, self.interleave)

    @property
    def arrival_order(self) -> TokenOrder:
        """Token order in which handed-off spans are stored (hisparse): the source's, or sequential."""
        return TokenOrder(self.source_ranks, self.source_interleave) if self.token_order == "keep" else SEQUENTIAL

    @property
    def unit_bytes(self) -> int:
        """Bytes of the equal pieces that the pools hand out: slabs (hisparse) or whole pages."""
        if self.kind == "hisparse":
            return self.kv_format.slab_bytes(self.page_rows)
        return self.kv_format.page_bytes(self.page_rows)

    @property
    def hbm_units(self) -> int:
        """Whole pages or slabs in one rank's device pool."""
        return self.hbm_bytes_per_rank // self.unit_bytes

    @property
    def host_units(self) -> int:
        """Whole pages or slabs in one rank's host pool."""
        return self.host_bytes_per_rank // self.unit_bytes

    @property
    def host_share(self) -> HostShare:
        """What it says of a host region that it shares."""
        limits = self.host_floor, self.host_ceiling, self.host_extent_bytes, 2 if self.kind == "hisparse" else 1
        return HostShare(self.name, self.ranks, self.unit_bytes, self.host_bytes_per_rank, self.host_region, *limits)

    @property
    def offload_units(self) -> int:
        """Those of the host's slabs that indexer pages have for themselves (a strict split)."""
        return self.offload_bytes_per_rank // self.unit_bytes

    @property
    def hot_slabs(self) -> int:
        """Slabs of one hot buffer."""
        return self.hot_rows // self.page_rows

    @property
    def planned_bytes(self) -> int:
        """Device and host pools and bounce regions of all ranks."""
        return self.ranks * (self.hbm_bytes_per_rank + self.host_bytes_per_rank + self.bounce_bytes_per_rank)


GROUP: Final[Mapping[str, Parser]] = {
    "name": parse.text,
    "kind": parse.choice("sharded", "replicated", "hisparse", "cache", "engine"),
    "format": parse.kv_format,
    "ranks": parse.count(1),
    "page_rows": parse.count(1),
    "interleave": parse.count(1),
    "hbm_bytes_per_rank": parse.size,
    "host_bytes_per_rank": parse.size,
    "token_order": parse.choice("keep", "sequential"),
    "source_ranks": parse.count(1),
    "source_interleave": parse.count(1),
    "hot_rows": parse.count(1),
    "host_region": parse.text,
    "host_floor": parse.share,
    "host_ceiling": parse.share,
    "host_extent_bytes": parse.size,
    "residency": parse.choice(*Residency),
    "host_split": parse.choice("soft", "strict"),
    "offload_bytes_per_rank": parse.size,
    "trust": parse.text,
    "scrub": parse.switch,
    "bounce_bytes_per_rank": parse.size,
    "workspace_bytes_per_rank": parse.size,
}
"""Parsers of the keys."""
