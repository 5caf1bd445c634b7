"""Two tiers: what is kept in both, what in one, and who goes first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvmanager.core.events import Close, Closing, Trim
from kvmanager.core.eviction import Kinds, Policy, leaf_first_lru, return_cost, return_rate
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE, HOST, NO_OWNER, CopyState
from kvmanager.core.spec import Inclusion, Limits, MissCosts
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def _brought_back(inclusion: Inclusion, host: int = 6) -> tuple[Driver, Client]:
    """Sessions "a" and "b", three spans each, went to the host; "a" came back to the device and runs."""
    driver = Driver([sharded_group(8, host)], Limits(inclusion=inclusion, clean_share=0.0))
    client = Client(driver, "p")
    client.serve(1, 3 * SPAN, "a")
    client.serve(2, 3 * SPAN, "b")
    driver.apply(Trim("p", "p/hbm", 8))
    assert driver.counters["reclaim"] == 6
    assert client.open(3, 3 * SPAN + 1, "a").state == "waiting"
    driver.end_all()
    return driver, client


def _copies(driver: Driver, session_rows: list[int], tier: int) -> list[bool]:
    table = driver.node.state.groups["p"].chains[0].table
    return (table.copies[0, tier, session_rows] == CopyState.READY).tolist()


def _rows(driver: Driver) -> list[int]:
    return driver.node.state.engines["e"].requests[3].chains[0].rows[:3]


def test_exclusive_an_onboard_marks_the_host_copy_and_does_not_drop_it() -> None:
    driver, client = _brought_back(Inclusion.EXCLUSIVE)
    rows = _rows(driver)
    assert _copies(driver, rows, HOST) == [True] * 3
    assert driver.node.state.groups["p"].chains[0].table.redundant[rows].all()
    # Two pages are wanted: "a", the more recent session, gives them, since the device has it.
    driver.apply(Trim("p", "p/host", 2))
    assert _copies(driver, rows, HOST).count(True) == 1
    assert _copies(driver, rows, DEVICE) == [True] * 3
    assert client.open(4, 3 * SPAN + 1, "b").cached_tokens == 3 * SPAN, "nothing was forgotten"
    driver.leave(client)


def test_inclusive_the_least_recent_is_forgotten_instead() -> None:
    driver, client = _brought_back(Inclusion.INCLUSIVE)
    driver.apply(Trim("p", "p/host", 2))
    assert _copies(driver, _rows(driver), HOST) == [True] * 3
    assert driver.counters["host_eviction"] == 2
    assert client.open(4, 3 * SPAN + 1, "b").cached_tokens == SPAN
    driver.leave(client)


@pytest.mark.parametrize(("host", "marked"), [(6, True), (12, False)])
def test_as_needed_asks_the_host_pool(host: int, marked: bool) -> None:
    driver, client = _brought_back(Inclusion.AS_NEEDED, host)
    assert driver.node.state.groups["p"].chains[0].table.redundant[_rows(driver)].all() == marked
    driver.leave(client)


def test_a_host_copy_is_the_last_one_again_once_the_device_copy_has_gone() -> None:
    driver, client = _brought_back(Inclusion.EXCLUSIVE)
    rows = _rows(driver)
    client.close(3)
    client.run()
    driver.apply(Trim("p", "p/hbm", 8))
    assert not driver.node.state.groups["p"].chains[0].table.redundant[rows].any()
    assert _copies(driver, rows, DEVICE) == [False] * 3
    driver.apply(Trim("p", "p/host", 3))
    assert driver.counters["host_eviction"] == 3
    assert client.open(4, 3 * SPAN + 1, "a").cached_tokens == 3 * SPAN
    driver.leave(client)


def test_what_lost_its_redundant_copy_is_written_again_when_the_device_gets_short_of_clean_copies() -> None:
    driver = Driver([sharded_group(8, 6)], Limits(inclusion=Inclusion.EXCLUSIVE, clean_share=0.5))
    client = Client(driver, "p")
    client.serve(1, 3 * SPAN, "a")
    client.serve(2, 3 * SPAN, "b")
    driver.apply(Trim("p", "p/hbm", 8))
    client.open(3, 3 * SPAN + 1, "a")
    driver.end_all()
    driver.apply(Trim("p", "p/host", 3))
    assert not driver.plans, "half of the device is free, which is what should be"
    client.open(4, SPAN, "c")
    (plan,) = driver.plans
    assert driver.plans[plan].total_bytes == 8 * 3_502_592, "one page is lacking"
    driver.end_all()
    assert driver.counters["writeback_again"] == 3
    assert _copies(driver, _rows(driver), HOST) == [True] * 3
    assert not driver.plans
    driver.leave(client)


def test_a_write_back_that_displaces_redundant_copies_comes_to_rest() -> None:
    """Every rewrite uses up a mark, and only an onboard makes one."""
    driver = Driver([sharded_group(12, 6)], Limits(inclusion=Inclusion.EXCLUSIVE, clean_share=0.9))
    client = Client(driver, "p")
    client.serve(1, 6 * SPAN, "a")
    driver.apply(Trim("p", "p/hbm", 12))
    client.serve(2, 6 * SPAN + 1, "a")
    client.serve(3, 5 * SPAN, "b")
    for _ in range(20):
        if not driver.plans:
            break
        driver.end(min(driver.plans))
    assert not driver.plans
    assert driver.pages("p/host", PageState.READY) == 6
    driver.leave(client)


def _kinds(*rows: tuple[int, float, bool, bool, float]) -> Kinds:
    """Rows of (owner, rate, dead, reloadable, seconds a miss costs)."""
    owner, rate, dead, reloadable, cost = zip(*rows, strict=True)
    return Kinds(np.array(owner, np.int32), np.array(dead), np.array(rate), np.array(reloadable), np.array(cost))


def _order(ranks: npt.NDArray[np.int64]) -> list[int]:
    return np.argsort(ranks, kind="stable").tolist()


def test_what_can_be_loaded_again_goes_first_but_not_before_what_hardly_anybody_wants() -> None:
    likely_clean, dead_dirty, unlikely_dirty, likely_dirty, shared_clean, shared_dirty = range(6)
    told = _kinds(
        (1, 0.5, False, True, 0.01),
        (1, 0.5, True, False, 1.0),
        (2, 0.001, False, False, 1.0),
        (3, 0.5, False, False, 1.0),
        (NO_OWNER, 0.0, False, True, 0.01),
        (NO_OWNER, 0.0, False, False, 1.0),
    )
    # Seconds lost: 0.001, 0.005, 0.005, 0.5 / 30, 0.5, and what is shared and nowhere else goes last.
    expected = [unlikely_dirty, likely_clean, shared_clean, dead_dirty, likely_dirty, shared_dirty]
    assert _order(return_cost(told)) == expected
    assert _order(return_rate(told))[:2] == [likely_clean, shared_clean]
    assert set(_order(leaf_first_lru(told))[:2]) == {likely_clean, shared_clean}


@pytest.mark.parametrize(
    ("policy", "reload_s", "kept"), [(return_cost, 1.0, True), (return_cost, 0.001, False), (return_rate, 1.0, False)]
)
def test_a_likely_clean_copy_outlives_a_dead_branch_only_where_loading_is_dear(
    policy: Policy, reload_s: float, kept: bool
) -> None:
    driver = Driver([sharded_group(4, 2)], Limits(miss_costs=MissCosts(reload_s, 1.0)), policy=policy)
    client = Client(driver, "p")
    client.serve(1, 2 * SPAN, "a")
    client.open(2, 2 * SPAN, "over")
    client.commit(2, 2 * SPAN)
    client.step(closes=(Close(2, Closing.FINISHED, "end_turn", session_ends=True),))
    client.run()
    assert not driver.plans, "an ended session is not written"
    client.open(3, 2 * SPAN, "new")
    reloads = client.open(4, SPAN + 1, "a").state == "waiting"
    assert reloads is not kept
    driver.leave(client)
