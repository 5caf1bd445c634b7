"""BL-08: whatever becomes of a request after its match, its pins go with it."""

import pytest

from kvmanager.core.events import Closing
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def cached() -> tuple[Driver, Client]:
    """Ten pages of one prompt on the host, some of them also on the device."""
    driver = Driver([sharded_group(10, 10)])
    client = Client(driver, "p")
    client.serve(1, 10 * SPAN, "old")
    assert driver.counters["offload"] == 10
    return driver, client


def all_old_pages_can_go(driver: Driver, client: Client) -> None:
    driver.end_all()
    assert client.serve(50, 10 * SPAN, "new").state == "runnable"
    assert driver.node.state.groups["p"].chains[0].table.live.sum() == 10
    again = client.open(51, 10 * SPAN + 1, "new")
    assert again.cached_tokens == 10 * SPAN or again.state == "refused"
    driver.leave(client)


def test_a_hit_that_needs_no_load() -> None:
    driver, client = cached()
    assert client.serve(2, 10 * SPAN, "old").cached_tokens >= 9 * SPAN
    all_old_pages_can_go(driver, client)


def test_refused_after_the_match() -> None:
    driver, client = cached()
    for i in range(5):
        assert client.open(2 + i, 11 * SPAN, "old").state == "refused"
    all_old_pages_can_go(driver, client)


@pytest.mark.parametrize("end", ["first", "done"])
def test_aborted_while_loading(end: str) -> None:
    driver, client = cached()
    client.serve(2, 4 * SPAN, "push")  # some device copies of `old` go
    opened = client.open(3, 5 * SPAN, "old")
    waiting = opened.state == "waiting"
    if end == "done":
        driver.end_all()
    client.close(3, Closing.ABORTED)
    client.run()
    assert waiting or opened.state == "runnable"
    all_old_pages_can_go(driver, client)


def test_two_lookups_of_one_prompt() -> None:
    driver, client = cached()
    client.serve(2, 6 * SPAN, "push")
    first, second = client.open(3, 3 * SPAN, "old"), client.open(4, 3 * SPAN, "old")
    assert {first.state, second.state} <= {"waiting", "runnable"}
    driver.end_all()
    client.close(3)
    client.close(4)
    client.run()
    all_old_pages_can_go(driver, client)


def test_one_unpin_too_many_is_an_error_and_no_clamp() -> None:
    driver, client = cached()
    table = driver.node.state.groups["p"].chains[0].table
    client.open(2, 2 * SPAN, "old")
    row = next(row for row in table if table.pins[row])
    table.unpin([row])
    with pytest.raises(AssertionError, match="once too often"):
        table.unpin([row])


def test_one_close_too_many_takes_no_pin_of_another_reader() -> None:
    """X and Y read the same pages, X lets go twice; under pressure Y's bytes are still there."""
    driver, client = start(6, 0)
    client.serve(1, 4 * SPAN, "old")
    client.open(2, 4 * SPAN + 1, "old")
    reader = client.open(3, 4 * SPAN + 1, "old")
    assert reader.cached_tokens == 4 * SPAN
    client.write(reader, "old", 4 * SPAN, 4 * SPAN + 1)
    assert not client.close(2).errors
    client.run()
    assert len(client.close(2).errors) == 1
    assert client.open(5, 2 * SPAN, "push").state == "refused", "Y's pages are no victims"
    push = client.open(6, SPAN, "push")
    client.write(push, "push", 0, SPAN)
    client.read(reader, "old", 4 * SPAN + 1)
    driver.leave(client)
