"""The whole core against a naive model: any order of opens, commits, growth, closes, ends, deaths and tickets."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager.core.events import (
    AcceptTicket,
    Close,
    Closing,
    CopyOutcome,
    Exported,
    ExportRequestKV,
    MoverGone,
    Open,
    Progress,
    ReleaseTicket,
    StepDone,
    Tick,
    TimelinesRead,
)
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits
from kvmanager.errors import KVError, PoolExhausted
from tests.properties.core_model import ROWS, SPAN, Held, Lease, Model, chained
from tests.sim.driver import Client, Driver, sharded_group
from tests.sim.worlds import FORMAT

LIMITS = Limits(plans_in_flight=2, batch_spans=3, growth_cap_tokens=64, ticket_ttl_ns=100_000, ticket_grace_ns=20_000)
WORDS = st.sampled_from([0, 0, 12, 1, 2, 3, 4, 5, 7]).map(lambda fork: (0,) * (12 - fork) + (1,) * fork)
"""Twelve segments: prompts share prefixes of every length."""
PROMPTS = st.sampled_from([1, 4, 5, 8, 9, 12, 16, 17, 20, 23, 24, 25, 33, 41])
ENDS = st.sampled_from([CopyOutcome.DONE] * 5 + [CopyOutcome.FAILED, CopyOutcome.CANCELLED, CopyOutcome.UNKNOWN_FATE])


RARELY = st.integers(0, 5).map(lambda drawn: drawn == 5)


class CoreMachine(RuleBasedStateMachine):
    """`pages`, `host_pages`: of the group. `roomy`: nothing is ever evicted, so what may be found must be found."""

    pages, host_pages, roomy = 5, 9, False

    def __init__(self) -> None:
        super().__init__()
        group = sharded_group(self.pages, self.host_pages, ranks=2, page_rows=ROWS, kv_format=FORMAT)
        self.driver = Driver([group], LIMITS)
        self.client = Client(self.driver, "p")
        self.model = Model()
        self.said = 0
        self.next_id = 1
        self.next_ticket = 1
        self.words = dict.fromkeys(self.client.attaches, 0)

    # ----------------------------------------------------------------------------- messages

    def step(self, **parts: tuple) -> StepDone:
        """A message; notices first, as an engine would."""
        for notice in self.driver.notices[self.said :]:
            self._told(notice.ready)
        self.said = len(self.driver.notices)
        return self.client.step(**parts)

    def _told(self, answer: object) -> None:
        held = self.model.requests.get(answer.request_id)
        if held is None or not held.waiting:
            return
        if answer.state == "refused":
            del self.model.requests[answer.request_id]
        else:
            self.model.opened(held, answer)

    @rule(words=WORDS, prompt=PROMPTS, growth=st.sampled_from([0, 3, 9]))
    def open(self, words: tuple[int, ...], prompt: int, growth: int) -> None:
        self._open(words, prompt, growth)

    @rule(words=WORDS, prompt=PROMPTS, close=st.booleans())
    def serve(self, words: tuple[int, ...], prompt: int, close: bool) -> None:
        """Opens, computes and commits a prompt, and all ranks have done it; perhaps closes."""
        request_id = self.next_id
        self._open(words, prompt, 0)
        if request_id in self.running():
            self._compute(request_id)
            if close:
                self.step(closes=(Close(request_id, Closing.FINISHED, "end_turn"),))
                del self.model.requests[request_id]
                self.ranks_run((0, 1), 0)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """All of a prompt, by all ranks."""
        self._compute(data.draw(st.sampled_from(self.running())))

    def _compute(self, request_id: int) -> None:
        held = self.model.requests[request_id]
        if held.written < held.prompt:
            self.step()
            self.model.write(self.client.value, held, held.prompt - held.written)
        self._say(request_id, held, held.written, held.keys_sent, max(held.prompt, held.written))
        self.ranks_run((0, 1), 0)

    def _open(self, words: tuple[int, ...], prompt: int, growth: int) -> None:
        keys = chained(words[: prompt // ROWS])
        most = self.model.most(words, prompt)
        fits = self._must_fit(prompt + growth)
        request_id, self.next_id = self.next_id, self.next_id + 1
        # Ends that the step's own notices bring are taken in before the open is answered.
        answer = self.step(opens=(Open(request_id, prompt, growth, keys, f"s{request_id % 3}"),)).opened[0]
        assert answer.cached_tokens <= most, "found what nobody is known to have written"
        if answer.state == "refused":
            assert isinstance(answer.error, PoolExhausted)
            assert not fits, "refused although all that is held leaves room"
            return
        if self.roomy:
            assert answer.cached_tokens == most
        assert prompt + growth <= self.pages * SPAN + SPAN
        held = Held(words, prompt, growth, waiting=answer.state == "waiting")
        self.model.requests[request_id] = held
        if not held.waiting:
            self.model.opened(held, answer)

    def _must_fit(self, tokens: int) -> bool:
        """Whether nothing that may be held could stand in the way: plans, tickets and giving up aside."""
        if self.driver.plans or self.model.leases or self.model.commits or self.pending_closes():
            return False
        if self.driver.pages("p/hbm", PageState.QUARANTINED) or self.driver.pages("p/hbm", PageState.DRAINING):
            return False
        # A request holds a page for each span, and perhaps one more for each that equals a span found by others.
        held = sum(2 * -(-max(h.prompt + h.growth, h.room) // SPAN) for h in self.model.requests.values())
        return held + -(-tokens // SPAN) <= self.pages

    def pending_closes(self) -> bool:
        return any(engine.fences for engine in self.driver.node.state.all_engines())

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=st.integers(0, 2 * SPAN))
    def write(self, data: st.DataObject, tokens: int) -> None:
        """Work on a request, launched by a message of its own."""
        held = self.model.requests[data.draw(st.sampled_from(self.running()))]
        end = min(held.room, held.prompt if held.written < held.prompt else held.prompt + held.growth)
        count = min(tokens, max(end - held.written, 0))
        if count:
            self.step()
            self.model.write(self.client.value, held, count)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), short=st.integers(0, 3), ahead=st.integers(0, SPAN), late_keys=st.booleans())
    def commit(self, data: st.DataObject, short: int, ahead: int, late_keys: bool) -> None:
        """Says what is final; grows, or gives back what lies ahead."""
        request_id = data.draw(st.sampled_from(self.running()))
        held = self.model.requests[request_id]
        committed = max(held.committed, held.written - short)
        last = held.keys_sent if late_keys else max(held.keys_sent, committed // ROWS)
        capacity = max(held.prompt, min(held.written + ahead, held.prompt + held.growth), held.written)
        self._say(request_id, held, committed, last, capacity)

    def _say(self, request_id: int, held: Held, committed: int, last: int, capacity: int) -> None:
        """Commits; `last`: segments with keys from now on."""
        keys = chained(held.words)[held.keys_sent * 16 : last * 16]
        held.keys_sent = last
        fence = self.client.value
        reply = self.step(progress=(Progress(request_id, capacity, committed, 0, keys),))
        assert not reply.errors
        if committed > held.committed:
            self.model.commits.append((fence, held, committed))
            self.model.reached(min(self.words.values()))  # its fence may have passed before it was sent
        held.committed = committed
        for grown in reply.grown:
            if grown.error is None:
                self.model.grown(held, grown.spans, grown.spans_kept)
            else:
                assert isinstance(grown.error, PoolExhausted)
                assert self.driver.pages("p/hbm", PageState.DRAINING), "growth inside the promise failed"
                self.model.grown(held, grown.spans, grown.spans_kept)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), closing=st.sampled_from((Closing.FINISHED, Closing.ABORTED)))
    def close(self, data: st.DataObject, closing: Closing) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model.requests)))
        self.step(closes=(Close(request_id, closing, "end_turn"),))
        # It may have been answered by the notices of this very step.
        self.model.requests.pop(request_id, None)

    # ------------------------------------------------------------------------------- others

    @rule(ranks=st.sampled_from([(0,), (1,), (0, 1)]), back=st.integers(0, 2))
    def ranks_run(self, ranks: tuple[int, ...], back: int) -> None:
        """Some ranks get as far as `back` launches before the newest."""
        for rank in ranks:
            attach = self.client.attaches[rank]
            self.words[attach] = max(self.words[attach], self.client.value - back)
        self.model.reached(min(self.words.values()))
        self.driver.apply(TimelinesRead(dict(self.words)))

    @precondition(lambda self: self.driver.plans)
    @rule(data=st.data(), outcome=ENDS)
    def plan_ends(self, data: st.DataObject, outcome: CopyOutcome) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.driver.plans))), outcome)

    @precondition(lambda self: self.driver.plans)
    @rule()
    def all_plans_end(self) -> None:
        while self.driver.plans:
            self._end(min(self.driver.plans), CopyOutcome.DONE)

    def _end(self, plan_id: int, outcome: CopyOutcome) -> None:
        plan = self.driver.plans[plan_id]
        if outcome is CopyOutcome.DONE:
            self.model.copied(plan)
        else:
            self.model.ruined(plan)
        self.driver.end(plan_id, outcome)

    @rule(rarely=RARELY)
    def mover_dies(self, rarely: bool) -> None:
        if not rarely:
            return
        for plan in self.driver.plans.values():
            self.model.ruined(plan)
        self.driver.plans.clear()
        self.driver.apply(MoverGone())
        assert self.driver.pages("p/hbm", PageState.QUARANTINED) == 0
        assert self.driver.pages("p/host", PageState.QUARANTINED) == 0

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def export(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.running()))
        held = self.model.requests[request_id]
        ticket_id, self.next_ticket = f"t{self.next_ticket}", self.next_ticket + 1
        answer = self.driver.apply(ExportRequestKV("e", self.client.epoch, request_id, ticket_id))
        if isinstance(answer, KVError):
            return
        assert isinstance(answer, Exported)
        assert answer.committed_tokens == held.committed
        assert not any(h is held for _, h, _ in self.model.commits), "exported what is not known to be written"
        pages = self.driver.apply(AcceptTicket(ticket_id, "d")).spans[0].pages["kv"][0].tolist()
        assert pages == held.pages[: -(-held.committed // SPAN)]
        content = [held.at(position) for position in range(held.committed)]
        self.model.leases[ticket_id] = Lease(pages, content)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket_id = data.draw(st.sampled_from(sorted(self.model.leases)))
        del self.model.leases[ticket_id]
        assert self.driver.apply(ReleaseTicket(ticket_id, "d")) is None

    @rule(leases_end=RARELY)
    def time_passes(self, leases_end: bool) -> None:
        if leases_end:
            self.model.leases.clear()
        self.driver.apply(Tick(), passes=200_000 if leases_end else 1_000)

    @rule(rarely=RARELY)
    def engine_dies(self, rarely: bool) -> None:
        """All its processes, whatever they were doing; another starts."""
        if not rarely:
            return
        self.client.die()
        self.model.engine_died()
        self.driver.notices.clear()
        self.said = 0
        self.client = Client(self.driver, "p")
        self.words = dict.fromkeys(self.client.attaches, 0)

    # ------------------------------------------------------------------------------- checks

    def running(self) -> list[int]:
        return sorted(i for i, held in self.model.requests.items() if not held.waiting)

    @invariant()
    def model_holds(self) -> None:
        self.model.check()

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        used = {page for held in self.model.requests.values() for page in held.pages}
        used |= {page for lease in self.model.leases.values() for page in lease.pages}
        for name in ("p/hbm", "p/host"):
            account = self.driver.pool(name).account()
            assert sum(account.values()) == self.driver.pool(name).capacity_bytes
            assert min(account.values()) >= 0
        assert self.pages - self.driver.pages("p/hbm", PageState.FREE) >= len(used)

    def teardown(self) -> None:
        self.driver.leave(self.client)


class RoomyMachine(CoreMachine):
    pages, host_pages, roomy = 400, 400, True


TestTight = CoreMachine.TestCase
TestRoomy = RoomyMachine.TestCase
TestTight.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRoomy.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
