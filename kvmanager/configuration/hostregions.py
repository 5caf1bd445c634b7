"""Host regions that several groups share, from the configuration: how large they are and how they are cut.

    [[group]]                              [[group]]
    name = "chat"                          name = "code"
    host_bytes_per_rank = "48 GiB"         host_bytes_per_rank = "16 GiB"
    host_region = "ram"                    host_region = "ram"
    host_floor = 0.25                      host_ceiling = 0.75

are two models in one region of 64 GiB a rank; the one always keeps a quarter of it, the other never gets the rest.

A decode rank has two pools there, one of latents and one of indexer pages, which share the group's floor and ceiling as
their pages' bytes are: a span has as many of the one as of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvmanager.core.spec import ExtentSpec, GroupSpec
from kvmanager.errors import ConfigError
from kvmanager.units import MIB

EXTENT_LEAST_BYTES: Final = 32 * MIB
EXTENT_LEAST_PAGES: Final = 8
_LEAST_PAGES: Final = 2
"""In a configured extent: fewer might hold no whole page of some pool."""


@dataclass(frozen=True)
class HostShare:
    """What a `[[group]]` says of its host memory: see `config.GroupSection`.

    unit_bytes: of a page. pools: that the group has in it.
    """

    name: str
    ranks: int
    unit_bytes: int
    host_bytes_per_rank: int
    host_region: str
    host_floor: float
    host_ceiling: float
    host_extent_bytes: int
    pools: int = 1


@dataclass(frozen=True)
class HostRegion:
    """One region on each of `ranks` ranks: `extents` extents of `extent_bytes`; what they don't fill is not made."""

    name: str
    ranks: int
    extents: int
    extent_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes on one rank."""
        return self.extents * self.extent_bytes


def shared_host_regions(sections: Sequence[HostShare]) -> dict[str, HostRegion]:
    """The shared regions by name. Raises ConfigError where groups of one contradict each other, or it is too small."""
    parts: dict[str, list[HostShare]] = {}
    for section in sections:
        _check_alone(section)
        if section.host_region:
            parts.setdefault(section.host_region, []).append(section)
    return {name: _region(name, part) for name, part in parts.items()}


def in_extents(group: GroupSpec, region: HostRegion, floor: int, ceiling: int) -> GroupSpec:
    """The group with its host pools in extents of the region, which together have that floor and ceiling."""
    host = [pool for pool in group.pools if pool.tier == "host"]
    limits = _split(floor, ceiling, region.extents, [pool.slab_bytes for pool in host])
    parts = {
        pool.name: ExtentSpec(region.name, region.ranks, region.extents, region.extent_bytes, *limit)
        for pool, limit in zip(host, limits, strict=True)
    }
    pools = tuple(
        replace(p, slabs=region.size_bytes // p.slab_bytes * (region.ranks // p.ranks), extents=parts[p.name])
        if p.name in parts
        else p
        for p in group.pools
    )
    return replace(group, pools=pools)


def _split(floor: int, ceiling: int, extents: int, page_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """(floor, ceiling) of each pool of a group, the one of large pages first, at least one extent for each.

    Those of small pages get what as many pages as the first has may take, rounded up.
    """
    total = sum(page_bytes)
    small = [(-(-floor * size // total) if floor > 1 else 0, -(-ceiling * size // total)) for size in page_bytes[1:]]
    most = ceiling if ceiling == extents else max(1, ceiling - sum(most for _, most in small))
    return [(floor - sum(least for least, _ in small), most), *small]


def _check_alone(section: HostShare) -> None:
    extras = {"host_floor": section.host_floor != 0, "host_ceiling": section.host_ceiling != 1}
    extras["host_extent_bytes"] = section.host_extent_bytes != 0
    given = [key for key, is_given in extras.items() if is_given]
    if given and not section.host_region:
        raise ConfigError(f"[[group]] {section.name!r} {given[0]}: only with host_region, which names what is shared")
    if section.host_floor > section.host_ceiling:
        raise ConfigError(
            f"[[group]] {section.name!r} host_floor: {section.host_floor} is above host_ceiling {section.host_ceiling}"
        )


def _region(name: str, sections: Sequence[HostShare]) -> HostRegion:
    first = sections[0]
    for key in ("ranks", "host_extent_bytes"):
        values = {section.name: getattr(section, key) for section in sections}
        if len(set(values.values())) > 1:
            raise ConfigError(f"host_region {name!r}: its groups differ in {key}: {values}")
    largest = max(section.unit_bytes for section in sections)
    total = sum(section.host_bytes_per_rank for section in sections)
    extent_bytes = first.host_extent_bytes or _extent_bytes(largest)
    if extent_bytes < _LEAST_PAGES * largest:
        raise ConfigError(
            f"host_region {name!r} host_extent_bytes: {extent_bytes} bytes do not hold {_LEAST_PAGES} pages of "
            f"{largest} bytes"
        )
    region = HostRegion(name, first.ranks, total // extent_bytes, extent_bytes)
    pools = sum(section.pools for section in sections)
    if region.extents < pools:
        raise ConfigError(
            f"host_region {name!r}: host_bytes_per_rank of its groups, {total} bytes together, hold {region.extents} "
            f"extents of {extent_bytes} bytes; that takes one for each of their {pools} pools"
        )
    floors = [limits_in(section, region.extents)[0] for section in sections]
    if sum(floors) > region.extents:
        raise ConfigError(f"host_region {name!r}: floors of {floors} extents, it has {region.extents}")
    return region


def _extent_bytes(largest_page_bytes: int) -> int:
    """32 MiB or 8 pages, the larger, in whole pages of the largest kind: those then leave nothing over."""
    least = max(EXTENT_LEAST_BYTES, EXTENT_LEAST_PAGES * largest_page_bytes)
    return -(-least // largest_page_bytes) * largest_page_bytes


def limits_in(section: HostShare, extents: int) -> tuple[int, int]:
    """Floor and ceiling in extents; a ceiling leaves room for one."""
    return int(section.host_floor * extents), max(int(section.host_ceiling * extents), 1)
