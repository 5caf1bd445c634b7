"""Sums of host copies in the core: what is kept, compared, taken out, told and counted."""

import numpy as np
import pytest

from kvmanager.core.audit import audit
from kvmanager.core.events import CheckCopies, Closing, CopyOutcome, MoverGone, PlanEnded
from kvmanager.core.plans import Purpose
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.spec import Limits
from kvmanager.errors import ChecksumMismatch
from tests.sim.bytes_driver import BytesClient, BytesDriver, start
from tests.sim.driver import Client, Driver
from tests.sim.worlds import SOURCE_ORDER, Regions, hisparse

SPAN = 512
ALL = Limits(checksums=1)


def on_the_host(limits: Limits = ALL, spans: int = 3) -> tuple[BytesDriver, BytesClient]:
    """Session "a" of some spans lies on the host alone."""
    driver, client = start(4, 12, limits)
    client.serve(1, spans * SPAN, "a")
    client.serve(2, 4 * SPAN, "b")
    table = driver.node.state.groups["p"].chains[0].table
    assert (table.copies[0, HOST][table.published] == CopyState.READY).all()
    return driver, client


def row_of(driver: BytesDriver, span: int, what: str = "a") -> int:
    """The span of a session, which was served first ("a") or second."""
    table = driver.node.state.groups["p"].chains[0].table
    rows = [row for row in table if table.first_token[row] == span * SPAN]
    return min(rows, key=lambda row: int(table.uids[row, 0])) if what == "a" else max(rows)


def flip(driver: BytesDriver, row: int, *, section: int = 0, rank: int = 0, at: int = 0) -> int:
    """Flips a bit of the span's host copy; its host page."""
    chain = driver.node.state.groups["p"].chains[0]
    c = chain.spec.classes[0]
    page = int(chain.table.page_list(0, HOST, row)[0])
    region = driver.memory.regions[c.host_regions[rank]]
    region[page * c.page_bytes + c.sections[section].start + at] ^= 4
    return page


@pytest.mark.parametrize("section", [0, 1])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_flipped_bit_on_the_host_is_a_miss_and_never_served(section: int, rank: int) -> None:
    driver, client = on_the_host()
    row = row_of(driver, 1)
    page = flip(driver, row, section=section, rank=rank, at=3)
    assert client.open(3, 3 * SPAN, "a").state == "waiting"
    driver.end_all()
    answer = driver.notices[-1].ready
    assert answer is not None
    assert answer.state == "refused"
    assert isinstance(answer.error, ChecksumMismatch)
    name = ("latent", "indexer")[section]
    for part in (f"page {page}", f"{name} section", f"rank {rank}", "1 of "):
        assert part in str(answer.error)
    assert driver.counters["bad_copy"] == 1
    assert driver.pages("p/host", PageState.QUARANTINED) == 1
    again = client.open(4, 3 * SPAN, "a")
    assert again.cached_tokens == SPAN, "what lies before the bad span is there"
    client.finish(client.ready(again), 3 * SPAN, "a")  # computed again; all bytes are checked
    driver.end_all()
    for number in range(40):  # the page is given to nobody, however much the host is used
        client.serve(10 + number, 4 * SPAN, f"c{number}")
    assert driver.pool("p/host").spaces["kv"].state[page] == PageState.QUARANTINED
    driver.apply(MoverGone())
    assert driver.pool("p/host").spaces["kv"].state[page] == PageState.QUARANTINED, "nor after the mover's end"
    driver.leave(client)


def test_right_copies_are_served_and_counted() -> None:
    driver, client = on_the_host()
    made = driver.counters["summed_page"]
    assert made == 7 * 8, "seven spans, a page on each of eight ranks"
    client.serve(3, 3 * SPAN, "a")
    assert driver.counters["checked_page"] == 3 * 8, "the last one to copy its first slots"
    assert driver.counters["bad_copy"] == 0
    driver.leave(client)


def test_a_bit_that_flips_on_the_way_is_found_too() -> None:
    driver, client = on_the_host()
    assert client.open(3, SPAN + 1, "a").state == "waiting"
    (plan_id,) = driver.plans
    plan = driver.plans[plan_id]
    assert plan.purpose is Purpose.ONBOARD
    driver.move(plan)
    assert plan.sums is not None
    driver.memory.regions[int(plan.sums.regions[-1])][int(plan.sums.offsets[-1])] ^= 1
    driver.plans.pop(plan_id)
    driver.apply(PlanEnded(plan_id, CopyOutcome.DONE, None, driver.sums(plan.sums)))
    answer = driver.notices[-1].ready
    assert answer is not None
    assert isinstance(answer.error, ChecksumMismatch)
    driver.leave(client)


def test_the_source_of_an_offload_counts_not_what_arrived() -> None:
    """What the copy engine wrote wrongly is found when it is loaded, for sums are made of the device's bytes."""
    driver, client = start(4, 12, ALL)
    client.finish(client.open(1, 3 * SPAN, "a"), 3 * SPAN, "a")
    row = row_of(driver, 0)
    for plan_id in list(driver.plans):
        plan = driver.plans.pop(plan_id)
        driver.move(plan)
        flip(driver, row)
        assert plan.sums is not None
        driver.apply(PlanEnded(plan_id, CopyOutcome.DONE, None, driver.sums(plan.sums)))
    client.serve(2, 4 * SPAN, "b")
    assert client.open(3, 3 * SPAN, "a").state == "waiting"
    driver.end_all()
    answer = driver.notices[-1].ready
    assert answer is not None
    assert isinstance(answer.error, ChecksumMismatch)
    driver.leave(client)


def test_off_asks_for_nothing_and_a_sample_is_a_sample() -> None:
    for share, made in ((0, 0), (2, 3 * 8), (1, 7 * 8)):
        driver, client = on_the_host(Limits(checksums=share))
        assert abs(driver.counters["summed_page"] - made) <= (8 if share > 1 else 0)
        client.serve(3, 3 * SPAN, "a")
        assert (driver.counters["checked_page"] > 0) is (share > 0)
        driver.leave(client)


def test_a_load_whose_sums_did_not_come_is_no_load() -> None:
    driver, client = on_the_host()
    assert client.open(3, 3 * SPAN, "a").state == "waiting"
    for plan_id in list(driver.plans):
        driver.plans.pop(plan_id)
        driver.apply(PlanEnded(plan_id, CopyOutcome.DONE))
    assert driver.notices[-1].ready is not None
    assert driver.notices[-1].ready.state == "refused"
    driver.leave(client)


# ------------------------------------------------------------------------------ after a restart


def checked(driver: BytesDriver, spans: int = 100, most_ns: int = 10**12) -> None:
    driver.apply(CheckCopies(spans, most_ns))
    driver.end_all()


def test_a_check_finds_what_lies_on_the_host_alone() -> None:
    driver, client = on_the_host()
    row = row_of(driver, 1)
    flip(driver, row)
    checked(driver)
    assert driver.counters["restart_check"] == 7
    assert driver.counters["bad_copy"] == 1
    assert client.open(3, 3 * SPAN, "a").cached_tokens == SPAN, "not offered any more"
    driver.end_all()
    driver.leave(client)


def test_a_bad_copy_beside_a_good_one_is_written_again() -> None:
    driver, client = start(8, 8, ALL)
    client.serve(1, 3 * SPAN, "a")
    table = driver.node.state.groups["p"].chains[0].table
    row = row_of(driver, 1)
    page = flip(driver, row)
    checked(driver)
    assert driver.counters["bad_copy"] == 1
    assert table.published[row]
    assert (table.copies[0, :, row] == CopyState.READY).all(), "the device's copy was right, and is on the host again"
    assert int(table.page_list(0, HOST, row)[0]) != page
    client.serve(2, 3 * SPAN + 1, "a")
    assert driver.counters["prefix_hit_tokens"] == 3 * SPAN
    driver.leave(client)


def test_a_check_is_bounded_in_number_and_time() -> None:
    driver, client = on_the_host()
    checked(driver, spans=2)
    assert driver.counters["restart_check"] == 2
    driver.apply(CheckCopies(100, 0))
    assert len(driver.plans) == 1, "one plan at a time"
    driver.end_all()
    assert driver.counters["restart_check"] <= 2 + 8, "no other is begun when the time is over"
    checked(driver, spans=0)
    driver.leave(client)


@pytest.mark.parametrize(("promised", "compared"), [(1, 2), (2, 1), (3, 0)])
def test_a_check_keeps_no_page_that_a_request_was_promised(promised: int, compared: int) -> None:
    """Growth takes the place of clean device copies while the host copies beside them are being read."""
    driver, client = start(4, 12, ALL)
    client.serve(1, 3 * SPAN, "a")
    assert client.open(2, SPAN, "b", growth=promised * SPAN).state == "runnable"
    assert driver.pool("p/hbm").promised_slabs == promised
    driver.apply(CheckCopies(100, 10**12))
    assert len(driver.plans) == (compared > 0), "it still runs when the request grows"
    (grown,) = client.commit(2, SPAN, capacity=(1 + promised) * SPAN).grown
    assert grown.error is None
    driver.end_all()
    assert driver.counters["restart_check"] == compared
    assert not driver.node.state.checks
    driver.leave(client)


def test_a_check_that_fails_proves_nothing() -> None:
    driver, client = on_the_host()
    flip(driver, row_of(driver, 0))
    driver.apply(CheckCopies(100, 10**12))
    driver.end_all(CopyOutcome.FAILED)
    assert driver.counters["bad_copy"] == 0
    assert not driver.node.state.checks
    driver.leave(client)


def test_a_copy_found_bad_while_it_is_loaded_is_told_once() -> None:
    driver, client = on_the_host()
    flip(driver, row_of(driver, 0))
    assert client.open(3, SPAN + 1, "a").state == "waiting"
    (load,) = driver.plans
    driver.apply(CheckCopies(100, 10**12))
    check = next(plan_id for plan_id in driver.plans if plan_id != load)
    driver.end(check)
    audit(driver.node.state)
    driver.end_all()
    answer = driver.notices[-1].ready
    assert answer is not None
    assert isinstance(answer.error, ChecksumMismatch)
    assert driver.counters["bad_copy"] == 1
    assert driver.pages("p/host", PageState.QUARANTINED) == 1
    driver.leave(client)


def test_sums_of_a_page_with_other_content_are_not_used() -> None:
    """A page that is taken again has no sums until its own are made, also where those of before lie beside it."""
    driver, client = on_the_host()
    chain = driver.node.state.groups["p"].chains[0]
    space = driver.pool("p/host").spaces["kv"]
    used = np.flatnonzero(chain.sums[0].generations)
    assert chain.sums[0].known(used, space.generation[used]).all()
    space.generation[used] += 1
    assert not chain.sums[0].known(used, space.generation[used]).any()
    space.generation[used] -= 1
    assert (chain.table.copies[0, DEVICE, row_of(driver, 0)]) == CopyState.ABSENT
    driver.leave(client)


def test_several_bad_copies_in_one_plan_that_nobody_waits_for_any_more() -> None:
    """The first one takes the spans below it out of the index: their pages must not be free before they are known."""
    driver, client = on_the_host()
    pages = [flip(driver, row_of(driver, span)) for span in range(2)]
    assert client.open(3, 3 * SPAN, "a").state == "waiting"
    client.close(3, Closing.ABORTED)
    client.run()
    driver.end_all()
    assert driver.counters["bad_copy"] == 2
    assert (driver.pool("p/host").spaces["kv"].state[pages] == PageState.QUARANTINED).all()
    driver.leave(client)


def test_several_bad_copies_in_one_check() -> None:
    driver, client = on_the_host()
    pages = [flip(driver, row_of(driver, span)) for span in range(3)]
    checked(driver)
    assert driver.counters["bad_copy"] == 3
    assert (driver.pool("p/host").spaces["kv"].state[pages] == PageState.QUARANTINED).all()
    assert client.open(3, 3 * SPAN, "a").cached_tokens == 0
    driver.end_all()
    driver.leave(client)


def test_a_bad_mirror_of_a_resident_span_is_written_anew() -> None:
    """Its nine latent pages and nine indexer pages: nobody was told where they are, since nobody reads them there."""
    driver, client = mirrored(40)
    table = driver.node.state.groups["d"].chains[0].table
    held = [set(table.page_lists(c, HOST, table.rows()[:9]).tolist()) for c in (0, 1)]
    wrong_check(driver)
    assert driver.counters["bad_copy"] == 18
    driver.end_all()
    for c in (0, 1):
        again = table.page_lists(c, HOST, table.rows()[:9]).tolist()
        assert len(again) == 9
        assert held[c].isdisjoint(again), "other pages of the host"
    spaces = driver.pool("d/host").spaces
    assert [spaces[c].counts[PageState.QUARANTINED] for c in ("latent", "indexer")] == [9, 9]
    driver.leave(client)


def test_a_request_that_reads_a_bad_copy_on_the_host_has_failed() -> None:
    driver, client = mirrored(20)
    client.open(2, 30, "b")  # pressure: the first one's pages leave the device, tail first
    for _ in range(4):
        client.step()
        client.run()
        driver.end_all()
    table = driver.node.state.groups["d"].chains[0].table
    gone = int(((table.copies[0, DEVICE] == CopyState.ABSENT) & table.live).sum())
    assert gone > 0, driver.counters
    seen = len(driver.notices)
    wrong_check(driver)
    told = [notice.failed for notice in driver.notices[seen:] if notice.failed]
    assert {failed.request_id for failed in told} == {1}
    assert isinstance(told[0].error, ChecksumMismatch)
    driver.leave(client)
    assert driver.pages("d/host", PageState.QUARANTINED) > 0


def mirrored(slabs: int) -> tuple[Driver, Client]:
    """A running request of a decode rank whose nine sealed spans have mirrors with sums."""
    driver = Driver([hisparse(Regions({}), "d", slabs, 200, SOURCE_ORDER, 2)], ALL)
    client = Client(driver, "d")
    client.open(1, 37, "a", growth=8)
    client.commit(1, 37, capacity=40)
    client.run()
    driver.end_all()
    return driver, client


def wrong_check(driver: Driver) -> None:
    """All that is checked after a restart is wrong."""
    driver.apply(CheckCopies(100, 10**12))
    while checks := [plan for plan in driver.plans.values() if plan.purpose is Purpose.CHECK]:
        plan = driver.plans.pop(checks[0].plan_id)
        assert plan.sums is not None
        driver.apply(PlanEnded(plan.plan_id, CopyOutcome.DONE, None, driver.sums(plan.sums) + np.uint64(1)))
