"""Where a model keeps its KV rows: the protocol, and the plain store of the reference run."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvmanager.clients.glm.codec import Codec
from kvmanager.layout import KVFormat


class KVStore(Protocol):
    """KV rows of one request, by layer and absolute token position.

    Positions and selections are int64; rows are uint8. A selection has one row a query token, ascending
    positions, -1 in unused places.
    """

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores rows uint8[T, latent bytes] at positions int64[T]."""

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores indexer keys uint8[T, index bytes] with scales float32[T] at positions int64[T]."""

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[tokens, index bytes], float32[tokens]) of positions 0..tokens-1."""

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Called once a step for each share group, after its top-k int64[T, k] and before its gathers."""

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[T, k, latent bytes] of a (part of a) prepared selection int64[T, k]; bytes at -1 mean nothing."""


class ContiguousStore:
    """One growing tensor a layer: no pages, no shards, nothing that could go wrong."""

    def __init__(self, format_: KVFormat, codec: Codec) -> None:
        self._latent = {layer: _Rows(codec.latent_bytes) for group in format_.share_groups for layer in group}
        self._values = {layer: _Rows(codec.index_bytes) for layer in format_.leaders}
        self._scales = {layer: _Rows(4) for layer in format_.leaders}

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores rows uint8[T, latent bytes]."""
        self._latent[layer].write(positions, rows)

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores keys uint8[T, index bytes] and scales float32[T]."""
        self._values[layer].write(positions, values)
        self._scales[layer].write(positions, scales.contiguous().view(torch.uint8).view(-1, 4))

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[tokens, index bytes], float32[tokens])."""
        scales = self._scales[layer].data[:tokens].view(torch.float32).view(-1)
        return self._values[layer].data[:tokens], scales

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Nothing to do: every row is at hand."""

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[T, k, latent bytes]."""
        return self._latent[layer].data[selection.clamp(min=0)]


class _Rows:
    """uint8[capacity, row bytes] that doubles when a position lies beyond it."""

    def __init__(self, row_bytes: int) -> None:
        self.data = torch.zeros((256, row_bytes), dtype=torch.uint8)

    def write(self, positions: Tensor, rows: Tensor) -> None:
        last = int(positions.max())
        if last >= len(self.data):
            grown = torch.zeros((max(last + 1, 2 * len(self.data)), self.data.shape[1]), dtype=torch.uint8)
            grown[: len(self.data)] = self.data
            self.data = grown
        self.data[positions] = rows
