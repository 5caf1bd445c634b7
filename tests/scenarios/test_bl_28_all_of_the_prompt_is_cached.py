"""BL-28: the last token of a prompt is always computed, and never into a page that others read."""

import pytest

from kvmanager.core.events import Closing, TicketInfo
from kvmanager.core.spans import DEVICE
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


@pytest.mark.parametrize("closed", [False, True], ids=["commits", "closes"])
def test_a_donor_keeps_its_page_until_the_copy_of_it_is_fenced(closed: bool) -> None:
    """The worker may still copy from the donor when its engine says that it is done: who needs the page waits."""
    driver = Driver([sharded_group(4, 0)])
    client = Client(driver, "p")
    client.serve(1, SPAN, "a")
    group = driver.node.state.groups["p"]
    table = group.chains[0].table
    (donor,) = list(table)
    page = int(table.page_list(0, DEVICE, donor)[0])
    taken = int(group.pools["p/hbm"].spaces["kv"].generation[page])

    def others_get_it(request_id: int) -> bool:
        """Whether a request that needs the donor's page, too, gets in."""
        opened = client.open(request_id, 3 * SPAN, f"other {request_id}")
        assert opened.state == "runnable" or "p/hbm" in str(opened.error)
        return opened.state == "runnable"

    opened = client.open(2, SPAN, "a")
    assert opened.cached_tokens == SPAN - ROWS
    assert len(opened.worker_plans) == 1
    assert not others_get_it(3)
    client.commit(2, SPAN - ROWS + 1)
    assert not others_get_it(4), "said to be written, not known to be"
    if closed:
        client.close(2, Closing.ABORTED)
        assert not others_get_it(5)
    client.run(but=(7,))
    assert not others_get_it(6), "one rank has not run its copy"
    assert int(group.pools["p/hbm"].spaces["kv"].generation[page]) == taken
    client.run()
    assert table.pins[donor] == 0
    assert others_get_it(7)
    assert int(group.pools["p/hbm"].spaces["kv"].generation[page]) > taken
    driver.leave(client)
