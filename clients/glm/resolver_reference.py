"""Top-k positions to device rows, in numpy: what the GPU resolver must compute, to the last hot row.

The rules, for one request and share group. Entries are numbered row by row of the step, in top-k order.

1. A negative position is padding: its row is -1 and nothing counts it.
2. A position that the tables do not name is *unreadable*: row -1.
3. A position of a page with a device index within the region is *resident*: its row is there, and the hot rows
   are not touched for it.
4. All other positions need a hot row of their key, `uid * page_rows + slot`. Keys are taken once each, in the order
   of their first entries. A key that the hot map holds is a *hit*. Any other whose page has a host index within the
   region is a *miss*; without one it is unreadable, with all entries of that key.
5. The hot rows of a request form a list, least recently used first; at the start by number. Rows whose key is not
   wanted now are evictable; the n-th miss takes the n-th evictable row of the list. The new list is: evictable rows
   that were not taken, rows taken, rows hit, each part in its old order.
6. Without a whole hot buffer, what would need one is unreadable, and the list stays as it is.

So an entry that is stale or out of range turns into a miss or into -1, never into another token's row. What it relies
on: a key names content that does not change (a page may be without a resident copy only when it is sealed).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.clients.glm.sparse_tables import PAGE_ROW, SPAN_ROW, GroupPlace, SparseShape, Structured
from kvmanager.geometry import Int64Array

Int32Array = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

RESIDENT, HOT, MISS, UNREADABLE = range(4)
"""Columns of the counters: entries, distinct rows, distinct rows, entries."""


@dataclass
class RankTables:
    """Tables of all requests of a rank, by place.

    `spans` SPAN_ROW[R, P], `pages` PAGE_ROW[R, P], `page_count` int32[R], `hot_pages` int32[R, hot slabs] (-1: none).
    """

    spans: Structured
    pages: Structured
    page_count: Int32Array
    hot_pages: Int32Array

    @classmethod
    def empty(cls, shape: SparseShape) -> RankTables:
        """Of requests without pages and hot buffers."""
        spans = np.zeros((shape.requests, shape.most_pages), SPAN_ROW)
        pages = np.zeros((shape.requests, shape.most_pages), PAGE_ROW)
        spans["first"] = -1
        pages["uid"] = pages["device"] = pages["host"] = -1
        hot = np.full((shape.requests, shape.hot_slabs), -1, np.int32)
        return cls(spans, pages, np.zeros(shape.requests, np.int32), hot)


@dataclass(frozen=True)
class Resolved:
    """`rows` int64[R, rows, topk]: byte offset of the group row in device memory, or -1.

    `miss_source`, `miss_target`: per request the offsets of group rows to copy, host to device, in miss order.
    """

    rows: Int64Array
    miss_source: list[Int64Array]
    miss_target: list[Int64Array]


@dataclass(frozen=True)
class _Places:
    """Entries located: the key, page indexes and slot; `known` is False where the tables name no place."""

    known: Bools
    key: Int64Array
    device: Int64Array
    host: Int64Array
    slot: Int64Array


class ReferenceResolver:
    """Hot rows of all requests of a rank, for each share group.

    `keys` int64[G, R, hot rows] (-1 when empty), `lru` uint16[G, R, hot rows]; `counters` int64[R, 4], over all
    calls, in the order RESIDENT, HOT, MISS, UNREADABLE.
    """

    def __init__(self, shape: SparseShape, groups: list[GroupPlace]) -> None:
        self.shape = shape
        self.groups = groups
        self.tables = RankTables.empty(shape)
        size = (len(groups), shape.requests, shape.hot_rows)
        self.keys = np.full(size, -1, np.int64)
        self.lru = np.broadcast_to(np.arange(shape.hot_rows, dtype=np.uint16), size).copy()
        self.counters = np.zeros((shape.requests, 4), np.int64)

    def set_hot_pages(self, request: int, pages: Int64Array | None) -> None:
        """Gives a request another hot buffer, or none; what the old one held is forgotten in all groups."""
        self.tables.hot_pages[request] = -1 if pages is None else pages
        self.keys[:, request] = -1
        self.lru[:, request] = np.arange(self.shape.hot_rows)

    def resolve(self, group: int, topk: Int32Array) -> Resolved:
        """`topk` int32[R, rows, topk]."""
        shape = self.shape
        rows = np.full((shape.requests, shape.entries), -1, np.int64)
        sources, targets = [], []
        for request in range(shape.requests):
            flat = topk[request].reshape(-1).astype(np.int64)
            source, target = self._resolve_one(group, request, flat, rows[request])
            sources.append(source)
            targets.append(target)
        return Resolved(rows.reshape(topk.shape), sources, targets)

    def _resolve_one(
        self, group: int, request: int, flat: Int64Array, out: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Fills `out`; the swap-in list."""
        shape, place = self.shape, self.groups[group]
        count = self.counters[request]
        where = self._locate(request, flat)
        resident = where.known & (where.device >= 0) & (where.device < shape.device_pages)
        out[resident] = _address(place, where.device[resident], where.slot[resident])
        count[RESIDENT] += int(resident.sum())
        away = np.flatnonzero(where.known & ~resident)
        count[UNREADABLE] += int(((flat >= 0) & ~where.known).sum())
        hot_pages = self.tables.hot_pages[request].astype(np.int64)
        none = np.zeros(0, np.int64)
        if len(away) == 0:
            return none, none
        if ((hot_pages < 0) | (hot_pages >= shape.device_pages)).any():
            count[UNREADABLE] += len(away)
            return none, none
        _, first, inverse = np.unique(where.key[away], return_index=True, return_inverse=True)
        order = np.argsort(first)  # distinct keys by their first entry
        entries = away[first[order]]
        row, missed = self._place(group, request, where.key[entries], where.host[entries])
        count[HOT] += int(((row >= 0) & ~missed).sum())
        count[MISS] += int(missed.sum())
        target = np.full(len(row), -1, np.int64)
        slab, slot = np.divmod(row[row >= 0], shape.page_rows)
        target[row >= 0] = _address(place, hot_pages[slab], slot)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        out[away] = target[rank[inverse]]
        count[UNREADABLE] += int((out[away] < 0).sum())
        taken = entries[missed]
        return _address(place, where.host[taken], where.slot[taken]), target[missed]

    def _place(self, group: int, request: int, wanted: Int64Array, host: Int64Array) -> tuple[Int64Array, Bools]:
        """(hot row or -1, whether it must be filled) of distinct keys."""
        keys, lru = self.keys[group, request], self.lru[group, request]
        held = {int(key): row for row, key in enumerate(keys) if key >= 0}
        row = np.array([held.get(int(key), -1) for key in wanted], np.int64)
        missed = (row < 0) & (host >= 0) & (host < self.shape.host_pages)
        hit = np.zeros(self.shape.hot_rows, np.bool_)
        hit[row[row >= 0]] = True
        evictable = lru[~hit[lru]]
        misses = int(missed.sum())
        victims = evictable[:misses]
        row[missed] = victims
        keys[victims] = wanted[missed]
        lru[:] = np.concatenate((evictable[misses:], victims, lru[hit[lru]]))
        return row, missed

    def _locate(self, request: int, positions: Int64Array) -> _Places:
        shape, tables = self.shape, self.tables
        segment = positions // shape.page_rows
        known = (positions >= 0) & (segment < shape.most_pages)
        span = tables.spans[request][np.where(known, segment, 0)]
        first, segments, interleave = (span[name].astype(np.int64) for name in ("first", "segments", "interleave"))
        known &= (first >= 0) & (first <= segment) & (segments >= 1) & (interleave >= 1)
        segments, interleave = np.maximum(segments, 1), np.maximum(interleave, 1)
        offset = positions - first * shape.page_rows
        turn = offset // interleave
        ordinal = first + turn % segments
        slot = turn // segments * interleave + offset % interleave
        known &= (ordinal < tables.page_count[request]) & (slot < shape.page_rows)
        page = tables.pages[request][np.where(known, ordinal, 0)]
        key = page["uid"] * shape.page_rows + slot
        known &= (page["uid"] >= 0) & (key >= 0)
        return _Places(known, key, page["device"].astype(np.int64), page["host"].astype(np.int64), slot)


def _address(place: GroupPlace, pages: Int64Array, slots: Int64Array) -> Int64Array:
    return pages * place.page_bytes + place.offset + slots * place.row_bytes


def copy_rows(host: npt.NDArray[np.uint8], device: npt.NDArray[np.uint8], resolved: Resolved, row_bytes: int) -> None:
    """The swap-in that goes with `resolved`, between uint8 arrays of the two regions."""
    for sources, targets in zip(resolved.miss_source, resolved.miss_target, strict=True):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            device[target : target + row_bytes] = host[source : source + row_bytes]
