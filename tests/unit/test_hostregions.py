"""Groups that share a host region: how the configuration cuts it, and what it refuses."""

from __future__ import annotations

import os

import pytest
from rich.console import Console

from kvmanager.command.screens import pools_screen
from kvmanager.configuration.groups import plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.configuration.sizing import size_of
from kvmanager.errors import ConfigError
from kvmanager.layout import GLM53, GLM53_TINY
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import GIB, MIB
from kvmanager.wire import RegionKind, pack_u32

HEAD = '[node]\nname = "n"\nruntime_dir = "/tmp/n"\n'
LARGE, SMALL = GLM53.page_bytes(64), GLM53_TINY.page_bytes(16)


def group(name: str, kv_format: str, page_rows: int, host: str, more: str = "", kind: str = "sharded") -> str:
    return f"""
[[group]]
name = "{name}"
kind = "{kind}"
format = "{kv_format}"
ranks = 8
page_rows = {page_rows}
hbm_bytes_per_rank = "64 MiB"
host_bytes_per_rank = "{host}"
{more}
"""


def two(more: str = 'host_region = "ram"', other: str = 'host_region = "ram"', host: str = "1 GiB") -> str:
    large = group("large", GLM53.name, 64, host, more)
    return HEAD + large + group("small", GLM53_TINY.name, 16, "512 MiB", other, "replicated")


def test_an_extent_is_of_32_mib_or_8_pages_in_whole_pages_of_the_largest_kind() -> None:
    plan = plan_memory(parse_config(two()))
    shared = [region for region in plan.regions if region.kind is RegionKind.HOST]
    extent = -(-32 * MIB // LARGE) * LARGE
    assert [(r.rank, r.pool, r.page_bytes) for r in shared] == [(rank, "ram", extent) for rank in range(8)]
    assert {r.size_bytes for r in shared} == {3 * GIB // 2 // extent * extent}
    large, small = plan.groups
    ids = tuple(r.region_id for r in shared)
    assert large.chains[0].classes[0].host_regions == small.chains[0].classes[0].host_regions == ids
    pools = {pool.name: pool for spec in plan.groups for pool in spec.pools}
    assert pools["large/host"].slabs == shared[0].size_bytes // LARGE
    assert pools["small/host"].slabs == shared[0].size_bytes // SMALL * 8
    assert pools["large/hbm"].extents is None


def test_eight_large_pages_are_more_than_32_mib() -> None:
    rows = 128
    text = HEAD + group("a", GLM53.name, rows, "1 GiB", 'host_region = "ram"')
    (spec,) = plan_memory(parse_config(text)).groups
    part = spec.pools[1].extents
    assert part is not None
    assert part.extent_bytes == 8 * GLM53.page_bytes(rows) > 32 * MIB


def test_floors_and_ceilings_are_shares_of_the_region() -> None:
    config = parse_config(two('host_region = "ram"\nhost_floor = 0.25\nhost_ceiling = 0.5'))
    part = plan_memory(config).groups[0].pools[1].extents
    assert part is not None
    assert (part.floor, part.ceiling) == (part.extents // 4, part.extents // 2)
    sizes = {line.pool: line for line in size_of(config, 512).pools}
    per_extent = part.extent_bytes // LARGE
    assert sizes["large/host"].pages == part.ceiling * per_extent
    assert {fit.refusal for fit in size_of(config, 512).fits} == {None}


def test_a_decode_rank_has_two_pools_there_within_its_floor_and_ceiling() -> None:
    sparse = 'token_order = "sequential"\nsource_ranks = 2\nsource_interleave = 1\nhot_rows = 10240\n'
    sparse += 'host_region = "ram"\n'
    text = HEAD + group("d", GLM53.name, 64, "48 GiB", sparse + "host_floor = 0.5\nhost_ceiling = 0.75", "hisparse")
    text += group("e", GLM53.name, 64, "16 GiB", sparse, "hisparse")
    text = text.replace("ranks = 8", "ranks = 1").replace('"64 MiB"', '"15 GiB"')
    left, right = plan_memory(parse_config(text)).groups
    shares = {}
    for pool in (*left.pools[1:], *right.pools[1:]):
        assert pool.extents is not None
        shares[pool.name] = (pool.extents.floor, pool.extents.ceiling, pool.extents.extents)
    extents = shares["d/host"][2]
    assert shares["d/host"][0] + shares["d/offload"][0] == extents // 2
    assert shares["d/host"][1] + shares["d/offload"][1] == int(0.75 * extents)
    assert shares["d/offload"][1] == -(-int(0.75 * extents) * 185_856 // (3_345_408 + 185_856))
    assert shares["e/host"][:2] == (0, extents), "alone it may have all"
    assert [pool.slab_bytes for pool in left.pools] == [3_345_408, 3_345_408, 185_856]
    latent, indexer = left.chains[0].classes
    assert latent.host_regions == indexer.host_regions


SHARES = 'host_region = "ram"'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (two("host_floor = 0.5", ""), "'large' host_floor: only with host_region"),
        (two(SHARES + "\nhost_floor = 0.6\nhost_ceiling = 0.5"), "'large' host_floor: 0.6 is above host_ceiling 0.5"),
        (two(SHARES + "\nhost_floor = 0.6", SHARES + "\nhost_floor = 0.6"), "host_region 'ram': floors"),
        (two(SHARES + '\nhost_extent_bytes = "64 MiB"'), "'ram': its groups differ in host_extent_bytes"),
        (two(*[SHARES + '\nhost_extent_bytes = "6 MiB"'] * 2), "do not hold 2 pages"),
        (two(*[SHARES + '\nhost_extent_bytes = "1 GiB"'] * 2), "hold 1 extents"),
        (two().replace("ranks = 8", "ranks = 4", 1), "'ram': its groups differ in ranks"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert says in str(caught.value)


def test_chunks_end_where_extents_do() -> None:
    text = two(host="120 GiB").replace(HEAD, HEAD + 'device = "cuda:0"\n')
    shared = [r for r in plan_memory(parse_config(text)).regions if r.kind is RegionKind.HOST]
    for region in shared:
        assert len(region.chunk_bounds) == 1
        assert all(bound % region.page_bytes == 0 and bound % 4096 == 0 for bound in region.chunk_bounds)
        assert region.chunk_bounds[0] <= 64 * GIB


def test_the_pools_screen_shows_who_owns_the_extents() -> None:
    shared = pb.SharedRegionStatus(
        name="ram", ranks=2, capacity_bytes=10 << 25, extent_bytes=32 << 20, unowned_bytes=2 << 25, moves=1_234,
        pools=["chat/host", "code/host"], owners=pack_u32([0, 0, 1, 0, 2**32 - 1]), floor_extents=pack_u32([1, 0]),
        most_extents=pack_u32([5, 4]),
    )  # fmt: skip
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=80, record=True, file=nowhere)
        console.print(pools_screen(pb.PoolsReply(pools=[pb.PoolStatus(pool="chat/host")], regions=[shared])))
    rows = [line.split() for line in console.export_text().splitlines() if line.startswith("ram")]
    assert rows == [
        ["ram", "chat/host", "3", "1", "5", "96.00", "MiB"],
        ["ram", "code/host", "1", "0", "4", "32.00", "MiB"],
        ["ram", "(nobody)", "1", "32.00", "MiB", "1,234"],
    ]
