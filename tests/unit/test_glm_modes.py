"""Every memory mode gives the tokens of the run on one rank: float64, the same KV format, real prompts and drafts.

Ranks are threads here; `test_glm_processes` runs the same code on processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvmanager.clients.glm import attention
from kvmanager.clients.glm.attention import PartialAttention, ShortPrompts, merge_partials
from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp_rank import prefill_on_rank, prefill_over_shards
from kvmanager.clients.glm.rank_models import ContextParallelGlm, TensorParallelGlm
from kvmanager.clients.glm.ranks import Gather, RankGroup, gather, run_threads
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.store import ContiguousStore, KVStore
from kvmanager.clients.glm.workspace import TOKEN_BYTES, GatheredStore, Workspace
from kvmanager.errors import InvalidArgument, InvariantViolation, PeerUnreachable, PoolExhausted
from kvmanager.geometry import ShardGeometry
from tests.glm_ranks import (
    CUTS,
    MAIN_LAYERS,
    OUTPUT,
    PROMPT,
    ROWS,
    assert_rows,
    decode_shards,
    expected_answer,
    plain_model,
    plain_rows,
    poisoned_workspace,
    prefill_answer,
    prefill_shards,
    shard_of,
    the_prompt,
    weights,
)

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

@pytest.fixture(scope="module")
def model() -> Glm:
    return plain_model()


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return the_prompt()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return list(expected_answer())


def answer(model: Glm, store: KVStore, prompt: list[int], drafts: int) -> tuple[list[int], int]:
    """Greedy tokens of a prompt computed in two chunks and decoded with MTP drafts, and how many steps that took."""
    parts = []
    for a, b in itertools.pairwise((0, 50, len(prompt))):
        parts.append(model.forward(torch.tensor(prompt[a:b]), torch.arange(a, b), store))
    hidden = torch.cat(parts)
    tokens = model.greedy(hidden[-1:])
    model.mtp_rows(torch.tensor(prompt[1:] + tokens), hidden, torch.arange(len(prompt)), store)
    waiting: list[int] = []
    rows, steps = len(prompt), 0
    while len(tokens) < OUTPUT:
        step = verify_step(model, store, [tokens[-1], *waiting], rows, drafts)
        tokens += step.accepted
        rows += len(step.accepted)
        waiting = step.drafts
        steps += 1
    return tokens[:OUTPUT], steps


def check_all_ranks(size: int, work: Callable[[RankGroup], list[int]], expected: list[int]) -> None:
    for rank, tokens in enumerate(run_threads(size, work)):
        assert tokens == expected, f"rank {rank}"


def test_data_parallel_rank(model: Glm, prompt: list[int], expected: list[int]) -> None:
    tokens, _ = answer(model, shard_of(0, ShardGeometry(1, ROWS, 1)), prompt, 3)
    assert tokens == expected


@pytest.mark.parametrize("short", ShortPrompts)
def test_tensor_parallel_ranks_with_replicated_latents(
    prompt: list[int], expected: list[int], short: ShortPrompts
) -> None:
    memories: dict[int, ShardStore] = {}

    def work(ranks: RankGroup) -> list[int]:
        memories[ranks.rank] = _replica()
        split = TensorParallelGlm(TINY, weights(), torch.float64, Fp8Codec(), ranks, short)
        return answer(split, memories[ranks.rank], prompt, 3)[0]

    check_all_ranks(2, work, expected)
    everything = torch.arange(PROMPT).unsqueeze(0)
    for layer in range(TINY.layers + 1):
        assert torch.equal(memories[0].latent_rows(layer, everything), memories[1].latent_rows(layer, everything))


def _replica() -> ShardStore:
    return shard_of(0, ShardGeometry(1, ROWS, 1))


def test_heads_are_divided_evenly() -> None:
    with pytest.raises(InvalidArgument, match="4 heads on 3 ranks"):
        run_threads(3, lambda ranks: TensorParallelGlm(TINY, weights(), torch.float64, Fp8Codec(), ranks))


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 16), (8, 16)])
def test_dcp_decode_brings_the_query_to_the_shards(
    prompt: list[int], expected: list[int], size: int, interleave: int
) -> None:
    """With 8 ranks and runs of 16 tokens, one holds no token of the prompt at first and two less than a page."""
    geometry = ShardGeometry(size, ROWS, interleave)

    def work(ranks: RankGroup) -> list[int]:
        shared = ContextParallelGlm(TINY, weights(), torch.float64, Fp8Codec(), ranks)
        tokens, steps = answer(shared, shard_of(ranks.rank, geometry), prompt, 3)
        assert steps < OUTPUT - 1, "no draft was ever right"
        return tokens

    check_all_ranks(size, work, expected)


def test_dcp_selects_alike_where_scores_are_equal(model: Glm) -> None:
    """Equal keys have equal scores: with keys of two kinds nearly every choice is a tie, for any sharding."""
    rng = np.random.default_rng(3)
    hidden = torch.from_numpy(rng.standard_normal((5, TINY.hidden)))
    positions = torch.tensor([3, 30, 70, 71, 99])
    kinds = torch.from_numpy(rng.integers(0, 256, (2, 128), dtype=np.uint8) & 0x3F)
    values, scales = kinds[torch.from_numpy(rng.integers(0, 2, 100))], torch.ones(100)
    whole = ContiguousStore(TINY.format, model.codec)
    whole.write_index(0, torch.arange(100), values, scales)
    expected = [set(row.tolist()) - {-1} for row in model.choose(0, hidden, positions, whole)]

    def work(ranks: RankGroup) -> list[set[int]]:
        store = shard_of(ranks.rank, ShardGeometry(ranks.size, ROWS, 4))
        store.write_index(0, torch.arange(100), values, scales)
        shared = ContextParallelGlm(TINY, weights(), torch.float64, Fp8Codec(), ranks)
        mine = shared.choose(0, hidden, positions, store)
        return [set(row.tolist()) - {-1} for row in mine]

    parts = run_threads(4, work)
    assert [set().union(*(part[query] for part in parts)) for query in range(5)] == expected
    assert sum(len(part[4]) for part in parts) == TINY.index_topk


def test_a_shard_without_tokens_adds_nothing() -> None:
    rng = np.random.default_rng(6)
    mixed = torch.from_numpy(rng.standard_normal((3, 2, 512)))
    lse = torch.from_numpy(rng.standard_normal((3, 2)))
    nothing = PartialAttention(torch.zeros_like(mixed), torch.full_like(lse, float("-inf")))
    merged = merge_partials([nothing, PartialAttention(mixed, lse), nothing])
    torch.testing.assert_close(merged, mixed)


def test_parts_merge_whatever_their_size() -> None:
    """Weights depend on differences of log-sum-exps alone, however large they are: exponents must not overflow."""
    rng = np.random.default_rng(7)
    mixed = torch.from_numpy(rng.standard_normal((3, 4, 2, 512)))
    lse = torch.from_numpy(rng.standard_normal((3, 4, 2)))
    weights = lse.exp() / lse.exp().sum(dim=0)
    expected = (weights.unsqueeze(-1) * mixed).sum(dim=0)
    for shift in (-2000.0, 0.0, 2000.0):
        parts = [PartialAttention(*part) for part in zip(mixed, lse + shift, strict=True)]
        torch.testing.assert_close(attention.merge_partials(parts), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", [2, 4])
def test_pcp_ranks_with_whole_copies(model: Glm, prompt: list[int], expected: list[int], size: int) -> None:
    stores: dict[int, ShardStore] = {}

    def work(ranks: RankGroup) -> list[int]:
        store = stores[ranks.rank] = _replica()
        return prefill_answer(model, ranks, prompt, lambda *chunk: prefill_on_rank(model, store, ranks, *chunk))

    check_all_ranks(size, work, expected[:1])
    plain = plain_rows(model, prompt)
    for store in stores.values():
        assert_rows(store, plain, torch.arange(PROMPT))


@pytest.mark.parametrize(("size", "interleave"), [(4, 1), (8, 16)])
def test_pcp_ranks_with_shards_attend_over_a_gathered_copy(
    model: Glm, prompt: list[int], expected: list[int], size: int, interleave: int
) -> None:
    geometry = ShardGeometry(size, ROWS, interleave)
    shards: dict[int, ShardStore] = {}
    spaces: dict[int, Workspace] = {}

    def work(ranks: RankGroup) -> list[int]:
        shard = shards[ranks.rank] = shard_of(ranks.rank, geometry)
        space = spaces[ranks.rank] = poisoned_workspace(geometry)
        return prefill_shards(model, ranks, shard, space)

    check_all_ranks(size, work, expected[:1])
    plain = plain_rows(model, prompt)
    for rank, shard in shards.items():
        assert_rows(shard, plain, shard.own_positions(PROMPT))
        assert spaces[rank].leases == 3, "one a step, not one a layer"

    # The same shards, decoded where they lie.
    check_all_ranks(size, lambda ranks: decode_shards(ranks, shards[ranks.rank], expected[:1]), expected)


def test_the_workspace_is_one_lease_at_a_time() -> None:
    space = Workspace(torch.zeros(20 * TOKEN_BYTES, dtype=torch.uint8))
    with pytest.raises(PoolExhausted, match="11 rows"):
        space.lease(11)
    for copy in space.lease(10):
        assert copy.latent.shape == (10, 656)
        assert copy.index.shape == (10, 132)
        copy.latent.fill_(1)
        copy.index.fill_(2)
    assert space._memory.bincount().tolist() == [0, 2 * 10 * 656, 2 * 10 * 132], "they share no byte"
    with pytest.raises(InvariantViolation, match="has not ended"):
        space.lease(1)
    space.end()
    space.lease(1)


class Noting:
    """A group of one rank that notes gathers into its workspace, which land only when they are waited for."""

    rank, size = 0, 1

    def __init__(self, geometry: ShardGeometry) -> None:
        self.space = poisoned_workspace(geometry)
        self.notes: list[str] = []
        self.under_way = 0

    def start_gather(self, tensor: torch.Tensor, received: torch.Tensor) -> Gather:
        memory = self.space._memory
        if not memory.data_ptr() <= received.data_ptr() < memory.data_ptr() + len(memory):
            received[0] = tensor
            return Landed([received[0]])
        self.notes.append("ask")
        self.under_way += 1
        received.fill_(0xEE)  # whoever reads too early reads this
        return Late(self, tensor.clone(), received)


@dataclass
class Landed:
    tensors: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        return self.tensors


@dataclass
class Late:
    ranks: Noting
    sent: torch.Tensor
    received: torch.Tensor

    def wait(self) -> list[torch.Tensor]:
        self.ranks.notes.append("wait")
        self.ranks.under_way -= 1
        self.received[0] = self.sent
        return [self.received[0]]


def test_the_next_layers_shards_travel_while_this_layer_is_computed(
    model: Glm, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = ShardGeometry(1, ROWS, 1)
    shard, ranks = shard_of(0, geometry), Noting(geometry)
    store = GatheredStore(shard, ranks, ranks.space, MAIN_LAYERS)
    attend = model.attend
    monkeypatch.setattr(model, "attend", lambda *a: (ranks.notes.append("attend"), attend(*a))[1])
    for a, b in itertools.pairwise(CUTS):
        ranks.notes.clear()
        prefill_over_shards(model, store, ranks, prompt[a:b], a, prompt[a + 1 : b + 1])
        asks = {layer: ["ask"] * (1 + (layer in TINY.format.leaders)) for layer in MAIN_LAYERS}
        expected = list(asks[0])
        for layer in MAIN_LAYERS:
            expected += ["wait"] * len(asks[layer]) + asks.get(layer + 1, []) + ["attend"]
        assert ranks.notes == expected
    assert_rows(shard, plain_rows(model, prompt), torch.arange(PROMPT))


def test_a_step_that_fails_gives_the_workspace_back_once_nothing_lands_in_it_any_more(
    model: Glm, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = ShardGeometry(1, ROWS, 1)
    ranks = Noting(geometry)
    store = GatheredStore(shard_of(0, geometry), ranks, ranks.space, MAIN_LAYERS)

    def fail(*_: object) -> torch.Tensor:
        assert ranks.under_way > 0
        assert ranks.space.held
        raise PeerUnreachable("layer 2")

    monkeypatch.setattr(model, "attend", fail)
    with pytest.raises(PeerUnreachable, match="layer 2"):
        prefill_over_shards(model, store, ranks, prompt[:50], 0, prompt[1:51])
    assert ranks.under_way == 0
    assert not ranks.space.held


@pytest.mark.parametrize("tokens", [1, TINY.index_topk - 5, TINY.index_topk, TINY.index_topk + 1])
def test_short_prompts_through_heads_or_latents(model: Glm, tokens: int) -> None:
    """`sparse_mla_force_mqa` on and off: prompts about as long as the top-k, decoded past it."""
    dense = Glm(TINY, weights(), torch.float64, Fp8Codec(), ShortPrompts.MHA)
    prompt = np.random.default_rng(8).integers(0, TINY.vocab, tokens).tolist()
    assert ReferenceRun(dense).turn(prompt, OUTPUT) == ReferenceRun(model).turn(prompt, OUTPUT)
    stores = [ContiguousStore(TINY.format, model.codec) for _ in range(2)]
    ours, theirs = (
        each.forward(torch.tensor(prompt), torch.arange(tokens), store)
        for each, store in zip((dense, model), stores, strict=True)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_the_two_paths_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = Glm(TINY, weights(), torch.float64, Fp8Codec(), ShortPrompts.MHA)
    calls: list[int] = []
    taken = dense._attention._attend_dense
    monkeypatch.setattr(dense._attention, "_attend_dense", lambda *a: (calls.append(len(a[1])), taken(*a))[1])
    ReferenceRun(dense).turn(list(range(TINY.index_topk)), 3)
    assert calls == [TINY.index_topk] * TINY.layers, "the prompt, and nothing that follows it"


def test_an_error_on_one_rank_ends_the_others() -> None:
    def work(ranks: RankGroup) -> None:
        if ranks.rank == 1:
            raise InvalidArgument("rank 1 stops")
        gather(ranks, torch.zeros(1))

    with pytest.raises(InvalidArgument, match="rank 1 stops"):
        run_threads(3, work)
