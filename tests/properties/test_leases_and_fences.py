"""Fences and tickets against naive models: a list of messages, and a dictionary of leases."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    Close,
    Closing,
    DetachRank,
    EngineGone,
    ExportRequestKV,
    Open,
    ReleaseTicket,
    RenewTickets,
    Step,
    StepDone,
    Tick,
    TimelinesRead,
)
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits
from kvmanager.errors import InvalidArgument, LeaseExpired, StalePage, UnknownLease
from tests.sim.driver import Client, Driver, sharded_group
from tests.sim.worlds import FORMAT

RANKS, ROWS = 3, 4
TTL, GRACE = 1_000, 200


class FenceMachine(RuleBasedStateMachine):
    """Messages that close requests of one page each: the pages come back in message order, each when all words
    reached the value its message named; the word of a dead rank counts as reached."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver([sharded_group(60, 0, ranks=RANKS, page_rows=ROWS, kv_format=FORMAT)])
        self.client = Client(self.driver, "p")
        self.words = dict.fromkeys(self.client.attaches, 0)
        self.alive = list(self.client.attaches)
        self.number = 0
        self.held: list[int] = []
        self.messages: list[tuple[dict[int, int], int]] = []  # fence, requests closed
        self.closed = 0

    def send(self, fence: dict[int, int], **parts: tuple) -> None:
        reply = self.driver.apply(Step("e", self.client.epoch, self.number + 1, 0, fence, **parts))
        assert isinstance(reply, StepDone), reply
        assert not reply.errors
        self.number += 1

    @precondition(lambda self: len(self.alive) == RANKS)
    @rule(count=st.integers(1, 3))
    def open(self, count: int) -> None:
        for _ in range(count):
            if len(self.held) + len(self.messages) < 40:
                request_id = self.number + 1
                opened = self.client_open(request_id)
                assert opened.state == "runnable"
                self.held.append(request_id)

    def client_open(self, request_id: int) -> object:
        reply = self.driver.apply(
            Step("e", self.client.epoch, self.number + 1, 0, {}, (), (Open(request_id, 1, 0, b""),))
        )
        assert isinstance(reply, StepDone), reply
        self.number += 1
        return reply.opened[0]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(self.held), unique=True, min_size=1))
        newest = self.messages[-1][0] if self.messages else {}
        fence = {a: max(newest.get(a, 0), self.words[a]) + data.draw(st.integers(0, 2)) for a in self.alive}
        self.send(fence, closes=tuple(Close(request_id, Closing.FINISHED) for request_id in some))
        self.held = [request_id for request_id in self.held if request_id not in some]
        self.messages.append((fence, len(some)))

    @rule(data=st.data())
    def words_rise(self, data: st.DataObject) -> None:
        """Some words are read; a value may be older than one read before."""
        read = {a: self.words[a] + data.draw(st.integers(-1, 2)) for a in self.alive if data.draw(st.booleans())}
        for attach, value in read.items():
            self.words[attach] = max(self.words[attach], value)
        self.driver.apply(TimelinesRead({a: max(v, 0) for a, v in read.items()}))

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data(), rarely=st.integers(0, 4))
    def rank_dies(self, data: st.DataObject, rarely: int) -> None:
        if rarely:
            return
        attach = data.draw(st.sampled_from(self.alive))
        self.alive.remove(attach)
        self.driver.apply(DetachRank(attach))

    @invariant()
    def pages_come_back_in_order(self) -> None:
        while self.messages and all(
            attach not in self.alive or self.words[attach] >= value for attach, value in self.messages[0][0].items()
        ):
            self.messages.pop(0)
        waiting = sum(count for _, count in self.messages)
        assert self.driver.pages("p/hbm", PageState.FREE) == 60 - len(self.held) - waiting

    def teardown(self) -> None:
        for attach in self.alive:
            self.driver.apply(DetachRank(attach))
        self.driver.apply(EngineGone("e", self.client.epoch))
        assert self.driver.pages("p/hbm", PageState.FREE) == 60


class TicketMachine(RuleBasedStateMachine):
    """Ticket id -> (end of its lease, holder). A ticket is readable until its lease ends, and keeps its pages for
    the grace after that."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(ticket_ttl_ns=TTL, ticket_grace_ns=GRACE)
        self.driver = Driver([sharded_group(4, 0, ranks=RANKS, page_rows=ROWS, kv_format=FORMAT)], limits)
        self.client = Client(self.driver, "p")
        self.client.open(1, 3 * RANKS * ROWS, "a")
        self.client.commit(1, 3 * RANKS * ROWS)
        self.client.run()
        self.open = True
        self.real_generations = None
        self.leases: dict[str, list] = {}
        self.ids = [f"t{i}" for i in range(4)]

    def apply(self, event: object, passes: int = 1) -> object:
        return self.driver.apply(event, passes)

    def readable(self, ticket_id: str) -> type | None:
        """The error that a reader gets now, None: it may read."""
        if ticket_id not in self.leases:
            return UnknownLease
        return LeaseExpired if self.driver.now > self.leases[ticket_id][0] else None

    @precondition(lambda self: self.open)
    @rule(i=st.integers(0, 3))
    def export(self, i: int) -> None:
        answer = self.apply(ExportRequestKV("e", self.client.epoch, 1, self.ids[i]))
        if self.ids[i] in self.leases:
            assert isinstance(answer, InvalidArgument)
            return
        assert answer.committed_tokens == 3 * RANKS * ROWS
        self.leases[self.ids[i]] = [self.driver.now + TTL, ""]

    @rule(i=st.integers(0, 3), holder=st.sampled_from(["x", "y"]))
    def accept(self, i: int, holder: str) -> None:
        answer = self.apply(AcceptTicket(self.ids[i], holder))
        wrong = self.readable(self.ids[i])
        if wrong is None and self.leases[self.ids[i]][1] not in ("", holder):
            wrong = InvalidArgument
        if wrong is not None:
            assert type(answer) is wrong
            return
        self.leases[self.ids[i]] = [self.driver.now + TTL, holder]
        assert answer.spans[0].pages["kv"][0].tolist() == [0, 1, 2]
        self.real_generations = answer.generations

    @rule(i=st.integers(0, 3), off=st.sampled_from([0, 0, 1]))
    def check(self, i: int, off: int) -> None:
        if self.real_generations is None:
            return
        answer = self.apply(CheckTicket(self.ids[i], self.real_generations + off))
        wrong = self.readable(self.ids[i]) or (StalePage if off else None)
        assert type(answer) is wrong if wrong else answer is None

    @rule(some=st.lists(st.integers(0, 3), unique=True))
    def renew(self, some: list[int]) -> None:
        answer = self.apply(RenewTickets(tuple(self.ids[i] for i in some)))
        assert list(answer.unknown_ids) == [self.ids[i] for i in some if self.readable(self.ids[i])]
        for i in some:
            if self.readable(self.ids[i]) is None:
                self.leases[self.ids[i]][0] = self.driver.now + TTL

    @rule(i=st.integers(0, 3), holder=st.sampled_from(["x", "y"]))
    def release(self, i: int, holder: str) -> None:
        answer = self.apply(ReleaseTicket(self.ids[i], holder))
        lease = self.leases.get(self.ids[i])
        if lease is None:
            assert isinstance(answer, UnknownLease)
        elif lease[1] not in ("", holder):
            assert isinstance(answer, InvalidArgument)
        else:
            assert answer is None
            del self.leases[self.ids[i]]

    @rule(passes=st.sampled_from([1, GRACE - 1, TTL // 2, TTL, TTL + GRACE, TTL + GRACE + 1]))
    def tick(self, passes: int) -> None:
        self.apply(Tick(), passes)
        self.leases = {k: lease for k, lease in self.leases.items() if self.driver.now <= lease[0] + GRACE}

    @precondition(lambda self: self.open)
    @rule(rarely=st.integers(0, 5))
    def close(self, rarely: int) -> None:
        if rarely == 0:
            self.client.close(1)
            self.client.run()
            self.open = False

    @invariant()
    def pages_stay_as_long_as_a_lease_does(self) -> None:
        if self.open:
            return
        wanted = self.client.open(2, 4 * RANKS * ROWS, "b")
        assert (wanted.state == "refused") == bool(self.leases)
        if wanted.state == "runnable":
            self.client.close(2)
            self.client.run()

    def teardown(self) -> None:
        self.driver.leave(self.client)


TestFences = FenceMachine.TestCase
TestTickets = TicketMachine.TestCase
TestFences.settings = TestTickets.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
