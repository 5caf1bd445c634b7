"""Prefill context parallel as one rank does it: own chunks of the queries, everybody's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmanager.clients.glm.attention import LayerRows
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp import WRITER, PcpChunks, pcp_chunks
from kvmanager.clients.glm.ranks import RankGroup, gather, gather_uneven
from kvmanager.clients.glm.store import KVStore
from kvmanager.clients.glm.workspace import GatheredStore
from kvmanager.errors import InvalidArgument


def prefill_on_rank(
    model: Glm, store: KVStore, ranks: RankGroup, tokens: Sequence[int], start: int, next_tokens: Sequence[int]
) -> Tensor:
    """Computes this rank's part of one scheduler step; post-norm hidden [h] of the step's last token, on every rank.

    `tokens` stand at positions `start` on; rows of all earlier positions are in the store. `next_tokens[i]` follows
    `tokens[i]`: as many as tokens, or one fewer when the last one's is not known yet. MTP rows are written where it is
    known. All of that is the same on all ranks. `store` gets the rows of the whole step: a whole copy of the request
    (PCP), or a `GatheredStore` in a step that has begun (PCP x DCP). Raises InvalidArgument for other lengths.
    """
    if len(next_tokens) not in (len(tokens) - 1, len(tokens)):
        raise InvalidArgument(f"{len(next_tokens)} next tokens for {len(tokens)}; give all, or all but the last")
    chunks = pcp_chunks(len(tokens), ranks.size)
    mine = chunks.queries[ranks.rank]
    positions, hidden = start + mine, model.embed(torch.tensor(tokens)[mine])
    step = _Parts(ranks, chunks, len(tokens), start)
    for group in model.config.main_groups:
        selection = None
        for layer in group:
            step.write(model, store, layer, model.layer_rows(layer, hidden, positions))
            if selection is None:
                keys = model.index_keys(layer, start + len(tokens), store)
                selection = model.select(layer, hidden, positions, keys)
                store.prepare(layer, selection)
            hidden = model.attend(layer, hidden, positions, model.gather(layer, selection, store))
            hidden = model.ffn(layer, hidden)
    hidden = model.final_norm(hidden)
    known = _Parts(ranks, chunks, len(next_tokens), start)
    own = mine < len(next_tokens)
    following = torch.tensor(next_tokens, dtype=torch.int64)[mine[own]]
    known.write(model, store, model.config.mtp_layer, model.mtp_layer_rows(following, hidden[own], positions[own]))
    return gather(ranks, hidden[-1])[WRITER]


class _Parts:
    """Who has which of the step's first `tokens` tokens, and how their rows are brought together."""

    def __init__(self, ranks: RankGroup, chunks: PcpChunks, tokens: int, start: int) -> None:
        parts = [part[part < tokens] for part in chunks.distinct]
        self._ranks = ranks
        self._counts = None if chunks.replicated else [len(part) for part in parts]
        self._positions = start + torch.cat(parts)

    def write(self, model: Glm, store: KVStore, layer: int, own: LayerRows) -> None:
        """Puts every rank's rows of a layer into the store."""
        if not len(self._positions):
            return
        latent = self._everybodys(own.latent)
        if own.index_values is None or own.index_scales is None:
            rows = LayerRows(latent, None, None)
        else:
            rows = LayerRows(latent, self._everybodys(own.index_values), self._everybodys(own.index_scales))
        model.write_rows(layer, self._positions, rows, store)

    def _everybodys(self, own: Tensor) -> Tensor:
        return own if self._counts is None else torch.cat(gather_uneven(self._ranks, own, self._counts))


def prefill_over_shards(
    model: Glm, store: GatheredStore, ranks: RankGroup, tokens: Sequence[int], start: int, next_tokens: Sequence[int]
) -> Tensor:
    """`prefill_on_rank` with DCP shards: the workspace is taken for the step, and given back whatever happens."""
    store.begin(start, start + len(tokens), frozenset(model.config.format.leaders))
    try:
        return prefill_on_rank(model, store, ranks, tokens, start, next_tokens)
    finally:
        store.end()
