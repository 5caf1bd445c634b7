"""The tiny GLM against transformers' GLM MoE DSA: same weights, no quantisation of KV rows.

Top-k, expert choice and argmax jump where two candidates are close, so prompts are screened: the tests assert
that the smallest gaps are wide compared with float32 noise before they compare anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from kvmanager.clients.glm.codec import ExactCodec
from kvmanager.clients.glm.config import TINY, GlmConfig
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, Weights, make_weights

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

PROMPT_TOKENS = 160
OUTPUT_TOKENS = 12
LEADERS = (0, 1, 2)


class RecordingStore(ContiguousStore):
    """Keeps the selections of the run."""

    def __init__(self, config: GlmConfig, dtype: torch.dtype) -> None:
        super().__init__(config.format, ExactCodec(dtype))
        self.selections: dict[int, list[Tensor]] = {}

    def prepare(self, leader: int, selection: Tensor) -> None:
        self.selections.setdefault(leader, []).append(selection)


def oracle_config(config: GlmConfig) -> GlmMoeDsaConfig:
    leaders = config.format.leaders
    return GlmMoeDsaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.dense_intermediate,
        moe_intermediate_size=config.moe_intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        n_shared_experts=config.shared_experts,
        n_routed_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        routed_scaling_factor=config.routed_scaling,
        kv_lora_rank=config.kv_lora,
        q_lora_rank=config.q_lora,
        qk_rope_head_dim=config.rope_dim,
        v_head_dim=config.value_dim,
        qk_nope_head_dim=config.nope_dim,
        rms_norm_eps=config.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        first_k_dense_replace=config.dense_layers,
        index_topk=config.index_topk,
        index_head_dim=config.index_dim,
        index_n_heads=config.index_heads,
        indexer_types=["full" if layer in leaders else "shared" for layer in range(config.layers)],
        index_topk_freq=4,
        index_skip_topk_offset=3,
        attn_implementation="eager",
    )


def make_oracle(config: GlmConfig, weights: Weights) -> GlmMoeDsaForCausalLM:
    oracle = GlmMoeDsaForCausalLM(oracle_config(config)).eval()
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    loaded = oracle.load_state_dict(state, strict=False)
    assert not loaded.missing_keys
    assert all(name.startswith(f"model.layers.{config.mtp_layer}.") for name in loaded.unexpected_keys)
    for layer in oracle.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = config.latent_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = config.latent_eps
    return oracle


@dataclasses.dataclass
class OracleRun:
    """Logits [T, vocab], selections of leaders int[T, k], caches by layer, and greedy tokens."""

    tokens: list[int]
    logits: Tensor
    selections: dict[int, Tensor]
    cache: Any


def run_oracle(oracle: GlmMoeDsaForCausalLM, prompt: list[int]) -> OracleRun:
    selections: dict[int, list[Tensor]] = {layer: [] for layer in LEADERS}
    hooks = [
        oracle.model.layers[layer].self_attn.indexer.register_forward_hook(
            lambda _module, _inputs, output, layer=layer: selections[layer].append(output[0])
        )
        for layer in LEADERS
    ]
    tokens, logits, cache, new = list(prompt), [], None, list(prompt)
    with torch.no_grad():
        for _ in range(OUTPUT_TOKENS + 1):
            output = oracle(input_ids=torch.tensor([new]), cache=cache, use_cache=True)
            cache = output.cache
            logits.append(output.logits[0])
            new = [int(output.logits[0, -1].argmax())]
            tokens += new
    for hook in hooks:
        hook.remove()
    padded = {
        layer: torch.cat([torch.nn.functional.pad(s, (0, TINY.index_topk - s.shape[1]), value=-1) for s in parts])
        for layer, parts in selections.items()
    }
    return OracleRun(tokens, torch.cat(logits), padded, cache)


def prompt_of(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, TINY.vocab, PROMPT_TOKENS).tolist()


def rank_gap(model: Glm, store: ContiguousStore, hidden_at: dict[int, Tensor]) -> float:
    """Smallest distance between the last chosen and the best rejected score, over all leaders and queries."""
    gaps = []
    for layer, hidden in hidden_at.items():
        positions = torch.arange(len(hidden))
        keys = model.index_keys(layer, len(hidden), store)
        attention = model._layers[layer].attention
        scores = model._attention._index_scores(attention, hidden, positions, keys)
        scores = scores.masked_fill(positions > positions.unsqueeze(-1), float("-inf"))
        best = scores[TINY.index_topk :].topk(TINY.index_topk + 1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))
    return min(gaps)


class Recorder(Glm):
    """Keeps the hidden states that leaders selected for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hidden_at: dict[int, Tensor] = {}

    def select(self, leader: int, hidden: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        self.hidden_at[leader] = hidden
        return super().select(leader, hidden, positions, keys)


@dataclasses.dataclass
class Comparison:
    model: Glm
    store: RecordingStore
    hidden: Tensor
    oracle: OracleRun
    gap: float


@pytest.fixture(scope="module", params=[(1e-5, 1e-6), (1e-3, 1e-2)], ids=["true eps", "wide eps"])
def calm(request: pytest.FixtureRequest) -> Comparison:
    """With the true epsilons, and with some so large that mistaking one for the other shows."""
    rms_eps, latent_eps = request.param
    config = dataclasses.replace(TINY, rms_eps=rms_eps, latent_eps=latent_eps)
    return compare(config, Profile.CALM, seed=1, prompt_seed=1)


@pytest.fixture(scope="module")
def sharp() -> Comparison:
    return compare(TINY, Profile.SHARP, seed=1, prompt_seed=1)


def compare(config: GlmConfig, profile: Profile, seed: int, prompt_seed: int) -> Comparison:
    print(f"weights seed {seed}, prompt seed {prompt_seed}")
    weights = make_weights(config, seed, profile)
    oracle = run_oracle(make_oracle(config, weights), prompt_of(prompt_seed))
    model = Recorder(config, weights, torch.float64, ExactCodec(torch.float64))
    store = RecordingStore(config, torch.float64)
    tokens = torch.tensor(oracle.tokens[:-1])
    hidden = model.forward(tokens, torch.arange(len(tokens)), store)
    return Comparison(model, store, hidden, oracle, rank_gap(model, store, model.hidden_at))


def check_screened(run: Comparison) -> None:
    """The prompt is fit for an exact comparison."""
    margins = run.model.logits(run.hidden[PROMPT_TOKENS - 1 :]).topk(2).values
    assert run.gap >= 4e-6
    assert float((margins[:, 0] - margins[:, 1]).min()) > 0.02


def check_selections(run: Comparison) -> None:
    for layer in LEADERS:
        (ours,) = run.store.selections[layer]
        for query, (mine, theirs) in enumerate(zip(ours, run.oracle.selections[layer], strict=True)):
            # The oracle fills short rows with keys that its causal mask hides.
            expected = {int(j) for j in theirs if 0 <= j <= query}
            assert {int(j) for j in mine if j >= 0} == expected, f"layer {layer}, query {query}"


def halves_to_pairs(values: Tensor) -> Tensor:
    """The oracle keeps rotated dims as (first of each pair | second of each pair)."""
    return values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def test_calm_logits_match_the_oracle(calm: Comparison) -> None:
    check_screened(calm)
    assert float(calm.oracle.logits.std()) > 3
    torch.testing.assert_close(calm.model.logits(calm.hidden).float(), calm.oracle.logits, atol=1e-4, rtol=0)


def test_sharp_logits_match_the_oracle(sharp: Comparison) -> None:
    check_screened(sharp)
    torch.testing.assert_close(sharp.model.logits(sharp.hidden).float(), sharp.oracle.logits, atol=1e-3, rtol=0)


def test_selections_match_the_oracle_as_sets(calm: Comparison, sharp: Comparison) -> None:
    check_selections(calm)
    check_selections(sharp)


def test_greedy_tokens_match_the_oracle(calm: Comparison) -> None:
    check_screened(calm)
    greedy = calm.model.greedy(calm.hidden[PROMPT_TOKENS - 1 :])
    assert greedy == calm.oracle.tokens[PROMPT_TOKENS:]
    assert len(set(greedy)) > OUTPUT_TOKENS // 2


def test_rows_match_the_oracles_cache(calm: Comparison) -> None:
    tokens = len(calm.hidden)
    everything = torch.arange(tokens).unsqueeze(0)
    for layer in range(TINY.layers):
        theirs = calm.oracle.cache.layers[layer]
        c_kv, k_pe = calm.model.codec.decode_latent(calm.store.latent_rows(layer, everything)[0], torch.float32)
        torch.testing.assert_close(c_kv, theirs.keys[0, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(k_pe, halves_to_pairs(theirs.values[0, 0]), atol=1e-4, rtol=0)
        if layer not in LEADERS:
            assert theirs.indexer_keys is None
            continue
        ours = calm.model.index_keys(layer, tokens, calm.store).float()
        expected = theirs.indexer_keys[0]
        rope = TINY.rope_dim
        torch.testing.assert_close(ours[:, :rope], halves_to_pairs(expected[:, :rope]), atol=1e-4, rtol=0)
        torch.testing.assert_close(ours[:, rope:], expected[:, rope:], atol=1e-4, rtol=0)


def test_first_drafts_match_the_oracles_decoder_layer() -> None:
    """The oracle has no MTP layer, but one is an ordinary decoder layer between two norms and a projection."""
    weights = make_weights(TINY, 1, Profile.CALM)
    tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
    longer = dataclasses.replace(TINY, layers=TINY.layers + 1)
    oracle = GlmMoeDsaForCausalLM(oracle_config(longer)).eval()
    loaded = oracle.load_state_dict(tensors, strict=False)
    assert not loaded.missing_keys
    base = f"model.layers.{TINY.mtp_layer}."
    assert len(loaded.unexpected_keys) == 4

    model = Glm(TINY, weights, torch.float64, ExactCodec(torch.float64))
    store = ContiguousStore(TINY.format, model.codec)
    tokens, positions = torch.tensor(prompt_of(1)), torch.arange(PROMPT_TOKENS)
    hidden = model.forward(tokens, positions, store)
    following = torch.tensor(model.greedy(hidden))

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], tensors[base + name], TINY.rms_eps)

    embedded = tensors["model.embed_tokens.weight"][following].clone()
    embedded[0] = 0
    both = torch.cat((norm(embedded, "enorm.weight"), norm(hidden.float(), "hnorm.weight")), dim=-1)
    x = (both @ tensors[base + "eh_proj.weight"].T).unsqueeze(0)
    mask = torch.full((PROMPT_TOKENS, PROMPT_TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        rope = oracle.model.rotary_emb(x, position_ids=positions.unsqueeze(0))
        out, _ = oracle.model.layers[-1](x, attention_mask=mask, position_embeddings=rope)
    logits = norm(out[0], "shared_head.norm.weight") @ tensors["lm_head.weight"].T
    margins = logits.topk(2).values
    clear = (margins[:, 0] - margins[:, 1]) > 0.02

    model.mtp_rows(following, hidden, positions, store)
    checked = [i for i in range(PROMPT_TOKENS) if clear[i] and (i % 8 == 0 or i > PROMPT_TOKENS - 9)]
    assert len(checked) > 20
    for i in checked:
        assert model.draft(store, int(following[i]), hidden[i], i, 1) == [int(logits[i].argmax())], f"position {i}"
