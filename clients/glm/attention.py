"""Sparse multi-head latent attention: rows, indexer, top-k, and attention over gathered rows.

The pieces are apart because ranks of an engine run them apart: rows are made by the rank that holds a
token, stored where the placement says, and read by the rank that holds the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
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
    causal = torch.arange(scores.shape[1]) <= positions.unsqueeze(-1)
    chosen = best(scores, causal, k)
    selection = torch.full((len(scores), k), -1, dtype=torch.int64)
    row, position = chosen.nonzero(as_tuple=True)
    counts = chosen.sum(dim=-1)
    first = counts.cumsum(dim=0) - counts
    selection[row, torch.arange(len(row)) - first[row]] = position
    return selection


def best(scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    """bool[T, n]: each query's k best keys among the `allowed` bool[T, n], all of them where they are fewer.

    Of equal `scores` [T, n] those of the first columns are taken.
    """
    scores = scores.masked_fill(~allowed, float("-inf"))
    if scores.shape[1] == 0:
        return allowed
    least = scores.topk(min(k, scores.shape[1]), dim=-1).values[:, -1:]
    above = scores > least
    equal = scores == least
    room = k - above.sum(dim=-1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=-1) <= room))) & allowed


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention over some of a query's rows, before it is projected: what shards of a context are merged from.

    `mixed` [T, H, 512]: softmax-weighted mean of the latents; `lse` [T, H]: logarithm of the sum of the exponents.
    A query without rows has 0 and -inf.
    """

    mixed: Tensor
    lse: Tensor


def merge_partials(parts: Sequence[PartialAttention]) -> Tensor:
    """Attention [T, H, 512] over the union of the parts' rows; a query needs a row in one of them at least."""
    lse = torch.stack([part.lse for part in parts])
    weights = lse.softmax(dim=0)
    return torch.einsum("nth,nthc->thc", weights, torch.stack([part.mixed for part in parts]))


class ShortPrompts(StrEnum):
    """How prompts no longer than the top-k, whose queries select every key, are attended.

    Engines call the choice `sparse_mla_force_mqa`: on is MQA, over latents as for every other prompt; off is MHA, with
    keys and values of each head made from the latents.
    """

    MQA = "mqa"
    MHA = "mha"


class SparseAttention:
    """The computation that all layers share; weights are passed in."""

    def __init__(self, config: GlmConfig, dtype: torch.dtype, codec: Codec, short: ShortPrompts) -> None:
        self._config = config
        self._short = short
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
            scores = self.index_scores(w, hidden[block], positions[block], seen)
            parts.append(top_k(scores, positions[block], self._config.index_topk))
        return torch.cat(parts)

    def gather(self, layer: int, selection: Tensor, store: KVStore) -> GatheredRows:
        """Reads and decodes each selected row once."""
        used = selection >= 0
        distinct, inverse = torch.unique(selection[used], return_inverse=True)
        places = torch.zeros_like(selection)
        places[used] = inverse
        if len(distinct) == 0:
            width = self._config.kv_lora + self._config.rope_dim
            return GatheredRows(torch.zeros((1, width), dtype=self._dtype), places, used)
        rows = store.latent_rows(layer, distinct.unsqueeze(0)).squeeze(0)
        return GatheredRows(torch.cat(self._codec.decode_latent(rows, self._dtype), dim=-1), places, used)

    def attend(self, w: Attention, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> Tensor:
        """Attention's output [T, h], to be added to the residual stream.

        With weights of some of the heads only, those heads' share of it.
        """
        if self._short is ShortPrompts.MHA and int(positions.max()) < self._config.index_topk:
            return self._attend_dense(w, hidden, positions, rows.values)
        return self.project(w, self.attend_partial(w, hidden, positions, rows).mixed)

    def attend_partial(self, w: Attention, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> PartialAttention:
        """Attention over `rows` alone."""
        blocks = [slice(at, at + _BLOCK_QUERIES) for at in range(0, len(hidden), _BLOCK_QUERIES)]
        parts = [self._attend_block(w, hidden[b], positions[b], rows[b]) for b in blocks]
        return PartialAttention(torch.cat([part.mixed for part in parts]), torch.cat([part.lse for part in parts]))

    def project(self, w: Attention, mixed: Tensor) -> Tensor:
        """Output [T, h] of attention over latents [T, H, 512]."""
        return torch.einsum("thc,hdc->thd", mixed, w.value_up).flatten(1) @ w.output.T

    def _attend_block(self, w: Attention, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> PartialAttention:
        nope, rope = self._queries(w, hidden, positions)
        query = torch.cat((torch.einsum("thd,hdc->thc", nope, w.key_up), rope), dim=-1)
        gathered = rows.values[rows.places]
        scores = torch.bmm(query, gathered.transpose(1, 2)).masked_fill(~rows.used.unsqueeze(1), float("-inf"))
        # A query that has no row here would divide nothing by nothing: its softmax is taken over zeros instead.
        nothing = ~rows.used.any(dim=-1).view(-1, 1, 1)
        weights = scores.masked_fill(nothing, 0.0).softmax(dim=-1).masked_fill(nothing, 0.0)
        mixed = torch.bmm(weights, gathered[..., : self._config.kv_lora])
        return PartialAttention(mixed, scores.logsumexp(dim=-1))

    def _attend_dense(self, w: Attention, hidden: Tensor, positions: Tensor, values: Tensor) -> Tensor:
        """Attention over every key up to the query, with the heads' keys and values; `values` [n, 576] by position."""
        latents, k_pe = _cut(values, self._config.kv_lora)
        nope, rope = self._queries(w, hidden, positions)
        keys = torch.einsum("nc,hdc->nhd", latents, w.key_up)
        scores = torch.einsum("thd,nhd->thn", nope, keys) + torch.einsum("thd,nd->thn", rope, k_pe)
        later = torch.arange(len(values)) > positions.unsqueeze(-1)
        weights = scores.masked_fill(later.unsqueeze(1), float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("thn,nhd->thd", weights, torch.einsum("nc,hdc->nhd", latents, w.value_up))
        return mixed.flatten(1) @ w.output.T

    def _queries(self, w: Attention, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled queries [T, H, nope] and, turned to their positions, [T, H, rope]."""
        config = self._config
        x = rms_norm(hidden, w.input_norm, config.rms_eps)
        query = (self._query_latent(w, x) @ w.query_up.T).view(len(x), -1, config.query_dim) * config.query_dim**-0.5
        nope, rope = _cut(query, config.nope_dim)
        return nope, self._rope.rotate(rope, positions)

    def index_scores(self, w: Attention, hidden: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
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
