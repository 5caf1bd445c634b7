"""BL-11: a preempted request comes back while its store is still in flight."""

from kvmanager.core.events import Closing
from tests.sim.bytes_driver import start
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


def test_the_bytes_are_right_after_all() -> None:
    driver, client = start(8, 16)
    tokens = 3 * SPAN + 10
    first = client.open(1, tokens, "a")
    client.finish(first, tokens, "a")
    again = client.open(1, tokens, "a")
    client.write(again, "a", again.cached_tokens, tokens)
    driver.end_all()
    client.read(again, "a", tokens)
    client.commit(1, tokens)
    client.close(1)
    client.run()
    driver.end_all()
    client.serve(2, 8 * SPAN, "push")
    assert client.serve(3, tokens, "a").cached_tokens == 3 * SPAN, "from the host, and right"
    driver.leave(client)
