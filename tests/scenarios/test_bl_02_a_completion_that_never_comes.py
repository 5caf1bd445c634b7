"""BL-02: cancelled transfers whose end is never reported must not shrink the pool for good."""

from kvmanager.core.events import Closing, CopyOutcome, MoverGone, TicketInfo
from kvmanager.core.pool import PageState
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def test_twenty_rounds_of_a_dead_peer() -> None:
    driver = Driver([sharded_group(8, 0)])
    client = Client(driver, "p")
    for round_ in range(20):
        ticket = TicketInfo(f"t{round_}", "peer", 4 * SPAN, 1_000_000)
        assert client.open(1, 4 * SPAN, round_, ticket=ticket).state == "waiting"
        if round_ % 2:
            client.close(1, Closing.ABORTED)
        # The puller's deadline passes; nobody knows what became of the last chunk.
        driver.end(next(iter(driver.pulls)), CopyOutcome.UNKNOWN_FATE)
        assert driver.pages("p/hbm", PageState.QUARANTINED) == 4
        driver.apply(MoverGone())
        assert driver.pages("p/hbm", PageState.FREE) == 8
    assert driver.counters["failed_plan"] == 20
    driver.leave(client)
