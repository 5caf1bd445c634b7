"""BL-01: a client aborts while bytes are on their way into its pages.

Seen elsewhere: the destination pages were freed at once, and the next request read what the late write left.
"""

from dataclasses import replace

import numpy as np
import pytest

from kvmanager.core.events import Closing, CopyOutcome, MoverGone, TicketInfo
from kvmanager.core.pool import PageState
from kvmanager.errors import PoolExhausted
from tests.sim.bytes_driver import pattern, start
from tests.sim.driver import Client, Driver, pages_of, sharded_group

SPAN = 512
TICKET = TicketInfo("t", "peer", 4 * SPAN, 1_000_000)


@pytest.fixture
def driver() -> Driver:
    return Driver([sharded_group(8, 0)])


def test_pages_wait_for_the_write_to_end(driver: Driver) -> None:
    client = Client(driver, "p")
    assert client.open(1, 4 * SPAN, "a", ticket=TICKET).state == "waiting"
    (pull,) = driver.pulls
    target = set(driver.pulls[pull].chains[0].targets[0].spans[0].pages.tolist())
    assert len(target) == 4
    client.close(1, Closing.ABORTED)
    client.run()
    other = client.open(2, 4 * SPAN, "b")
    assert other.state == "runnable"
    assert not set(pages_of(other)) & target
    assert isinstance(client.open(3, 1, "c").error, PoolExhausted)
    driver.end(pull)
    assert client.open(4, 1, "c").state == "runnable"
    free = driver.pages("p/hbm", PageState.FREE)
    driver.end(pull)  # a second report
    assert driver.pages("p/hbm", PageState.FREE) == free
    driver.leave(client)


def test_a_write_of_unknown_fate_keeps_its_pages_until_it_can_not_land(driver: Driver) -> None:
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a", ticket=TICKET)
    client.close(1, Closing.ABORTED)
    driver.end(next(iter(driver.pulls)), CopyOutcome.UNKNOWN_FATE)
    assert driver.pages("p/hbm", PageState.QUARANTINED) == 4
    assert driver.counters["quarantined_copy"] == 4
    assert client.open(2, 5 * SPAN, "b").state == "refused"
    driver.apply(MoverGone())
    assert client.open(3, 5 * SPAN, "b").state == "runnable"
    driver.leave(client)


def test_the_next_request_of_that_id_is_not_woken_by_the_old_write(driver: Driver) -> None:
    """The id is used again at once: the end of the first pull says nothing about the second."""
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a", ticket=TICKET)
    (old,) = driver.pulls
    client.close(1, Closing.ABORTED)
    assert client.open(1, 4 * SPAN, "b", ticket=TicketInfo("u", "peer", 4 * SPAN, 1_000_000)).state == "waiting"
    driver.end(old)
    assert not driver.notices
    assert client.open(2, 4 * SPAN + 1, "b").cached_tokens == 0
    driver.end_all()
    assert driver.notices[-1].ready.state == "runnable"
    driver.leave(client)


def test_bytes_that_arrive_after_the_abort_hurt_nobody() -> None:
    driver, client = start(8, 0)
    client.open(1, 4 * SPAN, "a", ticket=TICKET)
    (pull,) = driver.pulls
    (target,) = driver.pulls[pull].chains[0].targets
    client.close(1, Closing.ABORTED)
    other = client.open(2, 4 * SPAN, "b")
    client.write(other, "b", 0, 4 * SPAN)
    (spans,) = target.spans
    entries = spans.rows(client.layout.page_rows, 0, target.end)
    rows = replace(entries, page=spans.pages[entries.page])
    driver.memory.fill(client.layout, rows, pattern("late", np.arange(target.end)))
    client.read(other, "b", 4 * SPAN)
    driver.end(pull)
    last = client.open(3, 3 * SPAN, "c")
    client.write(last, "c", 0, 3 * SPAN)
    client.read(last, "c", 3 * SPAN)
    client.read(other, "b", 4 * SPAN)
    driver.leave(client)
