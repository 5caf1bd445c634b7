"""One DCP rank's shard of a request's KV rows, in the rank's own memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.region_rows import Bytes
from kvmanager.clients.glm.tensor_rows import TensorRows
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array, ShardGeometry
from kvmanager.layout import KVLayout, Section


class ShardStore:
    """The rows whose positions the placement gives to `rank`: writes of others are left out, reads of others fail.

    With one rank it is the whole request, as an engine has it whose latents are replicated: a `KVStore`. Rows come and
    go as CPU tensors, wherever the memory lies.
    """

    def __init__(self, memory: Bytes | Tensor, layout: KVLayout, geometry: ShardGeometry, rank: int) -> None:
        """`memory`: uint8[bytes], as a worker maps it: a numpy array, or a tensor of GPU memory."""
        if layout.page_rows != geometry.page_rows or not 0 <= rank < geometry.ranks:
            raise InvalidArgument(
                f"rank {rank} of {geometry.ranks}, pages of {layout.page_rows} and {geometry.page_rows} rows"
            )
        self.geometry = geometry
        self.rank = rank
        self._span_pages = np.zeros(0, dtype=np.int64)
        region = torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory
        self._rows = {key: TensorRows(region, part, layout.page_rows) for key, part in layout.by_key.items()}

    def set_span_pages(self, pages: Int64Array) -> None:
        """The page index of each span, int64[spans]: replaces what was set before."""
        self._span_pages = np.array(pages, dtype=np.int64)

    def owns(self, positions: Tensor) -> Tensor:
        """bool[...]: which positions lie here. Negative ones do not."""
        _, ranks, _ = self.geometry.place(positions.clamp(min=0).numpy())
        return torch.from_numpy(ranks == self.rank) & (positions >= 0)

    def own_positions(self, tokens: int) -> Tensor:
        """int64[n] ascending: positions below `tokens` that lie here."""
        positions = torch.arange(tokens)
        return positions[self.owns(positions)]

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores those of the rows uint8[T, latent bytes] that belong here."""
        self._write(Section.LATENT, layer, positions, rows)

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores those of the keys uint8[T, index bytes] and float32[T] that belong here."""
        self._write(Section.INDEX_VALUE, layer, positions, values)
        self._write(Section.INDEX_SCALE, layer, positions, scales.contiguous().view(torch.uint8).view(-1, 4))

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[n, index bytes], float32[n]) of the positions below `tokens` that lie here, ascending."""
        return self.index_keys_of(layer, self.own_positions(tokens))

    def index_keys_of(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(uint8[n, index bytes], float32[n]) of positions int64[n] that lie here."""
        scales = self._read(Section.INDEX_SCALE, layer, positions)
        values = self._read(Section.INDEX_VALUE, layer, positions)
        return values, scales.view(torch.float32).view(-1)

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Nothing to do: every row is in device memory."""

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[..., latent bytes] of positions that lie here."""
        rows = self._read(Section.LATENT, layer, selection.reshape(-1))
        return rows.view(*selection.shape, rows.shape[-1])

    def _write(self, section: Section, layer: int, positions: Tensor, rows: Tensor) -> None:
        mine = self.owns(positions)
        pages, slots = self._place(positions[mine])
        self._rows[section, layer].write(pages, slots, rows[mine])

    def _read(self, section: Section, layer: int, positions: Tensor) -> Tensor:
        assert bool(self.owns(positions).all()), f"positions of other ranks asked of rank {self.rank}"
        return self._rows[section, layer].read(*self._place(positions))

    def _place(self, positions: Tensor) -> tuple[Int64Array, Int64Array]:
        spans, _, slots = self.geometry.place(positions.numpy())
        covered = len(self._span_pages)
        assert not len(spans) or spans.max() < covered, f"position {int(positions.max())} beyond {covered} spans"
        return self._span_pages[spans], slots
