"""An engine whose ranks compute the tiny GLM in one memory mode, on memory that a real node lends it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from nodes_support import LAYOUT, PAGE_BYTES, ROWS, device_pages, node_head

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.glm.attention import ShortPrompts
from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.decode import VerifiedStep, verify_step
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp_rank import prefill_on_rank, prefill_over_shards
from kvmanager.clients.glm.rank_models import ContextParallelGlm, TensorParallelGlm
from kvmanager.clients.glm.ranks import RankGroup, run_threads
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.workspace import GatheredStore, Workspace, workspace_bytes
from kvmanager.clients.keys import KeyChain
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.geometry import ShardGeometry
from kvmanager.protos import kvmanager_pb2 as pb
from tests.glm_ranks import DRAFTS, MAIN_LAYERS, plain_model, weights

CUTS = (20, 53)
"""Ends of a prompt's first chunks: one within the top-k of 24 positions, one not at the end of a page."""
OUTPUT = 8
AHEAD = 1 + DRAFTS + 1
MOST_TOKENS = 256
RANKS = 2
WHOLE, SHARDED = ShardGeometry(1, ROWS, 1), ShardGeometry(RANKS, ROWS, 1)


@dataclass(frozen=True)
class Mode:
    """How ranks compute.

    `prefill(ranks, store, tokens, start, next tokens, short)`: post-norm hidden [h] of the last token. `decoder`: the
    model that decodes on a rank.
    """

    group: str
    geometry: ShardGeometry
    ranks: int
    prefill: Callable[[RankGroup, ShardStore, list[int], int, list[int], ShortPrompts], torch.Tensor]
    decoder: Callable[[RankGroup, ShortPrompts], Glm]


@cache
def model_of(short: ShortPrompts) -> Glm:
    return plain_model() if short is ShortPrompts.MQA else Glm(TINY, weights(), torch.float64, Fp8Codec(), short)


def tensor_parallel(ranks: RankGroup, short: ShortPrompts) -> Glm:
    return TensorParallelGlm(TINY, weights(), torch.float64, Fp8Codec(), ranks, short)


def context_parallel(ranks: RankGroup, _: ShortPrompts) -> Glm:
    """It has no path of its own for short prompts: decode is past them."""
    return ContextParallelGlm(TINY, weights(), torch.float64, Fp8Codec(), ranks)


def alone(model: Glm, store: ShardStore, tokens: list[int], start: int, following: list[int]) -> torch.Tensor:
    """Every row is made here."""
    positions = torch.arange(start, start + len(tokens))
    hidden = model.forward(torch.tensor(tokens), positions, store)
    known = len(following)
    model.mtp_rows(torch.tensor(following, dtype=torch.int64), hidden[:known], positions[:known], store)
    return hidden[-1]


def over_shards(
    ranks: RankGroup, store: ShardStore, tokens: list[int], start: int, following: list[int], short: ShortPrompts
) -> torch.Tensor:
    space = Workspace(torch.full((workspace_bytes(store.geometry, start + len(tokens)),), 0xFF, dtype=torch.uint8))
    gathered = GatheredStore(store, ranks, space, MAIN_LAYERS)
    return prefill_over_shards(model_of(short), gathered, ranks, tokens, start, following)


MODES = {
    "DP": Mode("one", WHOLE, 1, lambda _, *w: alone(model_of(w[-1]), *w[:-1]), lambda _, short: model_of(short)),
    "TP": Mode("copies", WHOLE, RANKS, lambda r, *w: alone(tensor_parallel(r, w[-1]), *w[:-1]), tensor_parallel),
    "PCP": Mode(
        "copies", WHOLE, RANKS, lambda r, store, *w: prefill_on_rank(model_of(w[-1]), store, r, *w[:-1]),
        lambda _, short: model_of(short),
    ),
    "PCPxDCP": Mode("shards", SHARDED, RANKS, over_shards, context_parallel),
}  # fmt: skip


def prompt_of(seed: int, tokens: int = 90) -> list[int]:
    return np.random.default_rng(seed).integers(0, TINY.vocab, tokens).tolist()


@cache
def expected(seed: int, tokens: int = 90) -> list[int]:
    """Of the run on one rank with one store."""
    return ReferenceRun(plain_model()).turn(prompt_of(seed, tokens), OUTPUT)


@cache
def expected_hidden(seed: int, tokens: int = 90) -> torch.Tensor:
    """Post-norm hidden states [prompt + answer, h] of that run."""
    everything = prompt_of(seed, tokens) + expected(seed, tokens)
    store = ContiguousStore(TINY.format, plain_model().codec)
    return plain_model().forward(torch.tensor(everything), torch.arange(len(everything)), store)


@dataclass
class Request:
    """One that is being answered. `tokens`: prompt and answer so far; `rows` of them have final rows.

    `hidden`: position -> post-norm hidden state [h] there, of the last position of each step.
    """

    request_id: int
    tokens: list[int]
    prompt: int
    cached: int
    keys: KeyChain
    pages: np.ndarray
    rows: int = 0
    waiting: list[int] = field(default_factory=list)
    rejected: int = 0
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :][:OUTPUT]

    def check(self, seed: int) -> None:
        """The answer is that of one rank; so are the hidden states, which a smaller mistake would move."""
        assert self.answer == expected(seed)
        states = expected_hidden(seed)
        compared = [at for at in self.hidden if at < len(states)]
        assert len(compared) > 1
        for at in compared:
            torch.testing.assert_close(self.hidden[at], states[at], atol=1e-9, rtol=0)


class ModeEngine:
    """One request at a time; the ranks are threads, the daemon another process."""

    def __init__(self, runtime_dir: Path, name: str, mode: Mode, short: ShortPrompts = ShortPrompts.MQA) -> None:
        self.mode, self.short = mode, short
        self.engine = AttachedEngine(
            runtime_dir, name, group=mode.group, namespace=NAMESPACE, layouts=[LAYOUT], ranks=mode.ranks
        )
        self._stores = [
            ShardStore(rank.classes["kv"].device, LAYOUT, mode.geometry, rank.rank % mode.geometry.ranks)
            for rank in self.engine.workers.ranks
        ]
        self._requests = 0

    def answer(self, prompt: Sequence[int]) -> Request:
        """The whole of it; the request is closed."""
        request = self.prefill(prompt)
        while len(request.answer) < OUTPUT:
            self.decode(request)
        self.close_request(request)
        return request

    def prefill(self, prompt: Sequence[int]) -> Request:
        """Opens, computes what is not cached in chunks, a message each; with the first token of the answer."""
        self._requests += 1
        keys = KeyChain(NAMESPACE)
        opened = self.engine.open(
            pb.OpenRequest(
                request_id=self._requests, prompt_tokens=len(prompt), growth_tokens=OUTPUT + AHEAD,
                prompt_keys=keys.extend(np.asarray(prompt)),
            )
        )  # fmt: skip
        request = Request(
            self._requests, list(prompt), len(prompt), opened.cached_tokens, keys, device_pages(opened)
        )
        self.run_plans(opened.worker_plans)
        self.set_pages(request.pages)
        ends = [end for end in (*CUTS, len(prompt)) if end > request.cached]
        for start, end in itertools.pairwise((request.cached, *ends)):
            chunk = (request.tokens[start:end], start, request.tokens[start + 1 : end + 1])
            hidden = self.prefill_on_ranks(chunk)
            request.rows = end
            if end < len(prompt):
                self._tell(request, len(prompt))
        request.hidden[request.rows - 1] = hidden[0]
        request.tokens += model_of(self.short).greedy(hidden[0].unsqueeze(0))
        self._tell(request, request.rows + AHEAD)
        return request

    def decode(self, request: Request) -> None:
        """One step with drafts, on all ranks; they agree on every token."""
        fed = [request.tokens[request.rows], *request.waiting]
        steps = self.decode_on_ranks(fed, request.rows)
        assert len({(tuple(step.accepted), tuple(step.drafts)) for step in steps}) == 1
        accepted = steps[0].accepted
        request.tokens += accepted
        request.rows += len(accepted)
        request.hidden[request.rows - 1] = steps[0].hidden
        request.rejected, request.waiting = len(fed) - len(accepted), steps[0].drafts
        self._tell(request, request.rows + AHEAD)

    def close_request(self, request: Request) -> None:
        self.engine.step(closes=[pb.CloseRequest(request_id=request.request_id, reason=pb.FINISHED)])

    def displace(self, seed: int, count: int) -> None:
        """Requests that nobody computes, over as many pages of other prompts."""
        for number in range(count):
            self._requests += 1
            tokens = prompt_of(1000 * seed + number, 4 * self.mode.geometry.span_tokens)
            keys = KeyChain(NAMESPACE).extend(np.asarray(tokens))
            self.engine.open(pb.OpenRequest(request_id=self._requests, prompt_tokens=len(tokens), prompt_keys=keys))
            self.engine.step([RequestStep(self._requests, len(tokens), len(tokens))])
            self.engine.step(closes=[pb.CloseRequest(request_id=self._requests, reason=pb.FINISHED)])

    def close(self) -> None:
        self.engine.close()

    def prefill_on_ranks(self, chunk: tuple[list[int], int, list[int]]) -> list[torch.Tensor]:
        return self._on_ranks(lambda ranks, store: self.mode.prefill(ranks, store, *chunk, self.short))

    def decode_on_ranks(self, fed: list[int], rows: int) -> list[VerifiedStep]:
        return self._on_ranks(
            lambda ranks, store: verify_step(self.mode.decoder(ranks, self.short), store, fed, rows, DRAFTS)
        )

    def run_plans(self, plans: Iterable[pb.Plan]) -> None:
        self.engine.workers.run_plans(plans)

    def set_pages(self, pages: np.ndarray) -> None:
        for store in self._stores:
            store.set_span_pages(pages)

    def _on_ranks(self, work):
        torch.set_num_threads(1)
        return run_threads(self.mode.ranks, lambda ranks: work(ranks, self._stores[ranks.rank]))

    def _tell(self, request: Request, capacity: int) -> None:
        """What is done, and the room that comes next."""
        fresh = request.keys.extend(np.asarray(request.tokens[request.keys.tokens : request.rows], dtype=np.int64))
        step = RequestStep(request.request_id, capacity, request.rows, request.rejected, fresh)
        growth = self.engine.step([step]).growth.get(request.request_id)
        request.rejected = 0
        if growth is None:
            return
        kept = growth.spans[0].first_span if growth.spans else growth.spans_kept
        more = device_pages(pb.OpenReply(spans=growth.spans))
        request.pages = np.concatenate((request.pages[:kept], more))
        self.set_pages(request.pages)


def shards_toml(
    runtime_dir: Path, *, name: str, pages: int, host_pages: int, lent_bytes: int, device: str = "cpu"
) -> str:
    """A node with one group of this geometry, its pages a rank in either tier, and its ranks' workspaces."""
    return f"""{node_head(runtime_dir, name, device=device)}
[[group]]
name = "shards"
kind = "sharded"
format = "{TINY.format.name}"
ranks = {SHARDED.ranks}
page_rows = {ROWS}
hbm_bytes_per_rank = {pages * PAGE_BYTES}
host_bytes_per_rank = {host_pages * PAGE_BYTES}
workspace_bytes_per_rank = {lent_bytes}
"""
