"""BL-03: the first failed copy of a request must not free pages that its other copies still use."""

import itertools

import pytest

from kvmanager.core.events import Closing, CopyOutcome, ExportRequestKV, ReleaseTicket
from kvmanager.core.pool import PageState
from kvmanager.errors import TransferFailed
from tests.sim.driver import Client, Driver
from tests.sim.worlds import Regions, two_chains


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


@pytest.mark.parametrize("first", ["send", "offload"])
def test_a_send_and_an_offload_of_one_request(first: str) -> None:
    """The same pages are read by a ticket's holder and by an offload when the request is aborted."""
    from tests.sim.driver import sharded_group

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
