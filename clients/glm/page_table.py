"""A decode request's pages: where positions lie, and in which tier each page can be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array, TokenOrder

NO_PAGE: Final = -1


@dataclass
class _Run:
    """Spans of one order, one after the other."""

    order: TokenOrder
    first_token: int
    first_ordinal: int
    spans: int


class PageTable:
    """Pages of one request, counted by ordinal over its spans in order.

    `uid`, `device`, `host`, `indexer`: int64[pages]; `device` and `host` are NO_PAGE where that tier has no
    readable copy of the latent rows. Span i + 1 begins where span i is full.
    """

    def __init__(self, page_rows: int) -> None:
        self.page_rows = page_rows
        self._runs: list[_Run] = []
        self.uid = np.zeros(0, dtype=np.int64)
        self.device = np.zeros(0, dtype=np.int64)
        self.host = np.zeros(0, dtype=np.int64)
        self.indexer = np.zeros(0, dtype=np.int64)

    @property
    def capacity_tokens(self) -> int:
        """Positions that have a slot."""
        return len(self.uid) * self.page_rows

    def runs(self) -> Iterator[tuple[int, int, TokenOrder]]:
        """(first page ordinal, spans, their order), in order."""
        for run in self._runs:
            yield run.first_ordinal, run.spans, run.order

    def append(
        self,
        order: TokenOrder,
        first_token: int,
        uid: Int64Array,
        device: Int64Array,
        host: Int64Array,
        indexer: Int64Array,
    ) -> None:
        """Adds whole spans at the end; arrays int64[spans * M]. Raises InvalidArgument if they don't fit on."""
        order.check_page_rows(self.page_rows)
        if first_token != self.capacity_tokens:
            raise InvalidArgument(f"spans from token {first_token}; the table ends at {self.capacity_tokens}")
        if len(uid) % order.segments or not len(uid) == len(device) == len(host) == len(indexer):
            raise InvalidArgument(
                f"{len(uid)} uids, {len(device)} device, {len(host)} host, {len(indexer)} indexer pages for spans "
                f"of {order.segments} pages; send one entry a page in each"
            )
        self._runs.append(_Run(order, first_token, len(self.uid), len(uid) // order.segments))
        self.uid = np.concatenate((self.uid, uid))
        self.device = np.concatenate((self.device, device))
        self.host = np.concatenate((self.host, host))
        self.indexer = np.concatenate((self.indexer, indexer))

    def truncate(self, spans: int) -> None:
        """Keeps the first `spans` spans."""
        kept: list[_Run] = []
        pages = 0
        for run in self._runs:
            run.spans = min(run.spans, spans)
            spans -= run.spans
            if run.spans:
                kept.append(run)
                pages += run.spans * run.order.segments
        assert spans == 0, f"{spans} more spans to keep than there are"
        self._runs = kept
        self.uid, self.device = self.uid[:pages], self.device[:pages]
        self.host, self.indexer = self.host[:pages], self.indexer[:pages]

    def set_residency(self, ordinals: Int64Array, device: Int64Array, host: Int64Array) -> None:
        """New tiers of some pages, int64[n] each."""
        self.device[ordinals] = device
        self.host[ordinals] = host

    def resolve(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(page ordinal, slot) of each position int64[n]."""
        if len(positions) == 0:
            return positions, positions
        assert positions.min() >= 0
        assert positions.max() < self.capacity_tokens, f"position {positions.max()} of {self.capacity_tokens}"
        ordinals, slots = np.empty_like(positions), np.empty_like(positions)
        which = np.searchsorted([run.first_token for run in self._runs], positions, side="right") - 1
        for number in np.unique(which):
            run = self._runs[number]
            pick = which == number
            span, offset = np.divmod(positions[pick] - run.first_token, run.order.segments * self.page_rows)
            page, slots[pick] = run.order.place(offset)
            ordinals[pick] = run.first_ordinal + span * run.order.segments + page
        return ordinals, slots
