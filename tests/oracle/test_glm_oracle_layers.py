"""Layer by layer: each piece of the reference gets the oracle's own input, so no error is carried along.

The oracle computes in float32, the reference in float64. What a layer selects is compared as a set: where
the two differ, the scores must be as close as float32 noise makes them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from oracle_support import LEADERS, halves_to_pairs, make_oracle, prompt_of
from torch import Tensor
from transformers import DynamicCache, GlmMoeDsaForCausalLM

from kvmanager.clients.glm.codec import Codec, ExactCodec, Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, make_weights

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

NEAR = 1e-5
"""Scores closer than this share of the largest one are equal for float32."""


@dataclasses.dataclass
class LayerTrace:
    """One oracle layer. Tensors [T, h]; `selection` int[T, k], unordered, later positions allowed."""

    entered: Tensor
    attention: Tensor
    attended: Tensor
    left: Tensor
    selection: Tensor


def trace(oracle: GlmMoeDsaForCausalLM, tokens: list[int], cache: DynamicCache) -> list[LayerTrace]:
    """Runs the oracle over `tokens` in one pass, and notes what goes in and out of each layer."""
    seen: list[dict[str, Tensor]] = [{} for _ in oracle.model.layers]
    hooks = []
    for notes, layer in zip(seen, oracle.model.layers, strict=True):
        hooks += [
            layer.register_forward_pre_hook(lambda _module, args, notes=notes: notes.update(entered=args[0][0])),
            layer.register_forward_hook(
                lambda _module, _args, out, notes=notes: notes.update(left=out[0][0], selection=out[1][0])
            ),
            layer.self_attn.register_forward_hook(
                lambda _module, _args, out, notes=notes: notes.update(attention=out[0][0])
            ),
            layer.post_attention_layernorm.register_forward_pre_hook(
                lambda _module, args, notes=notes: notes.update(attended=args[0][0])
            ),
        ]
    with torch.no_grad():
        oracle(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return [LayerTrace(**notes) for notes in seen]


class EmulatedCache(DynamicCache):
    """Rounds rows as fp8_ds_mla does when they enter, so a token also attends to its own rounded row."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, **more: Any) -> tuple[Tensor, Tensor]:
        rope = value_states.to(torch.bfloat16).float()
        return super().update(rounded(key_states), rope, layer_idx, **more)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        return super().update_indexer(rounded(indexer_key_states), layer_idx)


def rounded(values: Tensor) -> Tensor:
    """e4m3 with a power-of-two scale for 128 values: written down apart from the codec under test."""
    groups = values.unflatten(-1, (-1, 128))
    need = (groups.abs().amax(-1, keepdim=True).double() / 448).clamp(min=1e-4)
    scale = torch.exp2(need.log2().ceil()).float()
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@dataclasses.dataclass
class Replay:
    """The oracle's trace and rows, and a model of the reference with the same KV format."""

    layers: list[LayerTrace]
    cache: DynamicCache
    model: Glm
    tokens: int

    def store_with_rows_of(self, layer: int) -> ContiguousStore:
        """A store with the rows that the reference makes of the oracle's input to the layer."""
        store = ContiguousStore(TINY.format, self.model.codec)
        positions = torch.arange(self.tokens)
        rows = self.model.layer_rows(layer, self.layers[layer].entered.double(), positions)
        self.model.write_rows(layer, positions, rows, store)
        return store

    def causal_selection(self, layer: int) -> Tensor:
        """The oracle's selection as the reference writes it: ascending, -1 in unused places."""
        chosen = self.layers[layer].selection.long()
        later = chosen > torch.arange(self.tokens).unsqueeze(-1)
        ascending = chosen.masked_fill(later, TINY.vocab**2).sort(dim=-1).values
        return ascending.masked_fill(ascending >= self.tokens, -1)


CASES = {
    "calm": (Profile.CALM, ExactCodec(torch.float64), DynamicCache),
    "sharp": (Profile.SHARP, ExactCodec(torch.float64), DynamicCache),
    "calm fp8": (Profile.CALM, Fp8Codec(), EmulatedCache),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def replay(request: pytest.FixtureRequest) -> Replay:
    profile, codec, cache_kind = request.param
    return make_replay(profile, codec, cache_kind)


def make_replay(profile: Profile, codec: Codec, cache_kind: type[DynamicCache]) -> Replay:
    weights = make_weights(TINY, 1, profile)
    oracle = make_oracle(TINY, weights)
    cache = cache_kind(config=oracle.config)
    tokens = prompt_of(1)
    return Replay(trace(oracle, tokens, cache), cache, Glm(TINY, weights, torch.float64, codec), len(tokens))


def assert_rows_agree(ours: Tensor, theirs: Tensor, codec: Codec) -> None:
    """Equal to float32 noise; rounded to fp8, that noise may take one value in a thousand one step further."""
    if isinstance(codec, ExactCodec):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        return
    other = (ours - theirs).abs() > 1e-6
    assert float(other.float().mean()) < 1e-3
    assert bool(((ours - theirs).abs() <= ours.abs() / 8 + 1e-2)[other].all())


def test_rows_of_each_layer(replay: Replay) -> None:
    everything = torch.arange(replay.tokens).unsqueeze(0)
    codec = replay.model.codec
    for layer in range(TINY.layers):
        store, theirs = replay.store_with_rows_of(layer), replay.cache.layers[layer]
        c_kv, k_pe = codec.decode_latent(store.latent_rows(layer, everything)[0], torch.float32)
        assert_rows_agree(c_kv, theirs.keys[0, 0], codec)
        assert_rows_agree(k_pe, halves_to_pairs(theirs.values[0, 0]), codec)
        if layer in LEADERS:
            keys, expected = replay.model.index_keys(layer, replay.tokens, store).float(), theirs.indexer_keys[0]
            rope = TINY.rope_dim
            assert_rows_agree(keys[:, :rope], halves_to_pairs(expected[:, :rope]), codec)
            assert_rows_agree(keys[:, rope:], expected[:, rope:], codec)


def test_selection_of_each_leader(replay: Replay) -> None:
    positions = torch.arange(replay.tokens)
    for layer in LEADERS:
        hidden = replay.layers[layer].entered.double()
        keys = replay.model.index_keys(layer, replay.tokens, replay.store_with_rows_of(layer))
        mine, theirs = replay.model.select(layer, hidden, positions, keys), replay.causal_selection(layer)
        scores = replay.model._attention.index_scores(replay.model._layers[layer].attention, hidden, positions, keys)
        differing = 0
        for query in range(replay.tokens):
            chosen, expected = set(mine[query].tolist()) - {-1}, set(theirs[query].tolist()) - {-1}
            assert len(chosen) == len(expected) == min(query + 1, TINY.index_topk)
            last = scores[query, list(chosen)].min()
            near = NEAR * scores[query, : query + 1].abs().max()
            if isinstance(replay.model.codec, Fp8Codec):
                near = 1e-2 * scores[query, : query + 1].abs().max()  # a key whose rounding differs moves by a step
            for position in chosen ^ expected:
                assert (scores[query, position] - last).abs() <= near, f"layer {layer}, query {query}"
            differing += chosen != expected
        assert differing <= replay.tokens // 50


def test_attention_of_each_layer(replay: Replay) -> None:
    positions = torch.arange(replay.tokens)
    exact = isinstance(replay.model.codec, ExactCodec)
    for layer, expected in enumerate(replay.layers):
        hidden = expected.entered.double()
        rows = replay.model.gather(layer, replay.causal_selection(layer), replay.store_with_rows_of(layer))
        ours = replay.model.attend(layer, hidden, positions, rows) - hidden
        if exact:
            torch.testing.assert_close(ours.float(), expected.attention, atol=1e-4, rtol=0)
        else:
            difference = (ours.float() - expected.attention).square().mean().sqrt()
            assert float(difference) <= 1e-3 * float(expected.attention.std())


def test_experts_of_each_layer(replay: Replay) -> None:
    for layer, expected in enumerate(replay.layers):
        ours = replay.model.ffn(layer, expected.attended.double())
        torch.testing.assert_close(ours.float(), expected.left, atol=1e-4, rtol=0)


@pytest.mark.parametrize("prompt_seed", [2, 4])
def test_logits_with_fp8_rows_match_the_oracle_with_the_same_rounding(prompt_seed: int) -> None:
    """End to end, each with its own selections.

    The prompts are ones where no choice is close: in 1 of 12 pairs of seeds, float32 noise took a value to its
    next step and with it one query to another key.
    """
    weights = make_weights(TINY, 1, Profile.CALM)
    oracle = make_oracle(TINY, weights)
    tokens = prompt_of(prompt_seed)
    with torch.no_grad():
        theirs = oracle(input_ids=torch.tensor([tokens]), cache=EmulatedCache(config=oracle.config), use_cache=True)
        plain = oracle(input_ids=torch.tensor([tokens])).logits[0]
    model = Glm(TINY, weights, torch.float64, Fp8Codec())
    hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), ContiguousStore(TINY.format, model.codec))
    ours, expected = model.logits(hidden).float(), theirs.logits[0]
    spread = float(expected.std())
    root_mean_square = float((ours - expected).square().mean().sqrt())
    rounding = float((plain - expected).square().mean().sqrt())
    print(f"rms {root_mean_square / spread:.2e} of the spread; rounding itself moves {rounding / spread:.2e}")
    assert rounding > 5 * root_mean_square, "the emulation must be seen in the logits"
    assert root_mean_square <= 1e-3 * spread
    margins = expected.topk(2).values
    clear = margins[:, 0] - margins[:, 1] > 0.05
    assert int(clear.sum()) > len(tokens) // 2
    assert torch.equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear])
