"""BL-14: a failed copy is told as failed, and nothing is ever served from its target."""

import pytest

from kvmanager.core.events import CopyOutcome
from kvmanager.core.pool import PageState
from kvmanager.errors import TransferFailed
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


@pytest.mark.parametrize("outcome", [CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE])
def test_an_onboard_that_fails(outcome: CopyOutcome) -> None:
    driver = Driver([sharded_group(8, 16)])
    client = Client(driver, "p")
    client.serve(1, 4 * SPAN, "a")
    client.serve(2, 8 * SPAN, "push")
    assert client.open(3, 4 * SPAN + 1, "a").state == "waiting"
    assert client.open(4, 4 * SPAN + 1, "a").state == "waiting", "a second request waits for the same copy"
    assert len(driver.plans) == 1
    driver.end(next(iter(driver.plans)), outcome, TransferFailed("page 2"))
    told = [notice.ready for notice in driver.notices]
    assert [(ready.request_id, ready.state) for ready in told] == [(3, "refused"), (4, "refused")]
    assert all("page 2" in str(ready.error) for ready in told)
    assert driver.counters["failed_plan"] == 1
    quarantined = 4 if outcome is CopyOutcome.UNKNOWN_FATE else 0
    assert driver.pages("p/hbm", PageState.QUARANTINED) == quarantined
    assert driver.counters["onboard"] == 0
    again = client.open(5, 3 * SPAN, "a")
    assert (again.state, again.cached_tokens) == ("runnable", 0)
    driver.leave(client)


def test_a_copy_that_was_never_tried_costs_no_cache() -> None:
    driver = Driver([sharded_group(8, 16)])
    client = Client(driver, "p")
    client.serve(1, 4 * SPAN, "a")
    client.serve(2, 8 * SPAN, "push")
    client.open(3, 4 * SPAN + 1, "a")
    driver.end_all(CopyOutcome.CANCELLED)
    assert driver.notices[-1].ready.state == "refused"
    again = client.open(4, 4 * SPAN + 1, "a")
    assert (again.state, again.cached_tokens) == ("waiting", 4 * SPAN)
    driver.end_all()
    driver.leave(client)


def test_an_offload_that_fails() -> None:
    driver = Driver([sharded_group(4, 8)])
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a")
    client.commit(1, 4 * SPAN)
    client.close(1)
    client.run()
    driver.end_all(CopyOutcome.FAILED)
    assert driver.pages("p/host", PageState.FREE) == 8
    client.serve(2, 4 * SPAN, "push")
    assert client.open(3, 2 * SPAN, "a").cached_tokens == 0
    driver.leave(client)


@pytest.mark.parametrize("outcome", [CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE, CopyOutcome.CANCELLED])
def test_nothing_is_served_from_the_target_of_a_failed_copy(outcome: CopyOutcome) -> None:
    """The target held another request's rows before; whoever asks next gets right bytes all the same."""
    driver, client = start(10, 20)
    client.serve(1, 4 * SPAN, "a")
    client.serve(2, 10 * SPAN, "another")
    waiting = client.open(3, 4 * SPAN + 1, "a")
    assert waiting.state == "waiting"
    (plan,) = driver.plans
    driver.end(plan, outcome)
    assert driver.notices[-1].ready.state == "refused"
    again = client.serve(4, 4 * SPAN + 1, "a")
    assert again.cached_tokens == (4 * SPAN if outcome is CopyOutcome.CANCELLED else 0)
    driver.leave(client)
