"""The prefill node: first come, first served, prompts in chunks, all engines in step, then a ticket for the other node.

An engine's step takes at most `step_tokens` new tokens. DP ranks step together, since the experts are spread over them.
A session stays with the rank that has its prefix; a new one goes where the fewest tokens wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvmanager.core.events import Close, Closing, ExportRequestKV, Open, Progress, ReleaseTicket, TurnEnded
from kvmanager.errors import CapacityError, UnknownLease
from kvmanager.simulation.clock import Clock
from kvmanager.simulation.costs import Chunk
from kvmanager.simulation.jobs import Job, Rank
from kvmanager.simulation.turns import Turn

StepCost = Callable[[list[list[Chunk]]], float]
RETURNED = 1 << 32
"""Numbers of requests that bring an answer back lie above all others."""
RETRY_S = 0.5
"""A request that found no room asks again when one ended or a copy did, and after this time at the latest."""


class _Engine:
    """One engine's work: waiting for room, waiting for bytes, being computed."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.queue: deque[Job] = deque()
        self.loading: dict[int, Job] = {}
        self.running: list[Job] = []
        self.batch: list[tuple[Job, int]] = []
        self.refused_opens = 0
        self.retry_s = 0.0

    @property
    def load(self) -> int:
        """Tokens that are not computed yet."""
        waiting = [*self.queue, *self.loading.values(), *self.running]
        return sum(job.turn.prompt_tokens - job.computed_tokens for job in waiting)

    def take_ready(self) -> None:
        """Jobs whose bytes have come are computed next."""
        for notice in self.rank.engine.notices():
            told = notice.ready or notice.failed
            job = self.loading.pop(told.request_id, None) if told else None
            if job is None:
                continue
            assert notice.ready is not None, notice
            assert notice.ready.error is None, notice
            self._runs(job, notice.ready.cached_tokens)

    def admit(self, whole_blocks: int) -> list[Job]:
        """Opens waiting jobs in order until one finds no room; those that never will are returned."""
        never = []
        while self.queue and self.rank.clock.now_s >= self.retry_s:
            job = self.queue[0]
            turn = job.turn
            asked = Open(job.number, turn.prompt_tokens, 0, turn.keys(whole_blocks), turn.session)
            opened = self.rank.engine.step(self.rank.clock.ns, opens=(asked,)).opened[0]
            self.rank.carry_out()
            if opened.error is not None:
                self.refused_opens += 1
                if not isinstance(opened.error, CapacityError):
                    raise opened.error
                if opened.error.retry_after_ns:
                    self.retry_s = self.rank.clock.now_s + RETRY_S
                    break
                job.refused = str(opened.error)
                never.append(self.queue.popleft())
                continue
            self.queue.popleft()
            if opened.state == "waiting":
                self.loading[job.number] = job
            else:
                self._runs(job, opened.cached_tokens)
        return never

    def _runs(self, job: Job, cached: int) -> None:
        job.cached_tokens = job.computed_tokens = cached
        self.running.append(job)

    def fill(self, step_tokens: int) -> list[Chunk]:
        """The chunks of the next step."""
        self.batch, chunks = [], []
        for job in self.running:
            tokens = min(job.turn.prompt_tokens - job.computed_tokens, step_tokens)
            if tokens <= 0:
                break
            step_tokens -= tokens
            self.batch.append((job, tokens))
            chunks.append(Chunk(tokens, job.computed_tokens))
        return chunks

    def finish_step(self) -> list[Job]:
        """Jobs whose prompts are computed now, with a ticket each; their own requests are closed."""
        for job, tokens in self.batch:
            job.computed_tokens += tokens
        finished = [job for job, _ in self.batch if job.computed_tokens == job.turn.prompt_tokens]
        if not finished:
            return []
        rank, engine, now = self.rank, self.rank.engine, self.rank.clock.ns
        self.running = [job for job in self.running if job not in finished]
        commits = tuple(Progress(job.number, job.turn.prompt_tokens, job.turn.prompt_tokens) for job in finished)
        engine.step(now, progress=commits)
        engine.step(now)
        for job in finished:
            rank.node.apply(ExportRequestKV(engine.name, engine.epoch, job.number, job.ticket_id), now)
            job.source = rank
            job.release = partial(self._release, job)
        engine.step(now, closes=tuple(Close(job.number, Closing.FINISHED) for job in finished))
        engine.step(now)
        rank.carry_out()
        return finished

    def _release(self, job: Job) -> None:
        try:
            self.rank.node.apply(ReleaseTicket(job.ticket_id, "decode"), self.rank.clock.ns)
        except UnknownLease:
            raise AssertionError(f"{job.ticket_id} was released twice") from None
        self.rank.carry_out()
        self.rank.on_change()


class PrefillNode:
    """Steps while there is work. `handed(job)`: its prompt is computed. whole_blocks: see `turns.Turn.keys`."""

    def __init__(
        self,
        ranks: list[Rank],
        clock: Clock,
        step_s: StepCost,
        step_tokens: int,
        handed: Callable[[Job], None],
        whole_blocks: int,
    ) -> None:
        self.engines = [_Engine(rank) for rank in ranks]
        self._clock, self._step_s, self._step_tokens = clock, step_s, step_tokens
        self._handed, self._whole_blocks = handed, whole_blocks
        self._stepping = False
        self._homes: dict[str, _Engine] = {}
        self.busy_s = 0.0
        self.steps = 0
        for engine in self.engines:
            engine.rank.on_change = partial(self._copied, engine)

    def submit(self, job: Job) -> None:
        """A request arrives."""
        home = self._homes.get(job.turn.session) or min(self.engines, key=lambda engine: engine.load)
        self._homes[job.turn.session] = home
        home.queue.append(job)
        self._kick()

    def turn_ends(self, job: Job) -> None:
        """The answer is complete, wherever it was made."""
        turn = job.turn
        rank = self._homes[turn.session].rank
        ended = TurnEnded(turn.session, turn.stop_reason, turn.last)
        rank.engine.step(self._clock.ns, turn_ends=(ended,))
        rank.carry_out()
        if turn.last:
            del self._homes[turn.session]
        self._kick()

    def take_back(self, job: Job, turn: Turn) -> None:
        """The KV of an answer comes to the rank that has its prompt, if that is still in HBM and there is room."""
        engine = self._homes.get(turn.session)
        if engine is None:
            return
        rank, number = engine.rank, job.number + RETURNED
        asked = Open(number, turn.prompt_tokens, 0, turn.keys(self._whole_blocks), turn.session)
        opened = rank.engine.step(self._clock.ns, opens=(asked,)).opened[0]
        if opened.error is not None:
            return
        if opened.state == "waiting":  # its prompt would have to be loaded first: not worth it
            rank.engine.step(self._clock.ns, closes=(Close(number, Closing.ABORTED),))
            rank.carry_out()
            return
        size = (turn.prompt_tokens - opened.cached_tokens) * rank.token_bytes // rank.spec.ranks
        self._clock.at(rank.nic.send(self._clock.now_s, size), partial(self._is_back, engine, number, turn))
        rank.carry_out()

    def _is_back(self, engine: _Engine, number: int, turn: Turn) -> None:
        rank, tokens = engine.rank, turn.prompt_tokens
        rank.engine.step(self._clock.ns, progress=(Progress(number, tokens, tokens),))
        rank.engine.step(self._clock.ns, closes=(Close(number, Closing.FINISHED),))
        rank.engine.step(self._clock.ns)
        rank.carry_out()

    def _copied(self, engine: _Engine) -> None:
        """Bytes came, or a copy or a hand-off made room."""
        engine.retry_s = 0.0
        if engine.queue or engine.loading:
            self._kick()

    def _kick(self) -> None:
        if not self._stepping:
            self._begin()

    def _begin(self) -> None:
        """The next step, if there is something to compute."""
        batches = []
        for engine in self.engines:
            engine.take_ready()
            for job in engine.admit(self._whole_blocks):
                self._clock.at(self._clock.now_s, partial(job.done, job))
            batches.append(engine.fill(self._step_tokens))
        if not any(batches):
            if any(engine.queue for engine in self.engines):
                self._clock.at(self._clock.now_s + RETRY_S, self._kick)
            return
        self._stepping = True
        length = self._step_s(batches)
        self.busy_s += length
        self.steps += 1
        self._clock.at(self._clock.now_s + length, self._end)

    def _end(self) -> None:
        finished = [job for engine in self.engines for job in engine.finish_step()]
        for job in finished:
            job.prefilled_s = self._clock.now_s
            self._handed(job)
        self._stepping = False
        self._begin()
