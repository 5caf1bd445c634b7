"""BL-11: a preempted request comes back while its store is still in flight."""

from kvmanager.core.events import Closing
from tests.sim.driver import Client, Driver, pages_of, sharded_group

SPAN = 512


def test_store_and_load_never_meet() -> None:
    driver = Driver([sharded_group(8, 8)])
    client = Client(driver, "p")
    first = client.open(1, 3 * SPAN + 10, "a")
    client.commit(1, 3 * SPAN + 10)
    client.close(1, Closing.ABORTED)
    client.run()
    stores = list(driver.plans)
    assert stores
    again = client.open(1, 3 * SPAN + 10, "a")
    assert again.state == "runnable", "its device pages are still there, so nothing is loaded"
    assert again.cached_tokens == 3 * SPAN
    assert pages_of(again)[:3] == pages_of(first)[:3]
    assert list(driver.plans) == stores
    driver.end_all()
    client.commit(1, 3 * SPAN + 10)
    client.run()
    driver.leave(client)
