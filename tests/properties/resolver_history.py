"""Random histories of resolver tables and top-k lists, with bytes behind them; the seed decides all."""

from __future__ import annotations

import numpy as np

from kvmanager.clients.glm.page_table import NO_PAGE, PageTable
from kvmanager.clients.glm.resolver_reference import RankTables
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape, group_place, pack_request
from kvmanager.geometry import TokenOrder
from kvmanager.layout import KVFormat, latent_layout

POISON = 0xEE


def places(format_: KVFormat, page_rows: int) -> list[GroupPlace]:
    """Of all share groups, in a decode rank's latent pages."""
    layout = latent_layout(format_, page_rows)
    return [group_place(layout, group) for group in format_.share_groups]


class ResolverHistory:
    """Tables that change at random, as a worker would change them, and worse.

    `host`, `device`: uint8 pages of both regions. A page that has a place in a tier has its bytes there, else it is
    poison. The first `requests * hot_slabs * 2` device pages are hot slabs: two buffers a request.
    """

    def __init__(self, seed: int, shape: SparseShape, page_bytes: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = shape
        self.tables = RankTables.empty(shape)
        self.requests = [PageTable(shape.page_rows) for _ in range(shape.requests)]
        first = shape.requests * shape.hot_slabs * 2
        assert first < shape.device_pages, "no room for resident pages"
        self.free_device = list(range(first, shape.device_pages))
        self.free_host = list(range(shape.host_pages))
        self.host = np.full((shape.host_pages, page_bytes), POISON, np.uint8)
        self.device = np.full((shape.device_pages, page_bytes), POISON, np.uint8)
        self.next_uid = 1
        self.broken: set[tuple[int, int]] = set()
        """(request, ordinal) whose row in the tables is garbage on purpose."""
        self.other_buffer = [0] * shape.requests

    def content(self, uid: int) -> np.ndarray:
        """The bytes of a page, by its uid alone."""
        return np.random.default_rng(uid).integers(0, 256, self.host.shape[1], dtype=np.uint8)

    def pages(self, request: int) -> int:
        return len(self.requests[request].uid)

    def replace_request(self, request: int) -> None:
        """Another request in this place: spans of some orders, on the device, the host, or both."""
        old = self.requests[request]
        for ordinal in range(len(old.uid)):
            self._drop(old, ordinal)
        table = self.requests[request] = PageTable(self.shape.page_rows)
        self.broken = {pair for pair in self.broken if pair[0] != request}
        most = int(self.rng.integers(1, self.shape.most_pages + 1))
        while True:
            order = TokenOrder(int(self.rng.choice([1, 1, 2, 4, 8])), int(self.rng.choice([1, 1, 2, 4])))
            spans = int(self.rng.integers(1, 4))
            count = spans * order.segments
            if len(table.uid) + count > most:
                break
            uids = np.arange(self.next_uid, self.next_uid + count)
            self.next_uid += count
            none = np.full(count, NO_PAGE, np.int64)
            table.append(order, table.capacity_tokens, uids, none, none, none)
            for ordinal in range(len(table.uid) - count, len(table.uid)):
                self._place(table, ordinal)
        self._publish(request)

    def move_pages(self, request: int) -> None:
        """Some pages change their tiers; the tables follow."""
        table = self.requests[request]
        for ordinal in range(len(table.uid)):
            if self.rng.random() < 0.3:
                self._drop(table, ordinal)
                self._place(table, ordinal)
        self._publish(request)

    def lose_pages(self, request: int) -> None:
        """A page is in no tier, its row says nonsense, or has another content's uid: it may only become a miss."""
        table, shape = self.requests[request], self.shape
        for ordinal in self.rng.choice(len(table.uid), min(2, len(table.uid)), replace=False).tolist():
            self._drop(table, ordinal)
            self.broken.add((request, ordinal))
        self._publish(request)
        wrong = [(-1, -1), (shape.device_pages, -1), (-7, shape.host_pages), (2**31 - 1, -(2**31))]
        for owner, ordinal in self.broken:
            if owner == request:
                device, host = wrong[int(self.rng.integers(len(wrong)))]
                self.tables.pages[request, ordinal]["device"] = device
                self.tables.pages[request, ordinal]["host"] = host
                if self.rng.random() < 0.3:
                    self.tables.pages[request, ordinal]["uid"] = self.rng.choice([-1, -5])

    def garble_spans(self, request: int) -> None:
        """Segments whose entry is nonsense. They stay so until the request's tables are written again."""
        for segment in self.rng.choice(self.shape.most_pages, 2).tolist():
            row = self.tables.spans[request, segment]
            row["first"] = self.rng.choice([-1, self.shape.most_pages - 1, 2**31 - 1])
            row["segments"] = self.rng.choice([0, 1, -3, 32767])
            row["interleave"] = self.rng.choice([0, 1, 3, 32767])

    def next_buffer(self, request: int) -> np.ndarray | None:
        """Hot slabs to give the request now: its other buffer, in some order; at times none, or one slab short."""
        self.other_buffer[request] ^= 1
        first = (request * 2 + self.other_buffer[request]) * self.shape.hot_slabs
        slabs = self.rng.permutation(np.arange(first, first + self.shape.hot_slabs))
        self.device[slabs] = POISON
        chance = self.rng.random()
        if chance < 0.15:
            return None
        if chance < 0.25:
            slabs[-1] = self.rng.choice([-1, self.shape.device_pages])
        return slabs

    def topk(self, reach: float) -> np.ndarray:
        """int32[R, rows, topk], distinct within a row: mostly from a window, `reach` of the request long, with
        padding and a few positions beyond the end."""
        shape = self.shape
        chosen = np.full((shape.requests, shape.rows, shape.topk), -1, np.int32)
        for request in range(shape.requests):
            tokens = self.pages(request) * shape.page_rows
            window = max(shape.topk, int(tokens * reach))
            start = int(self.rng.integers(0, max(1, tokens - window + 1)))
            for row in chosen[request]:
                count = int(self.rng.integers(0, shape.topk + 1)) if self.rng.random() < 0.5 else shape.topk
                row[:count] = self.rng.permutation(window + 2)[:count] + start
                self.rng.shuffle(row)
        if self.rng.random() < 0.2:
            chosen[0, 0, 0] = self.rng.choice([-(2**31), 2**31 - 1, shape.most_pages * shape.page_rows])
        return chosen

    def _publish(self, request: int) -> None:
        table = self.requests[request]
        spans, pages = pack_request(table, self.shape.most_pages)
        self.tables.spans[request]["first"] = -1
        self.tables.spans[request, : len(spans)] = spans
        self.tables.pages[request, : len(pages)] = pages
        self.tables.page_count[request] = len(pages)

    def _place(self, table: PageTable, ordinal: int) -> None:
        """On the host, on the device, on both, or nowhere when there is no room."""
        uid, where = int(table.uid[ordinal]), self.rng.random()
        device, host = NO_PAGE, NO_PAGE
        if where < 0.4 and self.free_device:
            device = self.free_device.pop(int(self.rng.integers(len(self.free_device))))
            self.device[device] = self.content(uid)
        if (where > 0.3 or device == NO_PAGE) and self.free_host:
            host = self.free_host.pop(int(self.rng.integers(len(self.free_host))))
            self.host[host] = self.content(uid)
        table.device[ordinal], table.host[ordinal] = device, host

    def _drop(self, table: PageTable, ordinal: int) -> None:
        """Takes a page's places away and poisons them."""
        if (page := int(table.device[ordinal])) != NO_PAGE:
            self.device[page] = POISON
            self.free_device.append(page)
            table.device[ordinal] = NO_PAGE
        if (page := int(table.host[ordinal])) != NO_PAGE:
            self.host[page] = POISON
            self.free_host.append(page)
            table.host[ordinal] = NO_PAGE

    def change(self) -> tuple[int, np.ndarray | None] | None:
        """One change, or none; (request, its new hot slabs) when the caller has to give it another hot buffer."""
        request, kind = int(self.rng.integers(self.shape.requests)), self.rng.random()
        if kind < 0.1:
            self.replace_request(request)
        elif kind < 0.4:
            self.move_pages(request)
        elif kind < 0.5:
            self.lose_pages(request)
        elif kind < 0.58:
            self.garble_spans(request)
        elif kind < 0.7:
            return request, self.next_buffer(request)
        return None

    def first_buffers(self) -> list[tuple[int, np.ndarray]]:
        """Pages and whole hot buffers for all requests, to begin with."""
        buffers = []
        for request in range(self.shape.requests):
            self.replace_request(request)
            first = request * 2 * self.shape.hot_slabs
            buffers.append((request, np.arange(first, first + self.shape.hot_slabs)))
        return buffers
