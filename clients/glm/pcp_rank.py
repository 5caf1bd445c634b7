"""Prefill context parallel as one rank does it: own chunks of the queries, everybody's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmanager.clients.glm.attention import LayerRows
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp import pcp_chunks
from kvmanager.clients.glm.ranks import RankGroup, gather_uneven
from kvmanager.clients.glm.store import KVStore
from kvmanager.clients.glm.workspace import GatheredStore


def prefill_on_rank(
    model: Glm, store: KVStore, ranks: RankGroup, tokens: Sequence[int], start: int, next_tokens: Sequence[int]
) -> Tensor:
    """Computes this rank's part of one scheduler step; post-norm hidden [h] of the step's last token, on every rank.

    `tokens`, `start`, `next_tokens` as in `pcp.prefill`, the same on all ranks. `store` gets the rows of the whole
    step: a whole copy of the request (PCP), or a `GatheredStore` in a step that has begun (PCP x DCP).
    """
    chunks = pcp_chunks(len(tokens), ranks.size)
    parts = _Parts(ranks, chunks.queries, chunks.replicated, start)
    mine = chunks.queries[ranks.rank]
    positions, hidden = start + mine, model.embed(torch.tensor(tokens)[mine])
    for group in model.config.main_groups:
        selection = None
        for layer in group:
            rows = parts.everybodys(model.layer_rows(layer, hidden, positions))
            model.write_rows(layer, parts.positions, rows, store)
            if selection is None:
                keys = model.index_keys(layer, start + len(tokens), store)
                selection = model.select(layer, hidden, positions, keys)
                store.prepare(layer, selection)
            hidden = model.attend(layer, hidden, positions, model.gather(layer, selection, store))
            hidden = model.ffn(layer, hidden)
    hidden = model.final_norm(hidden)
    whole = hidden.new_empty((len(tokens), hidden.shape[1]))
    whole[parts.positions - start] = parts.everybodys_tensor(hidden)
    following = torch.tensor(next_tokens, dtype=torch.int64)
    known = len(following)
    # The MTP layer's rows are cheap beside its attention, which nobody needs here: every rank makes all of them.
    model.mtp_rows(following, whole[:known], torch.arange(start, start + known), store)
    return whole[-1]


class _Parts:
    """Who has which of the step's tokens, and how their tensors are brought together."""

    def __init__(self, ranks: RankGroup, queries: Sequence[Tensor], replicated: bool, start: int) -> None:
        self._ranks = ranks
        self._counts = None if replicated else [len(part) for part in queries]
        self.positions = start + (queries[0] if replicated else torch.cat(tuple(queries)))
        """Of the rows that `everybodys` returns."""

    def everybodys_tensor(self, own: Tensor) -> Tensor:
        if self._counts is None:
            return own
        return torch.cat(gather_uneven(self._ranks, own, self._counts))

    def everybodys(self, own: LayerRows) -> LayerRows:
        latent = self.everybodys_tensor(own.latent)
        if own.index_values is None or own.index_scales is None:
            return LayerRows(latent, None, None)
        return LayerRows(latent, self.everybodys_tensor(own.index_values), self.everybodys_tensor(own.index_scales))


def prefill_over_shards(
    model: Glm, store: GatheredStore, ranks: RankGroup, tokens: Sequence[int], start: int, next_tokens: Sequence[int]
) -> Tensor:
    """`prefill_on_rank` with DCP shards: the workspace is taken for the step, and given back whatever happens."""
    store.begin(start, start + len(tokens), frozenset(model.config.format.leaders))
    try:
        return prefill_on_rank(model, store, ranks, tokens, start, next_tokens)
    finally:
        store.end()
