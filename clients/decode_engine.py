"""A HiSparse decode rank: takes prompts by ticket and decodes them greedily with MTP drafts, a few at a time."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvmanager.clients.attached_engine import ADMIT_TIMEOUT_S, AttachedEngine
from kvmanager.clients.engine import RequestStep, StepResult, refusal_pause_s
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.hisparse import HiSparseStore
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.keys import KeyChain
from kvmanager.clients.tables import Int64Array, decode_hot, decode_residency, decode_spans, order_runs
from kvmanager.clients.worker import ClassMemory
from kvmanager.errors import InvalidArgument
from kvmanager.layout import indexer_layout, latent_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_from_proto

DRAFTS: Final = 3
"""Tokens the MTP layer proposes a step."""
MOST_RUNNING: Final = 2
"""Requests decoded side by side."""
LATENT: Final = "latent"
INDEXER: Final = "indexer"


@dataclass(frozen=True)
class DecodeWork:
    """A prompt int64[L] that was computed elsewhere, and the answer wanted: `output_tokens`, `first_token` included."""

    prompt: Int64Array
    first_token: int
    ticket: pb.Ticket
    output_tokens: int
    session: pb.SessionHint
    stop_reason: str


@dataclass
class _Drafts:
    """Drafts waiting to be verified, and how they have fared. `rejected`: not told yet."""

    waiting: list[int] = field(default_factory=list)
    rejected: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(eq=False)
class Running:
    """A request whose prompt is here. `opened` is the daemon's table of it at that time.

    `tokens`: prompt, then the answer as far as it is known; `committed` of them have final rows.
    """

    request_id: int
    work: DecodeWork
    opened: pb.OpenReply
    tokens: list[int]
    committed: int
    keys: KeyChain
    store: HiSparseStore
    drafts: _Drafts = field(default_factory=_Drafts)

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far."""
        return self.tokens[len(self.work.prompt) :][: self.work.output_tokens]

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return len(self.answer) == self.work.output_tokens


@dataclass(frozen=True)
class Decoded:
    """An answer: token ids, and what drafts and the hot buffer did for it (counts)."""

    request_id: int
    tokens: tuple[int, ...]
    drafts_proposed: int
    drafts_accepted: int
    swap_in_rows: int


@dataclass(frozen=True)
class Turnover:
    """What a step changed: requests whose KV has arrived (decoded from the next step on), and answers completed."""

    arrived: list[Running]
    finished: list[Decoded]


@dataclass
class _Asked:
    """Work whose request is not running yet. `retry_at`, `deadline`: on the monotonic clock, seconds."""

    request_id: int
    work: DecodeWork
    keys: KeyChain
    request: pb.OpenRequest
    deadline: float
    retry_at: float = 0.0


class DecodeEngine:
    """Up to `MOST_RUNNING` requests on one rank. One thread uses it. Uses only the public client API."""

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
    ) -> None:
        """Registers `name` with the node and attaches its rank. Raises the daemon's typed errors."""
        format_ = model.config.format
        layouts = [latent_layout(format_, page_rows), indexer_layout(format_, page_rows)]
        self.name = name
        self._model = model
        self._namespace = namespace
        self._hot_rows = hot_rows
        self._engine = AttachedEngine(runtime_dir, name, group=group, namespace=namespace, layouts=layouts, ranks=1)
        (rank,) = self._engine.workers.ranks
        self.latent: ClassMemory = rank.classes[LATENT]
        self._indexer: ClassMemory = rank.classes[INDEXER]
        self._requests = 0
        self._queued: deque[_Asked] = deque()
        self._waiting: list[_Asked] = []
        self._running: list[Running] = []

    @property
    def running(self) -> tuple[Running, ...]:
        """Requests being decoded."""
        return tuple(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._queued or self._waiting or self._running)

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
        )
        self._queued.append(_Asked(self._requests, work, keys, request, time.monotonic() + ADMIT_TIMEOUT_S))
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
        for request in self._running:
            self._verify(request)
        self._running += arrived
        return Turnover(arrived, [_decoded(request) for request in finished])

    def _exchange(self, finished: list[Running], asked: _Asked | None) -> list[Running]:
        """One message; the requests that arrived by it. Requests in `finished` are closed with it."""
        result = self._engine.step(
            [self._progress(request) for request in self._running],
            [_close(request) for request in finished],
            [asked.request] if asked else [],
        )
        arrived = self._answered(asked, result.opened[asked.request_id]) if asked else []
        arrived += self._arrivals()
        self._running = [request for request in self._running if request not in finished]
        # A request may run, for the daemon, since before this reply: the reply's rows are for it too.
        for request in (*self._running, *arrived):
            _apply(request, result)
        return arrived

    def _next_to_open(self) -> _Asked | None:
        """The work to ask for now: one at a time, in order, and not before the daemon's pause has passed."""
        busy = len(self._waiting) + sum(not request.finished for request in self._running)
        if not self._queued or busy >= MOST_RUNNING or time.monotonic() < self._queued[0].retry_at:
            return None
        return self._queued.popleft()

    def _answered(self, asked: _Asked, opened: pb.OpenReply) -> list[Running]:
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
        self._queued.appendleft(asked)
        return []

    def _wait(self) -> list[Running]:
        """Nothing runs: until the first awaited request is ready, or a refused one may be asked for again."""
        if self._waiting:
            first = self._waiting[0]
            opened = self._engine.client.wait_ready(first.request_id, first.deadline - time.monotonic())
            self._waiting.remove(first)
            return [self._start(first, opened)]
        if self._queued:
            time.sleep(max(self._queued[0].retry_at - time.monotonic(), 0.0))
        return []

    def _arrivals(self) -> list[Running]:
        arrived = []
        for asked in list(self._waiting):
            opened = self._engine.client.take_ready(asked.request_id)
            if opened is not None:
                self._waiting.remove(asked)
                arrived.append(self._start(asked, opened))
        return arrived

    def _start(self, asked: _Asked, opened: pb.OpenReply) -> Running:
        """The worker's side of a request. Raises InvalidArgument when less than the prompt came."""
        work, host = asked.work, self.latent.host
        length = len(work.prompt)
        if opened.cached_tokens != length:
            raise InvalidArgument(f"the hand-off brought {opened.cached_tokens} of {length} prompt tokens")
        if host is None:
            raise InvalidArgument(f"class {LATENT!r} came without a host region; a decode rank reads it")
        groups = self._model.config.format.share_groups
        store = HiSparseStore(
            self.latent.device, host, self.latent.layout, self._indexer.layout, groups, self._hot_rows
        )
        for run in opened.spans:
            _append(store, run)
        for hot in opened.hot:
            store.set_hot_pages(decode_hot(hot))
        tokens = [*work.prompt.tolist(), work.first_token]
        return Running(asked.request_id, work, opened, tokens, length, asked.keys, store)

    def _progress(self, request: Running) -> RequestStep:
        """What the request did since the last message, and the room that its next step needs."""
        fresh = request.tokens[request.keys.tokens : request.committed]
        new_keys = request.keys.extend(np.asarray(fresh, dtype=np.int64))
        # This step's tokens, and a position ahead so that the next step need not wait.
        ahead = 0 if request.finished else 1 + DRAFTS + 1
        capacity = request.committed + ahead
        rejected, request.drafts.rejected = request.drafts.rejected, 0
        return RequestStep(request.request_id, capacity, request.committed, rejected, new_keys)

    def _verify(self, request: Running) -> None:
        """One step of the model: the last token and the drafts after it."""
        drafts = request.drafts
        fed = [request.tokens[request.committed], *drafts.waiting]
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


def _apply(request: Running, result: StepResult) -> None:
    """Brings the worker's table up to date before the step's first row is read or written."""
    store = request.store
    growth = result.growth.get(request.request_id)
    if growth is not None:
        store.truncate_spans(growth.spans[0].first_span if growth.spans else growth.spans_kept)
        for run in growth.spans:
            _append(store, run)
    for rows in result.residency.get(request.request_id, ()):
        decoded = decode_residency(rows)
        if decoded.page_class != LATENT:
            raise InvalidArgument(f"residency of class {decoded.page_class!r}; only {LATENT!r} pages move")
        store.set_residency(decoded.ordinals, decoded.column.device, decoded.column.host)
    hot = result.hot.get(request.request_id)
    if hot is not None:
        store.set_hot_pages(decode_hot(hot))


def _append(store: HiSparseStore, run: pb.SpanRun) -> None:
    spans = decode_spans(run)
    latent, indexer = spans.pages[LATENT], spans.pages[INDEXER]
    for part in order_runs(spans, ranks=1):
        store.append_spans(
            part.order,
            part.first_token,
            spans.uids[part.pages],
            latent.device[part.pages],
            latent.host[part.pages],
            indexer.device[part.pages],
        )


def _close(request: Running) -> pb.CloseRequest:
    return pb.CloseRequest(request_id=request.request_id, reason=pb.FINISHED, stop_reason=request.work.stop_reason)


def _decoded(request: Running) -> Decoded:
    drafts, swapped = request.drafts, request.store.counters.swap_in_rows
    return Decoded(request.request_id, tuple(request.answer), drafts.proposed, drafts.accepted, swapped)
