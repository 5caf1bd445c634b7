"""Sparse multi-head latent attention: rows, indexer, top-k, and attention over gathered rows.

The pieces are apart because ranks of an engine run them apart: rows are made by the rank that holds a
token, stored where the placement says, and read by the rank that holds the query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kvmanager.clients.glm.codec import Codec
from kvmanager.clients.glm.config import GlmConfig
from kvmanager.clients.glm.norm import Rope, rms_norm
from kvmanager.clients.glm.store import KVStore

_BLOCK_QUERIES: Final = 64
_BLOCK_SCORES: Final = 1 << 20
"""Queries attended, and per-head index scores held, at a time: a few MB each, so that passes stay in cache."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """Weights of a leader's indexer."""

    query: Tensor
    key: Tensor
    key_norm: Tensor
    key_bias: Tensor
    head_weight: Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one layer's attention. `key_up` [H, nope, 512] and `value_up` [H, value, 512] are kv_b's halves."""

    input_norm: Tensor
    query_down: Tensor
    query_norm: Tensor
    query_up: Tensor
    kv_down: Tensor
    kv_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    output: Tensor
    indexer: Indexer | None


@dataclass(frozen=True, slots=True)
class LayerRows:
    """New KV rows of T tokens: uint8[T, latent bytes]; on leaders also index uint8[T, n] and float32[T]."""

    latent: Tensor
    index_values: Tensor | None
    index_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """The distinct latent rows of a selection, decoded.

    `values` [U, 576]: latent and rope part side by side. `places` int64[T, k] index into it; where `used`
    bool[T, k] is false they mean nothing.
    """

    values: Tensor
    places: Tensor
    used: Tensor

    def __getitem__(self, queries: Tensor | slice) -> GatheredRows:
        return GatheredRows(self.values, self.places[queries], self.used[queries])


def top_k(scores: Tensor, positions: Tensor, k: int) -> Tensor:
    """The k best keys of each query: int64[T, k], ascending, -1 where fewer than k keys are causal.

    `scores` [T, n] by key position; keys after the query's position (int64[T]) are never chosen. Equal scores
    go to the lowest position, so that the choice does not depend on how a batch was cut.
    """
    queries, keys = scores.shape
    causal = torch.arange(keys) <= positions.unsqueeze(-1)
    scores = scores.masked_fill(~causal, float("-inf"))
    least = scores.topk(min(k, keys), dim=-1).values[:, -1:]
    above = scores > least
    equal = scores == least
    room = k - above.sum(dim=-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(dim=-1) <= room))) & causal
    selection = torch.full((queries, k), -1, dtype=torch.int64)
    row, position = chosen.nonzero(as_tuple=True)
    counts = chosen.sum(dim=-1)
    first = counts.cumsum(dim=0) - counts
    selection[row, torch.arange(len(row)) - first[row]] = position
    return selection


class SparseAttention:
    """The computation that all layers share; weights are passed in."""

    def __init__(self, config: GlmConfig, dtype: torch.dtype, codec: Codec) -> None:
        self._config = config
        self._dtype = dtype
        self._codec = codec
        self._rope = Rope(config.rope_dim, config.rope_theta, dtype)

    def rows(self, w: Attention, hidden: Tensor, positions: Tensor) -> LayerRows:
        """KV rows of tokens with residual stream `hidden` [T, h] at int64[T]."""
        x = rms_norm(hidden, w.input_norm, self._config.rms_eps)
        c, k_pe = _cut(x @ w.kv_down.T, self._config.kv_lora)
        latent = self._codec.encode_latent(
            rms_norm(c, w.kv_norm, self._config.latent_eps), self._rope.rotate(k_pe, positions)
        )
        if w.indexer is None:
            return LayerRows(latent, None, None)
        key = layer_norm(
            x @ w.indexer.key.T,
            (self._config.index_dim,),
            w.indexer.key_norm,
            w.indexer.key_bias,
            self._config.index_eps,
        )
        return LayerRows(latent, *self._codec.encode_index(self._rotate_head(key, positions)))

    def index_keys(self, layer: int, tokens: int, store: KVStore) -> Tensor:
        """Decoded indexer keys [tokens, 128] of positions 0..tokens-1."""
        return self._codec.decode_index(*store.index_keys(layer, tokens), self._dtype)

    def select(self, w: Attention, hidden: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """Top-k selection int64[T, k] of queries `hidden` [T, h] over decoded index keys [n, 128]."""
        step = max(1, min(_BLOCK_QUERIES, _BLOCK_SCORES // (self._config.index_heads * len(keys))))
        parts = []
        for at in range(0, len(hidden), step):
            block = slice(at, at + step)
            seen = keys[: int(positions[block].max()) + 1]
            scores = self._index_scores(w, hidden[block], positions[block], seen)
            parts.append(top_k(scores, positions[block], self._config.index_topk))
        return torch.cat(parts)

    def gather(self, layer: int, selection: Tensor, store: KVStore) -> GatheredRows:
        """Reads and decodes each selected row once."""
        used = selection >= 0
        # A query always selects at least one key, and the lowest comes first: unused places repeat it.
        filled = torch.where(used, selection, selection[:, :1])
        distinct, places = torch.unique(filled, return_inverse=True)
        rows = store.latent_rows(layer, distinct.unsqueeze(0)).squeeze(0)
        return GatheredRows(torch.cat(self._codec.decode_latent(rows, self._dtype), dim=-1), places, used)

    def attend(self, w: Attention, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> Tensor:
        """Attention's output [T, h], to be added to the residual stream."""
        blocks = [slice(at, at + _BLOCK_QUERIES) for at in range(0, len(hidden), _BLOCK_QUERIES)]
        return torch.cat([self._attend_block(w, hidden[b], positions[b], rows[b]) for b in blocks])

    def _attend_block(self, w: Attention, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> Tensor:
        config = self._config
        x = rms_norm(hidden, w.input_norm, config.rms_eps)
        query = (self._query_latent(w, x) @ w.query_up.T).view(len(x), config.heads, config.query_dim)
        nope, rope = _cut(query, config.nope_dim)
        absorbed = torch.einsum("thd,hdc->thc", nope, w.key_up)
        query = torch.cat((absorbed, self._rope.rotate(rope, positions)), dim=-1) * config.query_dim**-0.5
        gathered = rows.values[rows.places]
        scores = torch.bmm(query, gathered.transpose(1, 2)).masked_fill(~rows.used.unsqueeze(1), float("-inf"))
        mixed = torch.bmm(scores.softmax(dim=-1), gathered[..., : config.kv_lora])
        return torch.einsum("thc,hdc->thd", mixed, w.value_up).flatten(1) @ w.output.T

    def _index_scores(self, w: Attention, hidden: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """`sum_h g[t, h] * relu(q[t, h] . keys[j])` for keys [n, 128] -> [T, n]."""
        assert w.indexer is not None
        config = self._config
        x = rms_norm(hidden, w.input_norm, config.rms_eps)
        query = self._query_latent(w, x) @ w.indexer.query.T
        query = self._rotate_head(query.view(len(x), config.index_heads, config.index_dim), positions)
        weight = (x @ w.indexer.head_weight.T) * (config.index_heads * config.index_dim) ** -0.5
        products = (query.flatten(0, 1) @ keys.T).clamp_(min=0).view(len(x), config.index_heads, len(keys))
        return torch.bmm(weight.unsqueeze(1), products).squeeze(1)

    def _query_latent(self, w: Attention, x: Tensor) -> Tensor:
        return rms_norm(x @ w.query_down.T, w.query_norm, self._config.latent_eps)

    def _rotate_head(self, x: Tensor, positions: Tensor) -> Tensor:
        """Indexer heads carry their rotated dims first."""
        rope, rest = _cut(x, self._config.rope_dim)
        return torch.cat((self._rope.rotate(rope, positions), rest), dim=-1)


def _cut(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` values of the last dimension, and the others."""
    return x[..., :width], x[..., width:]
