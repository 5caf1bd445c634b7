"""Tickets on a request whose prefix is still being onboarded: they name host copies, which stay until they are over."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.core.audit import audit
from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    Closing,
    CopyOutcome,
    Exported,
    ExportRequestKV,
    ReleaseTicket,
    Tick,
    TicketPages,
)
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, CopyState
from kvmanager.core.spec import Limits
from kvmanager.core.verification import ticket_sums
from kvmanager.errors import NotReady, StalePage, TransferFailed
from tests.sim.bytes_driver import BytesClient, BytesDriver, start
from tests.sim.driver import Client, Driver
from tests.sim.worlds import Regions, replicated, two_chains

SPAN = 512
FROM_HOST = Limits(export_from_host=True)


def waiting(
    limits: Limits = FROM_HOST, tokens: int = 3 * SPAN + 7, pages: tuple[int, int] = (4, 12)
) -> tuple[BytesDriver, BytesClient]:
    """Session "a" lies on the host alone, and request 3 waits for its first three spans."""
    driver, client = start(*pages, limits)
    client.serve(1, 3 * SPAN, "a")
    client.serve(2, pages[0] * SPAN, "b")
    assert client.open(3, tokens, "a").state == "waiting"
    return driver, client


def export(driver: Driver, client: Client, expected: int, ticket_id: str = "t") -> object:
    return driver.apply(ExportRequestKV("e", client.epoch, 3, ticket_id, expected))


def accept(driver: Driver, ticket_id: str = "t") -> TicketPages:
    answer = driver.apply(AcceptTicket(ticket_id, "d"))
    assert isinstance(answer, TicketPages), answer
    return answer


def table_of(driver: Driver):
    return driver.node.state.groups["p"].chains[0].table


def test_host_copies_are_read_beside_the_onboard_and_what_follows_on_the_device() -> None:
    driver, client = waiting()
    answer = export(driver, client, 3 * SPAN + 7)
    assert isinstance(answer, Exported)
    assert (answer.committed_tokens, answer.expected_tokens) == (3 * SPAN, 3 * SPAN + 7)
    first = accept(driver)
    device, host = first.spans[0].pages["kv"]
    assert (device == NO_PAGE).all()
    table = table_of(driver)
    rows = [row for row in table if table.host_readers[row]]
    assert sorted(host) == sorted(table.page_lists(0, HOST, np.array(rows)))
    assert not first.final
    assert driver.apply(CheckTicket("t", first.generations)) is None
    driver.end_all()  # all three are on the device now, and read on where the ticket said
    assert (table.copies[0, DEVICE, rows] == CopyState.READY).all()
    client.commit(3, 3 * SPAN + 7)
    client.run()
    last = accept(driver)
    device, host = last.spans[0].pages["kv"]
    assert last.final
    assert (device[:3] == NO_PAGE).all()
    assert (host[:3] != NO_PAGE).all()
    assert (device[3] != NO_PAGE, host[3]) == (True, NO_PAGE)
    assert np.array_equal(last.generations[:3], first.generations)
    client.close(3)
    client.run()
    assert driver.apply(CheckTicket("t", last.generations)) is None
    driver.apply(ReleaseTicket("t", "d"))
    assert not table.host_readers.any()
    driver.leave(client)


def test_what_is_on_the_device_when_the_ticket_takes_it_in_is_read_there() -> None:
    """A mixed chain: two spans came back for another request, the third is on its way."""
    driver, client = start(5, 12, FROM_HOST)
    client.serve(1, 3 * SPAN, "a")
    client.serve(2, 5 * SPAN, "b")
    client.open(4, 2 * SPAN + 1, "a")
    driver.end_all()
    assert client.open(3, 3 * SPAN + 1, "a").state == "waiting"
    assert isinstance(export(driver, client, 3 * SPAN + 1), Exported)
    device, host = accept(driver).spans[0].pages["kv"]
    assert ((device != NO_PAGE).tolist(), (host != NO_PAGE).tolist()) == ([True, True, False], [False, False, True])
    driver.leave(client)


@pytest.mark.parametrize("ended", ["released", "expired"])
def test_a_host_copy_that_is_read_stays_whatever_wants_its_place(ended: str) -> None:
    """Without the reader it would be the first to go: its span is on the device, and the host is full."""
    driver, client = waiting(Limits(export_from_host=True, ticket_ttl_ns=10**9), pages=(6, 9))
    export(driver, client, 3 * SPAN + 7)
    seen = accept(driver)
    host = set(seen.spans[0].pages["kv"][1].tolist())
    driver.end_all()
    client.commit(3, 3 * SPAN + 7)
    client.close(3)
    client.run()

    def press(first: int) -> None:
        for number in range(first, first + 20):
            assert client.serve(number, SPAN, f"c{number}").state == "runnable"

    table = table_of(driver)
    rows = [row for row in table if table.host_readers[row]]
    assert table.redundant[rows].all()
    press(10)
    assert set(table.page_lists(0, HOST, np.array(rows)).tolist()) == host
    assert driver.apply(CheckTicket("t", accept(driver).generations)) is None
    if ended == "released":
        driver.apply(ReleaseTicket("t", "d"))
    else:
        driver.apply(Tick(), passes=10**9 + driver.limits.ticket_grace_ns + 1)
    press(40)
    left = [row for row in rows if table.live[row] and table.copies[0, HOST, row] == CopyState.READY]
    assert len(left) < len(rows), "now they go"
    driver.leave(client)


def test_an_onboard_that_fails_cuts_the_ticket_but_takes_no_page_from_its_reader() -> None:
    driver, client = waiting()
    export(driver, client, 3 * SPAN + 7)
    seen = accept(driver)
    driver.end_all(CopyOutcome.FAILED)
    assert driver.notices[-1].ready is not None
    assert driver.notices[-1].ready.state == "refused"
    assert driver.apply(CheckTicket("t", seen.generations)) is None
    assert isinstance(driver.apply(AcceptTicket("t", "d")), TransferFailed)
    driver.apply(ReleaseTicket("t", "d"))
    driver.leave(client)


def test_a_copy_that_the_onboard_finds_to_be_wrong_is_stale_for_its_reader() -> None:
    driver, client = waiting(Limits(export_from_host=True, checksums=1))
    answer = export(driver, client, 3 * SPAN)
    assert isinstance(answer, Exported)
    seen = accept(driver)
    ((device, host, sums),) = ticket_sums(driver.node.state, "t")
    assert (len(device), host.tolist()) == (0, seen.spans[0].pages["kv"][1].tolist())
    assert sums.shape[:2] == (3, 8), "so the reader finds it out too, before it is told"
    c = driver.node.state.groups["p"].chains[0].spec.classes[0]
    driver.memory.regions[c.host_regions[1]][int(host[1]) * c.page_bytes] ^= 4
    driver.end_all()
    assert driver.counters["bad_copy"] == 1
    assert isinstance(driver.apply(CheckTicket("t", seen.generations)), StalePage)
    assert isinstance(driver.apply(AcceptTicket("t", "d")), StalePage)
    driver.apply(ReleaseTicket("t", "d"))
    driver.leave(client)


def test_where_it_may_not_be_or_nothing_is_there_it_waits() -> None:
    driver, client = waiting(Limits())
    assert isinstance(export(driver, client, 3 * SPAN + 7), NotReady)
    driver.leave(client)
    driver, client = waiting()
    refused = export(driver, client, 0)
    assert isinstance(refused, NotReady), "a ticket on what is computed by now would be one on the prefix alone"
    assert "export_path" in str(refused)
    driver.leave(client)


@pytest.mark.parametrize("kind", ["replicated", "two chains"])
def test_replicated_chains_are_read_on_the_host_too(kind: str) -> None:
    """Page i of them is on the host once, in share i mod N; of several chains all are read, or none."""
    regions = Regions({})
    made = replicated(regions, "p", 6, 30, 2) if kind == "replicated" else two_chains(regions, "p", 4, 16, 2)
    driver = Driver([made], FROM_HOST)
    client = Client(driver, "p")
    rows = made.page_rows
    span = rows if kind == "replicated" else 2 * rows
    client.serve(1, 3 * span, "a")
    client.serve(2, (6 if kind == "replicated" else 4) * span, "b")
    assert client.open(3, 3 * span + 1, "a").state == "waiting"
    answer = export(driver, client, 3 * span + 1)
    assert isinstance(answer, Exported)
    assert answer.committed_tokens == 3 * span
    seen = accept(driver)
    for chain, run in zip(made.chains, seen.spans, strict=True):
        device, host = run.pages[chain.classes[0].name]
        assert ((device == NO_PAGE) != (host == NO_PAGE)).all()
        assert (host != NO_PAGE).any()
    driver.end_all()
    assert driver.apply(CheckTicket("t", seen.generations)) is None
    driver.apply(ReleaseTicket("t", "d"))
    driver.leave(client)


def test_what_the_audit_counts() -> None:
    driver, client = waiting()
    export(driver, client, 3 * SPAN + 7)
    table = table_of(driver)
    row = next(row for row in table if table.host_readers[row])
    table.host_readers[row] += 1
    with pytest.raises(Exception, match="readers on the host of spans"):
        audit(driver.node.state)
    table.host_readers[row] -= 1
    client.close(3, Closing.ABORTED)
    driver.leave(client)
