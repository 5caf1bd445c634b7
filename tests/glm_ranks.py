"""What ranks of the tiny GLM compute in the tests, as threads or as processes: a prompt, and its answer with drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp_rank import prefill_over_shards
from kvmanager.clients.glm.rank_models import ContextParallelGlm
from kvmanager.clients.glm.ranks import RankGroup, gather
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.store import ContiguousStore, KVStore
from kvmanager.clients.glm.weights import Profile, Weights, make_weights
from kvmanager.clients.glm.workspace import GatheredStore, Workspace, workspace_bytes
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import native_layout

ROWS = 16
LAYOUT = native_layout(TINY.format, ROWS)
PROMPT = 90
OUTPUT = 10
DRAFTS = 3
CUTS = (0, 50, 53, PROMPT)
"""Chunks of the prompt, one of them too small to be cut."""
MAIN_LAYERS = tuple(range(TINY.layers))


@cache
def weights() -> Weights:
    return make_weights(TINY, 2, Profile.CALM)


@cache
def plain_model() -> Glm:
    return Glm(TINY, weights(), torch.float64, Fp8Codec())


def the_prompt() -> list[int]:
    return np.random.default_rng(4).integers(0, TINY.vocab, PROMPT).tolist()


@cache
def expected_answer() -> tuple[int, ...]:
    """Of the run on one rank with one store."""
    return tuple(ReferenceRun(plain_model()).turn(the_prompt(), OUTPUT))


@cache
def expected_hidden() -> torch.Tensor:
    """Post-norm hidden states [prompt + answer, h] of that run."""
    tokens = [*the_prompt(), *expected_answer()]
    store = ContiguousStore(TINY.format, plain_model().codec)
    return plain_model().forward(torch.tensor(tokens), torch.arange(len(tokens)), store)


def shard_of(rank: int, geometry: ShardGeometry, tokens: int = 160) -> ShardStore:
    """A rank's memory full of rubbish, with its spans in no order."""
    rng = np.random.default_rng(rank)
    spans = geometry.spans(tokens)
    memory = rng.integers(0, 256, LAYOUT.page_bytes * (spans + 1), dtype=np.uint8)
    store = ShardStore(memory, LAYOUT, geometry, rank)
    store.set_span_pages(np.arange(spans, 0, -1))
    return store


def poisoned_workspace(geometry: ShardGeometry) -> Workspace:
    """Just enough for the prompt."""
    return Workspace(torch.full((workspace_bytes(geometry, PROMPT),), 0xFF, dtype=torch.uint8))


def prefill_answer(
    model: Glm, ranks: RankGroup, prompt: list[int], step: Callable[[list[int], int, list[int]], torch.Tensor]
) -> list[int]:
    """The first token after a prompt computed in chunks, one of them too small to be cut."""
    last = torch.empty(0)
    for a, b in itertools.pairwise((*CUTS[:-1], len(prompt))):
        last = step(prompt[a:b], a, prompt[a + 1 : b + 1])
    assert len(gather(ranks, last)) == ranks.size
    return model.greedy(last.unsqueeze(0))


def prefill_shards(model: Glm, ranks: RankGroup, shard: ShardStore, space: Workspace) -> list[int]:
    """PCP x DCP: the first token of the answer."""
    store = GatheredStore(shard, ranks, space, MAIN_LAYERS)
    return prefill_answer(
        model, ranks, the_prompt(), lambda *chunk: prefill_over_shards(model, store, ranks, *chunk)
    )


def decode_shards(ranks: RankGroup, shard: KVStore, first: list[int]) -> list[int]:
    """DCP decode of a prompt whose rows lie in the shards; each step's hidden state is that of one rank.

    The last MTP row depends on the answer; it may cost a draft, never a token, so it is left unwritten.
    """
    shared = ContextParallelGlm(TINY, weights(), torch.float64, Fp8Codec(), ranks)
    tokens, rows, waiting = first, PROMPT, list[int]()
    while len(tokens) < OUTPUT:
        step = verify_step(shared, shard, [tokens[-1], *waiting], rows, DRAFTS)
        tokens, rows, waiting = tokens + step.accepted, rows + len(step.accepted), step.drafts
        # A wrong weight of one shard need not change a token; it changes this.
        if rows <= len(expected_hidden()):
            torch.testing.assert_close(step.hidden, expected_hidden()[rows - 1], atol=1e-9, rtol=0)
    return tokens[:OUTPUT]


def plain_rows(model: Glm, prompt: list[int]) -> ContiguousStore:
    """The rows of the prompt as one rank writes them; the last MTP row is not known yet."""
    store = ContiguousStore(TINY.format, model.codec)
    hidden = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), store)
    model.mtp_rows(torch.tensor(prompt[1:]), hidden[:-1], torch.arange(len(prompt) - 1), store)
    return store


def assert_rows(shard: ShardStore, plain: ContiguousStore, positions: torch.Tensor) -> None:
    """Bit for bit."""
    for layer in range(TINY.layers + 1):
        here = positions[positions < PROMPT - 1] if layer == TINY.mtp_layer else positions
        assert torch.equal(shard.latent_rows(layer, here), plain.latent_rows(layer, here)), f"layer {layer}"
        if layer in TINY.format.leaders:
            tokens = PROMPT - 1 if layer == TINY.mtp_layer else PROMPT
            for mine, whole in zip(shard.index_keys(layer, tokens), plain.index_keys(layer, tokens), strict=True):
                assert torch.equal(mine, whole[here])
