"""BL-30: a request is admitted for all its pools and its declared growth, or waits; refusals cost nothing.

Host and HBM together must hold it: here HBM has room for indexers, hot buffers and tails, and little more.
"""

from kvmanager.core.admission import promises_hold
from kvmanager.core.events import TicketInfo
from kvmanager.core.pool import PageState
from tests.sim.driver import Client, Driver, chain_keys
from tests.sim.worlds import Regions, hisparse, sharded

ROWS = 4


def decode(host_pages: int, slabs: int = 20) -> tuple[Driver, Client]:
    driver = Driver([hisparse(Regions({}), "d", slabs, host_pages)])
    return driver, Client(driver, "d")


def test_two_fit_the_host_and_the_third_waits() -> None:
    driver, client = decode(10)
    states = [client.open(i, 3 * ROWS, i, growth=2 * ROWS).state for i in range(3)]
    assert states == ["runnable", "runnable", "refused"]
    for i in range(2):
        keys = chain_keys(i, 5)
        for tokens in range(3 * ROWS, 5 * ROWS + 1):
            new = b"" if tokens == 3 * ROWS else keys[(tokens - 1) // ROWS * 16 : tokens // ROWS * 16]
            reply = client.commit(i, tokens, min(tokens + 1, 5 * ROWS), new)
            assert not reply.errors
            assert all(grown.error is None for grown in reply.grown)
            client.run()
            driver.end_all()
    assert driver.pool("d/host").promised_slabs == 10, "homes of as many resident pages, whose mirrors may be taken"
    client.close(0)
    client.run()
    assert client.open(9, 3 * ROWS, "c", growth=2 * ROWS).state == "runnable"
    driver.leave(client)


def test_a_prompt_longer_than_host_and_hbm_is_refused_for_good() -> None:
    """11 latent pages are 6 slabs of indexer pages and a hot buffer of 2 besides."""
    driver, client = decode(10, slabs=18)
    refused = client.open(1, 11 * ROWS, "a")
    assert (refused.error.pool, refused.error.needed) == ("d/hbm", 11 + 6 + 2)
    assert "make the pool larger or the request shorter" in str(refused.error)
    assert refused.error.retry_after_ns == 0
    driver.leave(client)


def test_fifty_refusals_leave_nothing_behind() -> None:
    driver, client = decode(10)
    client.open(0, 8 * ROWS, "holder")
    for i in range(50):
        assert client.open(1 + i, 9 * ROWS, i).state == "refused"
    assert driver.counters["refusal"] == 50
    client.close(0)
    client.run()
    driver.end_all()
    assert client.open(60, 9 * ROWS, "good").state == "runnable"
    driver.leave(client)


def test_a_prompt_longer_than_the_host_stays_in_hbm_with_what_the_host_lacks() -> None:
    """No host page is needed for a page that stays resident: 40 pages on 30 of the host, and growth to 50."""
    driver, client = decode(30, slabs=70)
    tokens = 40 * ROWS
    assert client.open(1, tokens, "a", growth=10 * ROWS, ticket=TicketInfo("t", "peer", tokens, 1)).state == "waiting"
    driver.end_all()
    keys = chain_keys("a", 50)
    for have in range(tokens, tokens + 10 * ROWS):
        new = keys[(have - 1) // ROWS * 16 : have // ROWS * 16] if have > tokens else b""
        reply = client.commit(1, have, have + 1, new)
        assert not reply.errors
        assert all(grown.error is None for grown in reply.grown)
        client.run()
        driver.end_all()
    assert driver.pool("d/host").promised_slabs <= 30
    driver.leave(client)


def test_pages_that_the_host_has_no_room_for_are_not_pushed_out() -> None:
    """Others press for HBM at every step: what was promised to the first still holds, and its growth never fails."""
    driver, client = decode(30, slabs=90)
    group, tokens = driver.node.state.groups["d"], 40 * ROWS
    assert client.open(1, tokens, "a", growth=10 * ROWS, ticket=TicketInfo("t", "peer", tokens, 1)).state == "waiting"
    driver.end_all()
    keys = chain_keys("a", 50)
    admitted = 0
    for have in range(tokens, tokens + 10 * ROWS):
        number = have + 1
        ticket = TicketInfo(f"t{number}", "peer", 12 * ROWS, 1)
        admitted += client.open(number, 12 * ROWS, number, ticket=ticket).state == "waiting"
        new = keys[(have - 1) // ROWS * 16 : have // ROWS * 16] if have > tokens else b""
        reply = client.commit(1, have, have + 1, new)
        assert all(grown.error is None for grown in reply.grown), reply.grown
        assert promises_hold(group)
        client.run()
        driver.end_all()
    assert admitted > 0
    assert driver.counters["spill"] > 0
    driver.leave(client)


def test_every_pool_of_a_group_counts() -> None:
    """Limits are not taken from the device pool alone, nor from the host's."""
    driver, client = decode(100, slabs=12)
    assert client.open(1, 20 * ROWS, "a").state == "refused", "the engine would write 20 pages of HBM"
    driver = Driver([sharded(Regions({}), "p", 10, 2)])
    client = Client(driver, "p")
    assert client.open(1, 10 * 32, "a").state == "runnable", "an offload pool is no condition"
    assert driver.pages("p/host", PageState.FREE) == 2
    driver.leave(client)


def test_longer_than_the_device_but_not_than_the_host() -> None:
    """Of 152 latent pages few fit the device, all fit the host; 10 more are declared, and there when needed."""
    driver, client = decode(200, slabs=110)
    tokens = 152 * ROWS
    ticket = TicketInfo("t", "peer", tokens, 1_000_000)
    assert client.open(1, tokens, "a", growth=10 * ROWS, ticket=ticket).state == "waiting"
    driver.end_all()
    (ready,) = [notice.ready for notice in driver.notices]
    assert (ready.state, ready.cached_tokens) == ("runnable", tokens)
    device, host = ready.spans[0].pages["latent"]
    assert len(device) == len(host) == 152
    assert ((device >= 0) | (host >= 0)).all()
    keys = chain_keys("a", 162)
    for page in range(153, 163):
        reply = client.commit(1, (page - 1) * ROWS, page * ROWS, keys[(page - 2) * 16 : (page - 1) * 16] * (page > 153))
        assert not reply.errors
        assert all(grown.error is None for grown in reply.grown)
        client.run()
        driver.end_all()
    assert client.open(2, 60 * ROWS, "b", ticket=TicketInfo("u", "peer", 60 * ROWS, 1_000_000)).state == "refused"
    driver.leave(client)
