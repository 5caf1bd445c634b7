"""Offload: what is copied, in which order, and that it never stops for good."""

import numpy as np

from kvmanager.core.digest import state_digest
from kvmanager.core.endings import plan_ended
from kvmanager.core.events import (
    CheckTicket,
    Close,
    Closing,
    CopyOutcome,
    Drain,
    MoverGone,
    Replied,
    SubmitPlan,
    Tick,
    TimelinesRead,
    Trim,
    TurnEnded,
)
from kvmanager.core.eviction import return_rate
from kvmanager.core.plans import Purpose
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.spec import Limits
from tests.sim.driver import Client, Driver, sharded_group
from tests.sim.worlds import Regions, two_chains

SPAN = 512


def offloaded(driver: Driver) -> list[int]:
    """First tokens of spans with a complete host copy."""
    table = driver.node.state.groups["p"].chains[0].table
    ready = table.live & (table.copies[0, HOST] == CopyState.READY)
    return sorted(table.first_token[ready].tolist())


def test_parents_go_first_and_no_child_is_on_the_host_before_its_parent():
    driver = Driver([sharded_group(16, 16)], Limits(plans_in_flight=1, batch_spans=2))
    client = Client(driver, "p")
    client.open(1, 7 * SPAN, "a")
    client.commit(1, 7 * SPAN)
    client.run()
    seen = []
    while driver.plans:
        assert len(driver.plans) == 1
        driver.end(next(iter(driver.plans)))
        seen.append(offloaded(driver))
    assert seen == [[i * SPAN for i in range(n)] for n in (2, 4, 6, 7)]
    driver.leave(client)


def test_the_limit_of_plans_in_flight():
    driver = Driver([sharded_group(16, 16)], Limits(plans_in_flight=3, batch_spans=1))
    client = Client(driver, "p")
    client.open(1, 8 * SPAN, "a")
    client.commit(1, 8 * SPAN)
    client.run()
    assert len(driver.plans) == 3
    driver.end(max(driver.plans))
    assert len(driver.plans) == 3
    driver.end_all()
    assert driver.counters["offload"] == 8
    driver.leave(client)


def test_a_read_starts_no_copy_for_no_journal_has_it():
    """A replay would not start it: the pages and plan ids of all that follows would be others."""
    driver = Driver([sharded_group(16, 16)], Limits(plans_in_flight=1, batch_spans=1))
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a")
    client.commit(1, 4 * SPAN)
    client.run()
    node, (plan_id,) = driver.node, driver.plans
    plan_ended(node.state, plan_id, CopyOutcome.DONE, None)  # room for the next copy, which an event would start
    node.state.groups["p"].chains[0].table.touched.clear()  # as the end of an event does
    before = state_digest(node.state)
    (effect,) = node.apply(CheckTicket("none", np.zeros(1, np.uint32)), node.state.now)
    assert isinstance(effect, Replied)
    assert state_digest(node.state) == before
    assert any(isinstance(effect, SubmitPlan) for effect in node.apply(Drain("over"), node.state.now))


def test_a_private_twin_is_not_offloaded():
    driver = Driver([sharded_group(16, 16)])
    client = Client(driver, "p")
    client.open(1, 2 * SPAN, "a")
    client.open(2, 2 * SPAN, "a")
    for request in (1, 2):
        client.commit(request, 2 * SPAN)
    client.run()
    driver.end_all()
    assert driver.counters["offload"] == 2
    for request in (1, 2):
        client.close(request)
    client.run()
    assert driver.pages("p/hbm", PageState.READY) == 2
    driver.leave(client)


def test_blocked_write_back_goes_on_by_itself():
    """The host is full of copies in flight; as they end, room comes from spans that the device holds too."""
    driver = Driver([sharded_group(16, 2)], Limits(batch_spans=1, plans_in_flight=3))
    client = Client(driver, "p")
    client.open(1, 2 * SPAN, "a")
    client.commit(1, 2 * SPAN)
    client.run()
    assert len(driver.plans) == 2
    client.open(2, 2 * SPAN, "b")
    client.commit(2, 2 * SPAN)
    client.run()
    assert len(driver.plans) == 2
    assert driver.node.state.groups["p"].blocked == {0}
    driver.apply(Tick())
    assert len(driver.plans) == 2
    driver.end(min(driver.plans))
    assert len(driver.plans) == 2
    driver.end_all()
    assert driver.counters["offload"] == 4
    assert driver.counters["host_reclaim"] == 2
    assert driver.counters["eviction"] == 0
    driver.leave(client)


def test_one_chain_that_is_blocked_does_not_hold_up_another():
    driver = Driver([two_chains(Regions({}), "g", 16, 1)])
    client = Client(driver, "g")
    client.open(1, 16 * 3 + 1, "a")
    client.commit(1, 16 * 3 + 1)
    client.run()
    driver.end_all()
    main, draft = driver.node.state.groups["g"].chains
    assert int((main.table.copies[0, HOST] == CopyState.READY).sum()) == 1
    assert int((draft.table.copies[0, HOST] == CopyState.READY).sum()) == 2
    driver.leave(client)


def test_what_a_dead_mover_had_is_copied_again():
    driver = Driver([sharded_group(8, 8)])
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a")
    client.commit(1, 4 * SPAN)
    client.close(1)
    client.run()
    lost = set(driver.plans)
    driver.plans.clear()
    driver.apply(MoverGone())
    assert driver.pages("p/host", PageState.FILLING) == 4
    assert not lost & set(driver.plans)
    driver.end_all()
    assert offloaded(driver) == [i * SPAN for i in range(4)]
    assert driver.counters["offload"] == 4
    driver.leave(client)


def test_idle_spans_that_were_promised_are_not_made_busy():
    """A write-back must not take away what a running request was promised."""
    driver = Driver([sharded_group(8, 8)], Limits(plans_in_flight=1, batch_spans=1))
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a")
    client.commit(1, 4 * SPAN)
    client.close(1)
    client.run()
    assert client.open(2, SPAN, "b", growth=7 * SPAN).state == "refused", "one span is in flight"
    assert client.open(3, SPAN, "b", growth=6 * SPAN).state == "runnable"
    for spans in range(2, 8):
        for plan in list(driver.plans):
            driver.end(plan, CopyOutcome.FAILED)
        reply = client.commit(3, SPAN, capacity=spans * SPAN)
        assert reply.grown[0].error is None, spans
    driver.leave(client)


def test_offload_plans_name_whole_pages_of_every_rank():
    driver = Driver([sharded_group(16, 16)])
    client = Client(driver, "p")
    client.open(1, 5 * SPAN, "a")
    client.commit(1, 5 * SPAN)
    client.run()
    (plan,) = driver.plans.values()
    assert plan.total_bytes == 5 * 28_020_736
    assert len(plan.copies) == 8
    assert all(np.array_equal(c.source_offsets, [0]) and c.row_bytes == 5 * 3_502_592 for c in plan.pieces())
    driver.end_all()
    driver.leave(client)


def test_a_batch_evicts_no_more_than_it_needs_and_leaves_first():
    driver = Driver([sharded_group(16, 6)], Limits(plans_in_flight=1, batch_spans=4))
    client = Client(driver, "p")
    client.serve(1, 5 * SPAN, "a")
    assert offloaded(driver) == [i * SPAN for i in range(5)]
    client.open(2, 4 * SPAN, "b")
    client.commit(2, 4 * SPAN)
    client.run()
    (plan,) = driver.plans.values()
    assert plan.total_bytes == 4 * 28_020_736
    assert driver.counters["host_reclaim"] == 3
    assert offloaded(driver) == [0, SPAN]
    driver.end_all()
    assert offloaded(driver) == [0, 0, SPAN, SPAN, 2 * SPAN, 3 * SPAN]
    assert driver.counters["host_reclaim"] == 3
    assert driver.counters["eviction"] == 0, "the device holds them as before"
    driver.leave(client)


def test_a_batch_that_does_not_fit_goes_as_far_as_there_is_room():
    driver = Driver([sharded_group(16, 3)], Limits(plans_in_flight=8, batch_spans=8))
    client = Client(driver, "p")
    client.open(1, 5 * SPAN, "a")
    client.commit(1, 5 * SPAN)
    client.run()
    driver.end_all()
    assert offloaded(driver) == [0, SPAN, 2 * SPAN]
    assert driver.counters["writeback_bypass"] == 2, "no deeper span displaces one that leads to it"
    driver.leave(client)


def test_an_idle_span_of_the_batch_may_be_what_another_needs_evicted():
    """The oldest spans want host copies again: the batch must not both copy and forget one."""
    driver = Driver([sharded_group(16, 2)], Limits(plans_in_flight=1, batch_spans=4))
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a")
    client.commit(1, 4 * SPAN)
    client.close(1)
    client.run()
    driver.end_all()
    assert offloaded(driver) == [0, SPAN]
    driver.plans.clear()
    driver.apply(MoverGone())
    driver.end_all()
    assert offloaded(driver) == [0, SPAN]
    driver.leave(client)


def test_a_run_with_known_spans_in_it_is_published_around_them():
    driver = Driver([sharded_group(16, 16)])
    client = Client(driver, "p")
    for request, tokens in ((1, 2 * SPAN), (2, 5 * SPAN), (3, 3 * SPAN)):
        client.open(request, tokens, "a")
        client.commit(request, tokens)
    client.run()
    table = driver.node.state.groups["p"].chains[0].table
    assert sorted(table.first_token[table.published].tolist()) == [i * SPAN for i in range(5)]
    driver.end_all()
    assert driver.counters["offload"] == 5
    for request in (1, 2, 3):
        client.close(request)
    client.run()
    assert driver.pages("p/hbm", PageState.READY) == 5
    assert client.open(4, 5 * SPAN, "a").cached_tokens == 5 * SPAN - 64
    driver.leave(client)


def test_a_copy_that_fails_is_tried_again_but_not_for_ever():
    driver = Driver([sharded_group(8, 8)], Limits(writeback_tries=3))
    client = Client(driver, "p")
    client.open(1, 2 * SPAN, "a")
    client.commit(1, 2 * SPAN)
    client.run()
    for tried in range(3):
        (plan,) = driver.plans
        driver.end(plan, CopyOutcome.FAILED)
        assert driver.counters["writeback_retry"] == 2 * min(tried + 1, 2)
    assert not driver.plans
    assert driver.counters["writeback_given_up"] == 2
    assert driver.pages("p/host", PageState.FREE) == 8
    driver.apply(Tick())
    assert not driver.plans, "time alone does not bring it back"
    driver.leave(client)


def test_a_failure_that_heals_is_forgotten():
    driver = Driver([sharded_group(8, 8)], Limits(writeback_tries=2))
    client = Client(driver, "p")
    client.open(1, SPAN, "a")
    client.commit(1, SPAN)
    client.run()
    driver.end(next(iter(driver.plans)), CopyOutcome.UNKNOWN_FATE)
    assert driver.pages("p/host", PageState.QUARANTINED) == 1, "the next try goes to another page"
    driver.end_all()
    assert offloaded(driver) == [0]
    table = driver.node.state.groups["p"].chains[0].table
    assert not table.failures.any()
    driver.leave(client)


def test_write_back_steps_aside_while_a_request_waits_for_its_bytes():
    driver = Driver([sharded_group(4, 16)], Limits(plans_in_flight=4, plans_beside_onboards=1, batch_spans=1))
    client = Client(driver, "p")
    client.serve(1, 4 * SPAN, "a")
    client.serve(2, 2 * SPAN, "b")
    client.serve(3, 2 * SPAN, "c")
    assert client.open(4, SPAN + 1, "a").state == "waiting"
    (onboard,) = driver.plans
    client.open(5, 2 * SPAN, "d")
    client.commit(5, 2 * SPAN)
    client.run()
    assert len(driver.plans) == 2, "one write-back beside the onboard"
    driver.end(onboard)
    assert len(driver.plans) == 2, "both spans of the last request"
    driver.end_all()
    driver.leave(client)


def test_the_host_copy_of_a_running_requests_span_may_go_and_its_device_copy_may_not():
    """A pin holds the copy that is read, not the span in every tier."""
    driver = Driver([sharded_group(4, 4)])
    client = Client(driver, "p")
    client.serve(1, 4 * SPAN, "a")
    opened = client.open(2, 3 * SPAN + 1, "a")
    assert opened.state == "runnable"
    rows = driver.node.state.engines["e"].requests[2].chains[0].rows[:3]
    table = driver.node.state.groups["p"].chains[0].table
    assert (table.copies[0, HOST, rows] == CopyState.READY).all()
    driver.apply(Trim("p", "p/host", 4))
    assert (table.copies[0, HOST, rows] == CopyState.ABSENT).all()
    assert (table.copies[0, DEVICE, rows] == CopyState.READY).all()
    driver.apply(Trim("p", "p/hbm", 4))
    assert (table.copies[0, DEVICE, rows] == CopyState.READY).all()
    driver.leave(client)


def test_a_span_that_ranks_below_all_that_the_host_holds_is_not_written():
    driver = Driver([sharded_group(16, 3)], policy=return_rate)
    client = Client(driver, "p")
    client.serve(1, 3 * SPAN, "a")
    assert offloaded(driver) == [0, SPAN, 2 * SPAN]
    client.open(2, 2 * SPAN, "gone")
    client.commit(2, 2 * SPAN)
    client.step(closes=(Close(2, Closing.FINISHED, "end_turn", session_ends=True),))
    client.run()
    assert not driver.plans
    assert driver.counters["writeback_bypass"] == 2
    for _ in range(3):
        driver.apply(Tick())
        assert not driver.plans, "an ended session's spans rank last for good"
    assert driver.counters["writeback_bypass"] == 8, "looked at once a tick, no more"
    driver.apply(Trim("p", "p/host", 2))
    driver.apply(Tick())
    assert driver.plans, "there is room now"
    driver.leave(client)


def test_what_was_declined_is_written_when_its_rank_has_changed():
    driver = Driver([sharded_group(16, 3)], policy=return_rate)
    client = Client(driver, "p")
    client.serve(1, 3 * SPAN, "a")
    client.open(2, 2 * SPAN, "b")
    client.commit(2, 2 * SPAN)
    client.step(closes=(Close(2, Closing.FINISHED, "end_turn", session_ends=True),))
    client.run()
    assert not driver.plans
    # The session was not over after all, and the other one is.
    client.open(3, 3 * SPAN, "b")
    client.commit(3, 3 * SPAN)
    client.step(turn_ends=(TurnEnded("a", "end_turn", session_ends=True),))
    client.run()
    driver.apply(Tick())
    driver.end_all()
    assert driver.counters["offload"] == 6
    assert driver.counters["host_reclaim"] == 3
    driver.leave(client)


def test_what_has_something_to_do_is_not_left_out_of_the_journal():
    driver = Driver([sharded_group(6, 4)])
    client = Client(driver, "p")
    client.serve(1, 4 * SPAN, "readers")
    driver.apply(Trim("p", "p/hbm", 6))
    client.open(2, 4 * SPAN + 1, "readers")
    client.open(3, SPAN, "dirty")
    client.commit(3, SPAN)
    client.close(3)
    node = driver.node
    told = dict.fromkeys(client.attaches, client.value)
    assert not node.idle(TimelinesRead(told), driver.now)
    client.run()
    assert node.idle(TimelinesRead(told), driver.now), "said before"
    assert node.state.groups["p"].blocked
    assert not node.idle(Tick(), driver.now), "the blocked write-back is looked at again"
    driver.end_all()
    driver.leave(client)


def refused_beside_write_back():
    """The whole device is in copies to the host, whose request has ended, when another request comes."""
    driver = Driver([sharded_group(4, 16)], Limits(batch_spans=1, plans_in_flight=4))
    client = Client(driver, "p")
    client.open(1, 4 * SPAN, "a")
    client.commit(1, 4 * SPAN)
    client.close(1)
    client.run()
    assert sorted(driver.plans) == [1, 2, 3, 4]
    assert client.open(2, 2 * SPAN, "b").state == "refused"
    return driver, client


def test_write_back_gives_way_to_a_refused_request():
    driver, client = refused_beside_write_back()
    assert driver.cancelled == [4, 3], "as many as are needed, the newest first"
    assert client.open(2, 2 * SPAN, "b").state == "refused", "they may still be read"
    assert driver.cancelled == [4, 3], "asked once"
    for plan_id in (4, 3):
        driver.end(plan_id, CopyOutcome.CANCELLED)
    assert sorted(driver.plans) == [1, 2], "nor begun again before the request has asked"
    assert client.open(2, 2 * SPAN, "b").state == "runnable"
    assert driver.counters["writeback_cancelled"] == 2
    assert driver.counters["failed_plan"] == driver.counters["writeback_retry"] == 0
    driver.end_all()
    assert offloaded(driver) == [0, SPAN], "those before were written"
    driver.leave(client)


def test_a_plan_that_was_given_up_may_end_well_all_the_same():
    driver, client = refused_beside_write_back()
    driver.end_all()
    assert client.open(2, 2 * SPAN, "b").state == "runnable"
    assert driver.counters["writeback_cancelled"] == 0
    assert offloaded(driver) == [i * SPAN for i in range(4)]
    driver.leave(client)


def test_spans_whose_copy_was_given_up_are_written_later_where_they_are_still_there():
    driver, client = refused_beside_write_back()
    for plan_id in (4, 3):
        driver.end(plan_id, CopyOutcome.CANCELLED)
    driver.apply(Tick())
    driver.end_all()
    assert offloaded(driver) == [i * SPAN for i in range(4)]
    driver.leave(client)


def test_nothing_is_given_up_where_it_would_not_help():
    driver = Driver([sharded_group(4, 16)], Limits(batch_spans=1, plans_in_flight=4))
    client = Client(driver, "p")
    client.open(1, 2 * SPAN, "a")
    client.commit(1, 2 * SPAN)
    client.open(2, SPAN, "ended")
    client.commit(2, SPAN)
    client.close(2)
    client.run()
    assert len(driver.plans) == 3, "two of a request that goes on"
    assert client.open(3, 3 * SPAN, "b").state == "refused", "one page is free, and one more is no help"
    assert driver.cancelled == []
    assert client.open(4, 2 * SPAN, "c").state == "refused"
    assert len(driver.cancelled) == 1
    driver.end_all()
    driver.leave(client)


def test_copies_are_spills_while_a_refused_request_waits_for_their_pages():
    driver = Driver([sharded_group(4, 16)], Limits(batch_spans=1, plans_in_flight=1))
    client = Client(driver, "p")
    client.open(1, 3 * SPAN, "a")
    client.commit(1, 3 * SPAN)
    client.run()
    assert driver.plans[1].purpose is Purpose.OFFLOAD
    assert client.open(2, 2 * SPAN, "b").state == "refused"
    driver.end(1)
    assert driver.plans[2].purpose is Purpose.SPILL
    driver.apply(Tick(), passes=2 * driver.limits.claim_hold_ns)
    driver.end(2)
    assert driver.plans[3].purpose is Purpose.OFFLOAD
    driver.end_all()
    assert driver.counters["offload"] == 3
    driver.leave(client)
