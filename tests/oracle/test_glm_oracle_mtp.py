"""The MTP layer: the oracle has none, but one is an ordinary decoder layer between two norms and a projection."""

from __future__ import annotations

import dataclasses

import torch
from oracle_support import PROMPT_TOKENS, oracle_config, prompt_of
from torch import Tensor
from transformers import GlmMoeDsaForCausalLM

from kvmanager.clients.glm.codec import ExactCodec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.store import ContiguousStore
from kvmanager.clients.glm.weights import Profile, Weights, make_weights

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

BASE = f"model.layers.{TINY.mtp_layer}."
DRAFTS = 3
CLEAR = 0.02


@dataclasses.dataclass
class Rows:
    """The KV rows of one oracle layer, [1, 1, T, width], and indexer keys [1, T, 128]."""

    keys: Tensor
    values: Tensor
    index: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, **_: object) -> tuple[Tensor, Tensor]:
        assert layer_idx == TINY.mtp_layer
        self.keys = torch.cat((self.keys, key_states), dim=2)
        self.values = torch.cat((self.values, value_states), dim=2)
        return self.keys, self.values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        assert layer_idx == TINY.mtp_layer
        self.index = torch.cat((self.index, indexer_key_states), dim=1)
        return self.index

    def up_to(self, position: int, empty: int) -> Rows:
        """Rows of positions 0..position, and `empty` ones of zeros that no selection names."""
        keys, values = (
            torch.nn.functional.pad(rows[:, :, : position + 1], (0, 0, 0, empty)) for rows in (self.keys, self.values)
        )
        return Rows(keys, values, self.index[:, : position + 1])


def no_rows() -> Rows:
    return Rows(
        torch.empty(1, 1, 0, TINY.kv_lora), torch.empty(1, 1, 0, TINY.rope_dim), torch.empty(1, 0, TINY.index_dim)
    )


class OracleMtp:
    """The published definition around the oracle's own decoder layer."""

    def __init__(self, weights: Weights) -> None:
        self._tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        longer = dataclasses.replace(TINY, layers=TINY.layers + 1)
        self._oracle = GlmMoeDsaForCausalLM(oracle_config(longer)).eval()
        loaded = self._oracle.load_state_dict(self._tensors, strict=False)
        assert not loaded.missing_keys
        assert len(loaded.unexpected_keys) == 4
        self._layer = self._oracle.model.layers[-1]
        for norm in (self._layer.self_attn.q_a_layernorm, self._layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = TINY.latent_eps

    def run(
        self, tokens: Tensor, hidden: Tensor, first: int, rows: Rows, selection: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Post-norm output [T, h], logits [T, vocab] and selection of rows at positions `first` on.

        Row i is made of the token after it, tokens[i], and the hidden state `hidden[i]` [h] at it. With a
        `selection` the layer's own indexer does not run.
        """
        positions = torch.arange(first, first + len(tokens))
        embedded = self._tensors["model.embed_tokens.weight"][tokens].clone()
        embedded[positions == 0] = 0
        both = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), dim=-1)
        entered = (both @ self._tensors[BASE + "eh_proj.weight"].T).unsqueeze(0)
        least = torch.finfo(torch.float32).min
        mask = torch.full((len(tokens), first + len(tokens)), least).triu(first + 1)[None, None]
        rope = self._oracle.model.rotary_emb(entered, position_ids=positions.unsqueeze(0))
        attention = self._layer.self_attn
        indexer, attention.indexer = attention.indexer, attention.indexer if selection is None else None
        with torch.no_grad():
            out, chosen = self._layer(
                entered,
                attention_mask=mask,
                position_embeddings=rope,
                cache=rows,
                use_cache=True,
                prev_topk_indices=selection,
            )
        attention.indexer = indexer
        final = self._norm(out[0], "shared_head.norm")
        return final, final @ self._tensors["lm_head.weight"].T, chosen

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._tensors[f"{BASE}{name}.weight"], TINY.rms_eps)


class Recorder(Glm):
    """Keeps the logits that drafts were chosen by."""

    def greedy(self, post_norm: Tensor) -> list[int]:
        self.seen = [*getattr(self, "seen", []), self.logits(post_norm)]
        return super().greedy(post_norm)


def test_drafts_match_the_oracles_decoder_layer() -> None:
    """Three drafts after each of some positions, by their logits; later ones reuse the first one's selection."""
    weights = make_weights(TINY, 1, Profile.CALM)
    model = Recorder(TINY, weights, torch.float64, ExactCodec(torch.float64))
    store = ContiguousStore(TINY.format, model.codec)
    tokens, positions = torch.tensor(prompt_of(1)), torch.arange(PROMPT_TOKENS)
    hidden = model.forward(tokens, positions, store)
    following = torch.tensor(model.greedy(hidden))
    model.mtp_rows(following, hidden, positions, store)

    oracle, rows = OracleMtp(weights), no_rows()
    finals, first_logits, selection = oracle.run(following, hidden.float(), 0, rows)
    checked = [0, 1, *range(20, PROMPT_TOKENS, 8), PROMPT_TOKENS - 1]
    compared = 0
    for at in checked:
        model.seen = []
        ours = model.draft(store, int(following[at]), hidden[at], at, DRAFTS)
        final, logits, chosen = finals[at], first_logits[at], selection[0, at]
        for step in range(DRAFTS):
            torch.testing.assert_close(model.seen[step][0].float(), logits, atol=1e-4, rtol=0)
            compared += 1
            best = logits.topk(2).values
            if float(best[0] - best[1]) <= CLEAR:
                break  # the two may go on with different tokens
            assert ours[step] == int(logits.argmax()), f"position {at}, draft {step}"
            if step + 1 < DRAFTS:
                kept = chosen[chosen <= at].view(1, 1, -1)
                state, token = final.unsqueeze(0), torch.tensor([ours[step]])
                (final,), (logits,), _ = oracle.run(token, state, at + step + 1, rows.up_to(at, step), kept)
    assert compared > 2 * len(checked)
