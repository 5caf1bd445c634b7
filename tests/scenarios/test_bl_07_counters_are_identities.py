"""BL-07: states sum to capacity in every pool at every event, and nothing is ever clamped."""

from kvmanager.core.admission import promises_hold
from kvmanager.core.pool import PageState
from kvmanager.core.reclaim import reclaimable_slabs
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def check(driver: Driver) -> None:
    group = driver.node.state.groups["p"]
    for pool in group.pools.values():
        units = [pool.units(state) for state in PageState]
        assert sum(units) == pool.capacity_units
        assert min(units) >= 0
        assert reclaimable_slabs(group, pool) + pool.free_slabs <= pool.slabs
        assert [sum(space.counts) for space in pool.spaces.values()] == [pool.slabs]
    assert promises_hold(group)


def test_a_hundred_rounds_of_evict_to_host() -> None:
    driver = Driver([sharded_group(4, 4)])
    client = Client(driver, "p")
    for i in range(100):
        assert client.serve(i, SPAN, f"session {i % 7}").state == "runnable"
        check(driver)
    assert driver.counters["reclaim"] > 50
    assert driver.counters["eviction"] > 50
    driver.leave(client)


def test_shared_pages_are_counted_once() -> None:
    driver = Driver([sharded_group(8, 8)])
    client = Client(driver, "p")
    client.serve(1, 3 * SPAN + 1, "a")
    first = client.open(2, 3 * SPAN + 1, "a")
    second = client.open(3, 3 * SPAN + 1, "a")
    assert first.cached_tokens == second.cached_tokens == 3 * SPAN
    used = driver.pool("p/hbm").slabs - driver.pages("p/hbm", PageState.FREE)
    assert used == 3 + 2
    check(driver)
    client.close(2)
    client.run()
    check(driver)
    driver.leave(client)
