"""KV rows of one request sharded over the memories of a DCP group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.region_rows import Bytes, ComponentRows
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array, ShardGeometry
from kvmanager.layout import KVLayout, Section


class DcpStore:
    """A `KVStore` over N rank memories: position p lies on one rank, in the page that its span has on all ranks.

    Reading brings the shards together, as a group's all-gather does. Page indexes come from the daemon, one a
    span, by `set_span_pages`; a position beyond them fails an assertion.
    """

    def __init__(self, memories: Sequence[Bytes], layout: KVLayout, geometry: ShardGeometry) -> None:
        if len(memories) != geometry.ranks or layout.page_rows != geometry.page_rows:
            raise InvalidArgument(
                f"{len(memories)} memories with pages of {layout.page_rows} rows for a geometry of {geometry.ranks} "
                f"ranks x {geometry.page_rows} rows; both must agree"
            )
        self._geometry = geometry
        self._span_pages = np.zeros(0, dtype=np.int64)
        self._shards = {
            key: [ComponentRows(memory, component, layout.page_rows) for memory in memories]
            for key, component in layout.by_key.items()
        }

    def set_span_pages(self, pages: Int64Array) -> None:
        """The page index (the same on every rank) of each span, int64[spans]: replaces what was set before."""
        self._span_pages = np.array(pages, dtype=np.int64)

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores rows uint8[T, latent bytes] on the ranks that own the positions."""
        self._scatter(Section.LATENT, layer, positions.numpy(), rows.numpy())

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores keys uint8[T, index bytes] and float32[T] on the ranks that own the positions."""
        self._scatter(Section.INDEX_VALUE, layer, positions.numpy(), values.numpy())
        self._scatter(Section.INDEX_SCALE, layer, positions.numpy(), scales.numpy().view(np.uint8).reshape(-1, 4))

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[tokens, index bytes], float32[tokens]) gathered from all ranks."""
        positions = np.arange(tokens, dtype=np.int64)
        values = self._gather(Section.INDEX_VALUE, layer, positions)
        scales = self._gather(Section.INDEX_SCALE, layer, positions)
        return torch.from_numpy(values), torch.from_numpy(scales.view(np.float32).reshape(-1))

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Nothing to do: every row is in device memory."""

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[T, k, latent bytes] gathered from all ranks."""
        positions = selection.clamp(min=0).reshape(-1).numpy()
        return torch.from_numpy(self._gather(Section.LATENT, layer, positions)).view(*selection.shape, -1)

    def _place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(page, rank, slot) of each position."""
        spans, ranks, slots = self._geometry.place(positions)
        covered = len(self._span_pages)
        assert not len(spans) or spans.max() < covered, f"position {positions.max()} beyond {covered} spans"
        return self._span_pages[spans], ranks, slots

    def _scatter(self, section: Section, layer: int, positions: Int64Array, rows: Bytes) -> None:
        pages, ranks, slots = self._place(positions)
        for rank, shard in enumerate(self._shards[section, layer]):
            mine = ranks == rank
            shard.write(pages[mine], slots[mine], rows[mine])

    def _gather(self, section: Section, layer: int, positions: Int64Array) -> Bytes:
        pages, ranks, slots = self._place(positions)
        shards = self._shards[section, layer]
        rows = np.empty((len(positions), shards[0].row_bytes), dtype=np.uint8)
        for rank, shard in enumerate(shards):
            mine = ranks == rank
            rows[mine] = shard.read(pages[mine], slots[mine])
        return rows
