"""BL-17: a ticket is checked before and after its pages are read; the second owner's bytes are never taken."""

import numpy as np

from kvmanager.core.events import AcceptTicket, CheckTicket, Closing, ExportRequestKV, ReleaseTicket, Tick
from kvmanager.errors import InvalidArgument, LeaseExpired, StalePage, UnknownLease
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def exported(pages: int = 8) -> tuple[Driver, Client]:
    driver = Driver([sharded_group(pages, 0)])
    client = Client(driver, "p")
    client.open(1, 2 * SPAN + 5, "a")
    client.commit(1, 2 * SPAN + 5)
    client.run()
    assert driver.apply(ExportRequestKV("e", client.epoch, 1, "t")).committed_tokens == 2 * SPAN + 5
    return driver, client


def test_unknown_used_by_another_and_used_twice() -> None:
    driver, client = exported()
    assert isinstance(driver.apply(AcceptTicket("other", "d")), UnknownLease)
    pages = driver.apply(AcceptTicket("t", "d"))
    assert len(pages.generations) == 3
    assert isinstance(driver.apply(AcceptTicket("t", "d2")), InvalidArgument)
    assert isinstance(driver.apply(ReleaseTicket("t", "d2")), InvalidArgument)
    assert driver.apply(CheckTicket("t", pages.generations)) is None
    assert isinstance(driver.apply(CheckTicket("t", pages.generations + 1)), StalePage)
    assert isinstance(driver.apply(CheckTicket("t", pages.generations[:1])), StalePage)
    assert driver.apply(ReleaseTicket("t", "d")) is None
    assert isinstance(driver.apply(AcceptTicket("t", "d")), UnknownLease)
    driver.leave(client)


def test_the_source_closes_and_is_full_but_the_pages_stay() -> None:
    driver, client = exported()
    pages = driver.apply(AcceptTicket("t", "d"))
    client.close(1, Closing.ABORTED)
    client.run()
    assert client.open(2, 6 * SPAN, "b").state == "refused"
    assert driver.apply(CheckTicket("t", pages.generations)) is None
    driver.apply(ReleaseTicket("t", "d"))
    assert client.open(3, 6 * SPAN, "b").state == "runnable"
    driver.leave(client)


def test_the_lease_ends_while_the_copy_runs() -> None:
    driver, client = exported()
    pages = driver.apply(AcceptTicket("t", "d"))
    client.close(1)
    client.run()
    driver.apply(Tick(), passes=driver.limits.ticket_ttl_ns + 1)
    assert isinstance(driver.apply(CheckTicket("t", pages.generations)), LeaseExpired)
    assert client.open(2, 8 * SPAN, "b").state == "refused", "the grace protects a reader that is late"
    driver.apply(Tick(), passes=driver.limits.ticket_grace_ns)
    assert isinstance(driver.apply(CheckTicket("t", pages.generations)), UnknownLease)
    assert client.open(3, 8 * SPAN, "b").state == "runnable"
    driver.leave(client)


def test_the_same_key_on_the_same_page_has_another_generation() -> None:
    driver, client = exported(3)
    pages = driver.apply(AcceptTicket("t", "d"))
    driver.apply(ReleaseTicket("t", "d"))
    client.close(1)
    client.run()
    client.serve(2, 3 * SPAN, "push")
    client.open(3, 2 * SPAN + 5, "a")
    client.commit(3, 2 * SPAN + 5)
    client.run()
    driver.apply(ExportRequestKV("e", client.epoch, 3, "t2"))
    again = driver.apply(AcceptTicket("t2", "d"))
    old, new = (list(p.spans[0].pages["kv"][0]) for p in (pages, again))
    assert old == new
    assert not np.array_equal(pages.generations, again.generations)
    assert isinstance(driver.apply(CheckTicket("t2", pages.generations)), StalePage)
    driver.leave(client)
