"""Promises kept and refusals explained: growth, truncation, overbooking, what a refused request is told."""

import pytest

from kvmanager.core.events import ExportRequestKV, TicketInfo
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits
from kvmanager.errors import PoolExhausted
from tests.sim.driver import Client, Driver, chain_keys, sharded_group
from tests.sim.worlds import Regions, hisparse

SPAN = 512
MS = 1_000_000


def node(pages: int = 8, host_pages: int = 16, **limits: object) -> tuple[Driver, Client]:
    driver = Driver([sharded_group(pages, host_pages)], Limits(**limits))  # type: ignore[arg-type]
    return driver, Client(driver, "p")


@pytest.mark.parametrize("capacity", [9 * SPAN, 1 << 40, 1 << 62])
def test_growth_beyond_all_there_is_costs_nobody_a_page(capacity: int) -> None:
    driver, client = node()
    client.serve(1, 4 * SPAN, "cached")
    client.open(2, SPAN, "a", growth=SPAN)
    cached = driver.pages("p/hbm", PageState.READY)
    grown = client.commit(2, SPAN, capacity=capacity).grown[0]
    assert isinstance(grown.error, PoolExhausted)
    assert grown.spans_kept == 2, "what was promised, and no more"
    assert driver.pages("p/hbm", PageState.READY) == cached == 4
    assert driver.counters["eviction"] == driver.counters["reclaim"] == 0
    assert client.open(3, 4 * SPAN + 1, "cached").cached_tokens == 4 * SPAN
    driver.leave(client)


def test_what_a_request_gave_up_is_its_own_until_the_fence() -> None:
    """Drafts were rejected and the pages drain; the next growth has them again, and nobody else in between."""
    driver, client = node(4)
    client.open(1, SPAN, "a", growth=2 * SPAN)
    client.open(2, SPAN, "b")
    first = client.commit(1, SPAN, capacity=3 * SPAN).grown[0].spans[0].pages["kv"][0].tolist()
    client.commit(1, SPAN, capacity=SPAN)
    assert driver.pages("p/hbm", PageState.DRAINING) == 2
    assert client.open(3, 1, "c").state == "refused"
    again = client.commit(1, SPAN, capacity=3 * SPAN).grown[0]
    assert again.error is None
    assert again.spans[0].pages["kv"][0].tolist() == first
    assert driver.pages("p/hbm", PageState.DRAINING) == 0
    client.run()  # the fence of the truncation passes, and must not free what was taken back
    assert driver.pages("p/hbm", PageState.FREE) == 0
    client.commit(1, SPAN, capacity=SPAN)
    client.run()
    assert driver.pages("p/hbm", PageState.FREE) == 2
    driver.leave(client)


def test_overbooked_growth_may_fail_and_stepping_back_helps() -> None:
    driver, client = node(8, overcommit=1.5)
    assert client.open(1, 3 * SPAN, "a", growth=3 * SPAN).state == "runnable"
    assert client.open(2, 3 * SPAN, "b", growth=3 * SPAN).state == "runnable", "12 of 8 pages: half as many again"
    assert client.open(3, 1, "c").state == "refused"
    keys = {what: chain_keys(what, 48) for what in ("a", "b")}
    assert client.commit(1, 3 * SPAN, capacity=5 * SPAN).grown[0].error is None
    refused = client.commit(2, 3 * SPAN, capacity=4 * SPAN).grown[0]
    assert (refused.error.needed, refused.error.free) == (1, 0)
    assert refused.spans_kept == 3
    # The younger one steps back; what it computed stays found, so nothing is lost.
    client.run()
    client.close(2)
    client.run()
    driver.end_all()
    client.commit(1, 5 * SPAN, 6 * SPAN, keys["a"][24 * 16 : 40 * 16])
    assert client.commit(1, 6 * SPAN, 6 * SPAN, keys["a"][40 * 16 : 48 * 16]).errors == ()
    client.close(1)
    client.run()
    driver.end_all()
    again = client.open(4, 3 * SPAN + 1, "b", growth=3 * SPAN - 1)
    assert again.cached_tokens == 3 * SPAN
    driver.leave(client)


def test_a_refusal_names_pool_need_free_holders_and_when_to_come_back() -> None:
    driver, client = node(8, retry_after_ns=MS)
    client.open(1, 5 * SPAN, "a")
    client.open(2, 2 * SPAN, "b")
    error = client.open(3, 3 * SPAN, "c").error
    assert (error.pool, error.needed, error.free) == ("p/hbm", 3, 1)
    assert error.holder == "e/1 (5 pages), e/2 (2 pages)"
    assert error.retry_after_ns == MS, "nothing is known yet of how long things take here"
    driver.leave(client)


def test_the_retry_time_follows_what_will_free_the_pages() -> None:
    driver, client = node(8, retry_after_ns=MS, ticket_ttl_ns=900 * MS, ticket_grace_ns=100 * MS)
    # A message's work takes 50 ms here, and a request 70 ms.
    client.open(1, 8 * SPAN, "a")
    client.commit(1, 8 * SPAN)
    driver.now += 50 * MS
    client.run()
    driver.end_all()
    driver.apply(ExportRequestKV("e", client.epoch, 1, "t"))
    driver.now += 20 * MS
    client.close(1)
    wait = client.open(2, SPAN, "b").error.retry_after_ns
    assert 850 * MS < wait < 1000 * MS, "the ticket keeps all pages beyond the request's end: lease and grace"
    driver.leave(client)
    driver, client = node(8, retry_after_ns=MS)
    client.open(1, 8 * SPAN, "a")
    client.commit(1, 8 * SPAN)
    driver.now += 50 * MS
    client.run()
    driver.end_all()
    client.step()
    client.close(1)
    wait = client.open(2, SPAN, "b").error.retry_after_ns
    assert 50 * MS <= wait < 60 * MS, "the fence of the close is pending, and fences take that long"
    driver.leave(client)


def test_a_sparse_window_is_promised_and_kept() -> None:
    """Three requests decode into a device that is full; a page a step, each mirrored and released, none is refused."""
    rows = 4
    driver = Driver([hisparse(Regions({}), "d", 98, 200)])
    client = Client(driver, "d")
    for number in (1, 2, 3):
        ticket = TicketInfo(f"t{number}", "peer", 8 * rows, 1)
        assert client.open(number, 8 * rows, number, growth=30 * rows, ticket=ticket).error is None, number
        driver.end_all()
    for tokens in range(8 * rows, 38 * rows, rows):
        for number in (1, 2, 3):
            keys = chain_keys(number, 38)[tokens // rows * 16 - 16 : tokens // rows * 16] if tokens > 8 * rows else b""
            reply = client.commit(number, tokens, tokens + rows, keys)
            assert not reply.errors
            assert all(grown.error is None for grown in reply.grown), (tokens, number, reply.grown)
            client.run()
            driver.end_all()
    assert driver.counters["spill"] > 0, "there was no room for all of it"
    driver.leave(client)


def test_growth_beyond_a_promise_leaves_what_was_promised_to_others():
    driver = Driver([sharded_group(6, 0)])
    client = Client(driver, "p")
    client.open(1, 512, "a", growth=3 * 512)
    client.open(2, 512, "b")
    client.commit(1, 512)
    (grown,) = client.commit(2, 512, capacity=3 * 512).grown
    assert isinstance(grown.error, PoolExhausted), "two free pages are wanted, and three of four were promised"
    (grown,) = client.commit(2, 512, capacity=2 * 512).grown
    assert grown.error is None
    (grown,) = client.commit(1, 512, capacity=4 * 512).grown
    assert grown.error is None, "inside the promise nothing is refused"
    driver.leave(client)
