"""The owner loop: order, answers, ticks under load, and nobody waiting for a loop that has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvmanager.core.events import Drain, EngineResumed, RenewTickets, Replied, Tick, TicketsRenewed, TimelinesRead
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.errors import InvalidArgument, NotReady, StaleEpoch


class StandIn:
    """A core that notes events and answers as told."""

    fences_pending = False

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.state = None

    def idle(self, _event: object, _now: int) -> bool:
        return False

    def apply(self, event: object, now: int) -> list[object]:
        assert now > 0
        self.seen.append(event)
        if isinstance(event, EngineResumed):
            return [Replied(StaleEpoch("gone"))]
        if isinstance(event, Drain):
            raise AssertionError(event.why)
        if isinstance(event, RenewTickets):
            return [Replied(TicketsRenewed(event.ticket_ids)), ("effect", event.ticket_ids)]
        return []

    def read(self) -> dict[int, int]:
        return {1: 2}


class Running:
    def __init__(self) -> None:
        self.core = StandIn()
        self.performed: list[object] = []
        self.failures: list[BaseException] = []
        self.loop = OwnerLoop(self.core, self.core, self.performed.append, self.failures.append)


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    made.loop.start()
    yield made
    made.loop.stop()


def test_answers_and_effects(running: Running) -> None:
    assert running.loop.call(RenewTickets(("a",))) == TicketsRenewed(("a",))
    running.loop.settle()
    assert running.performed == [("effect", ("a",))]
    with pytest.raises(StaleEpoch, match="gone"):
        running.loop.call(EngineResumed("e", 1))
    assert running.failures == []


def test_what_a_thread_posts_is_applied_in_order(running: Running) -> None:
    for number in range(100):
        running.loop.post(RenewTickets((str(number),)))
    seen: list[object] = []
    running.loop.settle(lambda node: seen.extend(node.seen))
    assert [event.ticket_ids[0] for event in seen if isinstance(event, RenewTickets)] == [str(n) for n in range(100)]


def test_an_inspection_that_fails_with_a_typed_error_harms_nothing(running: Running) -> None:
    def look(_node: object) -> None:
        raise InvalidArgument("no such pool")

    with pytest.raises(InvalidArgument, match="no such pool"):
        running.loop.inspect(look)
    assert running.loop.call(RenewTickets(())) == TicketsRenewed(())


def test_timelines_are_read_while_a_fence_is_pending_only(running: Running) -> None:
    running.loop.call(RenewTickets(()))
    assert not any(isinstance(event, TimelinesRead) for event in running.core.seen)
    running.core.fences_pending = True
    running.loop.call(RenewTickets(()))
    assert TimelinesRead({1: 2}) in running.core.seen


def test_ticks_come_also_when_there_is_always_work(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager.daemon.loop.TICK_S", 0.01)
    running.loop._next_tick = 0.0
    give_up = time.monotonic() + 20
    while sum(isinstance(event, Tick) for event in list(running.core.seen)) < 3:
        for _ in range(50):
            running.loop.post(RenewTickets(()))
        assert time.monotonic() < give_up
    running.loop.settle()


def test_a_broken_invariant_answers_everybody_and_is_reported_once(running: Running) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(_node: object) -> None:
        entered.set()
        go_on.wait(20)

    results: list[object] = []

    def wait_for(ask: object) -> None:
        try:
            results.append(ask())
        except NotReady as error:
            results.append(error)

    holder = threading.Thread(target=running.loop.settle, args=(hold,))
    holder.start()
    entered.wait(20)
    running.loop.post(Drain("the story"))
    askers = [
        threading.Thread(target=wait_for, args=(ask,))
        for ask in (
            lambda: running.loop.call(RenewTickets(("late",))),
            lambda: running.loop.inspect(lambda _node: 1),
            lambda: running.loop.call(Drain("again")),
        )
    ]
    for asker in askers:
        asker.start()
    go_on.set()
    for thread in (holder, *askers):
        thread.join(20)
        assert not thread.is_alive()
    assert [type(result) for result in results] == [NotReady] * 3
    assert [str(failure) for failure in running.failures] == ["the story"]
    running.loop.post(RenewTickets(()))
    running.loop.settle()
    with pytest.raises(NotReady, match="the daemon is ending"):
        running.loop.call(RenewTickets(()))


def test_the_event_that_broke_it_is_answered(running: Running) -> None:
    with pytest.raises(NotReady):
        running.loop.call(Drain("the story"))


def test_stop_handles_what_was_posted_before() -> None:
    made = Running()
    for _ in range(10):
        made.loop.post(RenewTickets(()))
    made.loop.start()
    made.loop.stop()
    assert len(made.performed) == 10
    made.loop.stop()
    with pytest.raises(NotReady):
        made.loop.inspect(lambda _node: 1)
