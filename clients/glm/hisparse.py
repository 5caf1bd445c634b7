"""KV rows of one request on a decode rank: resident pages, a hot buffer, and host pages behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvmanager.clients.glm.hot_rows import EMPTY, HotRows
from kvmanager.clients.glm.page_table import NO_PAGE, PageTable
from kvmanager.clients.glm.region_rows import Bytes, ComponentRows
from kvmanager.errors import InvalidArgument, InvariantViolation, PoolExhausted
from kvmanager.geometry import Int64Array, TokenOrder
from kvmanager.layout import KVLayout, Section


@dataclass
class RowCounters:
    """Distinct rows that steps needed, by where they were found; a share group counts once."""

    resident_reads: int = 0
    hot_hits: int = 0
    swap_in_rows: int = 0


@dataclass(frozen=True)
class _Where:
    """Positions resolved: page ordinal, slot, content key, and whether the page is resident."""

    ordinals: Int64Array
    slots: Int64Array
    keys: Int64Array
    resident: npt.NDArray[np.bool_]


class HiSparseStore:
    """A `KVStore` whose latent pages may lie in host memory, while indexer pages stay in device memory.

    `hbm`, `host`: whole regions, uint8; `latent` addresses latent pages and hot slabs in both, `indexer` the
    indexer pages in `hbm`. New rows go to resident pages only. Each share group has `hot_rows` hot rows with a
    map of its own; hot row h lies in hot slab h // B, slot h % B.

    Hot rows are keyed by content (page uid and slot), so nothing has to be told when pages move or go away: what
    the map does not know is a miss, filled from the host page.
    """

    def __init__(
        self,
        hbm: Bytes,
        host: Bytes,
        latent: KVLayout,
        indexer: KVLayout,
        share_groups: tuple[tuple[int, ...], ...],
        hot_rows: int,
    ) -> None:
        if latent.page_rows != indexer.page_rows:
            raise InvalidArgument(f"pages of {latent.page_rows} latent and {indexer.page_rows} indexer rows")
        self.counters = RowCounters()
        self._page_rows = latent.page_rows
        self._groups = {group[0]: group for group in share_groups}
        self._leader_of = {layer: group[0] for group in share_groups for layer in group}
        self._hbm = _views(hbm, latent)
        self._index = _views(hbm, indexer)
        self._host = _views(host, latent)
        self._table = PageTable(latent.page_rows)
        self._hot_rows = hot_rows
        self._hot_pages = np.zeros(0, dtype=np.int64)
        self._hot = {leader: HotRows(0) for leader in self._groups}

    def close(self) -> None:
        """Nothing to give back: the map of hot rows is its own."""

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
        if len(uids) and not 0 <= int(uids.min()) <= int(uids.max()) < 2**63 // self._page_rows:
            raise InvalidArgument(f"uids {uids.min()}..{uids.max()} do not fit in 64-bit row keys")
        self._table.append(order, first_token, uids, latent_pages, host_pages, indexer_pages)

    def truncate_spans(self, kept: int) -> None:
        """Keeps the request's first `kept` spans."""
        self._table.truncate(kept)

    def set_residency(self, ordinals: Int64Array, device_pages: Int64Array, host_pages: Int64Array) -> None:
        """New tiers of pages by ordinal; a host page is given only once its copy has landed."""
        self._table.set_residency(ordinals, device_pages, host_pages)

    def set_hot_pages(self, pages: Int64Array) -> None:
        """Slabs of the hot buffer, int64; none takes it away. Raises InvalidArgument if they hold too few rows."""
        if np.array_equal(pages, self._hot_pages):
            return
        if len(pages) and len(pages) * self._page_rows < self._hot_rows:
            raise InvalidArgument(f"{len(pages)} slabs of {self._page_rows} rows for {self._hot_rows} hot rows")
        self._hot_pages = np.array(pages, dtype=np.int64)
        self._hot = {leader: HotRows(self._hot_rows if len(pages) else 0) for leader in self._groups}

    # Rows

    def write_latent(self, layer: int, positions: Tensor, rows: Tensor) -> None:
        """Stores rows uint8[T, latent bytes] in resident pages."""
        where = self._resolve(positions.numpy())
        if not where.resident.all():
            raise InvariantViolation(f"layer {layer}: write into pages {where.ordinals[~where.resident]}, not resident")
        self._hbm[Section.LATENT, layer].write(self._table.device[where.ordinals], where.slots, rows.numpy())
        self._hot[self._leader_of[layer]].forget(where.keys)

    def write_index(self, layer: int, positions: Tensor, values: Tensor, scales: Tensor) -> None:
        """Stores keys uint8[T, index bytes] and scales float32[T]."""
        ordinals, slots = self._table.resolve(positions.numpy())
        pages = self._table.indexer[ordinals]
        self._index[Section.INDEX_VALUE, layer].write(pages, slots, values.numpy())
        self._index[Section.INDEX_SCALE, layer].write(pages, slots, scales.numpy().view(np.uint8).reshape(-1, 4))

    def index_keys(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(uint8[tokens, index bytes], float32[tokens]) of positions 0..tokens-1."""
        ordinals, slots = self._table.resolve(np.arange(tokens, dtype=np.int64))
        pages = self._table.indexer[ordinals]
        values = self._index[Section.INDEX_VALUE, layer].read(pages, slots)
        scales = self._index[Section.INDEX_SCALE, layer].read(pages, slots)
        return torch.from_numpy(values), torch.from_numpy(scales.view(np.float32).reshape(-1))

    def prepare(self, leader: int, selection: Tensor) -> None:
        """Brings every selected row that is not resident into the group's hot rows.

        Raises PoolExhausted when the union of the queries' rows exceeds the hot buffer (cut the step into fewer
        queries), InvariantViolation when a row can be read nowhere.
        """
        wanted = torch.unique(selection).numpy()
        where = self._resolve(wanted[wanted >= 0])
        self.counters.resident_reads += int(where.resident.sum())
        away = np.flatnonzero(~where.resident)
        if len(away) == 0:
            return
        hot = self._hot[leader]
        if len(away) > len(hot):
            raise PoolExhausted(
                f"layer {leader}: {len(away)} rows for a hot buffer of {len(hot)}; run fewer queries a step",
                pool="hot",
                needed=len(away),
                free=len(hot),
            )
        self._check_readable(leader, hot, where, away)
        rows, missed = hot.place(where.keys[away])
        self.counters.hot_hits += len(away) - int(missed.sum())
        self.counters.swap_in_rows += int(missed.sum())
        self._swap_in(leader, where, away[missed], rows[missed])

    def latent_rows(self, layer: int, selection: Tensor) -> Tensor:
        """uint8[T, k, latent bytes] from resident pages and hot rows. Raises InvariantViolation if not prepared."""
        flat = selection.reshape(-1).numpy()
        used = flat >= 0
        where = self._resolve(flat[used])
        pages, slots = self._table.device[where.ordinals], where.slots
        away = ~where.resident
        if away.any():
            hot = self._hot[self._leader_of[layer]].find(where.keys[away])
            if (hot == EMPTY).any():
                raise InvariantViolation(f"layer {layer}: rows {where.keys[away][hot == EMPTY]} were not prepared")
            pages[away], slots[away] = self._hot_place(hot)
        view = self._hbm[Section.LATENT, layer]
        rows = np.zeros((len(flat), view.row_bytes), dtype=np.uint8)
        rows[used] = view.read(pages, slots)
        return torch.from_numpy(rows).view(*selection.shape, -1)

    def _resolve(self, positions: Int64Array) -> _Where:
        ordinals, slots = self._table.resolve(positions)
        keys = self._table.uid[ordinals] * self._page_rows + slots
        return _Where(ordinals, slots, keys, self._table.device[ordinals] != NO_PAGE)

    def _hot_place(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(page, slot) of hot rows, in the latent layout's terms."""
        slab, slot = np.divmod(rows, self._page_rows)
        return self._hot_pages[slab], slot

    def _check_readable(self, leader: int, hot: HotRows, where: _Where, away: Int64Array) -> None:
        lost = (hot.find(where.keys[away]) == EMPTY) & (self._table.host[where.ordinals[away]] == NO_PAGE)
        if lost.any():
            ordinals = np.unique(where.ordinals[away[lost]])
            raise InvariantViolation(f"layer {leader}: pages {ordinals} are neither resident, nor hot, nor on the host")

    def _swap_in(self, leader: int, where: _Where, missed: Int64Array, rows: Int64Array) -> None:
        """Copies the group's rows of all its layers from host pages into hot rows."""
        source_pages, source_slots = self._table.host[where.ordinals[missed]], where.slots[missed]
        pages, slots = self._hot_place(rows)
        for layer in self._groups[leader]:
            rows_read = self._host[Section.LATENT, layer].read(source_pages, source_slots)
            self._hbm[Section.LATENT, layer].write(pages, slots, rows_read)


def _views(region: Bytes, layout: KVLayout) -> dict[tuple[Section, int], ComponentRows]:
    return {key: ComponentRows(region, component, layout.page_rows) for key, component in layout.by_key.items()}
