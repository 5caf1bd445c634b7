"""BL-06: the unused part of an interrupted load is released once, by whichever path comes first."""

import pytest

from kvmanager.core.events import Closing, CopyOutcome, TicketInfo, Trim
from kvmanager.core.pool import PageState
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512
ENDS = {
    "failure": [CopyOutcome.FAILED],
    "stopped early": [CopyOutcome.CANCELLED],
    "failure and a late report": [CopyOutcome.FAILED, CopyOutcome.DONE, CopyOutcome.CANCELLED],
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("abort", ["before", "after", "never"])
def test_ten_pages_of_which_some_arrived(ends: str, abort: str) -> None:
    driver = Driver([sharded_group(16, 0)])
    client = Client(driver, "p")
    client.open(1, 10 * SPAN, "a", ticket=TicketInfo("t", "peer", 10 * SPAN, 1_000_000))
    (pull,) = driver.pulls
    if abort == "before":
        client.close(1, Closing.ABORTED)
        assert driver.pages("p/hbm", PageState.FREE) == 6
    for outcome in ENDS[ends]:
        driver.end(pull, outcome)
    assert driver.pages("p/hbm", PageState.FREE) == 16
    if abort == "after":
        reply = client.close(1, Closing.ABORTED)
        assert len(reply.errors) == 1, "it was refused already"
    assert client.open(2, 16 * SPAN, "b").state == "runnable"
    driver.leave(client)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("abort", ["before", "after", "never"])
def test_six_of_ten_are_kept(ends: str, abort: str) -> None:
    """A load of six spans arrives, that of four more does not: six are kept and right, four are given back once."""
    driver, client = start(16, 16, ranks=2, page_rows=4)
    span = 8
    client.serve(1, 10 * span, "a")
    driver.apply(Trim("p", "p/hbm", 16))
    client.open(2, 6 * span + 1, "a")
    (six,) = driver.plans
    client.open(3, 10 * span + 1, "a")
    (four,) = set(driver.plans) - {six}
    driver.end(six)
    if abort == "before":
        client.close(3, Closing.ABORTED)
    for outcome in ENDS[ends]:
        driver.end(four, outcome)
    if abort == "after":
        assert len(client.close(3, Closing.ABORTED).errors) == 1, "it was refused already"
    client.close(2, Closing.ABORTED)
    client.run()
    assert driver.pages("p/hbm", PageState.FREE) == 10
    assert driver.pages("p/hbm", PageState.READY) == 6
    other = client.open(4, 9 * span, "b")
    client.write(other, "b", 0, 9 * span)
    found = client.open(5, 6 * span + 1, "a")
    assert (found.state, found.cached_tokens) == ("runnable", 6 * span)
    client.finish(found, 6 * span + 1, "a")
    client.read(other, "b", 9 * span)
    client.close(4, Closing.ABORTED)
    client.run()
    driver.leave(client)
