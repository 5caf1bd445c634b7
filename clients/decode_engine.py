"""A HiSparse decode rank: takes a prompt by ticket and decodes greedily with MTP drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep, StepResult
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.hisparse import HiSparseStore
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.keys import KeyChain
from kvmanager.clients.tables import Int64Array, decode_hot, decode_residency, decode_spans, order_runs
from kvmanager.clients.worker import ClassMemory
from kvmanager.errors import InvalidArgument
from kvmanager.layout import indexer_layout, latent_layout
from kvmanager.protos import kvmanager_pb2 as pb

DRAFTS: Final = 3
"""Tokens the MTP layer proposes a step."""
LATENT: Final = "latent"
INDEXER: Final = "indexer"

Told = Callable[[int], None]


@dataclass
class Admitted:
    """A request whose prompt is here. `opened` is the daemon's table of it at that time.

    `tokens`: prompt, then the answer as far as it is known; `committed` of them have final rows.
    """

    request_id: int
    opened: pb.OpenReply
    tokens: list[int]
    prompt_tokens: int
    output_tokens: int
    committed: int
    keys: KeyChain
    store: HiSparseStore

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer so far, the first one from prefill included."""
        return self.tokens[self.prompt_tokens :]


@dataclass(frozen=True)
class Decoded:
    """An answer: token ids, and what drafts and the hot buffer did for it (counts)."""

    tokens: tuple[int, ...]
    drafts_proposed: int
    drafts_accepted: int
    swap_in_rows: int


@dataclass
class _Drafts:
    """Drafts waiting to be verified, and how they have fared."""

    waiting: list[int] = field(default_factory=list)
    rejected: int = 0
    proposed: int = 0
    accepted: int = 0


class DecodeEngine:
    """One request at a time on one rank. Uses only the public client API."""

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

    def admit(
        self, prompt: Int64Array, first_token: int, ticket: pb.Ticket, output_tokens: int, session: pb.SessionHint
    ) -> Admitted:
        """Opens a request with a ticket and waits until the KV of `prompt` int64[L] is here.

        `output_tokens` of answer will be decoded, `first_token` being the first. Raises the daemon's typed
        errors, InvalidArgument when less than the prompt came.
        """
        self._requests += 1
        keys = KeyChain(self._namespace)
        length = len(prompt)
        opened = self._engine.open(
            pb.OpenRequest(
                request_id=self._requests,
                prompt_tokens=length,
                growth_tokens=output_tokens + DRAFTS + 2,
                prompt_keys=keys.extend(prompt),
                session=session,
                ticket=ticket,
            )
        )
        if opened.cached_tokens != length:
            raise InvalidArgument(f"the hand-off brought {opened.cached_tokens} of {length} prompt tokens")
        store = self._new_store()
        for run in opened.spans:
            _append(store, run)
        for hot in opened.hot:
            store.set_hot_pages(decode_hot(hot))
        tokens = [*prompt.tolist(), first_token]
        return Admitted(self._requests, opened, tokens, length, output_tokens, length, keys, store)

    def _new_store(self) -> HiSparseStore:
        host = self.latent.host
        if host is None:
            raise InvalidArgument(f"class {LATENT!r} came without a host region; a decode rank reads it")
        groups = self._model.config.format.share_groups
        return HiSparseStore(self.latent.device, host, self.latent.layout, self._indexer.layout, groups, self._hot_rows)

    def generate(self, request: Admitted, stop_reason: str, told: Told) -> Decoded:
        """Decodes the rest of the answer and closes the request.

        `told` hears the answer's length after each step. Raises the daemon's typed errors.
        """
        drafts = _Drafts()
        while len(request.answer) < request.output_tokens:
            # Room for this step's tokens, and a position ahead so that the next step need not wait.
            capacity = request.committed + 1 + DRAFTS + 1
            self._apply(request, self._engine.step([self._progress(request, capacity, drafts)]))
            self._verify(request, drafts)
            told(len(request.answer))
        close = pb.CloseRequest(request_id=request.request_id, reason=pb.FINISHED, stop_reason=stop_reason)
        self._engine.step([self._progress(request, request.committed, drafts)], [close])
        answer = tuple(request.answer[: request.output_tokens])
        return Decoded(answer, drafts.proposed, drafts.accepted, request.store.counters.swap_in_rows)

    def _progress(self, request: Admitted, capacity: int, drafts: _Drafts) -> RequestStep:
        """What the request did since the last message."""
        new_keys = request.keys.extend(_tokens(request.tokens[request.keys.tokens : request.committed]))
        return RequestStep(request.request_id, capacity, request.committed, drafts.rejected, new_keys)

    def _apply(self, request: Admitted, result: StepResult) -> None:
        """Brings the worker's table up to date before the step's first row is read or written."""
        growth = result.growth.get(request.request_id)
        if growth is not None:
            request.store.truncate_spans(growth.spans[0].first_span if growth.spans else growth.spans_kept)
            for run in growth.spans:
                _append(request.store, run)
        for rows in result.residency.get(request.request_id, ()):
            decoded = decode_residency(rows)
            if decoded.page_class != LATENT:
                raise InvalidArgument(f"residency of class {decoded.page_class!r}; only {LATENT!r} pages move")
            request.store.set_residency(decoded.ordinals, decoded.column.device, decoded.column.host)
        hot = result.hot.get(request.request_id)
        if hot is not None:
            request.store.set_hot_pages(decode_hot(hot))

    def _verify(self, request: Admitted, drafts: _Drafts) -> None:
        """One step of the model: the last token and the drafts after it."""
        fed = [request.tokens[-1], *drafts.waiting]
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


def _tokens(tokens: list[int]) -> Int64Array:
    """int64[n]; numpy would make an empty list float64."""
    return np.asarray(tokens, dtype=np.int64)
