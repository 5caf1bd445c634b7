"""BL-06: the unused part of an interrupted load is released once, by whichever path comes first."""

import pytest

from kvmanager.core.events import Closing, CopyOutcome, TicketInfo
from kvmanager.core.pool import PageState
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
