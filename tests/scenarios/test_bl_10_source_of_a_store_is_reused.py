"""BL-10: a device page is not given away while its offload reads it, whoever asks."""

import pytest

from kvmanager.core.events import CopyOutcome, TicketInfo
from kvmanager.core.spans import HOST, CopyState
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


@pytest.mark.parametrize("path", ["fresh", "import", "grow"])
@pytest.mark.parametrize("outcome", [CopyOutcome.DONE, CopyOutcome.FAILED])
def test_no_path_gets_the_page(path: str, outcome: CopyOutcome) -> None:
    driver = Driver([sharded_group(5, 8)])
    client = Client(driver, "p")
    if path == "grow":
        client.open(9, 1, "g")
    client.open(1, 4 * SPAN, "a")
    client.commit(1, 4 * SPAN)
    client.close(1)
    client.run()
    assert driver.plans
    if path == "grow":
        assert client.commit(9, 1, capacity=2 * SPAN).grown[0].error is not None
    else:
        ticket = TicketInfo("t", "peer", 4 * SPAN, 1_000_000) if path == "import" else None
        assert client.open(2, 4 * SPAN, "b", ticket=ticket).state == "refused"
    driver.end_all(outcome)
    table = driver.node.state.groups["p"].chains[0].table
    on_host = int((table.copies[0, HOST, table.published] == CopyState.READY).sum())
    assert on_host == (4 if outcome is CopyOutcome.DONE else 0), "a failed copy is no copy"
    if path == "grow":
        assert client.commit(9, 1, capacity=2 * SPAN).grown[0].error is None
    else:
        assert client.open(3, 4 * SPAN, "b").state == "runnable"
    driver.end_all()
    driver.leave(client)


@pytest.mark.parametrize("outcome", [CopyOutcome.DONE, CopyOutcome.FAILED])
def test_the_host_copy_holds_the_first_owners_bytes(outcome: CopyOutcome) -> None:
    driver, client = start(4, 8)
    first = client.open(1, 4 * SPAN, "a")
    client.finish(first, 4 * SPAN, "a")
    assert driver.plans, "held"
    assert client.open(2, 4 * SPAN, "b").state == "refused"
    driver.end_all(outcome)
    client.serve(3, 4 * SPAN, "b")
    back = client.open(4, 3 * SPAN + 1, "a")
    assert back.state == ("waiting" if outcome is CopyOutcome.DONE else "runnable")
    assert back.cached_tokens == (3 * SPAN if outcome is CopyOutcome.DONE else 0)
    client.finish(client.ready(back), 3 * SPAN + 1, "a")
    driver.end_all()
    driver.leave(client)
