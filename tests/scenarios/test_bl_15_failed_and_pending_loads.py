"""BL-15: a hit whose load failed is not offered again, and a load that never ends holds nobody but its own."""

from kvmanager.core.events import Closing, CopyOutcome
from kvmanager.core.pool import PageState
from tests.sim.bytes_driver import start

ROWS, RANKS = 4, 2
SPAN = ROWS * RANKS


def test_one_read_attempt_then_misses() -> None:
    driver, client = start(8, 16, ranks=RANKS, page_rows=ROWS)
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
    assert client.serve(9, 3 * SPAN + 1, "a").cached_tokens == 0
    assert client.serve(10, 3 * SPAN + 1, "a").cached_tokens == 3 * SPAN, "computed again, found again, and right"
    driver.leave(client)


def test_a_store_that_never_ends_delays_nobody() -> None:
    driver, client = start(8, 8, ranks=RANKS, page_rows=ROWS)
    client.write(client.open(1, 2 * SPAN, "a"), "a", 0, 2 * SPAN)
    client.commit(1, 2 * SPAN)
    client.close(1)
    client.run()
    held = list(driver.plans)
    assert held
    second = client.open(2, 2 * SPAN + 1, "a")
    assert (second.state, second.cached_tokens) == ("runnable", 2 * SPAN), "the device copy serves"
    client.read(second, "a", 2 * SPAN)
    client.write(second, "a", 2 * SPAN, 2 * SPAN + 1)
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
