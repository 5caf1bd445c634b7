"""A GLM-5.3-like model in torch, cut into the steps that workers run on different ranks.

A layer is: `layer_rows` (every rank for its tokens) -> the store -> `select` on leaders (every rank for its
queries) -> `gather` -> `attend` -> `ffn`. `forward` chains them for a worker that does all alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kvmanager.clients.glm.attention import (
    Attention,
    GatheredRows,
    Indexer,
    LayerRows,
    ShortPrompts,
    SparseAttention,
)
from kvmanager.clients.glm.codec import Codec
from kvmanager.clients.glm.config import GlmConfig
from kvmanager.clients.glm.ffn import Mlp, Moe
from kvmanager.clients.glm.norm import rms_norm
from kvmanager.clients.glm.store import KVStore
from kvmanager.clients.glm.weights import Weights


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Attention
    post_norm: Tensor
    ffn: Mlp | Moe


@dataclass(frozen=True, slots=True)
class _Mtp:
    """What the MTP layer has beside a decoder layer."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    project: Tensor
    head_norm: Tensor


class Glm:
    """The model. `hidden` [T, h] is the residual stream unless said otherwise; positions are int64[T]."""

    def __init__(
        self,
        config: GlmConfig,
        weights: Weights,
        dtype: torch.dtype,
        codec: Codec,
        short_prompts: ShortPrompts = ShortPrompts.MQA,
    ) -> None:
        self.config = config
        self.codec = codec
        reader = _Reader(config, weights, dtype)
        self._embedding = reader.read("model.embed_tokens.weight")
        self._norm = reader.read("model.norm.weight")
        self._head = reader.read("lm_head.weight")
        self._layers = [reader.layer(layer) for layer in range(config.layers + 1)]
        self._mtp = reader.mtp()
        self._attention = SparseAttention(config, dtype, codec, short_prompts)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64[T] -> hidden [T, h]."""
        return self._embedding[tokens]

    def layer_rows(self, layer: int, hidden: Tensor, positions: Tensor) -> LayerRows:
        """The layer's new KV rows."""
        return self._attention.rows(self._layers[layer].attention, hidden, positions)

    def write_rows(self, layer: int, positions: Tensor, rows: LayerRows, store: KVStore) -> None:
        """Puts rows made by `layer_rows` into the store."""
        store.write_latent(layer, positions, rows.latent)
        if rows.index_values is not None and rows.index_scales is not None:
            store.write_index(layer, positions, rows.index_values, rows.index_scales)

    def index_keys(self, leader: int, tokens: int, store: KVStore) -> Tensor:
        """Decoded indexer keys [tokens, 128] of a leader."""
        return self._attention.index_keys(leader, tokens, store)

    def select(self, leader: int, hidden: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """Top-k selection int64[T, k] over decoded index keys, see `attention.top_k`."""
        return self._attention.select(self._layers[leader].attention, hidden, positions, keys)

    def gather(self, layer: int, selection: Tensor, store: KVStore) -> GatheredRows:
        """The selection's latent rows of one layer."""
        return self._attention.gather(layer, selection, store)

    def attend(self, layer: int, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> Tensor:
        """Hidden after the attention block."""
        return hidden + self._attention.attend(self._layers[layer].attention, hidden, positions, rows)

    def ffn(self, layer: int, hidden: Tensor) -> Tensor:
        """Hidden after the feed-forward block."""
        here = self._layers[layer]
        return hidden + here.ffn(rms_norm(hidden, here.post_norm, self.config.rms_eps))

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden [T, h]: what the head and the MTP layer read."""
        return rms_norm(hidden, self._norm, self.config.rms_eps)

    def logits(self, post_norm: Tensor) -> Tensor:
        """[T, vocab] of post-norm hidden states."""
        return post_norm @ self._head.T

    def greedy(self, post_norm: Tensor) -> list[int]:
        """The most likely token after each post-norm hidden state [T, h]."""
        return cast(list[int], self.logits(post_norm).argmax(dim=-1).tolist())

    def forward(self, tokens: Tensor, positions: Tensor, store: KVStore) -> Tensor:
        """Runs all main layers for int64[T] tokens and returns post-norm hidden [T, h].

        Rows of every earlier position must be in the store; this call writes those of `positions`.
        """
        hidden = self.embed(tokens)
        for group in self.config.main_groups:
            selection = None
            for layer in group:
                self.write_rows(layer, positions, self.layer_rows(layer, hidden, positions), store)
                if selection is None:
                    selection = self.choose(layer, hidden, positions, store)
                hidden = self.attend(layer, hidden, positions, self.gather(layer, selection, store))
                hidden = self.ffn(layer, hidden)
        return self.final_norm(hidden)

    def mtp_input(self, next_tokens: Tensor, post_norm: Tensor, positions: Tensor) -> Tensor:
        """The MTP layer's residual stream [T, h] at `positions`.

        Made of the token that follows each position and the model's post-norm hidden state at it.
        """
        embedded = self.embed(next_tokens) * (positions > 0).unsqueeze(-1)
        parts = (
            rms_norm(embedded, self._mtp.embedding_norm, self.config.rms_eps),
            rms_norm(post_norm, self._mtp.hidden_norm, self.config.rms_eps),
        )
        return torch.cat(parts, dim=-1) @ self._mtp.project.T

    def mtp_layer_rows(self, next_tokens: Tensor, post_norm: Tensor, positions: Tensor) -> LayerRows:
        """The MTP layer's KV rows of `positions`; its output is not needed for them."""
        hidden = self.mtp_input(next_tokens, post_norm, positions)
        return self.layer_rows(self.config.mtp_layer, hidden, positions)

    def mtp_rows(self, next_tokens: Tensor, post_norm: Tensor, positions: Tensor, store: KVStore) -> None:
        """Writes the MTP layer's KV rows of `positions`."""
        if len(positions):
            rows = self.mtp_layer_rows(next_tokens, post_norm, positions)
            self.write_rows(self.config.mtp_layer, positions, rows, store)

    def draft(self, store: KVStore, token: int, post_norm: Tensor, position: int, count: int) -> list[int]:
        """Proposes `count` tokens to follow `token`.

        `post_norm` [h] is the model's hidden state at `position`, `token` the one it chose, which will stand at
        `position + 1`. MTP rows of all earlier positions must be in the store; the row of `position` is
        written here. Later iterations reuse the first one's selection and so read no row of their own: they
        write none, and the store needs no room beyond `position`.
        """
        layer = self.config.mtp_layer
        drafts: list[int] = []
        rows: GatheredRows | None = None
        state = post_norm.unsqueeze(0)
        for step in range(count):
            positions = torch.tensor([position + step])
            hidden = self.mtp_input(torch.tensor([token]), state, positions)
            if rows is None:
                self.write_rows(layer, positions, self.layer_rows(layer, hidden, positions), store)
                rows = self.gather(layer, self.choose(layer, hidden, positions, store), store)
            hidden = self.ffn(layer, self.attend(layer, hidden, positions, rows))
            state = rms_norm(hidden, self._mtp.head_norm, self.config.rms_eps)
            (token,) = self.greedy(state)
            drafts.append(token)
        return drafts

    def choose(self, leader: int, hidden: Tensor, positions: Tensor, store: KVStore) -> Tensor:
        """The selection of a share group in this step; tells the store of it."""
        keys = self.index_keys(leader, int(positions.max()) + 1, store)
        selection = self.select(leader, hidden, positions, keys)
        store.prepare(leader, selection)
        return selection


class _Reader:
    """Turns named arrays into tensors of one dtype; a missing name is a KeyError that says it."""

    def __init__(self, config: GlmConfig, weights: Weights, dtype: torch.dtype) -> None:
        self._config = config
        self._weights = weights
        self._dtype = dtype

    def read(self, name: str) -> Tensor:
        return torch.from_numpy(self._weights[name]).to(self._dtype)

    def layer(self, layer: int) -> _Layer:
        base = f"model.layers.{layer}."
        mlp = self._mlp(base + "mlp.") if self._config.is_dense(layer) else self._moe(base + "mlp.")
        return _Layer(self._attention(layer), self.read(base + "post_attention_layernorm.weight"), mlp)

    def mtp(self) -> _Mtp:
        base = f"model.layers.{self._config.mtp_layer}."
        names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
        return _Mtp(*(self.read(base + name) for name in names))

    def _attention(self, layer: int) -> Attention:
        config = self._config
        base = f"model.layers.{layer}."
        attention = base + "self_attn."
        kv_up = self.read(attention + "kv_b_proj.weight").view(config.heads, -1, config.kv_lora)
        key_up, value_up = kv_up[:, : config.nope_dim], kv_up[:, config.nope_dim :]
        return Attention(
            input_norm=self.read(base + "input_layernorm.weight"),
            query_down=self.read(attention + "q_a_proj.weight"),
            query_norm=self.read(attention + "q_a_layernorm.weight"),
            query_up=self.read(attention + "q_b_proj.weight"),
            kv_down=self.read(attention + "kv_a_proj_with_mqa.weight"),
            kv_norm=self.read(attention + "kv_a_layernorm.weight"),
            key_up=key_up.contiguous(),
            value_up=value_up.contiguous(),
            output=self.read(attention + "o_proj.weight"),
            indexer=self._indexer(attention + "indexer.") if layer in config.format.leaders else None,
        )

    def _indexer(self, base: str) -> Indexer:
        names = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
        return Indexer(*(self.read(base + name) for name in names))

    def _mlp(self, base: str) -> Mlp:
        return Mlp(*(self.read(f"{base}{name}_proj.weight") for name in ("gate", "up", "down")))

    def _moe(self, base: str) -> Moe:
        return Moe(
            self._config,
            router=self.read(base + "gate.weight"),
            bias=self.read(base + "gate.e_score_correction_bias"),
            gate_up=self.read(base + "experts.gate_up_proj"),
            down=self.read(base + "experts.down_proj"),
            shared=self._mlp(base + "shared_experts."),
        )
