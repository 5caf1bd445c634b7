"""Prefill context parallel: who computes which query tokens, and a step computed so.

Causal attention costs more for later tokens, so each rank takes one early and one late chunk. Who computes
a token and who stores it are unrelated: storage follows the DCP placement alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmanager.clients.glm.attention import LayerRows
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.store import KVStore
from kvmanager.errors import InvalidArgument


@dataclass(frozen=True)
class PcpChunks:
    """Query offsets int64[T_r] of each rank, ascending.

    `replicated`: the batch is too small to cut, every rank computes all of it and rank 0 writes.
    """

    queries: tuple[Tensor, ...]
    replicated: bool

    @property
    def distinct(self) -> tuple[Tensor, ...]:
        """The parts that differ: all ranks', or the one that all compute alike."""
        return self.queries[:1] if self.replicated else self.queries


def pcp_chunks(queries: int, ranks: int) -> PcpChunks:
    """Cuts `queries` tokens of a step into 2 * ranks chunks; rank g takes chunks g and 2 * ranks - 1 - g."""
    assert queries > 0
    last = 2 * ranks - 1
    size = -(-queries // (2 * ranks))
    everything = torch.arange(queries)
    if last * size >= queries:
        return PcpChunks((everything,) * ranks, replicated=True)
    chunks = everything.split_with_sizes([size] * last + [queries - last * size])
    return PcpChunks(tuple(torch.cat((chunks[g], chunks[last - g])) for g in range(ranks)), replicated=False)


@dataclass
class _Part:
    """One rank's share of the step: absolute positions int64[T_r] and residual stream [T_r, h]."""

    positions: Tensor
    hidden: Tensor


def prefill(
    model: Glm, store: KVStore, tokens: Sequence[int], start: int, next_tokens: Sequence[int], ranks: int
) -> Tensor:
    """Computes one scheduler step of a prompt as `ranks` ranks do; returns post-norm hidden [h] of the last token.

    `tokens` stand at positions `start` on; rows of all earlier positions are in the store. `next_tokens[i]`
    follows `tokens[i]`: as many as tokens, or one fewer when the last one's is not known yet. MTP rows are
    written where it is known. Raises InvalidArgument for other lengths.
    """
    if len(next_tokens) not in (len(tokens) - 1, len(tokens)):
        raise InvalidArgument(f"{len(next_tokens)} next tokens for {len(tokens)}; give all, or all but the last")
    chunks = pcp_chunks(len(tokens), ranks).distinct
    batch = torch.tensor(tokens)
    parts = [_Part(start + offsets, model.embed(batch[offsets])) for offsets in chunks]
    for group in model.config.main_groups:
        _run_group(model, store, group, parts, start + len(tokens))
    following = torch.tensor(next_tokens, dtype=torch.int64)
    last = torch.empty(0)
    for offsets, part in zip(chunks, parts, strict=True):
        hidden = model.final_norm(part.hidden)
        known = offsets < len(following)
        model.mtp_rows(following[offsets[known]], hidden[known], part.positions[known], store)
        if int(offsets[-1]) == len(tokens) - 1:
            last = hidden[-1]
    return last


def _run_group(model: Glm, store: KVStore, group: Sequence[int], parts: list[_Part], tokens: int) -> None:
    """Runs the layers of one share group on all parts; `tokens` is the context's length after the step."""
    selections: list[Tensor] = []
    everything = torch.empty(0)
    for layer in group:
        _write_all(model, store, layer, parts)
        if not selections:
            keys = model.index_keys(layer, tokens, store)
            selections = [model.select(layer, part.hidden, part.positions, keys) for part in parts]
            everything = torch.cat(selections)
            store.prepare(layer, everything)
        workspace = model.gather(layer, everything, store)  # the temporary full copy that all ranks attend over
        first = 0
        for part, selection in zip(parts, selections, strict=True):
            rows = workspace[first : first + len(selection)]
            part.hidden = model.ffn(layer, model.attend(layer, part.hidden, part.positions, rows))
            first += len(selection)


def _write_all(model: Glm, store: KVStore, layer: int, parts: list[_Part]) -> None:
    """Each rank makes the rows of its tokens; together they go where the placement says."""
    made = [model.layer_rows(layer, part.hidden, part.positions) for part in parts]
    rows = LayerRows(
        torch.cat([r.latent for r in made]),
        _concatenate([r.index_values for r in made]),
        _concatenate([r.index_scales for r in made]),
    )
    model.write_rows(layer, torch.cat([part.positions for part in parts]), rows, store)


def _concatenate(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts))
    return torch.cat(present) if present else None
