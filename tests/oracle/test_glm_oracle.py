"""The tiny GLM against transformers' GLM MoE DSA: same weights, no quantisation of KV rows.

Top-k, expert choice and argmax jump where two candidates are close, so prompts are screened: the tests assert
that the smallest gaps are wide compared with float32 noise before they compare anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from oracle_support import LEADERS, PROMPT_TOKENS, halves_to_pairs, make_oracle, prompt_of
from torch import Tensor
from transformers import GlmMoeDsaForCausalLM

from kvmanager.clients.glm.codec import ExactCodec
from kvmanager.clients.glm.config import TINY, GlmConfig
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, make_weights

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

OUTPUT_TOKENS = 12
LEAST_GAP = 4e-6
LEAST_MARGIN = 0.02


class RecordingStore(ContiguousStore):
    """Keeps the selections of the run."""

    def __init__(self, config: GlmConfig, dtype: torch.dtype) -> None:
        super().__init__(config.format, ExactCodec(dtype))
        self.selections: dict[int, list[Tensor]] = {}

    def prepare(self, leader: int, selection: Tensor) -> None:
        self.selections.setdefault(leader, []).append(selection)


@dataclasses.dataclass
class OracleRun:
    """Logits [T, vocab], selections of leaders int[T, k], caches by layer, and greedy tokens."""

    tokens: list[int]
    logits: Tensor
    selections: dict[int, Tensor]
    cache: Any


def run_oracle(oracle: GlmMoeDsaForCausalLM, prompt: list[int], outputs: int) -> OracleRun:
    selections: dict[int, list[Tensor]] = {layer: [] for layer in LEADERS}
    hooks = [
        oracle.model.layers[layer].self_attn.indexer.register_forward_hook(
            lambda _module, _inputs, output, layer=layer: selections[layer].append(output[0])
        )
        for layer in LEADERS
    ]
    tokens, logits, cache, new = list(prompt), [], None, list(prompt)
    with torch.no_grad():
        for _ in range(outputs + 1):
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


def rank_gap(model: Glm, store: ContiguousStore, hidden_at: dict[int, Tensor]) -> float:
    """Smallest distance between the last chosen and the best rejected score, over all leaders and queries."""
    gaps = []
    for layer, hidden in hidden_at.items():
        positions = torch.arange(len(hidden))
        keys = model.index_keys(layer, len(hidden), store)
        attention = model._layers[layer].attention
        scores = model._attention.index_scores(attention, hidden, positions, keys)
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
    prompt_tokens: int


@pytest.fixture(scope="module", params=[(1e-5, 1e-6), (1e-3, 1e-2)], ids=["true eps", "wide eps"])
def calm(request: pytest.FixtureRequest) -> Comparison:
    """With the true epsilons, and with some so large that mistaking one for the other shows."""
    rms_eps, latent_eps = request.param
    config = dataclasses.replace(TINY, rms_eps=rms_eps, latent_eps=latent_eps)
    return compare(config, Profile.CALM, seed=1, prompt_seed=1)


@pytest.fixture(scope="module")
def sharp() -> Comparison:
    return compare(TINY, Profile.SHARP, seed=1, prompt_seed=1)


def compare(
    config: GlmConfig,
    profile: Profile,
    seed: int,
    prompt_seed: int,
    prompt_tokens: int = PROMPT_TOKENS,
    outputs: int = OUTPUT_TOKENS,
) -> Comparison:
    print(f"weights seed {seed}, prompt seed {prompt_seed}")
    weights = make_weights(config, seed, profile)
    oracle = run_oracle(make_oracle(config, weights), prompt_of(prompt_seed, prompt_tokens), outputs)
    model = Recorder(config, weights, torch.float64, ExactCodec(torch.float64))
    store = RecordingStore(config, torch.float64)
    tokens = torch.tensor(oracle.tokens[:-1])
    hidden = model.forward(tokens, torch.arange(len(tokens)), store)
    return Comparison(model, store, hidden, oracle, rank_gap(model, store, model.hidden_at), prompt_tokens)


def check_screened(run: Comparison) -> None:
    """The prompt is fit for an exact comparison."""
    gap, margin = screens(run)
    assert gap >= LEAST_GAP
    assert margin > LEAST_MARGIN


def screens(run: Comparison) -> tuple[float, float]:
    """Smallest gap at rank k, smallest margin of a greedy choice."""
    margins = run.model.logits(run.hidden[run.prompt_tokens - 1 :]).topk(2).values
    return run.gap, float((margins[:, 0] - margins[:, 1]).min())


def check_selections(run: Comparison) -> None:
    for layer in LEADERS:
        (ours,) = run.store.selections[layer]
        for query, (mine, theirs) in enumerate(zip(ours, run.oracle.selections[layer], strict=True)):
            # The oracle fills short rows with keys that its causal mask hides.
            expected = {int(j) for j in theirs if 0 <= j <= query}
            assert {int(j) for j in mine if j >= 0} == expected, f"layer {layer}, query {query}"


def check_greedy(run: Comparison) -> None:
    greedy = run.model.greedy(run.hidden[run.prompt_tokens - 1 :])
    assert greedy == run.oracle.tokens[run.prompt_tokens :]
    assert len(set(greedy)) > len(greedy) // 2


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
    check_greedy(calm)


def test_greedy_tokens_match_the_oracle_with_sharp_weights(sharp: Comparison) -> None:
    check_screened(sharp)
    check_greedy(sharp)


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


@pytest.mark.long
@pytest.mark.parametrize(("profile", "atol"), [(Profile.CALM, 1e-4), (Profile.SHARP, 1e-3)], ids=["calm", "sharp"])
def test_longer_prompts_and_answers_match_the_oracle(profile: Profile, atol: float) -> None:
    """600 tokens and 32 answered ones; of six pairs of seeds, those that pass the screen are compared."""
    compared = 0
    for seed, prompt_seed in ((seed, prompt) for seed in range(1, 3) for prompt in range(1, 4)):
        run = compare(TINY, profile, seed, prompt_seed, prompt_tokens=600, outputs=32)
        gap, margin = screens(run)
        print(f"gap {gap:.1e}, margin {margin:.1e}")
        if gap < LEAST_GAP:
            continue
        compared += 1
        check_selections(run)
        torch.testing.assert_close(run.model.logits(run.hidden).float(), run.oracle.logits, atol=atol, rtol=0)
        if margin > LEAST_MARGIN:
            check_greedy(run)
    assert compared > 0
