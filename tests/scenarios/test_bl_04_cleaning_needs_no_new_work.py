"""BL-04: expired exports are swept by time alone; a full pool admits no work that could do it."""

from kvmanager.core.events import Closing, ExportRequestKV, Tick
from kvmanager.core.pool import PageState
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def four_exports() -> tuple[Driver, Client]:
    driver = Driver([sharded_group(8, 0)])
    client = Client(driver, "p")
    for i in range(4):
        client.open(i, 2 * SPAN, i)
        client.commit(i, 2 * SPAN)
        client.run()
        driver.apply(ExportRequestKV("e", client.epoch, i, f"t{i}"))
        client.close(i, Closing.FINISHED)
        client.run()
    return driver, client


def test_time_alone_frees_what_nobody_fetched() -> None:
    driver, client = four_exports()
    assert client.open(9, 8 * SPAN, "x").state == "refused"
    driver.apply(Tick(), passes=driver.limits.ticket_ttl_ns)
    assert client.open(10, 8 * SPAN, "x").state == "refused", "the grace is not over"
    driver.apply(Tick(), passes=driver.limits.ticket_grace_ns + 1)
    assert driver.counters["expired_ticket"] == 4
    assert client.open(11, 8 * SPAN, "x").state == "runnable"
    driver.leave(client)


def test_a_client_that_only_asks_is_served_in_the_end() -> None:
    driver, client = four_exports()
    answers = []
    for i in range(12):
        answers.append(client.open(20 + i, 8 * SPAN, "x").state)
        driver.apply(Tick(), passes=driver.limits.ticket_ttl_ns // 8)
        if answers[-1] == "runnable":
            break
    assert answers[0] == "refused"
    assert answers[-1] == "runnable"
    assert driver.counters["refusal"] == len(answers) - 1
    assert driver.pages("p/hbm", PageState.FILLING) == 8
    driver.leave(client)
