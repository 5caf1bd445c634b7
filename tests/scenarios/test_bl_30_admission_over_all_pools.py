"""BL-30: a request is admitted for all its pools and its declared growth, or waits; refusals cost nothing."""

from kvmanager.core.pool import PageState
from tests.sim.driver import Client, Driver, chain_keys
from tests.sim.worlds import Regions, hisparse, sharded

ROWS = 4


def decode(host_pages: int, slabs: int = 60) -> tuple[Driver, Client]:
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
    assert driver.pool("d/host").promised_slabs == 0
    client.close(0)
    client.run()
    assert client.open(9, 3 * ROWS, "c", growth=2 * ROWS).state == "runnable"
    driver.leave(client)


def test_a_prompt_longer_than_the_host_is_refused_for_good() -> None:
    driver, client = decode(10)
    refused = client.open(1, 11 * ROWS, "a")
    assert refused.error.needed == 11
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


def test_every_pool_of_a_group_counts() -> None:
    """Limits are not taken from the device pool alone, nor from the host's."""
    driver, client = decode(100, slabs=12)
    assert client.open(1, 20 * ROWS, "a").state == "refused", "the engine would write 20 pages of HBM"
    driver = Driver([sharded(Regions({}), "p", 10, 2)])
    client = Client(driver, "p")
    assert client.open(1, 10 * 32, "a").state == "runnable", "an offload pool is no condition"
    assert driver.pages("p/host", PageState.FREE) == 2
    driver.leave(client)
