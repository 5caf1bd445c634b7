"""Every memory mode gives the tokens of the run on one rank: float64, the same KV format, real prompts and drafts.

Ranks are threads here; `test_glm_processes` runs the same code on processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvmanager.clients.glm.attention import PartialAttention, ShortPrompts, merge_partials
from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.decode import verify_step
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp_rank import prefill_on_rank, prefill_over_shards
from kvmanager.clients.glm.rank_models import ContextParallelGlm, TensorParallelGlm
from kvmanager.clients.glm.ranks import RankGroup, gather, run_threads
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.store import ContiguousStore, KVStore
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.clients.glm.workspace import TOKEN_BYTES, GatheredStore, Workspace
from kvmanager.errors import InvalidArgument, InvariantViolation, PoolExhausted
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import native_layout

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

ROWS = 16
LAYOUT = native_layout(TINY.format, ROWS)
WEIGHTS = make_weights(TINY, 2, Profile.CALM)
PROMPT = 90
OUTPUT = 10
MAIN_LAYERS = tuple(range(TINY.layers))


@pytest.fixture(scope="module")
def model() -> Glm:
    return Glm(TINY, WEIGHTS, torch.float64, Fp8Codec())


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(4).integers(0, TINY.vocab, PROMPT).tolist()


@pytest.fixture(scope="module")
def expected(model: Glm, prompt: list[int]) -> list[int]:
    return ReferenceRun(model).turn(prompt, OUTPUT)


def shard_of(rank: int, geometry: ShardGeometry, tokens: int = 160) -> ShardStore:
    """A rank's memory full of rubbish, with its spans in no order."""
    rng = np.random.default_rng(rank)
    spans = geometry.spans(tokens)
    memory = rng.integers(0, 256, LAYOUT.page_bytes * (spans + 1), dtype=np.uint8)
    store = ShardStore(memory, LAYOUT, geometry, rank)
    store.set_span_pages(np.arange(spans, 0, -1))
    return store


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
        split = TensorParallelGlm(TINY, WEIGHTS, torch.float64, Fp8Codec(), ranks, short)
        return answer(split, memories[ranks.rank], prompt, 3)[0]

    check_all_ranks(2, work, expected)
    everything = torch.arange(PROMPT).unsqueeze(0)
    for layer in range(TINY.layers + 1):
        assert torch.equal(memories[0].latent_rows(layer, everything), memories[1].latent_rows(layer, everything))


def _replica() -> ShardStore:
    return shard_of(0, ShardGeometry(1, ROWS, 1))


def test_heads_are_divided_evenly() -> None:
    with pytest.raises(InvalidArgument, match="4 heads on 3 ranks"):
        run_threads(3, lambda ranks: TensorParallelGlm(TINY, WEIGHTS, torch.float64, Fp8Codec(), ranks))


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 16), (8, 16)])
def test_dcp_decode_brings_the_query_to_the_shards(
    prompt: list[int], expected: list[int], size: int, interleave: int
) -> None:
    """With 8 ranks and runs of 16 tokens, one holds no token of the prompt at first and two less than a page."""
    geometry = ShardGeometry(size, ROWS, interleave)

    def work(ranks: RankGroup) -> list[int]:
        shared = ContextParallelGlm(TINY, WEIGHTS, torch.float64, Fp8Codec(), ranks)
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
        shared = ContextParallelGlm(TINY, WEIGHTS, torch.float64, Fp8Codec(), ranks)
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


def prefill_answer(
    model: Glm, ranks: RankGroup, prompt: list[int], step: Callable[[list[int], int, list[int]], torch.Tensor]
) -> list[int]:
    """The first token after a prompt computed in chunks, one of them too small to be cut."""
    last = torch.empty(0)
    for a, b in itertools.pairwise((0, 50, 53, len(prompt))):
        last = step(prompt[a:b], a, prompt[a + 1 : b + 1])
    assert len(gather(ranks, last)) == ranks.size
    return model.greedy(last.unsqueeze(0))


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
        space = spaces[ranks.rank] = Workspace(torch.full((PROMPT * TOKEN_BYTES,), 0xFF, dtype=torch.uint8))
        store = GatheredStore(shard, ranks, space, MAIN_LAYERS)
        return prefill_answer(model, ranks, prompt, lambda *chunk: prefill_over_shards(model, store, ranks, *chunk))

    check_all_ranks(size, work, expected[:1])
    plain = plain_rows(model, prompt)
    for rank, shard in shards.items():
        assert_rows(shard, plain, shard.own_positions(PROMPT))
        assert spaces[rank].leases == 3, "one a step, not one a layer"

    # The same shards, decoded where they lie.
    def decode(ranks: RankGroup) -> list[int]:
        shared = ContextParallelGlm(TINY, WEIGHTS, torch.float64, Fp8Codec(), ranks)
        tokens, rows, waiting = expected[:1], PROMPT, list[int]()
        while len(tokens) < OUTPUT:
            step = verify_step(shared, shards[ranks.rank], [tokens[-1], *waiting], rows, 2)
            tokens, rows, waiting = tokens + step.accepted, rows + len(step.accepted), step.drafts
        return tokens[:OUTPUT]

    # The last MTP row depends on the answer; it may cost a draft, never a token, so it is left unwritten.
    check_all_ranks(size, decode, expected)


def plain_rows(model: Glm, prompt: list[int]) -> ContiguousStore:
    store = ContiguousStore(TINY.format, model.codec)
    hidden = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), store)
    model.mtp_rows(torch.tensor(prompt[1:]), hidden[:-1], torch.arange(len(prompt) - 1), store)
    return store


def assert_rows(shard: ShardStore, plain: ContiguousStore, positions: torch.Tensor) -> None:
    for layer in range(TINY.layers + 1):
        here = positions[positions < PROMPT - 1] if layer == TINY.mtp_layer else positions
        assert torch.equal(shard.latent_rows(layer, here), plain.latent_rows(layer, here)), f"layer {layer}"
        if layer in TINY.format.leaders:
            tokens = PROMPT - 1 if layer == TINY.mtp_layer else PROMPT
            for mine, whole in zip(shard.index_keys(layer, tokens), plain.index_keys(layer, tokens), strict=True):
                assert torch.equal(mine, whole[here])


def test_the_workspace_is_one_lease_at_a_time() -> None:
    space = Workspace(torch.zeros(10 * TOKEN_BYTES, dtype=torch.uint8))
    with pytest.raises(PoolExhausted, match="11 tokens"):
        space.lease(11)
    copy = space.lease(10)
    assert copy.latent.shape == (10, 656)
    assert copy.index.shape == (10, 132)
    with pytest.raises(InvariantViolation, match="has not ended"):
        space.lease(1)
    space.end()
    space.lease(1)


@pytest.mark.parametrize("tokens", [1, TINY.index_topk - 5, TINY.index_topk, TINY.index_topk + 1])
def test_short_prompts_through_heads_or_latents(model: Glm, tokens: int) -> None:
    """`sparse_mla_force_mqa` on and off: prompts about as long as the top-k, decoded past it."""
    dense = Glm(TINY, WEIGHTS, torch.float64, Fp8Codec(), ShortPrompts.MHA)
    prompt = np.random.default_rng(8).integers(0, TINY.vocab, tokens).tolist()
    assert ReferenceRun(dense).turn(prompt, OUTPUT) == ReferenceRun(model).turn(prompt, OUTPUT)
    stores = [ContiguousStore(TINY.format, model.codec) for _ in range(2)]
    ours, theirs = (
        each.forward(torch.tensor(prompt), torch.arange(tokens), store)
        for each, store in zip((dense, model), stores, strict=True)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_the_two_paths_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = Glm(TINY, WEIGHTS, torch.float64, Fp8Codec(), ShortPrompts.MHA)
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
