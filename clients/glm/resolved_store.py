"""KV rows of a rank's requests through a resolver: where a selected row lies, and what is missing, it decides.

The store keeps no map of hot rows. It writes the daemon's table rows where the resolver reads them, asks it for each
share group's selection, and reads rows from the byte offsets that it gives. The same code runs over the reference and
over the GPU (`sparse_rank.SparseRank`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.hisparse import RowCounters
from kvmanager.clients.glm.page_table import NO_PAGE, PageTable
from kvmanager.clients.glm.sparse_rank import HOT_COLUMN, MISS_COLUMN, SparseRank
from kvmanager.clients.glm.tensor_rows import RowsByOffset, TensorRows
from kvmanager.errors import InvalidArgument, InvariantViolation, LimitExceeded
from kvmanager.geometry import Int64Array, TokenOrder
from kvmanager.layout import KVLayout, Section


class ResolvedStores:
    """The stores of a rank's requests: each takes a place of the resolver's tables until it is closed."""

    def __init__(
        self,
        rank: SparseRank,
        device: Tensor,
        latent: KVLayout,
        indexer: KVLayout,
        share_groups: tuple[tuple[int, ...], ...],
    ) -> None:
        """`device`: the rank's device region, uint8. Groups are numbered as the resolver's."""
        self.rank = rank
        self.share_groups = share_groups
        self.rows = {key: TensorRows(device, part, latent.page_rows) for key, part in latent.by_key.items()}
        self.index = {key: TensorRows(device, part, indexer.page_rows) for key, part in indexer.by_key.items()}
        self.by_offset = RowsByOffset(device)
        self.offset_in_row = {
            layer: part.offset - latent.by_key[Section.LATENT, group[0]].offset
            for group in share_groups
            for layer in group
            for part in [latent.by_key[Section.LATENT, layer]]
        }
        """Layer -> where its row begins in a group row, in bytes."""
        self._free = list(reversed(range(rank.shape.requests)))

    def open(self) -> ResolvedStore:
        """An empty store. Raises LimitExceeded when as many requests as the shape has places hold one."""
        if not self._free:
            raise LimitExceeded(f"all {self.rank.shape.requests} places of the resolver's tables are taken")
        return ResolvedStore(self, self._free.pop())

    def give_back(self, place: int) -> None:
        """The place of a store that is closed."""
        self._free.append(place)


@dataclass(frozen=True)
class _Prepared:
    """A share group's selection: distinct positions int64[n], ascending, and the byte offsets of their group rows."""

    positions: Int64Array
    offsets: Int64Array


class ResolvedStore:
    """A `KVStore` of one request; made by `ResolvedStores.open`. New rows go to resident pages only.

    Unlike `HiSparseStore` it may not be asked to write a page again that was released once: hot rows are keyed by the
    page's uid, and a page is released only when it is sealed.
    """

    def __init__(self, stores: ResolvedStores, place: int) -> None:
        self._stores = stores
        self._rank = stores.rank
        self._place = place
        self._table = PageTable(stores.rank.shape.page_rows)
        self._group = {group[0]: number for number, group in enumerate(stores.share_groups)}
        self._leader_of = {layer: group[0] for group in stores.share_groups for layer in group}
        self._hot_pages: Int64Array = np.zeros(0, np.int64)
        self._prepared: dict[int, _Prepared] = {}
        self.counters = RowCounters()
        self._rank.set_hot_pages(place, None)
        self._rank.write_request(place, self._table)

    def close(self) -> None:
        """Gives its place back; the store is of no use after that."""
        self._stores.give_back(self._place)

    @property
    def capacity_tokens(self) -> int:
        """Positions that have a slot."""
        return self._table.capacity_tokens

    # Tables: the worker applies the daemon's replies here before a step's first row is read.

    def append_spans(
        self,
        order: TokenOrder,
        first_token: int,
        uids: Int64Array,
        latent_pages: Int64Array,
        host_pages: Int64Array,
        indexer_pages: Int64Array,
    ) -> None:
        """Adds whole spans of M pages; arrays int64[spans * M], NO_PAGE (-1) where a tier has none."""
        self._table.append(order, first_token, uids, latent_pages, host_pages, indexer_pages)
        self._rank.write_request(self._place, self._table)

    def truncate_spans(self, kept: int) -> None:
        """Keeps the request's first `kept` spans."""
        self._table.truncate(kept)
        self._rank.write_request(self._place, self._table)

    def set_residency(self, ordinals: Int64Array, device_pages: Int64Array, host_pages: Int64Array) -> None:
        """New tiers of pages by ordinal; a host page is given only once its copy has landed."""
        self._table.set_residency(ordinals, device_pages, host_pages)
        self._rank.write_pages(self._place, self._table, ordinals)

    def set_hot_pages(self, pages: Int64Array) -> None:
        """Slabs of the hot buffer, int64; none takes it away. Raises InvalidArgument for another number of them."""
        if np.array_equal(pages, self._hot_pages):
            return
        self._hot_pages = np.array(pages, dtype=np.int64)
        self._rank.set_hot_pages(self._place, self._hot_pages if len(pages) else None)

    # Rows

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores rows uint8[T, latent bytes] in resident pages."""
        ordinals, slots = self._table.resolve(positions.numpy())
        pages = self._table.device[ordinals]
        if (pages == NO_PAGE).any():
            raise InvariantViolation(f"layer {layer}: write into pages {ordinals[pages == NO_PAGE]}, not resident")
        self._stores.rows[Section.LATENT, layer].write(pages, slots, rows)

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores keys uint8[T, index bytes] and scales float32[T]."""
        ordinals, slots = self._table.resolve(positions.numpy())
        pages = self._table.indexer[ordinals]
        self._stores.index[Section.INDEX_VALUE, layer].write(pages, slots, values)
        scale_bytes = scales.contiguous().view(torch.uint8).view(-1, 4)
        self._stores.index[Section.INDEX_SCALE, layer].write(pages, slots, scale_bytes)

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[tokens, index bytes], float32[tokens]) of positions 0..tokens-1."""
        ordinals, slots = self._table.resolve(np.arange(tokens, dtype=np.int64))
        pages = self._table.indexer[ordinals]
        values = self._stores.index[Section.INDEX_VALUE, layer].read(pages, slots)
        scales = self._stores.index[Section.INDEX_SCALE, layer].read(pages, slots)
        return values, scales.contiguous().view(torch.float32).view(-1)

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Resolves the selection int64[T, k] and brings in what is missing.

        Raises InvalidArgument for more queries or positions than the resolver's shape has, InvariantViolation when
        a row can be read nowhere.
        """
        shape, (queries, width) = self._rank.shape, selection.shape
        if queries > shape.rows or width > shape.topk:
            raise InvalidArgument(
                f"a selection of {queries} x {width}; this rank resolves at most {shape.rows} x {shape.topk} a request"
            )
        topk = np.full((shape.requests, shape.rows, shape.topk), -1, np.int32)
        topk[self._place, :queries, :width] = selection.numpy()
        before = self._rank.counters()[self._place]
        rows = self._rank.swap_in(self._group[leader], topk)[self._place, :queries, :width]
        counted = self._rank.counters()[self._place] - before
        chosen = selection.numpy()
        positions, first = np.unique(chosen[chosen >= 0], return_index=True)
        offsets = rows[chosen >= 0][first]
        if (offsets < 0).any():
            ordinals = np.unique(self._table.resolve(positions[offsets < 0])[0])
            raise InvariantViolation(f"layer {leader}: pages {ordinals} are neither resident, nor hot, nor on the host")
        resident = self._table.device[self._table.resolve(positions)[0]] != NO_PAGE
        self.counters.resident_reads += int(resident.sum())
        self.counters.hot_hits += int(counted[HOT_COLUMN])
        self.counters.swap_in_rows += int(counted[MISS_COLUMN])
        self._prepared[leader] = _Prepared(positions, offsets)

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[T, k, latent bytes] of what was prepared last. Raises InvariantViolation for other positions."""
        flat = selection.reshape(-1).numpy()
        used = flat >= 0
        row_bytes = self._stores.rows[Section.LATENT, layer].row_bytes
        rows = torch.zeros((len(flat), row_bytes), dtype=torch.uint8)
        prepared = self._prepared.get(self._leader_of[layer], _NOTHING)
        at = np.searchsorted(prepared.positions, flat[used])
        known = at < len(prepared.positions)
        known[known] = prepared.positions[at[known]] == flat[used][known]
        if not known.all():
            raise InvariantViolation(f"layer {layer}: positions {flat[used][~known]} were not prepared")
        offsets = prepared.offsets[at] + self._stores.offset_in_row[layer]
        rows[torch.from_numpy(used)] = self._stores.by_offset.read(offsets, row_bytes)
        return rows.view(*selection.shape, row_bytes)


_NOTHING = _Prepared(np.zeros(0, np.int64), np.zeros(0, np.int64))
