"""BL-15: a hit whose load failed is not offered again, and a load that never ends holds nobody but its own."""

from kvmanager.core.events import Closing, CopyOutcome
from kvmanager.core.pool import PageState
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def test_one_read_attempt_then_misses() -> None:
    driver = Driver([sharded_group(8, 16)])
    client = Client(driver, "p")
    client.serve(1, 4 * SPAN, "a")
    client.serve(2, 8 * SPAN, "push")
    states = []
    for i in range(6):
        opened = client.open(3 + i, 3 * SPAN + 1, "a")
        states.append((opened.state, opened.cached_tokens))
        driver.end_all(CopyOutcome.FAILED)
        if opened.state == "runnable":
            client.close(3 + i, Closing.ABORTED)
            client.run()
    assert states == [("waiting", 3 * SPAN)] + [("runnable", 0)] * 5
    driver.leave(client)


def test_a_store_that_never_ends_delays_nobody() -> None:
    driver = Driver([sharded_group(8, 8)])
    client = Client(driver, "p")
    client.open(1, 2 * SPAN, "a")
    client.commit(1, 2 * SPAN)
    client.close(1)
    client.run()
    held = list(driver.plans)
    assert held
    second = client.open(2, 2 * SPAN + 1, "a")
    assert (second.state, second.cached_tokens) == ("runnable", 2 * SPAN), "the device copy serves"
    client.commit(2, 2 * SPAN + 1)
    client.close(2)
    client.run()
    for plan in held:
        driver.end(plan, CopyOutcome.UNKNOWN_FATE)
    assert driver.pages("p/host", PageState.QUARANTINED) == 2
    for plan in held:
        driver.end(plan)  # late, and harmless
    assert driver.pages("p/host", PageState.QUARANTINED) == 2
    assert client.serve(3, 2 * SPAN + 1, "a").cached_tokens == 2 * SPAN
    driver.leave(client)
