"""BL-28: the last token of a prompt is always computed, and never into a page that others read."""

import pytest

from kvmanager.core.events import TicketInfo
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, sharded_group

SPAN, ROWS = 512, 64


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 512, 513, 1024, 1025])
@pytest.mark.parametrize("where", ["device", "host"])
def test_all_found(tokens: int, where: str) -> None:
    driver = Driver([sharded_group(8, 16)])
    client = Client(driver, "p")
    client.serve(1, tokens, "a")
    if where == "host":
        client.serve(2, 8 * SPAN, "push")
    again = client.open(3, tokens, "a")
    driver.end_all()
    if again.state == "waiting":
        again = driver.notices[-1].ready
        assert again.state == "runnable"
    usable = (tokens - 1) // ROWS * ROWS
    assert again.cached_tokens <= tokens - 1
    if where == "device":
        assert again.cached_tokens == usable, "hits are by segment, and inside a span they are copied"
        assert len(again.worker_plans) == (1 if usable % SPAN else 0)
    whole = again.cached_tokens // SPAN
    table = driver.node.state.groups["p"].chains[0].table
    own = driver.node.state.engines["e"].requests[3].chains[0].rows[whole:]
    assert (table.pins[own] == 1).all(), "the page that is written has no other reader"
    client.commit(3, tokens)
    client.close(3)
    client.run()
    driver.end_all()
    driver.leave(client)


def test_all_pulled() -> None:
    """A hand-off brings the last token too: nothing is left to compute."""
    driver = Driver([sharded_group(8, 0)])
    client = Client(driver, "p")
    ticket = TicketInfo("t", "peer", 1024, 1_000_000)
    assert client.open(1, 1024, "a", ticket=ticket).state == "waiting"
    driver.end_all()
    assert driver.notices[-1].ready.cached_tokens == 1024
    second = client.open(2, 1024, "a", ticket=TicketInfo("u", "peer", 1024, 1_000_000))
    assert (second.state, second.cached_tokens) == ("runnable", 1024)
    assert driver.abandoned == ["u"], "everything was here already, so the second ticket goes back"
    driver.leave(client)


def test_a_prompt_as_large_as_the_pool_is_served_again() -> None:
    """A donor is held beside the request's own pages: where both do not fit, the donor is done without."""
    driver = Driver([sharded_group(4, 0)])
    client = Client(driver, "p")
    assert client.serve(1, 4 * SPAN, "a").state == "runnable"
    again = client.open(2, 4 * SPAN, "a")
    assert (again.state, again.cached_tokens) == ("runnable", 3 * SPAN)
    driver.leave(client)


@pytest.mark.parametrize("tokens", [1, 512, 513, 1024])
def test_the_row_that_is_computed_again_goes_to_a_page_of_its_own(tokens: int) -> None:
    """Another reader of the same prompt is open, and would see a write into a shared page."""
    driver, client = start(10, 10)
    client.serve(1, tokens, "a")
    reader = client.open(2, tokens, "a")
    client.write(reader, "a", reader.cached_tokens, tokens)
    writer = client.open(3, tokens, "a")
    assert writer.cached_tokens == reader.cached_tokens == (tokens - 1) // ROWS * ROWS
    client.write(writer, "a", writer.cached_tokens, tokens)
    client.read(writer, "a", tokens)
    client.write(writer, "scratch", writer.cached_tokens, tokens)
    client.read(reader, "a", tokens)
    driver.leave(client)
