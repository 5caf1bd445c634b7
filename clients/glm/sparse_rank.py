"""A rank's resolver and swap-in as a decode worker drives them: one small protocol, the reference behind it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmanager.clients.glm.page_table import PageTable
from kvmanager.clients.glm.region_rows import Bytes
from kvmanager.clients.glm.resolver_reference import ReferenceResolver, copy_rows
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape, pack_pages, pack_request
from kvmanager.geometry import Int64Array
from kvmanager.layout import KVLayout

HOT_COLUMN, MISS_COLUMN = 1, 2
"""Of the counters: distinct rows found in hot rows, and distinct rows brought from the host."""


class SparseRank(Protocol):
    """Tables, hot rows and their maps for the requests of one rank, each at a place of its own.

    Tables are written by the worker alone, as the daemon's replies tell them, before the next `swap_in`.
    """

    shape: SparseShape

    def write_request(self, place: int, table: PageTable) -> None:
        """A request's whole table. Raises InvalidArgument if it has more pages than the shape allows."""

    def write_pages(self, place: int, table: PageTable, ordinals: Int64Array) -> None:
        """Those pages of its table that moved between tiers."""

    def set_hot_pages(self, place: int, pages: Int64Array | None) -> None:
        """Another hot buffer, or none; what the old one held is forgotten."""

    def swap_in(self, group: int, topk: npt.NDArray[np.int32]) -> Int64Array:
        """Resolves `topk` int32[R, rows, topk] for one share group, and copies the rows that are missing.

        int64[R, rows, topk]: where in the device region each entry's group row begins, in bytes, or -1.
        """

    def counters(self) -> Int64Array:
        """int64[R, 4] over all calls: resident entries, hot rows, missed rows, unreadable entries."""


def sparse_shape(
    latent: KVLayout, device_bytes: int, host_bytes: int, *, requests: int, rows: int, topk: int, hot_rows: int
) -> SparseShape:
    """The shape of a rank with these regions (bytes). A request's pages lie in the two, so it has no more than both."""
    device_pages, host_pages = device_bytes // latent.page_bytes, host_bytes // latent.page_bytes
    return SparseShape(
        requests, rows, topk, latent.page_rows, hot_rows, device_pages + host_pages, device_pages, host_pages
    )


class ReferenceRank:
    """`SparseRank` in numpy, over regions that the CPU maps: what the GPU's must do, to the last hot row."""

    def __init__(self, shape: SparseShape, groups: list[GroupPlace], device: Bytes, host: Bytes) -> None:
        self.shape = shape
        self._resolver = ReferenceResolver(shape, groups)
        self._device, self._host = device, host

    def write_request(self, place: int, table: PageTable) -> None:
        """As the protocol says."""
        spans, pages = pack_request(table, self.shape.most_pages)
        tables = self._resolver.tables
        tables.page_count[place] = len(pages)
        tables.spans[place][: len(spans)] = spans
        tables.pages[place][: len(pages)] = pages

    def write_pages(self, place: int, table: PageTable, ordinals: Int64Array) -> None:
        """As the protocol says."""
        self._resolver.tables.pages[place][ordinals] = pages_of(table, ordinals)

    def set_hot_pages(self, place: int, pages: Int64Array | None) -> None:
        """As the protocol says."""
        self._resolver.set_hot_pages(place, pages)

    def swap_in(self, group: int, topk: npt.NDArray[np.int32]) -> Int64Array:
        """As the protocol says."""
        resolved = self._resolver.resolve(group, topk)
        copy_rows(self._host, self._device, resolved, self._resolver.groups[group].row_bytes)
        return resolved.rows

    def counters(self) -> Int64Array:
        """As the protocol says."""
        return self._resolver.counters.copy()


def pages_of(table: PageTable, ordinals: Int64Array) -> npt.NDArray[np.void]:
    """PAGE_ROW[n] of some pages of a table."""
    return pack_pages(table.uid[ordinals], table.device[ordinals], table.host[ordinals], table.page_rows)
