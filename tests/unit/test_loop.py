"""The owner loop: order, answers, ticks under load, and nobody waiting for a loop that has ended."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvmanager.core.events import Drain, EngineResumed, RenewTickets, Replied, Tick, TicketsRenewed, TimelinesRead
from kvmanager.core.leaseevents import EndLease
from kvmanager.daemon.loop import TICK_S, OwnerLoop
from kvmanager.errors import InvalidArgument, NotReady, StaleEpoch


class StandIn:
    """A core that notes events and answers as told."""

    fences_pending = False

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.threads: list[str] = []
        self.inside = 0
        self.state = None

    def idle(self, _event: object, _now: int) -> bool:
        return False

    def apply(self, event: object, now: int) -> list[object]:
        assert now > 0
        self.inside += 1
        self.seen.append(event)
        self.threads.append(threading.current_thread().name)
        assert self.inside == 1, "two at one time"
        self.inside -= 1
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


def wait(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_who_asks_while_nothing_waits_has_it_done_in_his_own_thread(running: Running) -> None:
    assert running.loop.call(RenewTickets(("a",))) == TicketsRenewed(("a",))
    assert running.core.threads[-1] == threading.current_thread().name
    assert running.loop.inspect(lambda _node: threading.current_thread().name) == threading.current_thread().name


def test_who_asks_while_something_waits_comes_behind_it(running: Running) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(_node: object) -> None:
        entered.set()
        assert go_on.wait(20)

    holder = threading.Thread(target=running.loop.inspect, args=(hold,))
    holder.start()
    assert entered.wait(20)
    running.loop.post(RenewTickets(("posted",)))
    asker = threading.Thread(target=running.loop.call, args=(RenewTickets(("asked",)),))
    asker.start()
    wait(lambda: running.loop._waiting == 2)
    go_on.set()
    for thread in (holder, asker):
        thread.join(20)
    assert [event.ticket_ids for event in running.core.seen if isinstance(event, RenewTickets)] == [
        ("posted",), ("asked",),
    ]  # fmt: skip
    assert running.core.threads[-1] == "core"


def test_before_the_start_everything_waits() -> None:
    made = Running()
    asker = threading.Thread(target=made.loop.call, args=(RenewTickets(("a",)),))
    asker.start()
    wait(lambda: made.loop._waiting == 1)
    assert made.core.seen == []
    made.loop.start()
    asker.join(20)
    made.loop.stop()
    assert made.performed == [("effect", ("a",))]


def test_a_fence_that_a_caller_brings_is_watched_by_the_loop_at_once(running: Running) -> None:
    class Brings(StandIn):
        def apply(self, event: object, now: int) -> list[object]:
            self.fences_pending = True
            return super().apply(event, now)

    running.core.__class__ = Brings
    time.sleep(0.05)  # the loop sleeps until its next tick
    running.loop.call(RenewTickets(()))
    began = time.monotonic()
    wait(lambda: running.core.threads.count("core") >= 3)
    assert time.monotonic() - began < TICK_S
    assert isinstance(running.core.seen[-1], TimelinesRead)


def test_what_breaks_in_a_caller_s_thread_ends_the_loop(running: Running) -> None:
    with pytest.raises(NotReady):
        running.loop.call(Drain("the story"))
    assert running.core.threads[-1] == threading.current_thread().name
    running.loop._thread.join(20)
    assert not running.loop._thread.is_alive()
    with pytest.raises(NotReady):
        running.loop.inspect(lambda _node: 1)
    assert [str(failure) for failure in running.failures] == ["the story"]


def test_stop_waits_for_a_caller_who_is_in_the_core(running: Running) -> None:
    entered, go_on, left = threading.Event(), threading.Event(), threading.Event()

    def hold(_node: object) -> None:
        entered.set()
        assert go_on.wait(20)
        time.sleep(0.05)
        left.set()

    holder = threading.Thread(target=running.loop.inspect, args=(hold,))
    holder.start()
    assert entered.wait(20)
    stopper = threading.Thread(target=running.loop.stop)
    stopper.start()
    go_on.set()
    stopper.join(20)
    assert left.is_set()
    holder.join(20)


def test_many_at_once_are_handled_one_at_a_time_and_in_each_one_s_order(running: Running) -> None:
    answers: dict[int, list[object]] = {}

    def ask(who: int) -> None:
        dice = random.Random(who)
        mine = answers.setdefault(who, [])
        for number in range(300):
            event = RenewTickets((f"{who}.{number}",))
            match dice.randrange(4):
                case 0:
                    running.loop.post(event)
                case 1:
                    running.loop.send(event, mine.append)
                case 2:
                    mine.append(running.loop.call(event))
                case _:
                    running.loop.inspect(lambda node, event=event: node.seen.append(event))  # type: ignore[misc]

    threads = [threading.Thread(target=ask, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    running.loop.settle()
    seen = [event.ticket_ids[0] for event in running.core.seen if isinstance(event, RenewTickets)]
    for who in range(6):
        assert [name for name in seen if name.startswith(f"{who}.")] == [f"{who}.{number}" for number in range(300)]
    assert all(isinstance(answer, TicketsRenewed) for mine in answers.values() for answer in mine)
    assert {"core"} < set(running.core.threads), "some in their own threads, some behind others"
    assert running.failures == []


def test_the_end_of_a_lease_comes_with_what_its_timelines_show(running: Running) -> None:
    ended = EndLease("e", 1, 5, {1: 2, 9: 4})
    running.loop.post(ended)
    running.loop.post(EndLease("e", 1, 6))
    running.loop.settle()
    assert [event for event in running.core.seen if not isinstance(event, Tick)] == [
        replace(ended, seen={1: 2}),
        EndLease("e", 1, 6),
    ]
