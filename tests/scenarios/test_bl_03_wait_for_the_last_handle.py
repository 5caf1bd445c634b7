"""BL-03: the first failed copy of a request must not free pages that its other copies still use."""

import itertools
import random

import pytest

from kvmanager.core.events import Closing, CopyOutcome, ExportRequestKV, Opened, ReleaseTicket, Trim
from kvmanager.core.pool import PageState
from kvmanager.errors import TransferFailed
from tests.sim.bytes_driver import BytesClient, BytesDriver, start
from tests.sim.driver import Client, Driver, sharded_group
from tests.sim.worlds import Regions, two_chains

ROWS, RANKS = 4, 2
SPAN = ROWS * RANKS


def two_loads() -> tuple[Driver, Client]:
    """A request that waits for two onboards: one a chain."""
    driver = Driver([two_chains(Regions({}), "g", 4, 16)])
    client = Client(driver, "g")
    client.serve(1, 33, "a")
    for i in range(3):
        client.serve(2 + i, 33, f"push{i}")
    assert client.open(9, 34, "a").state == "waiting"
    assert len(driver.plans) == 2
    return driver, client


@pytest.mark.parametrize("order", list(itertools.permutations(range(2))))
def test_failed_at_once_freed_at_the_end(order: tuple[int, ...]) -> None:
    driver, client = two_loads()
    plans = list(driver.plans)
    driver.end(plans[order[0]], CopyOutcome.FAILED, TransferFailed("handle 3"))
    refused = driver.notices[-1].ready
    assert refused.state == "refused"
    assert "handle 3" in str(refused.error)
    busy = sum(int(chain.table.busy.sum()) for chain in driver.node.state.groups["g"].chains)
    assert busy > 0, "the other copy still runs into its pages"
    filling = sum(driver.pages(pool, PageState.FILLING) for pool in ("g/hbm", "g/draft-hbm"))
    assert filling > 0
    count = len(driver.notices)
    driver.end(plans[order[1]])
    assert len(driver.notices) == count, "it was answered already"
    driver.leave(client)


def eight_loads() -> tuple[BytesDriver, BytesClient, list[Opened]]:
    """Eight requests, each a span longer than the one before: the last waits for eight loads, one of them its own."""
    driver, client = start(24, 16, ranks=RANKS, page_rows=ROWS)
    client.serve(0, 8 * SPAN, "a")
    driver.apply(Trim("p", "p/hbm", 24))
    opened = [client.open(k, k * SPAN + 1, "a") for k in range(1, 9)]
    assert {answer.state for answer in opened} == {"waiting"}
    assert len(driver.plans) == 8
    return driver, client, opened


def answers(driver: BytesDriver, state: str) -> dict[int, Opened]:
    """What waiting requests were told so far, by request."""
    return {n.ready.request_id: n.ready for n in driver.notices if n.ready is not None and n.ready.state == state}


@pytest.mark.parametrize("seed", range(6))
def test_the_third_of_eight_handles_fails_first(seed: int) -> None:
    """No page of the seven others is given away before its bytes have landed; what landed is served."""
    driver, client, _ = eight_loads()
    plans = sorted(driver.plans)
    driver.end(plans[2], CopyOutcome.FAILED, TransferFailed("handle 3"))
    refused = answers(driver, "refused")
    assert sorted(refused) == [3, 4, 5, 6, 7, 8], "all that need the third span, at once"
    assert all("handle 3" in str(answer.error) for answer in refused.values())
    free = driver.pages("p/hbm", PageState.FREE)
    assert free == 24 - 7 - 2, "seven targets, and the tails of the two requests that go on waiting"
    other = client.open(20, free * SPAN, "b")
    client.write(other, "b", 0, free * SPAN)
    rest = [plan for plan in plans if plan != plans[2]]
    random.Random(seed).shuffle(rest)
    for plan in rest:
        driver.end(plan)
        client.read(other, "b", free * SPAN)  # nothing landed in what it was given
    assert driver.pages("p/hbm", PageState.FREE) == 5, "the targets of loads 4 to 8, freed once"
    for k, answer in answers(driver, "runnable").items():
        assert k in (1, 2)
        client.finish(answer, k * SPAN + 1, "a")
    client.close(20)
    client.run()
    driver.leave(client)


@pytest.mark.parametrize("order", ["SR", "RS"])
def test_a_send_and_a_receive_and_then_an_abort(order: str) -> None:
    """A ticket's holder reads two spans while a load brings the third of the request that is aborted."""
    driver, client = start(8, 8, ranks=RANKS, page_rows=ROWS)
    client.serve(1, 3 * SPAN, "a")
    driver.apply(Trim("p", "p/hbm", 8))
    sender = client.ready(client.open(2, 2 * SPAN + 1, "a"))
    client.write(sender, "a", 2 * SPAN, 2 * SPAN + 1)
    client.commit(2, 2 * SPAN + 1)
    client.run()
    driver.apply(ExportRequestKV("e", client.epoch, 2, "t"))
    client.close(2)
    assert client.open(3, 3 * SPAN + 1, "a").state == "waiting"
    client.close(3, Closing.ABORTED)
    client.run()
    free = driver.pages("p/hbm", PageState.FREE)
    assert free == 8 - 3 - 1, "two spans and a tail are sent, and one is being loaded"
    other = client.open(4, free * SPAN, "b")
    client.write(other, "b", 0, free * SPAN)

    def send() -> None:
        client.read(sender, "a", 2 * SPAN + 1)
        driver.apply(ReleaseTicket("t", ""))

    for end in (send, driver.end_all) if order == "SR" else (driver.end_all, send):
        assert client.open(5, 8 * SPAN, "c").state == "refused", "four pages are being read or written, four are used"
        end()
        client.read(other, "b", free * SPAN)
    client.close(4, Closing.ABORTED)
    client.run()
    assert client.serve(6, 8 * SPAN, "c").state == "runnable"
    driver.leave(client)


@pytest.mark.parametrize("first", ["send", "offload"])
def test_a_send_and_an_offload_of_one_request(first: str) -> None:
    """The same pages are read by a ticket's holder and by an offload when the request is aborted."""
    driver = Driver([sharded_group(8, 8)])
    client = Client(driver, "p")
    client.open(1, 1024, "a")
    client.commit(1, 1024)
    client.run()
    driver.apply(ExportRequestKV("e", client.epoch, 1, "t"))
    client.close(1, Closing.ABORTED)
    client.run()
    table = driver.node.state.groups["p"].chains[0].table
    assert table.pins.max() == 1
    assert table.busy.max() == 1

    def send() -> None:
        driver.apply(ReleaseTicket("t", ""))

    for end in (send, driver.end_all) if first == "send" else (driver.end_all, send):
        assert client.open(2, 8 * 512, "b").state == "refused", "both spans are still being read"
        end()
    assert client.open(3, 8 * 512, "b").state == "runnable"
    driver.leave(client)
