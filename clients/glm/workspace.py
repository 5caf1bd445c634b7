"""The temporary full copy of one layer that PCP ranks with DCP shards attend over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvmanager.clients.glm.ranks import Gather, RankGroup, cut_to, pad_to
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.errors import InvariantViolation, PoolExhausted
from kvmanager.layout import INDEX_VALUE_BYTES, LATENT_ROW_BYTES

INDEX_ROW_BYTES: Final = INDEX_VALUE_BYTES + 4
"""Key and scale."""
TOKEN_BYTES: Final = LATENT_ROW_BYTES + INDEX_ROW_BYTES
"""Workspace bytes a token: one layer's latent row and indexer key."""


@dataclass(frozen=True)
class FullCopy:
    """One layer of a context, by position: latent rows uint8[tokens, 656], indexer keys with scales uint8[tokens, 132].

    Views of a workspace, which hold layer after layer.
    """

    latent: Tensor
    index: Tensor


class Workspace:
    """Device memory for the full copy; one step holds it at a time. `memory`: uint8, one dimension."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._held = False
        self.leases = 0
        """Leases so far."""

    def lease(self, tokens: int) -> FullCopy:
        """Takes it for a step whose context ends with `tokens` tokens. Raises PoolExhausted where it is too small."""
        if self._held:
            raise InvariantViolation("the workspace is held by a step that has not ended")
        needed, latent_bytes = tokens * TOKEN_BYTES, tokens * LATENT_ROW_BYTES
        if needed > len(self._memory):
            raise PoolExhausted(
                f"a step over {tokens} tokens needs {needed} bytes of workspace; it has {len(self._memory)}",
                pool="workspace",
                needed=needed,
                free=len(self._memory),
            )
        self._held = True
        self.leases += 1
        latent = self._memory[:latent_bytes].view(tokens, LATENT_ROW_BYTES)
        return FullCopy(latent, self._memory[latent_bytes:needed].view(tokens, INDEX_ROW_BYTES))

    def end(self) -> None:
        """The step is over."""
        assert self._held
        self._held = False


@dataclass
class _Coming:
    """Shards of one layer on their way, of the context before the step."""

    layer: int
    latent: Gather
    index: Gather | None


class GatheredStore:
    """A `KVStore` over one rank's shard whose reads come from a full copy of the layer being computed.

    A step is `begin`, the layers in order, `end`. The first write to a layer makes it the one in the copy: earlier
    tokens' rows come from all shards, the step's own rows from the write, which has those of all ranks. The shards of
    the next layer are asked for at that time, so that they travel while this layer is computed.
    """

    def __init__(self, shard: ShardStore, ranks: RankGroup, workspace: Workspace, layers: tuple[int, ...]) -> None:
        """`layers`: those that are attended, in their order; rows of others are stored only."""
        assert (shard.rank, shard.geometry.ranks) == (ranks.rank, ranks.size)
        self._shard = shard
        self._ranks = ranks
        self._workspace = workspace
        self._next = dict(zip(layers, (*layers[1:], None), strict=True))
        self._first = layers[0]
        self._leaders: frozenset[int] = frozenset()
        self._copy: FullCopy | None = None
        self._layer = -1
        self._coming: _Coming | None = None
        self._counts: list[int] = []
        self._before = 0

    def begin(self, start: int, end: int, leaders: frozenset[int]) -> None:
        """A step over positions start..end-1, rows of earlier ones being in the shards. Raises as `lease` does."""
        self._copy = self._workspace.lease(end)
        self._before = start
        geometry = self._shard.geometry
        self._counts = [geometry.rows_on_rank(start, rank) for rank in range(geometry.ranks)]
        self._places = [self._positions(start, rank) for rank in range(geometry.ranks)]
        self._leaders = leaders
        self._layer = -1
        self._coming = self._ask(self._first)

    def end(self) -> None:
        """The step's last layer is done."""
        self._copy = None
        self._workspace.end()

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores the rows uint8[T, 656] of the whole step: those of this rank for good, all of them in the copy."""
        self._shard.write_latent(layer, positions, rows)
        if layer in self._next:
            self._enter(layer)
            self._held.latent[positions] = rows

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores keys uint8[T, 128] and scales float32[T] likewise; after the layer's latent rows."""
        self._shard.write_index(layer, positions, values, scales)
        if layer in self._next:
            assert layer == self._layer
            self._held.index[positions] = _index_rows(values, scales)

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[tokens, 128], float32[tokens]) of positions 0..tokens-1."""
        assert layer == self._layer
        rows = self._held.index[:tokens]
        scales = rows[:, INDEX_VALUE_BYTES:].contiguous().view(torch.float32).view(-1)
        return rows[:, :INDEX_VALUE_BYTES], scales

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Nothing to do: the copy has every row."""

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[T, k, 656]."""
        assert layer == self._layer
        return self._held.latent[selection.clamp(min=0)]

    @property
    def _held(self) -> FullCopy:
        if self._copy is None:
            raise InvariantViolation("rows are read or written outside a step")
        return self._copy

    def _enter(self, layer: int) -> None:
        """Makes `layer` the one in the copy, and asks for the one after it."""
        if layer == self._layer:
            return
        coming = self._coming
        if coming is None or coming.layer != layer:
            raise InvariantViolation(f"layer {layer} out of its order")
        self._spread(coming.latent, self._held.latent)
        if coming.index is not None:
            self._spread(coming.index, self._held.index)
        self._layer = layer
        following = self._next[layer]
        self._coming = None if following is None else self._ask(following)

    def _ask(self, layer: int) -> _Coming:
        own, most = self._places[self._shard.rank], max(self._counts)
        latent = self._ranks.start_gather(pad_to(self._shard.latent_rows(layer, own), most))
        if layer not in self._leaders:
            return _Coming(layer, latent, None)
        index = _index_rows(*self._shard.index_keys(layer, self._before))
        return _Coming(layer, latent, self._ranks.start_gather(pad_to(index, most)))

    def _spread(self, shards: Gather, rows: Tensor) -> None:
        for positions, shard in zip(self._places, cut_to(shards.wait(), self._counts), strict=True):
            rows[positions] = shard

    def _positions(self, tokens: int, rank: int) -> Tensor:
        _, ranks, _ = self._shard.geometry.place(torch.arange(tokens).numpy())
        return torch.from_numpy((ranks == rank).nonzero()[0])


def _index_rows(values: Tensor, scales: Tensor) -> Tensor:
    return torch.cat((values, scales.contiguous().view(torch.uint8).view(len(scales), 4)), dim=1)
