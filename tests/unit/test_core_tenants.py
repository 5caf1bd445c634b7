"""Tenants: floors that hold, ceilings nobody passes, priorities, decode before prefill; leases of the silent."""

import pytest

from kvmanager.core.events import AttachRank, RegisterEngine, Step, Tick, Trim
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits, TenantSpec
from kvmanager.core.tenants import used_units
from kvmanager.errors import InvalidArgument, PoolExhausted, QuotaExceeded, StaleEpoch
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512
MS = 1_000_000


def two(
    pages: int, a: TenantSpec, b: TenantSpec, host_pages: int = 0, **limits: object
) -> tuple[Driver, Client, Client]:
    driver = Driver([sharded_group(pages, host_pages)], Limits(tenants=(a, b), **limits))  # type: ignore[arg-type]
    clients = [Client(driver, "p", f"engine-{t.name}", t.name.encode(), tenant=t.name) for t in (a, b)]
    return driver, clients[0], clients[1]


def holds(driver: Driver, tenant: str, pool: str = "p/hbm") -> int:
    state = driver.node.state
    return used_units(state.groups["p"], state.groups["p"].pools[pool], state.tenants.numbers[tenant])


def test_pages_below_a_floor_are_never_victims() -> None:
    driver, a, b = two(10, TenantSpec("a", floor=0.4), TenantSpec("b"))
    for number in range(6):
        a.serve(number, SPAN, f"a{number}")
    assert holds(driver, "a") == 6
    assert b.open(1, 6 * SPAN, "b").state == "runnable", "four free, and what is above the floor"
    assert holds(driver, "a") == 4
    error = b.open(2, SPAN, "c").error
    assert isinstance(error, PoolExhausted | QuotaExceeded)
    assert holds(driver, "a") == 4
    # Its own pages are its own to replace.
    a.serve(20, SPAN, "new")
    assert holds(driver, "a") == 4
    b.close(1)
    b.run()
    driver.apply(Trim("p", "p/hbm", 10))
    assert holds(driver, "a") == 4, "also when room is made for nobody in particular"
    driver.leave(a, b)


def test_requests_of_others_leave_a_floor_alone_even_when_it_is_empty() -> None:
    driver, a, b = two(10, TenantSpec("a", floor=0.4), TenantSpec("b"))
    assert b.open(1, 6 * SPAN, "b").state == "runnable"
    error = b.open(2, SPAN, "c").error
    assert isinstance(error, QuotaExceeded)
    assert (error.pool, error.needed, error.free, error.holder) == ("p/hbm", 1, 0, "tenant b")
    assert a.open(1, 4 * SPAN, "a").state == "runnable"
    driver.leave(a, b)


def test_nobody_passes_its_ceiling() -> None:
    driver, a, b = two(10, TenantSpec("a", ceiling=0.5), TenantSpec("b"))
    for number in range(8):
        a.serve(number, SPAN, f"a{number}")
        assert holds(driver, "a") <= 5, "cached pages count, and the oldest go first"
    assert driver.pages("p/hbm", PageState.FREE) == 5
    assert a.open(20, 3 * SPAN, "x", growth=2 * SPAN).state == "runnable"
    assert isinstance(a.open(21, SPAN, "y").error, QuotaExceeded), "promised pages count, too"
    grown = a.commit(20, 3 * SPAN, capacity=6 * SPAN).grown[0]
    assert isinstance(grown.error, QuotaExceeded)
    assert grown.spans_kept == 5, "all of the promise"
    assert b.open(1, 5 * SPAN, "b").state == "runnable"
    driver.leave(a, b)


def test_a_ceiling_holds_on_the_host_too() -> None:
    driver, a, b = two(8, TenantSpec("a", ceiling=0.5), TenantSpec("b"), host_pages=8)
    for number in range(12):
        a.serve(number, SPAN, f"a{number}")
        assert holds(driver, "a", "p/host") <= 4
    b.serve(1, 8 * SPAN, "b")
    assert holds(driver, "b", "p/host") > 4
    driver.leave(a, b)


def test_the_lower_priority_gives_first() -> None:
    driver, a, b = two(10, TenantSpec("a", priority=0), TenantSpec("b", priority=1))
    b.serve(1, 4 * SPAN, "b")
    a.serve(1, 4 * SPAN, "a")
    assert b.open(2, 5 * SPAN, "c").state == "runnable"
    assert (holds(driver, "a"), holds(driver, "b")) == (1, 9), "a's are newer, and go all the same"
    driver.leave(a, b)


def test_a_growing_request_comes_before_one_that_asks_to_be_admitted() -> None:
    """Overbooked: growth finds nothing; what comes free then is not for the opens that ask in between."""
    driver, a, b = two(8, TenantSpec("a"), TenantSpec("b"), overcommit=1.5, claim_hold_ns=50 * MS)
    a.open(1, 4 * SPAN, "a", growth=2 * SPAN)
    b.open(1, 4 * SPAN, "b")
    refused = a.commit(1, 4 * SPAN, capacity=5 * SPAN).grown[0].error
    assert (refused.needed, refused.free) == (1, 0)
    b.close(1)
    b.run()
    assert b.open(2, 8 * SPAN, "c").state == "refused"
    assert b.open(3, 4 * SPAN, "c").state == "refused", "four are free, one of them is waited for"
    assert b.open(4, 3 * SPAN, "c").state == "runnable"
    assert a.commit(1, 4 * SPAN, capacity=5 * SPAN).grown[0].error is None
    driver.leave(a, b)


def test_who_waits_in_front_holds_others_back_only_so_long() -> None:
    driver, a, b = two(8, TenantSpec("a", priority=1), TenantSpec("b"), claim_hold_ns=50 * MS)
    b.open(1, 5 * SPAN, "b")
    assert a.open(1, 4 * SPAN, "a").state == "refused"
    assert b.open(2, 3 * SPAN, "c").state == "refused", "the higher priority waits for four pages"
    driver.now += 60 * MS
    assert a.open(1, 4 * SPAN, "a").state == "refused", "it asks again, and does not begin to wait anew"
    assert b.open(3, 3 * SPAN, "c").state == "runnable", "pages that fit somebody are not left idle for longer"
    driver.leave(a, b)


def test_one_engine_a_group_and_tenant() -> None:
    driver, a, b = two(8, TenantSpec("a"), TenantSpec("b"))
    layouts = tuple(c.layout.fingerprint for c in a.spec.chains[0].classes)
    answer = driver.apply(RegisterEngine("third", "p", b"x", 16, 64, layouts, 8, tenant="a"))
    assert isinstance(answer, InvalidArgument)
    driver.leave(a, b)


@pytest.mark.parametrize("heard", [False, True])
def test_a_session_that_never_attached_ends_with_its_lease(heard: bool) -> None:
    driver = Driver([sharded_group(8, 0)], Limits(session_ttl_ns=100 * MS, ticket_grace_ns=10 * MS))
    layouts = tuple(c.layout.fingerprint for chain in driver.specs[0].chains for c in chain.classes)
    epoch = driver.apply(RegisterEngine("e", "p", b"", 16, 64, layouts, 8)).epoch
    driver.apply(Tick(), passes=60 * MS)
    if heard:
        driver.apply(Step("e", epoch, 1))
    assert not driver.node.idle(Tick(), driver.now + 200 * MS)
    driver.apply(Tick(), passes=60 * MS)
    assert ("e" in driver.node.state.engines) is heard
    driver.apply(Tick(), passes=60 * MS)
    assert driver.node.state.engines == {}, "no new work was needed for it"
    assert isinstance(driver.apply(AttachRank("e", epoch, 0, 0)), StaleEpoch)


def test_an_attached_engine_is_never_thrown_out_for_being_idle() -> None:
    driver = Driver([sharded_group(8, 0)], Limits(session_ttl_ns=100 * MS))
    client = Client(driver, "p")
    driver.apply(Tick(), passes=100_000 * MS)
    assert client.open(1, SPAN, "a").state == "runnable"
    driver.leave(client)


def test_a_floor_holds_on_the_host_too() -> None:
    driver, a, b = two(4, TenantSpec("a", floor=0.5), TenantSpec("b"), host_pages=8)
    for number in range(12):
        a.serve(number, SPAN, f"a{number}")
    assert holds(driver, "a", "p/host") == 8
    for number in range(12):
        b.serve(number, SPAN, f"b{number}")
        assert holds(driver, "a", "p/host") >= 4
    assert holds(driver, "b", "p/host") > 0
    driver.leave(a, b)
