"""Two models whose host pools share a region: who gets which extent, and who never gives one up."""

from dataclasses import replace

import numpy as np
import pytest

from kvmanager.core.events import Closing, CopyOutcome, MoverGone, Tick, Trim
from kvmanager.core.extents import NOBODY, PoolExtents, SharedRegion
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.spans import HOST
from kvmanager.core.spec import ExtentSpec, GroupSpec, Limits, PoolSpec
from kvmanager.errors import InvalidArgument, PoolExhausted
from kvmanager.geometry import SEQUENTIAL
from kvmanager.layout import GLM53, GLM53_TINY
from tests.sim.driver import Client, Driver, sharded_group
from tests.sim.worlds import Regions, hisparse, sharing

RANKS, ROWS = 2, 16
LARGE, SMALL = GLM53.page_bytes(ROWS), GLM53_TINY.page_bytes(ROWS)
SPAN = RANKS * ROWS
EXTENT = 4 * LARGE
SMALL_PAGES = EXTENT // SMALL


def pair(extents: int, limits: list[tuple[int, int]], pages: int = 8) -> list[GroupSpec]:
    groups = [
        sharded_group(pages, 1, ranks=RANKS, page_rows=ROWS, name="large"),
        sharded_group(pages * SMALL_PAGES, 1, ranks=RANKS, page_rows=ROWS, name="small", kv_format=GLM53_TINY),
    ]
    return sharing(Regions({1: 0}), groups, extents, EXTENT, limits)


class Node(Driver):
    """A driver of both models, and what they hold of the region."""

    def __init__(self, extents: int, *limits: tuple[int, int], **more: object) -> None:
        pages = int(str(more.pop("pages", 8)))
        super().__init__(pair(extents, list(limits), pages), Limits(**more))  # type: ignore[arg-type]
        self.large, self.small = Client(self, "large", "l"), Client(self, "small", "s")

    @property
    def region(self) -> SharedRegion:
        return self.node.state.regions["ram"]

    def pools(self) -> dict[str, Pool]:
        return {name: pool for group in self.node.state.groups.values() for name, pool in group.pools.items()}

    def extents_of(self, name: str, state: PageState) -> np.ndarray:
        """Extents with pages of a model in that state."""
        pages = np.flatnonzero(self.pool(f"{name}/host").spaces["kv"].state == state)
        return np.unique(PoolExtents.of(self.node.state.groups[name].spec.pools[1]).extent_of(pages))

    def owned(self) -> tuple[int, int, int]:
        """Extents of the large model, of the small one, and of nobody."""
        return (*(len(self.region.owned(f"{name}/host")) for name in ("large", "small")), len(self.region.unowned))

    def cached(self, name: str) -> int:
        """Tokens of a model with a complete host copy."""
        table = self.node.state.groups[name].chains[0].table
        return int((table.live & (table.copies[0, HOST] == 2)).sum()) * SPAN


def test_pages_keep_their_places_whoever_owns_the_extents() -> None:
    spec = pair(3, [(0, 3), (0, 3)])[1].pools[1]
    view = PoolExtents.of(spec)
    assert (view.first * SMALL >= np.arange(3) * EXTENT).all()
    assert (view.end * SMALL <= np.arange(1, 4) * EXTENT).all()
    assert ((view.end - view.first + 2) * SMALL > EXTENT).all(), "less than two pages are left over"
    pages = np.concatenate([np.arange(a, b) for a, b in zip(view.first, view.end, strict=True)])
    assert (view.extent_of(pages) == pages * SMALL // EXTENT).all()


def test_a_pool_over_the_shares_of_all_ranks_deals_its_pages_out() -> None:
    part = ExtentSpec("ram", 4, 5, 1000, 0, 5)
    view = PoolExtents.of(PoolSpec("p", "host", 1, 5 * 1000 // 300 * 4, 300, (("kv", 1),), part))
    assert view.first.tolist() == [0, 16, 28, 40, 56], "page i lies in share i mod 4, at place i // 4"
    assert view.end.tolist() == [12, 24, 40, 52, 64]


def test_floors_are_there_from_the_start_and_the_rest_is_nobodys() -> None:
    node = Node(6, (1, 6), (2, 4))
    assert node.owned() == (1, 2, 3)
    assert node.pool("large/host").slabs == 4
    assert node.pool("large/host").most_slabs == 4 * 4, "less the other's floor"
    assert node.region.account(node.pools()).total_bytes == 6 * EXTENT * RANKS


def test_room_comes_from_nobody_first_then_from_the_colder_model() -> None:
    node = Node(4, (0, 4), (0, 4))
    node.small.serve(1, 2 * SMALL_PAGES * SPAN, "old")
    assert node.owned() == (0, 2, 2) or node.owned() == (0, 3, 1)
    node.large.serve(1, 8 * SPAN, "a")
    assert node.owned()[0] == 2
    before = node.cached("small")
    for n in range(3):
        node.large.serve(2 + n, 8 * SPAN, ("b", n))
    assert node.owned() == (4, 0, 0), "all that the small model had is older"
    assert node.cached("small") == 0 < before
    assert node.cached("large") == 16 * SPAN
    assert node.region.moves >= 1
    node.leave(node.large, node.small)


def test_a_colder_model_of_ones_own_goes_first() -> None:
    node = Node(2, (0, 2), (0, 2), pages=4)
    node.small.serve(1, SMALL_PAGES // 2 * SPAN, "s")
    node.large.serve(1, 4 * SPAN, "a")
    assert node.owned() == (1, 1, 0)
    node.small.open(2, SMALL_PAGES // 2 * SPAN, "s")  # used again: warmer than all of the large model
    node.small.close(2)
    node.small.run()
    node.large.serve(2, 4 * SPAN, "b")
    assert node.owned() == (1, 1, 0), "its own older prompt went"
    assert node.cached("small") == SMALL_PAGES // 2 * SPAN
    node.leave(node.large, node.small)


@pytest.mark.parametrize("limits", [[(0, 1), (0, 4)], [(0, 4), (3, 4)]])
def test_nobody_passes_its_ceiling_or_pushes_another_below_its_floor(limits: list[tuple[int, int]]) -> None:
    node = Node(4, *limits)
    for n in range(3):
        node.small.serve(n, SMALL_PAGES * SPAN, ("s", n))
    for n in range(6):
        node.large.serve(n, 8 * SPAN, ("a", n))
    assert node.owned()[0] == 1
    assert node.owned()[1] >= limits[1][0]
    assert node.cached("large") == 4 * SPAN
    node.leave(node.large, node.small)


def filled_by_small(outcome: CopyOutcome | None) -> Node:
    """One extent, all of it the small model's; its last copy ended so, or is in flight."""
    node = Node(1, (0, 1), (0, 1), batch_spans=4, plans_in_flight=1)
    node.small.open(1, 8 * SPAN, "s")
    node.small.commit(1, 8 * SPAN)
    node.small.run()
    node.end(min(node.plans))
    if outcome is not None:
        node.end(min(node.plans), outcome)
    node.small.close(1)
    node.small.run()
    return node


@pytest.mark.parametrize("outcome", [None, CopyOutcome.UNKNOWN_FATE])
def test_an_extent_with_a_page_that_something_may_still_write_to_stays(outcome: CopyOutcome | None) -> None:
    node = filled_by_small(outcome)
    if outcome is CopyOutcome.UNKNOWN_FATE:
        assert node.pages("small/host", PageState.QUARANTINED) == 4
    node.large.open(1, 4 * SPAN, "a")
    node.large.commit(1, 4 * SPAN)
    node.large.run()
    assert node.owned() == (0, 1, 0)
    assert node.cached("small") == 4 * SPAN, "nothing is lost for a move that can't be"
    assert node.pages("large/host", PageState.FILLING) == 0
    if outcome is None:
        node.end(min(node.plans))
    else:
        node.apply(MoverGone())
    node.apply(Tick())
    node.large.close(1)
    node.large.run()
    node.end_all()
    assert node.owned() == (1, 0, 0)
    assert node.cached("large") == 4 * SPAN
    node.leave(node.large, node.small)


def test_the_extent_beside_a_quarantined_page_moves() -> None:
    """Though the other is colder and has more free pages."""
    node = Node(2, (0, 2), (0, 2), batch_spans=4)
    node.small.open(1, 8 * SPAN, "cold")
    node.small.commit(1, 8 * SPAN)
    node.small.close(1)
    node.small.run()
    node.end(min(node.plans))
    node.end(min(node.plans), CopyOutcome.UNKNOWN_FATE)
    node.small.serve(2, SMALL_PAGES * SPAN, "warm")
    assert node.owned() == (0, 2, 0)
    (quarantined,) = {int(extent) for extent in node.extents_of("small", PageState.QUARANTINED)}
    node.large.open(1, 4 * SPAN, "a")
    node.large.commit(1, 4 * SPAN)
    node.large.run()
    assert node.owned() == (1, 1, 0)
    assert node.region.owned("small/host").tolist() == [quarantined]
    node.end_all()
    node.apply(MoverGone())
    node.leave(node.large, node.small)


def test_spans_that_a_request_reads_from_the_device_lose_their_host_copies_only() -> None:
    node = Node(1, (0, 1), (0, 1))
    node.small.serve(1, 4 * SPAN, "s")
    assert node.small.open(2, 4 * SPAN + 1, "s").cached_tokens == 4 * SPAN
    node.large.serve(1, 4 * SPAN, "a")
    assert node.owned() == (1, 0, 0)
    assert node.counters["host_reclaim"] == 4
    assert node.counters["eviction"] == 0
    node.small.close(2)
    node.small.run()
    assert node.small.open(3, 4 * SPAN + 1, "s").cached_tokens == 4 * SPAN
    node.leave(node.large, node.small)


def decode_pair(extents: int) -> Driver:
    """Two decode ranks whose latents are promised places in one region; extents of 8 latents."""
    groups = [hisparse(Regions({1: 0}), name, 60, 1, SEQUENTIAL, offload=None) for name in ("left", "right")]
    slab = groups[0].pools[1].slab_bytes
    return Driver(sharing(Regions({1: 0}), groups, extents, 8 * slab, [(0, extents)] * 2), Limits())


def test_a_promise_brings_the_extents_that_stand_behind_it() -> None:
    driver = decode_pair(4)
    left, right = Client(driver, "left", "l"), Client(driver, "right", "r")
    assert left.open(1, 20 * 4, "a").state == "runnable"
    assert driver.pool("left/host").slabs == 24
    assert driver.pool("left/host").promised_slabs == 20
    refused = right.open(1, 10 * 4, "b")
    assert refused.state == "refused", "8 are nobody's, and what was promised is not lent"
    assert isinstance(refused.error, PoolExhausted)
    assert refused.error.pool == "right/host"
    assert driver.pool("right/host").slabs == 0, "all or nothing"
    assert right.open(1, 8 * 4, "b").state == "runnable"
    left.close(1)
    left.run()
    assert right.open(2, 20 * 4, "c").state == "runnable", "nothing stands behind what was promised to nobody any more"
    assert driver.pool("right/host").slabs == 32
    never = left.open(2, 33 * 4, "d")
    assert isinstance(never.error, PoolExhausted)
    assert never.error.retry_after_ns == 0, "it would not fit if all were its own"
    driver.leave(left, right)


def test_a_decode_rank_in_a_shared_region_is_retracted_and_goes_on() -> None:
    """Its indexer pages have a host pool of their own there: all of it leaves the device, and comes back."""
    driver = decode_pair(6)
    left, right = Client(driver, "left", "l"), Client(driver, "right", "r")
    opened = left.open(1, 40, "a", growth=8)
    assert (opened.state, opened.whole_lacks_slabs) == ("runnable", 0)
    left.commit(1, 40)
    left.run()
    assert not left.close(1, Closing.RETRACTED).errors
    left.run()
    driver.end_all()
    driver.apply(Trim("left", "left/hbm", 60))
    assert driver.pool("left/hbm").free_slabs == 60
    assert [driver.pages(f"left/{kind}", PageState.READY) for kind in ("host", "offload")] == [10, 10]
    region = driver.node.state.regions["ram"]
    assert [len(region.owned(pool)) for pool in ("left/host", "left/offload")] == [2, 1]
    assert left.open(1, 40, "a").state == "waiting"
    driver.end_all()
    ready = driver.notices[-1].ready
    assert ready is not None
    assert ready.cached_tokens == 40
    driver.leave(left, right)


def test_what_a_region_cant_be() -> None:
    part = ExtentSpec("ram", 2, 4, 1000, 1, 4)

    def pool(**changes: object) -> PoolSpec:
        spec = replace(part, **{k: v for k, v in changes.items() if hasattr(part, k)})  # type: ignore[arg-type]
        return PoolSpec(
            "p", str(changes.get("tier", "host")), int(str(changes.get("pool_ranks", 2))), 10, 400, (("kv", 1),), spec
        )

    SharedRegion([pool()])
    for changes in ({"floor": 5}, {"ceiling": 0}, {"tier": "device"}, {"pool_ranks": 3}, {"extent_bytes": 799}):
        with pytest.raises(InvalidArgument, match="pool p"):
            SharedRegion([pool(**changes)])
    with pytest.raises(InvalidArgument, match="differ"):
        SharedRegion([pool(), replace(pool(extents=3, ceiling=3), slabs=7)])
    with pytest.raises(InvalidArgument, match="floors"):
        SharedRegion([pool(floor=3), pool(floor=2)])
    assert (SharedRegion([pool()]).owner == NOBODY).all()
