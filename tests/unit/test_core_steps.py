"""Messages: numbers, resends, fences, limits, and refusals that change nothing."""

import copy

import numpy as np
import pytest

from kvmanager.core.events import (
    AcceptTicket,
    AttachRank,
    CheckTicket,
    Close,
    Closing,
    CopyOutcome,
    DetachRank,
    EngineResumed,
    EngineSuspect,
    ExportRequestKV,
    Open,
    PlanEnded,
    Progress,
    RegisterEngine,
    ReleaseTicket,
    RenewTickets,
    Step,
    StepDone,
    TimelinesRead,
)
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits
from kvmanager.errors import (
    InvalidArgument,
    LayoutMismatch,
    LimitExceeded,
    NotReady,
    PoolExhausted,
    StaleEpoch,
    Suspect,
    UnknownLease,
    UnknownRequest,
)
from tests.sim.driver import Client, Driver, chain_keys, pages_of, sharded_group

ROWS = 64
SPAN = 8 * ROWS


def picture(driver: Driver) -> str:
    """Everything the core knows, as text."""
    state = copy.copy(driver.node.state)
    groups = []
    with np.printoptions(threshold=1_000_000):
        for group in state.groups.values():
            pools = [(p.name, p.promised_slabs, [(s.state, s.generation) for s in p.spaces.values()]) for p in
                     group.pools.values()]  # fmt: skip
            tables = [dict(vars(chain.table)) for chain in group.chains]
            indexes = [(chain.index.heads, chain.index.runs) for chain in group.chains]
            groups.append((pools, tables, indexes, group.writeback, group.deficit_slabs))
        engines = [{k: v for k, v in vars(e).items() if k != "requests"} for e in state.all_engines()]
        requests = [
            {k: v for k, v in vars(r).items() if k != "chains"} | {"rows": [c.rows for c in r.chains]}
            for e in state.all_engines()
            for r in e.requests.values()
        ]
        rest = (state.counters, state.timelines, state.dead_attaches, state.jobs, state.tickets, state.quarantine)
        return repr((groups, engines, requests, rest))


@pytest.fixture
def driver() -> Driver:
    return Driver([sharded_group(8, 8)])


@pytest.fixture
def client(driver: Driver) -> Client:
    return Client(driver, "p")


def test_a_resent_number_gets_the_same_reply_and_nothing_changes(driver, client):
    message = client.message(opens=(Open(1, 600, 0, chain_keys(0, 9)),))
    reply = driver.apply(message)
    before = picture(driver)
    assert driver.apply(message) is reply
    assert picture(driver) == before
    # Also with other contents: the number is what counts.
    assert driver.apply(Step("e", client.epoch, 1)) is reply
    assert picture(driver) == before


def test_replies_are_stored_only_so_long():
    driver = Driver([sharded_group(8, 8)], Limits(stored_replies=2))
    client = Client(driver, "p")
    messages = []
    for _ in range(3):
        messages.append(client.message())
        client.step()
    assert isinstance(driver.apply(messages[0]), InvalidArgument)
    assert isinstance(driver.apply(messages[1]), StepDone)


def test_errors_leave_the_state_as_it_was(driver, client):
    """One wrong event of each kind, in a state with a bit of everything."""
    client.serve(1, 600, "a")
    client.open(2, 700, "b", growth=100)
    client.run()
    client.commit(2, 650)
    client.run()
    driver.apply(ExportRequestKV("e", client.epoch, 2, "t1"))
    epoch, number, fence = client.epoch, client.number + 1, dict.fromkeys(client.attaches, client.value)
    layouts = tuple(c.layout.fingerprint for c in client.spec.chains[0].classes)
    wrong = [
        (Step("e", epoch + 1, number), StaleEpoch),
        (Step("f", epoch, number), StaleEpoch),
        (Step("e", epoch, number + 1, fence=fence), InvalidArgument),
        (Step("e", epoch, number, fence={999: 1}), InvalidArgument),
        (Step("e", epoch, number, fence={1: 1}, progress=(Progress(2, 700, 650),)), InvalidArgument),
        (RegisterEngine("e", "nowhere", b"", 16, ROWS, layouts, 8), InvalidArgument),
        (RegisterEngine("e", "p", b"", 16, ROWS, layouts, 4), InvalidArgument),
        (RegisterEngine("e", "p", b"", 16, 32, layouts, 8), InvalidArgument),
        (RegisterEngine("e", "p", b"", 24, ROWS, layouts, 8), InvalidArgument),
        (RegisterEngine("e", "p", b"", 32, ROWS, layouts, 8), InvalidArgument),
        (RegisterEngine("e", "p", b"", 16, ROWS, ("other",), 8), LayoutMismatch),
        (RegisterEngine("f", "p", b"", 16, ROWS, layouts, 8), InvalidArgument),
        (AttachRank("e", epoch, 8, 0), InvalidArgument),
        (AttachRank("e", epoch, 3, 0), InvalidArgument),
        (DetachRank(999), InvalidArgument),
        (EngineResumed("e", epoch + 1), StaleEpoch),
        (ExportRequestKV("e", epoch, 9, "t2"), UnknownRequest),
        (ExportRequestKV("e", epoch, 2, "t1"), InvalidArgument),
        (AcceptTicket("nope", "d"), UnknownLease),
        (CheckTicket("nope", np.zeros(1, np.uint32)), UnknownLease),
        (ReleaseTicket("nope", "d"), UnknownLease),
    ]
    for event, error in wrong:
        before = picture(driver)
        answer = driver.apply(event)
        assert isinstance(answer, error), (event, answer)
        assert picture(driver) == before, event
    assert driver.apply(RenewTickets(("nope",))).unknown_ids == ("nope",)


def test_operations_are_refused_one_by_one(driver, client):
    """What is wrong with one request of a message is that request's error; the others go on."""
    client.open(1, 600, "a")
    reply = client.step(
        (Progress(9, 10, 10), Progress(1, 600, 600)),
        opens=(
            Open(1, 100, 0, chain_keys("x", 1)),
            Open(2, 100, 0, b""),
            Open(3, 0, 0, b""),
            Open(4, 10, 1 << 20, b""),
        ),
        closes=(Close(7, Closing.ABORTED),),
    )
    assert [(e.request_id, type(e.error)) for e in reply.errors] == [(9, UnknownRequest), (7, UnknownRequest)]
    assert [o.state for o in reply.opened] == ["refused"] * 4
    assert all(isinstance(o.error, InvalidArgument) for o in reply.opened)
    client.run()
    assert driver.node.state.engines["e"].requests[1].fenced_tokens == 600


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        (Progress(1, 600, 4097), "outside 300"),
        (Progress(1, 600, 299), "outside 300"),
        (Progress(1, 600, 300, 0, b"123"), "3 key bytes"),
        (Progress(1, 600, 300, 0, chain_keys(1, 1)), "keys cover more"),
    ],
)
def test_a_wrong_progress_changes_nothing_of_its_request(driver, client, progress, message):
    client.open(1, 600, "a")
    client.commit(1, 300, 600)
    request = driver.node.state.engines["e"].requests[1]
    reply = client.step((progress,))
    assert message in str(reply.errors[0].error)
    assert (request.committed_tokens, len(request.keys)) == (300, 9 * 16)


def test_too_many_operations():
    driver = Driver([sharded_group(8, 8)], Limits(requests_per_step=2))
    client = Client(driver, "p")
    for message in (
        client.message(progress=(Progress(1, 1, 1),) * 3),
        client.message(opens=(Open(1, 1, 0, b""),) * 3),
        client.message(closes=(Close(1, Closing.FINISHED),) * 3),
    ):
        assert isinstance(driver.apply(message), LimitExceeded)


def test_nothing_is_published_before_every_rank_has_written(driver, client):
    client.open(1, 2 * SPAN + 10, "a")
    client.commit(1, 2 * SPAN + 10)
    client.run(but=(5,))
    assert not driver.plans
    again = client.open(2, 2 * SPAN + 10, "a")
    assert again.cached_tokens == 0
    client.run()
    assert driver.plans
    assert client.open(3, 2 * SPAN + 10, "a").cached_tokens == 2 * SPAN


def test_pages_of_a_closed_request_wait_for_the_fence(client):
    first = client.open(1, 8 * SPAN, "a")
    assert first.state == "runnable"
    client.close(1)
    client.run(but=(0,))
    refused = client.open(2, 1, "b")
    assert isinstance(refused.error, PoolExhausted)
    assert refused.error.needed == 1
    assert refused.error.holder.startswith("e/1 ")
    client.run()
    assert client.open(3, 1, "b").state == "runnable"


def test_truncate_drains_then_frees(driver, client):
    client.open(1, SPAN, "a", growth=3 * SPAN)
    reply = client.commit(1, SPAN, capacity=3 * SPAN)
    assert reply.grown[0].spans[0].first_span == 1
    reply = client.commit(1, SPAN + 1, capacity=SPAN + 4, rejected=3)
    assert reply.grown[0].spans_kept == 2
    assert driver.pages("p/hbm", PageState.DRAINING) == 1
    client.run(but=(7,))
    assert driver.pages("p/hbm", PageState.DRAINING) == 1
    client.run()
    assert driver.pages("p/hbm", PageState.DRAINING) == 0
    assert driver.pages("p/hbm", PageState.FREE) == 6
    # Committed spans are never given back.
    assert client.commit(1, SPAN + 1, capacity=0).grown == ()


def test_growth_inside_the_promise_can_not_fail_and_beyond_it_is_refused(driver, client):
    client.open(1, SPAN, "a", growth=SPAN)
    client.open(2, 5 * SPAN, "b", growth=SPAN)
    assert client.open(3, 1, "c").state == "refused"
    reply = client.commit(1, SPAN, capacity=3 * SPAN)
    grown = reply.grown[0]
    assert isinstance(grown.error, PoolExhausted)
    assert grown.spans_kept == 2, "what was promised was given before the refusal"
    assert driver.pool("p/hbm").promised_slabs == 1
    reply = client.commit(2, 5 * SPAN, capacity=6 * SPAN)
    assert reply.grown[0].error is None
    # Request 1 lost nothing and goes on inside its two spans.
    assert client.commit(1, 2 * SPAN, capacity=2 * SPAN).errors == ()


def test_growth_beyond_the_promise_works_where_there_is_room(client):
    client.open(1, SPAN, "a")
    reply = client.commit(1, SPAN, capacity=4 * SPAN)
    assert reply.grown[0].error is None
    assert reply.grown[0].spans_kept == 4


def test_a_suspect_engine_gets_nothing_until_it_is_back(driver, client):
    client.open(1, SPAN, "a")
    driver.apply(EngineSuspect("e", client.epoch))
    assert isinstance(driver.apply(client.message()), Suspect)
    client_commit = client.message((Progress(1, SPAN, SPAN),))
    driver.apply(EngineResumed("e", client.epoch))
    assert isinstance(driver.apply(client_commit), StepDone)


def test_a_new_epoch_leaves_the_old_ones_pages_alone(driver, client):
    client.open(1, 7 * SPAN, "a")
    client.commit(1, 7 * SPAN)
    old, old_epoch = client.attaches, client.epoch
    newer = Client(driver, "p")
    assert isinstance(driver.apply(client.message()), StaleEpoch)
    assert newer.open(1, 2 * SPAN, "b").state == "refused"
    # The old epoch's last commit still becomes known when its ranks finish.
    driver.apply(TimelinesRead(dict.fromkeys(old, client.value)))
    assert newer.open(2, SPAN + 1, "a").cached_tokens == SPAN
    client.die()
    assert driver.node.state.any_engine("e", old_epoch) is None
    driver.end_all()  # spans being offloaded can't be reclaimed
    assert newer.open(3, SPAN, "c").state == "runnable"


def test_unfenced_commits_of_a_dead_rank_are_dropped(driver, client):
    client.open(1, 2 * SPAN, "a")
    client.commit(1, 2 * SPAN)
    client.run(but=(2,))
    driver.apply(DetachRank(client.attaches[2]))
    assert driver.node.state.engines["e"].requests[1].fenced_tokens == 0
    # A fresh process of that rank attaches; what the request committed before can't become true any more.
    rank = driver.apply(AttachRank("e", client.epoch, 2, 2))
    client.attaches[2] = rank.attach_id
    client.step((Progress(1, 2 * SPAN, 2 * SPAN),))
    client.commit(1, 2 * SPAN, capacity=2 * SPAN + 5)
    client.commit(1, 2 * SPAN + 5)
    client.run()
    assert driver.node.state.engines["e"].requests[1].fenced_tokens == 0
    assert isinstance(driver.apply(ExportRequestKV("e", client.epoch, 1, "t")), InvalidArgument)
    assert client.open(2, 2 * SPAN, "a").cached_tokens == 0


def test_an_export_waits_for_the_fence_and_for_the_bytes(driver, client):
    client.serve(1, SPAN + 100, "a")
    client.open(2, SPAN + 128, "a")  # the last segment is copied from request 1's tail by the worker
    answer = driver.apply(ExportRequestKV("e", client.epoch, 2, "t"))
    assert isinstance(answer, NotReady), "the worker has not copied the donor's rows yet"
    client.commit(2, SPAN + 128)
    assert isinstance(driver.apply(ExportRequestKV("e", client.epoch, 2, "t")), NotReady)
    client.run()
    assert driver.apply(ExportRequestKV("e", client.epoch, 2, "t")).committed_tokens == SPAN + 128


def test_determinism():
    """The same events give the same effects, to the byte of their text."""

    def history() -> str:
        here = Driver([sharded_group(6, 4)])
        client = Client(here, "p")
        told = []
        for i in range(1, 12):
            told.append(repr(client.serve(i, 400 + 171 * i % 1400, i % 3)))
        told.append(picture(here))
        return "\n".join(told)

    assert history() == history()


def test_a_plan_that_nobody_knows_changes_nothing(driver, client):
    client.serve(1, 600, "a")
    before = picture(driver)
    driver.apply(PlanEnded(12345, CopyOutcome.FAILED))
    assert picture(driver) == before


def test_notices_stay_until_seen():
    a, b = "a", "b"
    driver = Driver([sharded_group(8, 16)])
    client = Client(driver, "p")
    client.serve(1, 5 * SPAN, a)
    client.serve(2, 6 * SPAN, b)  # pushes some of a's device copies out
    opened = client.open(3, 5 * SPAN + 1, a)
    assert opened.state == "waiting"
    driver.end_all()
    notice = driver.notices[-1]
    assert notice.ready.state == "runnable"
    assert sorted(pages_of(notice.ready)) == sorted(set(pages_of(notice.ready)))
    engine = driver.node.state.engines["e"]
    assert [n.sequence for n in engine.notices] == [notice.sequence]
    client.step()
    assert engine.notices
    client.seen = notice.sequence
    client.step()
    assert not engine.notices


def test_equal_spans_that_grow_a_segment_at_a_time_are_published_once():
    driver = Driver([sharded_group(8, 0)])
    client = Client(driver, "p")
    keys = chain_keys("a", 8)
    for request in (1, 2):
        client.step(opens=(Open(request, 64, 448, keys[:16], "a"),))
    for segments in range(1, 9):
        more = b"" if segments == 1 else keys[(segments - 1) * 16 : segments * 16]
        for request in (1, 2):
            client.commit(request, segments * 64, 512, more)
        client.run()
    table = driver.node.state.groups["p"].chains[0].table
    assert (table.published & (table.valid == 8)).sum() == 1
    driver.leave(client)
