"""The model as one rank of several computes it in decode: heads apart (TP), or the context apart (DCP)."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import Tensor

from kvmanager.clients.glm.attention import (
    Attention,
    GatheredRows,
    PartialAttention,
    ShortPrompts,
    best,
    merge_partials,
)
from kvmanager.clients.glm.codec import Codec
from kvmanager.clients.glm.config import GlmConfig
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.ranks import RankGroup, gather, gather_sum
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.store import KVStore
from kvmanager.clients.glm.weights import Weights
from kvmanager.errors import InvalidArgument


class TensorParallelGlm(Glm):
    """TP: each rank has a share of the attention heads and a whole copy of the latents.

    The indexer and the feed-forward blocks are whole on every rank. Every rank makes all rows and writes them to
    its own store. Raises InvalidArgument when the ranks do not divide the heads.
    """

    def __init__(
        self,
        config: GlmConfig,
        weights: Weights,
        dtype: torch.dtype,
        codec: Codec,
        ranks: RankGroup,
        short_prompts: ShortPrompts = ShortPrompts.MQA,
    ) -> None:
        super().__init__(config, weights, dtype, codec, short_prompts)
        if config.heads % ranks.size:
            raise InvalidArgument(f"{config.heads} heads on {ranks.size} ranks; each takes as many")
        self._ranks = ranks
        share = config.heads // ranks.size
        heads = slice(ranks.rank * share, (ranks.rank + 1) * share)
        self._shares = [_some_heads(layer.attention, config, heads) for layer in self._layers]

    def attend(self, layer: int, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> Tensor:
        """Hidden after the attention block: the sum of all ranks' heads."""
        own = self._attention.attend(self._shares[layer], hidden, positions, rows)
        return hidden + gather_sum(self._ranks, own)


def _some_heads(w: Attention, config: GlmConfig, heads: slice) -> Attention:
    query = w.query_up.view(config.heads, config.query_dim, -1)[heads]
    output = w.output.view(config.hidden, config.heads, config.value_dim)[:, heads]
    return dataclasses.replace(
        w,
        query_up=query.flatten(0, 1),
        key_up=w.key_up[heads],
        value_up=w.value_up[heads],
        output=output.flatten(1),
    )


class ContextParallelGlm(Glm):
    """DCP decode: each rank holds a shard of the context, and the query goes to the KV.

    A rank scores the keys that it has and offers its best ones; of all offers every rank takes the same top-k,
    attends over the chosen rows that it has, and the parts are merged by their log-sum-exp. The store is the
    rank's `ShardStore`; a rank may hold nothing of a request.
    """

    def __init__(self, config: GlmConfig, weights: Weights, dtype: torch.dtype, codec: Codec, ranks: RankGroup) -> None:
        super().__init__(config, weights, dtype, codec, ShortPrompts.MQA)
        self._ranks = ranks

    def choose(self, leader: int, hidden: Tensor, positions: Tensor, store: KVStore) -> Tensor:
        """int64[T, k]: the rows of the top-k over all ranks that lie here, ascending, -1 in the other places."""
        shard = cast(ShardStore, store)
        tokens = int(positions.max()) + 1
        own = shard.own_positions(tokens)
        scores = self._attention.index_scores(
            self._layers[leader].attention, hidden, positions, self.index_keys(leader, tokens, store)
        )
        offered = _offer(scores, own, positions, self.config.index_topk)
        parts = gather(self._ranks, offered)
        everyone = _ascending(torch.cat(parts, dim=1))
        at = everyone[..., 0].long()
        chosen = best(everyone[..., 1], at >= 0, self.config.index_topk) & shard.owns(at)
        selection = torch.where(chosen, at, -1).sort(dim=-1, descending=True).values[:, : self.config.index_topk]
        return selection.flip(-1)

    def attend(self, layer: int, hidden: Tensor, positions: Tensor, rows: GatheredRows) -> Tensor:
        """Hidden after the attention block; `rows` are those that lie here."""
        weights = self._layers[layer].attention
        own = self._attention.attend_partial(weights, hidden, positions, rows)
        parts = gather(self._ranks, torch.cat((own.mixed, own.lse.unsqueeze(-1)), dim=-1))
        merged = merge_partials([PartialAttention(part[..., :-1], part[..., -1]) for part in parts])
        return hidden + self._attention.project(weights, merged)


def _offer(scores: Tensor, own: Tensor, positions: Tensor, k: int) -> Tensor:
    """[T, k, 2]: position and score of each query's k best keys of a shard, -1 and -inf in unused places.

    `scores` [T, n] of the keys at `own` int64[n], ascending. Positions are exact in float32 up to 2**24.
    """
    chosen = best(scores, own <= positions.unsqueeze(-1), k)
    offered = torch.stack((torch.full_like(scores, -1.0), torch.full_like(scores, float("-inf"))), dim=-1)
    offered[chosen] = torch.stack((own.expand_as(chosen)[chosen].to(scores.dtype), scores[chosen]), dim=-1)
    order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :k]
    offered = offered.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
    missing = offered.new_tensor([-1.0, float("-inf")]).expand(len(offered), k - offered.shape[1], 2)
    return torch.cat((offered, missing), dim=1)


def _ascending(offered: Tensor) -> Tensor:
    """Offers [T, n, 2] in the order of their positions, so that ties go to the lowest one."""
    order = offered[..., 0].argsort(dim=-1, stable=True)
    return offered.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
