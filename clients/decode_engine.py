"""A HiSparse decode rank: takes prompts by ticket, or computes them, and decodes them greedily with MTP drafts."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Final

import numpy as np

from kvmanager.clients.attached_engine import ADMIT_TIMEOUT_S, AttachedEngine
from kvmanager.clients.decode_stores import DecodeMemory, DecodeStore, StoresOf, stores_of
from kvmanager.clients.decode_work import (
    INDEXER,
    LATENT,
    Asked,
    DecodeWork,
    Running,
    Turnover,
    append_run,
    apply_reply,
    closing,
    decoded_of,
)
from kvmanager.clients.engine import RequestStep, StepResult, refusal_pause_s
from kvmanager.clients.glm.decode import compute_prompt, verify_step
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.keys import KeyChain
from kvmanager.clients.tables import decode_hot
from kvmanager.clients.worker import ClassMemory
from kvmanager.errors import InvalidArgument, KVError
from kvmanager.layout import indexer_layout, latent_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_from_proto

DRAFTS: Final = 3
"""Tokens the MTP layer proposes a step."""
MOST_RUNNING: Final = 2
"""Requests decoded side by side."""
RETRACT_AFTER_S: Final = 0.25
"""Pages come back as rows reach the host: only a request that lacks room for so long costs another one its place."""
STALL_PAUSE_S: Final = 0.02
"""Between messages while no request has room for a step."""


class DecodeEngine:
    """Up to `MOST_RUNNING` requests on one rank. One thread uses it. Uses only the public client API.

    Where the node has no room for the next step of one, the newest gives up its device pages and goes on later from
    the host; the oldest never does, so one always gets on.
    """

    def __init__(
        self,
        runtime_dir: Path,
        name: str,
        *,
        group: str,
        namespace: pb.Namespace,
        page_rows: int,
        hot_rows: int,
        model: Glm,
        stores: StoresOf = stores_of,
    ) -> None:
        """Registers `name` with the node and attaches its rank. Raises the daemon's typed errors.

        `stores`: how rows are found; the model computes on the CPU whatever that is.
        """
        format_ = model.config.format
        layouts = [latent_layout(format_, page_rows), indexer_layout(format_, page_rows)]
        self.name = name
        self._model = model
        self._namespace = namespace
        self._engine = AttachedEngine(runtime_dir, name, group=group, namespace=namespace, layouts=layouts, ranks=1)
        (rank,) = self._engine.workers.ranks
        self.latent: ClassMemory = rank.classes[LATENT]
        memory = DecodeMemory(
            self.latent, rank.classes[INDEXER], format_.share_groups, MOST_RUNNING, 1 + DRAFTS,
            model.config.index_topk, hot_rows,
        )  # fmt: skip
        self._stores = stores(memory)
        self._requests = 0
        self._queued: deque[Asked] = deque()
        self._waiting: list[Asked] = []
        self._running: list[Running] = []
        self._retracted: deque[Asked] = deque()
        self._retract_at = 0.0
        self._stands_until = 0.0
        self._refusal: KVError | None = None
        self.retractions = 0

    @property
    def running(self) -> tuple[Running, ...]:
        """Requests being decoded."""
        return tuple(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._queued or self._retracted or self._waiting or self._running)

    def submit(self, work: DecodeWork) -> int:
        """Queues work; its request id."""
        self._requests += 1
        keys = KeyChain(self._namespace)
        request = pb.OpenRequest(
            request_id=self._requests,
            prompt_tokens=len(work.prompt),
            growth_tokens=work.output_tokens + DRAFTS + 2,
            prompt_keys=keys.extend(work.prompt),
            session=work.session,
            ticket=work.ticket,
            prompt_token_ids=keys.token_ids(),
        )
        self._queued.append(Asked(self._requests, work, keys, request, time.monotonic() + ADMIT_TIMEOUT_S))
        return self._requests

    def admit(self) -> list[Running]:
        """Asks for queued work and returns the requests whose KV has arrived; computes nothing.

        Waits for an arrival, or until a refused request may be asked for again. Raises the daemon's typed
        errors; a refusal for want of room only when it can't pass or lasts too long.
        """
        asked = self._next_to_open()
        arrived = self._wait() if asked is None else self._exchange([], asked)
        self._running += arrived
        return arrived

    def step(self) -> Turnover:
        """One message for all requests, then one verified step of each that runs. Raises as `admit` does."""
        finished = [request for request in self._running if request.finished]
        asked = self._next_to_open()
        arrived = self._exchange(finished, asked) if self._running or asked else self._wait()
        able = [request for request in self._running if not request.stalled]
        for request in able:
            self._verify(request)
        self._note_standstill(stands=bool(self._running) and not able)
        self._running += arrived
        return Turnover(arrived, [decoded_of(request) for request in finished])

    def _exchange(self, finished: list[Running], asked: Asked | None) -> list[Running]:
        """One message; the requests that arrived by it. Requests in `finished` are closed with it."""
        victim = self._victim()
        closes = [closing(request) for request in finished]
        if victim is not None:
            closes.append(pb.CloseRequest(request_id=victim.request_id, reason=pb.RETRACTED))
        result = self._engine.client.step(
            fence=self._engine.workers.fence(),
            requests=[self._progress(request, grows=request is not victim) for request in self._running],
            closes=closes,
            opens=[asked.request] if asked else [],
        )
        self._engine.workers.run_plans(result.worker_plans)
        self._check(result, victim)
        for request in finished:
            request.store.close()
        if victim is not None and victim.request_id not in result.errors:
            self._set_aside(victim)
        arrived = self._answered(asked, result.opened[asked.request_id]) if asked else []
        arrived += self._arrivals()
        self._running = [request for request in self._running if request not in finished]
        # A request may run, for the daemon, since before this reply: the reply's rows are for it too.
        for request in (*self._running, *arrived):
            apply_reply(request, result)
        return arrived

    def _victim(self) -> Running | None:
        """The newest request, where one has lacked room for a while since the last retraction."""
        now = time.monotonic()
        unfinished = [request for request in self._running if not request.finished]
        if len(unfinished) < 2 or not any(request.stalled for request in unfinished):
            self._retract_at = now + RETRACT_AFTER_S
        if now < self._retract_at:
            return None
        self._retract_at = now + RETRACT_AFTER_S
        return unfinished[-1]

    def _check(self, result: StepResult, victim: Running | None) -> None:
        """Raises the first error but those that waiting may mend: no room to grow, and none on the host to retract."""
        mended = {request_id for request_id, growth in result.growth.items() if growth.HasField("error")}
        if victim is not None:
            mended.add(victim.request_id)
        for request_id, error in result.errors.items():
            if request_id not in mended or refusal_pause_s(error) is None:
                raise error
            self._refusal = error

    def _note_standstill(self, *, stands: bool) -> None:
        """Waits a little where no request has room for a step. Raises the refusal that lasts too long."""
        now = time.monotonic()
        if not stands:
            self._stands_until = now + ADMIT_TIMEOUT_S
            return
        if now > self._stands_until and self._refusal is not None:
            raise self._refusal
        time.sleep(STALL_PAUSE_S)

    def _set_aside(self, victim: Running) -> None:
        """It was retracted: it is opened again with what it has committed, once there is room."""
        self.retractions += 1
        self._running.remove(victim)
        victim.store.close()
        keys = KeyChain(self._namespace)
        request = pb.OpenRequest(
            request_id=victim.request_id,
            prompt_tokens=victim.committed,
            growth_tokens=len(victim.work.prompt) + victim.work.output_tokens + DRAFTS + 2 - victim.committed,
            prompt_keys=keys.extend(np.asarray(victim.tokens[: victim.committed], dtype=np.int64)),
            session=victim.work.session,
        )
        deadline = time.monotonic() + ADMIT_TIMEOUT_S
        self._retracted.append(Asked(victim.request_id, victim.work, victim.keys, request, deadline, resumes=victim))

    def _next_to_open(self) -> Asked | None:
        """The work to ask for now: one at a time, in order, and not before the daemon's pause has passed.

        What was retracted goes first, and nothing while a running request lacks room.
        """
        queue = self._retracted or self._queued
        busy = len(self._waiting) + sum(not request.finished for request in self._running)
        if not queue or busy >= MOST_RUNNING or time.monotonic() < queue[0].retry_at:
            return None
        return None if any(request.stalled for request in self._running) else queue.popleft()

    def _answered(self, asked: Asked, opened: pb.OpenReply) -> list[Running]:
        """Files an open's reply; the request itself if it can run at once."""
        if opened.state == pb.OpenReply.RUNNABLE:
            return [self._start(asked, opened)]
        if opened.state == pb.OpenReply.WAITING:
            self._waiting.append(asked)
            return []
        refusal = error_from_proto(opened.error)
        pause = refusal_pause_s(refusal)
        if pause is None or time.monotonic() + pause > asked.deadline:
            raise refusal
        asked.retry_at = time.monotonic() + pause
        (self._queued if asked.resumes is None else self._retracted).appendleft(asked)
        return []

    def _wait(self) -> list[Running]:
        """Nothing runs: until the first awaited request is ready, or a refused one may be asked for again."""
        if self._waiting:
            first = self._waiting[0]
            opened = self._engine.client.wait_ready(first.request_id, first.deadline - time.monotonic())
            self._waiting.remove(first)
            return [self._start(first, opened)]
        queue = self._retracted or self._queued
        if queue:
            time.sleep(max(queue[0].retry_at - time.monotonic(), 0.0))
        return []

    def _arrivals(self) -> list[Running]:
        arrived = []
        for asked in list(self._waiting):
            opened = self._engine.client.take_ready(asked.request_id)
            if opened is not None:
                self._waiting.remove(asked)
                arrived.append(self._start(asked, opened))
        return arrived

    def _start(self, asked: Asked, opened: pb.OpenReply) -> Running:
        """The worker's side of a request. Raises InvalidArgument when less than the prompt came that was to come."""
        length, former, work = asked.request.prompt_tokens, asked.resumes, asked.work
        comes = former is not None or work.ticket is not None
        if comes and opened.cached_tokens != length:
            raise InvalidArgument(f"request {asked.request_id}: {opened.cached_tokens} of {length} tokens came")
        self._engine.workers.run_plans(opened.worker_plans)
        store = self._store(opened)
        if former is not None:
            store.counters = former.store.counters
            former.opened, former.store = opened, store
            return former
        tokens = work.prompt.tolist()
        first = work.first_token
        if first is None:
            first = compute_prompt(self._model, store, tokens, opened.cached_tokens, 1 + DRAFTS)
        return Running(asked.request_id, work, opened, [*tokens, first], length, asked.keys, store)

    def _store(self, opened: pb.OpenReply) -> DecodeStore:
        """Its rows, by the tables of an open's reply."""
        store = self._stores.open()
        for run in opened.spans:
            append_run(store, run)
        for hot in opened.hot:
            store.set_hot_pages(decode_hot(hot))
        return store

    def _progress(self, request: Running, *, grows: bool) -> RequestStep:
        """What the request did since the last message, and the room that its next step needs if it `grows`."""
        fresh = request.tokens[request.keys.tokens : request.committed]
        new_keys = request.keys.extend(np.asarray(fresh, dtype=np.int64))
        # This step's tokens, and a position ahead so that the next step need not wait.
        ahead = 1 + DRAFTS + 1 if grows and not request.finished else 0
        capacity = request.committed + ahead
        rejected, request.drafts.rejected = request.drafts.rejected, 0
        ids = request.keys.token_ids(new_keys)
        return RequestStep(request.request_id, capacity, request.committed, rejected, new_keys, ids)

    def _verify(self, request: Running) -> None:
        """One step of the model: the last token and the drafts after it."""
        drafts, fed = request.drafts, request.fed
        step = verify_step(self._model, request.store, fed, request.committed, DRAFTS)
        drafts.proposed += len(drafts.waiting)
        drafts.accepted += len(step.accepted) - 1
        drafts.rejected = len(fed) - len(step.accepted)
        drafts.waiting = step.drafts
        request.tokens += step.accepted
        request.committed += len(step.accepted)

    def close(self) -> None:
        """Leaves the node. Raises the first error of a detach."""
        self._engine.close()
