"""BL-12: a page without a host copy is never dropped as if it had one."""

from kvmanager.core.events import Trim
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def _host_full_of_copies_that_are_read(device: int, host: int) -> tuple[Driver, Client]:
    """A request waits for its bytes: the plan that brings them reads every host page."""
    driver = Driver([sharded_group(device, host)])
    client = Client(driver, "p")
    client.serve(1, host * SPAN, "readers")
    driver.apply(Trim("p", "p/hbm", device))
    assert client.open(2, host * SPAN + 1, "readers").state == "waiting"
    return driver, client


def test_host_full_of_pinned_pages() -> None:
    driver, client = _host_full_of_copies_that_are_read(6, 4)
    client.open(3, SPAN, "dirty")
    client.commit(3, SPAN)
    client.close(3)
    client.run()
    assert driver.counters["offload"] == 4
    client.open(4, SPAN, "more")  # the device is full: what has no host copy must be forgotten
    assert driver.counters["eviction"] == 1
    assert client.open(5, SPAN + 1, "dirty").cached_tokens == 0
    driver.end_all()
    assert driver.counters["onboard"] == 4, "nothing was ever believed to be on the host that was not"
    driver.leave(client)


def test_write_back_blocked_by_pins_goes_on_when_they_go() -> None:
    driver, client = _host_full_of_copies_that_are_read(8, 3)
    client.open(3, 2 * SPAN, "blocked")
    client.commit(3, 2 * SPAN)
    client.close(3)
    client.run()
    assert driver.counters["offload"] == 3
    assert len(driver.plans) == 1
    driver.end_all()
    assert driver.counters["offload"] == 5
    driver.leave(client)


def test_a_hit_is_on_a_tier_that_has_the_bytes() -> None:
    """Two dirty pages, a host full of pinned ones: what is forced out is missed, never served from nowhere."""
    driver, client = start(6, 4)
    client.serve(1, 4 * SPAN, "readers")
    held = client.open(2, 3 * SPAN + 1, "readers")
    assert held.cached_tokens == 3 * SPAN
    client.write(held, "readers", 3 * SPAN, 3 * SPAN + 1)
    for request_id, what in ((3, "dirty"), (4, "more"), (5, "yet more")):
        client.serve(request_id, SPAN, what)
    for request_id, what in ((6, "dirty"), (7, "more"), (8, "yet more")):
        client.serve(request_id, SPAN + 1, what)
    client.read(held, "readers", 3 * SPAN + 1)
    assert driver.counters["eviction"] > 0
    driver.leave(client)
