"""What stands behind promises where tenants have floors: no event takes it away."""

from __future__ import annotations

from kvmanager.core.audit import audit
from kvmanager.core.operatorevents import PinPrefix, UnpinPrefix
from kvmanager.core.spec import Limits, TenantSpec
from kvmanager.core.tenants import used_units
from kvmanager.errors import PoolExhausted
from tests.sim.driver import Client, Driver, chain_keys, sharded_group

SPAN = 512


def world(pages: int, host_pages: int, *specs: TenantSpec) -> tuple[Driver, list[Client]]:
    driver = Driver([sharded_group(pages, host_pages)], Limits(tenants=specs))
    return driver, [Client(driver, "p", f"engine-{t.name}", t.name.encode(), tenant=t.name) for t in specs]


def holds(driver: Driver, tenant: str, pool: str = "p/hbm") -> int:
    state = driver.node.state
    return used_units(state.groups["p"], state.groups["p"].pools[pool], state.tenants.numbers[tenant])


def test_a_host_copy_below_the_floor_keeps_no_device_page_from_others() -> None:
    """The device copy goes alone: the host's floor loses nothing by it, so write-back breaks no promise."""
    driver, (a, b) = world(10, 40, TenantSpec("a", floor=0.5), TenantSpec("b"))
    for number in range(8):
        a.serve(number, SPAN, f"a{number}")
    assert b.open(1, 2 * SPAN, "b", growth=3 * SPAN).state == "runnable"
    driver.end_all()
    audit(driver.node.state)
    assert holds(driver, "a", "p/host") == 8
    assert b.commit(1, 2 * SPAN, capacity=5 * SPAN).grown[0].error is None
    assert (holds(driver, "a"), holds(driver, "a", "p/host")) == (5, 8)
    driver.leave(a, b)


def test_below_its_floor_a_tenant_replaces_its_own_before_it_takes_what_others_were_promised() -> None:
    driver, (a, b, c) = world(10, 0, TenantSpec("a", floor=0.5), TenantSpec("b"), TenantSpec("c"))
    for number in range(2):
        a.serve(number, SPAN, f"a{number}")
    assert c.open(1, 3 * SPAN, "c").state == "runnable"
    assert b.open(1, 4 * SPAN, "b", growth=SPAN).state == "runnable"
    assert a.open(9, SPAN, "new").state == "runnable", "one page is free, and promised to b; two are its own"
    audit(driver.node.state)
    assert holds(driver, "a") == 2
    assert b.commit(1, 4 * SPAN, capacity=5 * SPAN).grown[0].error is None
    assert a.open(10, SPAN, "newer").state == "runnable"
    assert isinstance(a.open(11, SPAN, "newest").error, PoolExhausted)
    driver.leave(a, b, c)


def test_a_pinned_prefix_counts_below_the_floor_like_a_cached_one() -> None:
    """Or what others were promised would go when the pin is taken away."""
    driver, (a, b, c) = world(10, 10, TenantSpec("a", floor=0.5), TenantSpec("b"), TenantSpec("c"))
    a.serve(1, 5 * SPAN, "a")
    driver.end_all()
    pages = SPAN // a.spec.page_rows
    driver.apply(PinPrefix("x", "p", chain_keys("a", 5 * pages)[-16:]))
    assert c.open(1, 2 * SPAN, "c").state == "runnable"
    assert isinstance(b.open(1, 3 * SPAN, "b", growth=SPAN).error, PoolExhausted)
    assert b.open(2, 2 * SPAN, "b", growth=SPAN).state == "runnable"
    driver.apply(UnpinPrefix("x"))
    audit(driver.node.state)
    assert b.commit(2, 2 * SPAN, capacity=3 * SPAN).grown[0].error is None
    assert holds(driver, "a") == 5
    driver.leave(a, b, c)
