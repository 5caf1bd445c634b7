"""A new daemon takes over: what a mover carries stays out of reach, what none carries never happened."""

from __future__ import annotations

from kvmanager.core.events import (
    CopyOutcome,
    EngineResumed,
    MoverGone,
    MoverJoined,
    Recovered,
    StepDone,
    TicketInfo,
)
from kvmanager.core.pool import PageState
from kvmanager.errors import Suspect, TransferFailed
from tests.sim.driver import Client, Driver, sharded_group
from tests.sim.worlds import Regions, hisparse

SPAN = 8 * 64


def driver(pages: int = 32) -> Driver:
    made = Driver([sharded_group(pages, 32)])
    made.apply(MoverJoined(7))
    return made


def committed(client: Client, request_id: int, spans: int) -> None:
    """A request whose offloads are in flight."""
    client.open(request_id, spans * SPAN, ("s", request_id))
    client.commit(request_id, spans * SPAN)
    client.step()
    client.run()


def test_plans_that_no_mover_knows_are_cancelled_and_wanted_again() -> None:
    made = driver()
    committed(Client(made, "p"), 1, 4)
    lost = dict(made.plans)
    assert lost
    assert made.pages("p/host", PageState.FILLING) == 4
    made.plans.clear()
    made.apply(Recovered(2, 7, frozenset()))
    assert not set(made.plans) & set(lost), "plan ids never come twice"
    assert made.pages("p/host", PageState.FILLING) == 4, "the same copies, by new plans"
    assert made.counters["offload"] == 0
    made.end_all()
    assert made.counters["offload"] == 4


def test_plans_that_the_mover_carries_go_on() -> None:
    made = driver()
    committed(Client(made, "p"), 1, 4)
    carried = list(made.plans)
    made.apply(Recovered(2, 7, frozenset(carried)))
    assert list(made.plans) == carried
    made.end_all()
    assert made.counters["offload"] == 4


def test_pages_of_unknown_fate_stay_out_of_reach_as_long_as_the_same_mover_lives() -> None:
    made = driver()
    committed(Client(made, "p"), 1, 4)
    made.end(min(made.plans), CopyOutcome.UNKNOWN_FATE)
    quarantined = made.pages("p/host", PageState.QUARANTINED)
    assert quarantined
    made.apply(Recovered(2, 7, frozenset(made.plans)))
    assert made.pages("p/host", PageState.QUARANTINED) == quarantined
    made.apply(Recovered(3, 8, frozenset()))
    assert made.pages("p/host", PageState.QUARANTINED) == 0
    made.plans.clear()
    made.apply(MoverGone())
    made.end_all()


def test_an_onboard_that_never_began_refuses_its_request() -> None:
    made = driver(16)
    client = Client(made, "p")
    for number in range(6):
        client.serve(number, 4 * SPAN, ("s", number))
    opened = client.open(20, 4 * SPAN + 1, ("s", 1))
    assert opened.state == "waiting"
    made.plans.clear()
    made.notices.clear()
    made.apply(Recovered(2, 7, frozenset()))
    assert made.notices[-1].ready is not None
    assert made.notices[-1].ready.state == "refused"
    assert isinstance(made.notices[-1].ready.error, TransferFailed)
    made.apply(EngineResumed("e", client.epoch))
    made.end_all()
    assert client.open(21, 4 * SPAN + 1, ("s", 1)).state == "waiting", "the host copy is still good"


def test_engines_get_nothing_until_their_stream_is_back() -> None:
    made = driver()
    client = Client(made, "p")
    client.open(1, SPAN)
    message = client.message()
    before = made.apply(message)
    assert isinstance(before, StepDone)
    made.apply(Recovered(2, 7, frozenset(made.plans)))
    assert isinstance(made.apply(message), Suspect)
    made.apply(EngineResumed("e", client.epoch))
    assert made.apply(message) is before, "the stored reply"


def test_a_pull_that_nobody_can_check_fails_however_its_bytes_came() -> None:
    for outcome in (CopyOutcome.DONE, CopyOutcome.UNKNOWN_FATE, CopyOutcome.FAILED):
        made = Driver([hisparse(Regions({}), "d", 40, 60)])
        made.apply(MoverJoined(7))
        client = Client(made, "d")
        opened = client.open(1, 64, growth=4, ticket=TicketInfo("t", "there", 64, 10**9))
        assert opened.state == "waiting"
        made.apply(Recovered(2, 7, frozenset(made.pulls)))
        made.apply(EngineResumed("e", client.epoch))
        made.end(min(made.pulls), outcome)
        assert made.notices[-1].ready is not None
        assert made.notices[-1].ready.state == "refused"
        assert made.counters["handoff"] == 0
        assert not made.node.state.groups["d"].chains[0].table.published.any()
        quarantined = made.pages("d/host", PageState.QUARANTINED) + made.pages("d/hbm", PageState.QUARANTINED)
        assert bool(quarantined) == (outcome is CopyOutcome.UNKNOWN_FATE)
        made.leave(client)
