"""The decode node: ranks that step together, each with its own pages; requests come by hand-off and leave when done.

Between arrivals, ends and growth nothing changes, so as many steps are taken at one go. A request grows by
`GROW_TOKENS` at a time, inside what it was promised.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from kvmanager.core.events import Close, Closing, Open, Progress, PullTarget, StartPull, TicketInfo
from kvmanager.core.spans import ABSENT, DEVICE
from kvmanager.errors import CapacityError
from kvmanager.simulation.clock import Clock
from kvmanager.simulation.costs import Running
from kvmanager.simulation.jobs import Job, Rank

GROW_TOKENS = 256
DRAFT_ROOM = 8
LEASE_NS = 1 << 50
RETRY_S = 0.5
"""A request that found no room asks again when one ended or a copy did, and after this time at the latest."""


class _DecodeRank:
    """One rank: jobs that wait for room, for their bytes, and those that run."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.queue: deque[Job] = deque()
        self.arriving: dict[int, Job] = {}
        self.ready: list[Job] = []
        self.running: list[Job] = []
        self.refused_opens = 0
        self.retry_s = 0.0

    @property
    def load(self) -> int:
        """Requests that are here."""
        return len(self.queue) + len(self.arriving) + len(self.ready) + len(self.running)

    def admit(self) -> list[Job]:
        """Opens waiting jobs in order until one finds no room; those that never will are returned."""
        never = []
        rank = self.rank
        while self.queue and rank.clock.now_s >= self.retry_s:
            job = self.queue[0]
            turn = job.turn
            growth = turn.output_tokens + DRAFT_ROOM
            ticket = TicketInfo(job.ticket_id, "prefill", turn.prompt_tokens, LEASE_NS)
            asked = Open(job.number, turn.prompt_tokens, growth, turn.keys(), turn.session, ticket)
            # What an earlier step released is there once the next message's fence has passed.
            rank.engine.step(rank.clock.ns)
            opened = rank.engine.step(rank.clock.ns, opens=(asked,)).opened[0]
            rank.carry_out()
            if opened.error is not None:
                self.refused_opens += 1
                if not isinstance(opened.error, CapacityError):
                    raise opened.error
                if opened.error.retry_after_ns:
                    self.retry_s = rank.clock.now_s + RETRY_S
                    break
                job.refused = str(opened.error)
                never.append(self.queue.popleft())
                job.release()
                continue
            self.queue.popleft()
            job.granted_tokens = turn.prompt_tokens
            if opened.state == "waiting":
                self.arriving[job.number] = job
            else:
                job.release()
                self.ready.append(job)
            self._pull()
        return never

    def _pull(self) -> None:
        """Reads what was asked for: over the source's adapters and this rank's, host pages on to the host."""
        rank = self.rank
        for plan_id, pull in list(rank.node.pulls.items()):
            del rank.node.pulls[plan_id]
            job = next(job for job in self.arriving.values() if job.ticket_id == pull.ticket.ticket_id)
            now = rank.clock.now_s
            size = _missing_tokens(pull) * rank.token_bytes
            assert job.source is not None
            ends = [job.source.nic.send(now, size // job.source.spec.ranks), rank.nic.send(now, size)]
            on_host = sum(t.page_class == "latent" and _on_host(rank, t) for p in pull.chains for t in p.targets)
            if on_host:
                ends.append(rank.to_host.send(now, size // 2))
            rank.clock.at(max(ends), partial(self._pulled, plan_id, job))

    def _pulled(self, plan_id: int, job: Job) -> None:
        self.rank.node.end(plan_id, self.rank.clock.ns)
        self.rank.carry_out()
        job.release()
        self.rank.on_change()

    def take_ready(self) -> None:
        """Jobs whose bytes have all come."""
        for notice in self.rank.engine.notices():
            told = notice.ready or notice.failed
            job = self.arriving.pop(told.request_id, None) if told else None
            if job is not None:
                assert notice.ready is not None, notice
                assert notice.ready.error is None, notice
                self.ready.append(job)

    def grow(self) -> None:
        """Asks for the pages of the next tokens, and says what was written."""
        progress = []
        for job in self.running:
            there = job.turn.prompt_tokens + int(job.produced_tokens)
            if there + DRAFT_ROOM <= job.granted_tokens:
                continue
            most = job.turn.prompt_tokens + job.turn.output_tokens + DRAFT_ROOM
            committed = min(there, job.granted_tokens)
            job.granted_tokens = min(there + GROW_TOKENS, most)
            progress.append(Progress(job.number, job.granted_tokens, committed))
        if not progress:
            return
        for grown in self.rank.engine.step(self.rank.clock.ns, progress=tuple(progress)).grown:
            if grown.error is not None:
                raise AssertionError(f"growth inside the promise was refused: {grown.error}")
        self.rank.carry_out()

    def close(self, finished: list[Job]) -> None:
        """Requests end."""
        self.retry_s = 0.0
        closes = tuple(Close(job.number, Closing.FINISHED) for job in finished)
        self.rank.engine.step(self.rank.clock.ns, closes=closes)
        self.rank.engine.step(self.rank.clock.ns)
        self.rank.carry_out()

    def composition(self) -> list[Running]:
        """What a step has to do."""
        return [
            Running(job.turn.prompt_tokens + int(job.produced_tokens), self._on_host_share(job)) for job in self.running
        ]

    def _on_host_share(self, job: Job) -> float:
        """Share of a request's latent spans that are not in HBM."""
        if not self.rank.spec.swaps:
            return 0.0
        request = self.rank.node.core.state.engines[self.rank.engine.name].requests[job.number]
        part = request.chains[0]
        return float((part.chain.table.copies[0, DEVICE, part.rows.array] == ABSENT).mean())


def _missing_tokens(pull: StartPull) -> int:
    return max(part.targets[0].end - part.first_position for part in pull.chains)


def _on_host(rank: Rank, target: PullTarget) -> bool:
    hosts = {region for c in rank.spec.chains[0].classes for region in c.host_regions}
    return any(set(run.regions) & hosts for run in target.spans)


class DecodeNode:
    """Steps while requests run. done(job): its answer is complete."""

    def __init__(
        self,
        ranks: list[Rank],
        clock: Clock,
        step_s: Callable[[list[list[Running]]], float],
        accepted_tokens: float,
        done: Callable[[Job], None],
    ) -> None:
        self.ranks = [_DecodeRank(rank) for rank in ranks]
        self._clock, self._cost, self._accepted, self._done = clock, step_s, accepted_tokens, done
        self._began_s, self._step_s, self._turn = 0.0, 0.0, 0
        self._homes: dict[str, _DecodeRank] = {}
        self.busy_s = 0.0
        self.steps = 0
        self.most_running = 0
        for rank in self.ranks:
            rank.rank.on_change = partial(self._copied, rank)

    def submit(self, job: Job) -> None:
        """A prompt is computed; its KV is to come here."""
        least = min(self.ranks, key=lambda rank: rank.load)
        home = self._homes.get(job.turn.session, least)
        chosen = home if home.load <= least.load + 1 else least
        self._homes[job.turn.session] = chosen
        if job.turn.last:
            del self._homes[job.turn.session]
        chosen.queue.append(job)
        self._changed()

    def _copied(self, rank: _DecodeRank) -> None:
        """Bytes came, or a copy made room."""
        rank.retry_s = 0.0
        if rank.queue or rank.arriving:
            self._changed()

    def _changed(self) -> None:
        """Something may go on: at the end of the step under way, or now."""
        self._schedule(1)

    def _schedule(self, steps: int) -> None:
        """The next look at everything, `steps` steps after the last whole one."""
        self._turn += 1
        turn = self._turn
        due = self._clock.now_s
        if self._step_s:
            begun = math.ceil((self._clock.now_s - self._began_s) / self._step_s - 1e-9)
            due = self._began_s + max(steps, begun) * self._step_s
        self._clock.at(due, lambda: self._boundary() if turn == self._turn else None)

    def _boundary(self) -> None:
        """Between two steps: who is done leaves, who is ready joins, pages for the next tokens are taken."""
        self._settle()
        never = []
        for rank in self.ranks:
            finished = [job for job in rank.running if job.produced_tokens >= job.turn.output_tokens]
            if finished:
                rank.running = [job for job in rank.running if job not in finished]
                rank.close(finished)
                for job in finished:
                    job.end_s = self._clock.now_s
                    self._clock.at(self._clock.now_s, partial(self._done, job))
            rank.take_ready()
            never += rank.admit()
            rank.take_ready()
        for job in never:
            self._clock.at(self._clock.now_s, partial(self._done, job))
        self._go_on()

    def _go_on(self) -> None:
        for rank in self.ranks:
            joining, rank.ready = rank.ready, []
            rank.running += joining
            for job in joining:
                job.handed_s = self._clock.now_s
            rank.grow()
        running = [job for rank in self.ranks for job in rank.running]
        self.most_running = max(self.most_running, len(running))
        self._began_s = self._clock.now_s
        waits = any(rank.queue for rank in self.ranks)
        if not running:
            self._step_s = 0.0
            if waits:
                self._clock.at(self._clock.now_s + RETRY_S, self._changed)
            return
        self._step_s = self._cost([rank.composition() for rank in self.ranks])
        for job in running:
            if job.first_s < 0:
                job.first_s = self._clock.now_s + self._step_s
        steps = self._steps_until_change(running)
        self._schedule(min(steps, max(1, math.ceil(RETRY_S / self._step_s))) if waits else steps)

    def _steps_until_change(self, running: list[Job]) -> int:
        """Steps until some request is done or needs further pages."""
        steps = []
        for job in running:
            room = job.granted_tokens - DRAFT_ROOM - job.turn.prompt_tokens
            target = min(job.turn.output_tokens, room + 1) - job.produced_tokens
            steps.append(max(1, math.ceil(target / self._accepted)))
        return min(steps)

    def _settle(self) -> None:
        """Counts what whole steps have produced since the last look."""
        if not self._step_s:
            return
        steps = int((self._clock.now_s - self._began_s) / self._step_s + 1e-6)
        for rank in self.ranks:
            for job in rank.running:
                job.produced_tokens += steps * self._accepted
        self.steps += steps
        self.busy_s += steps * self._step_s
        self._began_s += steps * self._step_s
