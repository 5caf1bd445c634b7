"""Engines under simulation: sessions that grow and fork, messages, launches, and death at any point."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from kvmanager.core.events import (
    Attached,
    AttachRank,
    Close,
    Closing,
    DetachRank,
    EngineGone,
    EngineResumed,
    EngineSuspect,
    Grown,
    Open,
    Opened,
    Progress,
    Registered,
    RegisterEngine,
    Step,
    StepDone,
    TicketInfo,
    TimelinesRead,
)
from kvmanager.core.pool import PageState
from kvmanager.errors import (
    CapacityError,
    InvalidArgument,
    KVError,
    StaleEpoch,
    Suspect,
    TransferError,
    UnknownRequest,
)
from tests.sim import retracts, workerplans
from tests.sim.content import PAGE_ROWS, Text, next_text
from tests.sim.harness import World
from tests.sim.listener import ids_told
from tests.sim.published import learn
from tests.sim.story import same_effect
from tests.sim.worker import ChainTable, CopyOp, Rank, RowsOp, SimRequest

IDS = range(1, 13)  # few, so that they are used again soon


@dataclass
class Pending:
    """A message whose reply has not been taken in yet. `reply`: what the daemon said, if it got the message."""

    message: Step
    opens: list[tuple[Open, SimRequest]]
    closes: list[Close]
    reply: StepDone | None = None


class SimEngine:
    """One epoch of an engine: scheduler, ranks, and what they were told.

    stale: its epoch is over. cut: its stream broke, `pending` is what it does not know the answer to.
    """

    role = "engine"

    def __init__(
        self, world: World, group: str, texts: list[Text], tickets: deque[tuple[TicketInfo, Text, int]],
        tenant: str = "",
    ) -> None:  # fmt: skip
        self.world, self.draw, self.tenant = world, world.draw, tenant
        self.name = f"{self.role}-{group}{tenant}"
        self.spec = next(spec for spec in world.specs if spec.name == group)
        self.texts = texts
        self.tickets = tickets
        fingerprints = tuple(c.layout.fingerprint for chain in self.spec.chains for c in chain.classes)
        namespace = tenant.encode() or self.draw.choice((b"a", b"a", b"b"))
        answer = world.apply(
            RegisterEngine(self.name, group, namespace, 16, PAGE_ROWS, fingerprints, self.spec.ranks, tenant=tenant)
        )
        assert isinstance(answer, Registered)
        self.epoch = answer.epoch
        self.stale = False
        self.cut = False
        self.seen = 0
        world.engines.append(self)
        self.namespace = namespace[0]
        self.ranks: list[Rank] = []
        for rank in self.draw.sample(range(self.spec.ranks), self.spec.ranks):
            attached = world.apply(AttachRank(self.name, self.epoch, rank, rank))
            assert isinstance(attached, Attached)
            self.ranks.append(Rank(attached.attach_id, world.memory))
            self.ranks[-1].number = rank
        self.ranks.sort(key=lambda r: r.number)
        self.most = self.draw.choice((1, 2, 2, 3))
        self.number = 0
        self.value = 0
        self.requests: dict[int, SimRequest] = {}
        self.pending: Pending | None = None
        self.last: tuple[Step, StepDone] | None = None
        self.refused: SimRequest | None = None
        self.retracted: dict[int, SimRequest] = {}

    # --------------------------------------------------------------------------- messages

    def step(self) -> None:
        """Reads notices, sends one message, launches the work that its reply allows."""
        self._send(self._compose())

    def _compose(self) -> Pending:
        self._read_notices()
        progress, closes = self._progress(), self._closes()
        return self._message(progress, [*closes, *retracts.choose(self, {c.request_id for c in closes})], self._opens())

    def send(
        self, progress: list[Progress], closes: list[Close] | None = None,
        opens: list[tuple[Open, SimRequest]] | None = None,
    ) -> None:  # fmt: skip
        """One message that says just this; `_compose` draws what it says otherwise."""
        self._read_notices()
        self._send(self._message(progress, closes or [], opens or []))

    def _message(
        self, progress: list[Progress], closes: list[Close], opens: list[tuple[Open, SimRequest]]
    ) -> Pending:
        told = [(replace(o, token_ids=ids_told(self.namespace, o.keys)), request) for o, request in opens]
        rows = tuple(replace(row, token_ids=ids_told(self.namespace, row.new_keys)) for row in progress)
        return Pending(Step(
            self.name, self.epoch, self.number + 1, self.seen, {r.attach_id: self.value for r in self.ranks},
            rows, tuple(o for o, _ in told), tuple(closes),
        ), told, closes)  # fmt: skip

    def _send(self, pending: Pending) -> None:
        reply = self.world.apply(pending.message)
        assert isinstance(reply, StepDone), reply
        assert pending.reply is None or same_effect(pending.reply, reply)
        self._take(pending, reply)

    def _take(self, pending: Pending, reply: StepDone) -> None:
        self.number += 1
        self.last = (pending.message, reply)
        for answer, (_, request) in zip(reply.opened, pending.opens, strict=True):
            self._opened(answer, request)
        # A reply brings the notices not seen yet; one may have refused what the message closes.
        self._read_notices()
        gone = {close.request_id for close in pending.closes} - self.requests.keys()
        kept = retracts.kept(pending.closes, reply)
        others = [e for e in reply.errors if e.request_id not in kept]
        assert all(e.request_id in gone and isinstance(e.error, UnknownRequest) for e in others), reply.errors
        for said in pending.message.progress:
            self.requests[said.request_id].starved = False
        for grown in reply.grown:
            workerplans.clear(self, grown)
            self._grown(grown)
        for closed in pending.closes:
            if closed.request_id not in kept:
                retracts.closed(self, closed)
        for rows in reply.residency:
            self.requests[rows.request_id].residency(rows)
        for hot in reply.hot:
            self.requests[hot.request_id].hot = hot.pages
        self._launch()

    def cut_stream(self) -> None:
        """The stream breaks around a message: before the daemon got it, or before its reply came back.

        Ranks go on with what they were given; the daemon still reads their timelines.
        """
        self.pending = self._compose()
        if self.draw.random() < 0.5:
            reply = self.world.apply(self.pending.message)
            assert isinstance(reply, StepDone), reply
            self.pending.reply = reply
        self.cut = True
        self.world.apply(EngineSuspect(self.name, self.epoch))
        refused = self.world.apply(Step(self.name, self.epoch, self.number + 2))
        assert isinstance(refused, Suspect), refused
        self.world.net.note(f"stream cut: {self.name}")

    def resume_stream(self) -> None:
        """A new stream of the same epoch: notices that were not seen come again, and so does the message."""
        assert self.pending is not None
        pending, self.pending, self.cut = self.pending, None, False
        self.world.apply(EngineResumed(self.name, self.epoch))
        known = self.world.node.state.engines[self.name].notices
        kept = [n.notice for n in self.world.inbox.get((self.name, self.epoch), [])]
        assert [n for n in known if n.sequence > self.seen] == kept, "a notice was forgotten before it was seen"
        before = self._accounts()
        again = pending.reply is not None
        self._send(pending)
        assert not again or self._unmoved(before)
        self.world.happened["stream resumed"] += 1

    def resend(self) -> None:
        """The last message again: the same reply, and not a page moves."""
        if self.last is None:
            return
        before = self._accounts()
        reply = self.world.apply(self.last[0])
        assert same_effect(reply, self.last[1])
        assert self._unmoved(before), "a resend moved pages"
        self.world.happened["resend"] += 1

    def _accounts(self) -> tuple[int, list[dict[PageState, int]]]:
        """How often the daemon has died, and what every pool holds by state."""
        pools = [pool for group in self.world.node.state.groups.values() for pool in group.pools.values()]
        return self.world.net.happened["daemon died"], [pool.account() for pool in pools]

    def _unmoved(self, before: tuple[int, list[dict[PageState, int]]]) -> bool:
        """No page changed its state since; that is not said once the daemon has died, since its plans end then."""
        now = self._accounts()
        return now[0] != before[0] or now[1] == before[1]

    def _read_notices(self) -> None:
        for notified in self.world.inbox.pop((self.name, self.epoch), []):
            notice = notified.notice
            assert notice.sequence == self.seen + 1
            self.seen = notice.sequence
            ready = notice.ready
            assert ready is not None
            request = self.requests.get(ready.request_id)
            if request is None or not request.waiting:
                continue  # aborted meanwhile
            self._opened(ready, request)

    def _opened(self, answer: Opened, request: SimRequest) -> None:
        self.world.happened[answer.state] += 1
        if answer.state == "refused":
            assert isinstance(answer.error, (CapacityError, InvalidArgument, TransferError, KVError))
            if isinstance(answer.error, InvalidArgument):
                assert "open already" in str(answer.error)
            self.requests.pop(request.request_id, None)
            if request.request_id in self.retracted:
                assert isinstance(answer.error, CapacityError), answer
            elif isinstance(answer.error, CapacityError):
                self.refused = request
            return
        self.world.happened["resumed"] += self.retracted.pop(request.request_id, None) is not None
        self.requests[request.request_id] = request
        if answer.state == "waiting":
            request.waiting = True
            return
        request.run(answer)
        request.keys_sent = request.prompt // PAGE_ROWS

    def _grown(self, grown: Grown) -> None:
        request = self.requests[grown.request_id]
        request.starved = grown.error is not None
        if grown.error is not None:
            self.world.happened["grow refused"] += 1
            assert isinstance(grown.error, CapacityError)
            self._promise_broken(request, grown)
        for table in request.tables:
            # The reply counts the first chain's spans; the rule is the same for all: whole spans past the capacity go.
            if table.cut(max(request.capacity, request.committed)):
                self.world.happened["truncated"] += 1
            for run in grown.spans:
                if run.chain == table.spec.name:
                    table.apply(run)
        assert grown.spans_kept == len(request.tables[0].widths), grown

    def _promise_broken(self, request: SimRequest, grown: Grown) -> None:
        """Growth inside the promise must not fail. Overbooked pools may; so may a sparse request that sprints.

        A sparse request's promise covers the pages of its window: a tail and one more, renewed as older ones leave.
        """
        inside = request.capacity <= request.prompt + request.growth
        if not inside or self.world.limits.overcommit > 1.0:
            return
        table = request.tables[0]
        sprints = self.spec.sparse is not None and (
            request.capacity - table.end > 0 and self._behind(request) >= self.spec.sparse.tail_pages + 1
        )
        assert sprints, f"a promise was broken: {grown}, request {request.request_id}"

    def _behind(self, request: SimRequest) -> int:
        """Pages of a sparse request that it wrote or asked for and that can't have left HBM yet, or still drain."""
        group = self.world.node.state.groups[self.spec.name]
        part = self.world.node.state.engines[self.name].requests[request.request_id].chains[0]
        table = part.chain.table
        device_only = [r for r in part.rows[part.shared :] if table.copies[0, 1, r] != 2]
        return len(device_only) + group.pools[f"{self.spec.name}/hbm"].spaces["latent"].counts[PageState.DRAINING]

    def _progress(self) -> list[Progress]:
        found = []
        for request in self.requests.values():
            if request.waiting or self.draw.random() < 0.25:
                continue
            some = self.draw.randint(request.committed, request.done)
            committed = self.draw.choice((request.done, request.done, some))
            last = committed // PAGE_ROWS
            if self.draw.random() < 0.2:
                last = self.draw.randint(request.keys_sent, max(last, request.keys_sent))
            keys = request.text.keys(request.keys_sent, last) if last > request.keys_sent else b""
            request.keys_sent = max(request.keys_sent, last)
            request.committed = committed
            request.capacity = self._wanted_capacity(request)
            found.append(Progress(request.request_id, request.capacity, committed, request.rejected, keys))
            request.rejected = 0
        return found

    def _wanted_capacity(self, request: SimRequest) -> int:
        if request.done < request.prompt:
            return request.prompt
        most = request.prompt + request.growth
        ahead = request.done + self.draw.choice((0, 1, 4, 12))
        if self.draw.random() < 0.1:
            return ahead + self.draw.randint(0, 40)  # perhaps beyond what was declared
        return max(min(ahead, most), request.done)

    def _closes(self) -> list[Close]:
        found = []
        for request in self.requests.values():
            finished = not request.waiting and request.done >= request.prompt + request.growth
            if self.draw.random() < (0.5 if finished else 0.06):
                stopped = self.draw.choice(("", "tool_use", "end_turn"))
                ends = self.draw.random() < 0.05
                closing = self.draw.choice((Closing.FINISHED, Closing.ABORTED))
                found.append(Close(request.request_id, closing, stopped, ends))
        return found

    def _opens(self) -> list[tuple[Open, SimRequest]]:
        found: list[tuple[Open, SimRequest]] = []
        while len(self.requests) + len(found) < self.most and self.draw.random() < 0.45:
            taken = {*self.requests, *self.retracted, *(o.request_id for o, _ in found)}
            back = [r for r in self.retracted.values() if all(o.request_id != r.request_id for o, _ in found)]
            if back and self.draw.random() < 0.6:
                again = self.draw.choice(back)
                found.append((retracts.resume(again), again))
                continue
            found.append(self._open(self.draw.choice([i for i in IDS if i not in taken])))
        return found

    def _open(self, request_id: int) -> tuple[Open, SimRequest]:
        ticket: TicketInfo | None = None
        mine = [entry for entry in self.tickets if entry[2] == self.namespace]
        pulls = self.spec.sparse is not None or (self.spec.cache_only and self.spec.ranks == 1)
        if pulls and mine and self.draw.random() < 0.8:
            self.tickets.remove(mine[0])
            ticket, source, _ = mine[0]
            text = source.fork(len(source.digests))
            if self.draw.random() < 0.3:
                text.extend(self.draw.randint(1, 20), self.draw)
        else:
            text = next_text(self.texts, self.draw)
        prompt = len(text.digests)
        growth = self.draw.choice((0, 3, 10, 40) if self.world.limits.overcommit == 1.0 else (40, 90))
        learn(text.digests)
        group = self.world.node.state.groups[self.spec.name]
        tables = [ChainTable(chain, group) for chain in self.spec.chains]
        request = SimRequest(request_id, text, self.namespace, prompt, growth, tables)
        keys = text.keys(0, prompt // PAGE_ROWS)
        return Open(request_id, prompt, growth, keys, f"s{self.draw.randrange(7)}", ticket), request

    # --------------------------------------------------------------------------- launches

    def _launch(self) -> None:
        """One step on every rank, for some of the running requests."""
        self.value += 1
        work: list[list[RowsOp | CopyOp]] = [[] for _ in self.ranks]
        for request in self.requests.values():
            if request.waiting or self.draw.random() < 0.2:
                continue
            self._launch_request(request, work)
        for rank, ops in zip(self.ranks, work, strict=True):
            rank.queue.append((self.value, ops))

    def _launch_request(self, request: SimRequest, work: list[list[RowsOp | CopyOp]]) -> None:
        workerplans.run(self, request, request.plans, work)
        request.plans = ()
        first, old = request.done, request.done
        end = min(request.end, request.prompt if first < request.prompt else request.capacity)
        count = min(end - first, self.draw.choice((1, 4, 16, 33)))
        good = count
        if first >= request.prompt and count > 0:
            good = self.draw.randint(1, count)
            request.rejected = count - good
            request.text.extend(good, self.draw)
            learn(request.text.digests)
        request.done = first + good
        positions = np.arange(old)
        read = request.text.content(positions, request.namespace)
        written = request.text.content(np.arange(first, first + good), request.namespace)
        garbage = np.full(max(count - good, 0), 0x0BAD, np.uint64)
        content = np.concatenate((written, garbage))
        for rank, ops in zip(self.ranks, work, strict=True):
            ops += request.rows_ops(rank.number, 0, old, read, False)
            if count > 0:
                ops += request.rows_ops(rank.number, first, first + count, content, True)

    def rank_of(self, region: int) -> int:
        for chain in self.spec.chains:
            for c in chain.classes:
                if region in c.device_regions:
                    return c.device_regions.index(region)
        raise AssertionError(region)

    def advance(self) -> None:
        """Some ranks run some of their launches; perhaps the daemon looks at the timelines."""
        if self.draw.random() < 0.4:
            self.catch_up()
            return
        for rank in self.draw.sample(self.ranks, self.draw.randint(1, len(self.ranks))):
            for _ in range(self.draw.choice((1, 1, 2, 5))):
                rank.run_one()
        if self.draw.random() < 0.8:
            self.read_timelines()

    def read_timelines(self) -> None:
        words = {r.attach_id: r.word for r in self.ranks}
        chosen = self.draw.sample(list(words), self.draw.randint(1, len(words)))
        self.world.apply(TimelinesRead({a: words[a] for a in chosen}))

    def catch_up(self) -> None:
        """All ranks run everything they were given."""
        for rank in self.ranks:
            while rank.queue and not rank.dead:
                rank.run_one()
        if self.ranks:
            self.world.apply(TimelinesRead({r.attach_id: r.word for r in self.ranks}))

    # ------------------------------------------------------------------------------ ends

    def break_stream(self) -> None:
        """The scheduler's stream broke for good: nothing is granted to it any more."""
        self.stale = True
        self.world.apply(EngineSuspect(self.name, self.epoch))
        answer = self.world.apply(Step(self.name, self.epoch, self.number + 1))
        assert isinstance(answer, (Suspect, StaleEpoch))

    def lose_rank(self) -> bool:
        """One more rank's process is dead; True when none is left. Its last work may have run, unseen."""
        if self.ranks:
            rank = self.ranks.pop(self.draw.randrange(len(self.ranks)))
            for _ in range(self.draw.choice((0, 0, 2))):
                rank.run_one()
            rank.dead = True
            self.world.apply(DetachRank(rank.attach_id))
            if self.draw.random() < 0.4:
                self.catch_up()  # the others finish what this one never will
        return not self.ranks

    def gone(self) -> None:
        """All its processes are dead."""
        self.world.happened["engine gone"] += 1
        self.world.apply(EngineGone(self.name, self.epoch))
        assert self.world.node.state.any_engine(self.name, self.epoch) is None
        self.world.engines.remove(self)

    def leave(self) -> None:
        """A clean end: everything is closed and done first."""
        if self.cut:
            self.resume_stream()
        if not self.stale:
            self._read_notices()
            closes = tuple(Close(r, Closing.FINISHED) for r in (*self.requests, *self.retracted))
            fence = {r.attach_id: self.value for r in self.ranks}
            reply = self.world.apply(Step(self.name, self.epoch, self.number + 1, self.seen, fence, closes=closes))
            assert isinstance(reply, StepDone)
            assert not reply.errors
        self.catch_up()
        while not self.lose_rank():
            pass
        self.gone()

