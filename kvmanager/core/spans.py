"""Spans: the unit of grant, eviction and publication, kept as parallel arrays.

A span is M segments in one token order, stored as page indexes of each page class in up to two tiers.
All its pages of a class and tier share one fate: `CopyState`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import PageArray
from kvmanager.core.rows import BoolArray, RowArray, RowList, all_true, any_true, as_range, longer, places
from kvmanager.core.spankeys import SpanKeys
from kvmanager.geometry import TokenOrder

NO_SPAN = -1
NO_PAGE = -1
NO_OWNER, SHARED = -1, -2
DEVICE, HOST = 0, 1
TOKEN_ID_BYTES = 4


class CopyState(IntEnum):
    """What one tier holds of a span's pages of one class."""

    ABSENT = 0
    FILLING = 1  # an engine or a copy writes it
    READY = 2    # complete as far as `valid` says


ABSENT, FILLING, READY = (int(state) for state in CopyState)
"""The same as plain integers: numpy compares these several times faster."""


class SpanTable:
    """Spans of one chain by row number; rows are reused.

    parent: the canonical full span before it, NO_SPAN at the root (int32)
    children: published spans whose parent it is (int32)
    first_token: position of its first token (int64)
    segments, interleave: its token order (int32)
    valid: leading segments that are committed and fenced (int32)
    pins: requests, tickets and donors that hold it (int32); who they are is theirs to know
    anchored: those of the pins that need the span to be findable, but none of its copies (int32)
    redundant: it came back to the device while host room was short: its host copy is the first to go (bool)
    busy: plans in flight that read or write its pages (int32)
    host_readers: tickets that are read from its host copy, each of which has a pin too (int32)
    failures: how often its host copy failed, since one last arrived (int32)
    namespace: whose keys these are (int32)
    owner: number of the one session that used it, NO_OWNER, or SHARED by several (int32)
    dead: its session went on without it, or ended: it goes first (bool)
    last_used: ns; a parent's is never older than its published child's (int64)
    published: findable through the index (bool)
    copies[class, tier]: CopyState (uint8)
    pages[class, tier]: page indexes, int64[rows, widest], NO_PAGE where a live span has none
    uids[row]: content id of each span page, uint64[rows, widest]; given once and never again
    keys[row]: its segment keys so far, concatenated
    token_ids[row]: u32, those of its valid segments; only of spans whose engine gave them
    run, place: where the index has it, kept by the index (int32)
    touched: rows whose copies or place in the index changed in this event, perhaps several times; empty between events
    """

    def __init__(self, classes: int, widest: int) -> None:
        self.classes = classes
        self.widest = widest
        self.live = np.zeros(0, bool)
        self.parent = np.zeros(0, np.int32)
        self.children = np.zeros(0, np.int32)
        self.first_token = np.zeros(0, np.int64)
        self.segments = np.zeros(0, np.int32)
        self.interleave = np.zeros(0, np.int32)
        self.valid = np.zeros(0, np.int32)
        self.pins = np.zeros(0, np.int32)
        self.busy = np.zeros(0, np.int32)
        self.failures = np.zeros(0, np.int32)
        self.anchored = np.zeros(0, np.int32)
        self.host_readers = np.zeros(0, np.int32)
        self.redundant = np.zeros(0, bool)
        self.last_used = np.zeros(0, np.int64)
        self.namespace = np.zeros(0, np.int32)
        self.owner = np.zeros(0, np.int32)
        self.dead = np.zeros(0, bool)
        self.published = np.zeros(0, bool)
        self.copies = np.zeros((classes, 2, 0), np.uint8)
        self.pages = np.zeros((classes, 2, 0, widest), np.int64)
        self.uids = np.zeros((0, widest), np.uint64)
        self.next_uid = 1
        self.keys = SpanKeys()
        self.token_ids: dict[int, bytes] = {}
        self.run = np.zeros(0, np.int32)
        self.place = np.zeros(0, np.int32)
        self.touched: list[int | RowArray] = []
        self._unused = RowList()  # the last one is taken first
        self._grow(64)

    def _grow(self, rows: int) -> None:
        old = len(self.live)
        for name in (
            "live", "parent", "children", "first_token", "segments", "interleave", "valid", "pins", "busy",
            "failures", "anchored", "host_readers", "redundant", "last_used", "namespace", "owner", "dead",
            "published", "run", "place",
        ):
            setattr(self, name, longer(getattr(self, name), rows))
        self.copies = longer(self.copies, rows, axis=2)
        self.pages = longer(self.pages, rows, axis=2)
        self.pages[:, :, old:] = NO_PAGE  # as `drop` leaves them
        self.uids = longer(self.uids, rows)
        self.keys.grow(rows)
        older = self._unused[:]
        self._unused = RowList(np.arange(old + rows - 1, old - 1, -1, dtype=np.int64))
        self._unused.extend(older)

    def add(
        self, first_token: int, order: TokenOrder, now: int, namespace: int = 0, owner: int = NO_OWNER
    ) -> int:
        """A new span with new uids, without pages, keys or pins; returns its row."""
        if len(self._unused) == 0:
            self._grow(len(self.live))
        row = self._unused.pop()
        self.live[row] = True
        self.parent[row] = NO_SPAN
        self.first_token[row] = first_token
        self.segments[row] = order.segments
        self.interleave[row] = order.interleave
        self.valid[row] = 0
        self.failures[row] = 0
        self.last_used[row] = now
        self.namespace[row] = namespace
        self.owner[row] = owner
        self.dead[row] = False
        self.uids[row] = self.next_uid
        if self.widest > 1:
            self.uids[row] += np.arange(self.widest, dtype=np.uint64)
        self.next_uid += self.widest
        self.keys.clear(row)
        return row

    def add_many(
        self,
        first_tokens: PageArray,
        order: TokenOrder,
        now: int,
        namespace: int = 0,
        owner: int = NO_OWNER,
    ) -> RowArray:
        """`add` for several spans of one order; returns their rows, in order."""
        count = len(first_tokens)
        if count == 1:
            return np.array((self.add(int(first_tokens[0]), order, now, namespace, owner),), np.int64)
        if len(self._unused) < count:
            more = len(self.live)
            while len(self._unused) + more < count:
                more += len(self.live) + more  # doubled as often as need be
            self._grow(more)
        rest = len(self._unused) - count
        rows = self._unused[rest:][::-1].copy()
        self._unused.shorten(rest)
        at = as_range(rows)
        self.live[at] = True
        self.parent[at] = NO_SPAN
        for column in (self.valid, self.failures, self.dead):
            column[at] = 0
        self.first_token[at] = first_tokens
        self.segments[at] = order.segments
        self.interleave[at] = order.interleave
        self.last_used[at] = now
        self.namespace[at] = namespace
        self.owner[at] = owner
        uids = np.arange(self.next_uid, self.next_uid + count * self.widest, dtype=np.uint64)
        self.uids[at] = uids.reshape(count, self.widest)
        self.next_uid += count * self.widest
        self.keys.clear(at)
        return rows

    def remove(self, row: int) -> None:
        """Forgets a span that holds no page and that nobody holds. What is checked here `add` need not set."""
        assert self.live[row]
        assert not self.published[row]
        for counts in (self.pins, self.busy, self.anchored, self.host_readers, self.children):
            assert not counts[row]
        assert not self.redundant[row]
        assert not self.copies[:, :, row].any()
        self.live[row] = False
        self.token_ids.pop(row, None)
        self._unused.append(row)

    def order(self, row: int) -> TokenOrder:
        """The span's token order."""
        return TokenOrder(int(self.segments[row]), int(self.interleave[row]))

    def full(self, row: int) -> bool:
        """All its segments are valid."""
        return bool(self.valid[row] == self.segments[row])

    def page_list(self, page_class: int, tier: int, row: int) -> PageArray:
        """The span's pages of a class in a tier, in span-page order; empty when absent."""
        return self.held(page_class, tier, slice(row, row + 1)).copy()

    def held(self, page_class: int, tier: int, at: RowArray | slice) -> PageArray:
        """Pages of spans, one after the other. Perhaps a view: not to be kept over a change."""
        pages: PageArray = self.pages[page_class, tier, at]
        there = pages != NO_PAGE
        return pages.reshape(-1) if all_true(there) else pages[there]

    def put(self, page_class: int, tier: int, row: int, pages: PageArray, state: CopyState) -> None:
        """Gives an absent copy its pages."""
        assert self.copies[page_class, tier, row] == ABSENT
        self.pages[page_class, tier, row, : len(pages)] = pages
        self.copies[page_class, tier, row] = state
        self.touched.append(row)

    def drop(self, page_class: int, tier: int, row: int) -> PageArray:
        """Takes a copy away from the span; its pages are returned, to be freed by the caller."""
        assert self.copies[page_class, tier, row] != ABSENT
        pages = self.page_list(page_class, tier, row)
        self.pages[page_class, tier, row] = NO_PAGE
        self.copies[page_class, tier, row] = ABSENT
        self.redundant[row] = False
        self.touched.append(row)
        return pages

    def page_lists(self, page_class: int, tier: int, rows: RowArray) -> PageArray:
        """`page_list` of several spans, one after the other."""
        return self.held(page_class, tier, as_range(rows)).copy()

    def put_many(
        self, page_class: int, tier: int, rows: RowArray, widths: PageArray, pages: PageArray, state: CopyState
    ) -> None:
        """`put` for distinct spans: the first `widths[0]` pages go to the first of them, and so on."""
        at = as_range(rows)
        assert all_true(self.copies[page_class, tier, at] == ABSENT)
        if len(pages) == len(rows) * self.widest:
            self.pages[page_class, tier, at] = pages.reshape(len(rows), self.widest)
        else:
            dealt = np.full((len(rows), self.widest), NO_PAGE, np.int64)
            dealt[np.arange(self.widest) < widths[:, None]] = pages
            self.pages[page_class, tier, at] = dealt
        self.copies[page_class, tier, at] = state
        self.touched.append(rows)

    def drop_many(self, page_class: int, tier: int, rows: RowArray) -> PageArray:
        """`drop` for distinct spans, whose pages are returned in order."""
        if len(rows) == 1:
            return self.drop(page_class, tier, int(rows[0]))
        at = as_range(rows)
        assert all_true(self.copies[page_class, tier, at] != ABSENT)
        held = self.page_lists(page_class, tier, rows)
        self.pages[page_class, tier, at] = NO_PAGE
        self.copies[page_class, tier, at] = ABSENT
        self.redundant[at] = False
        self.touched.append(rows)
        return held

    def remove_many(self, rows: RowArray) -> None:
        """`remove` for distinct spans."""
        if len(rows) == 1:
            self.remove(int(rows[0]))
            return
        ordered = np.sort(rows)
        at = as_range(ordered)
        assert all_true(self.live[at])
        assert not any_true(self.published[at])
        for counts in (self.pins, self.busy, self.anchored, self.host_readers, self.children):
            assert not counts[at].any()
        assert not any_true(self.redundant[at])
        assert not self.copies[:, :, at].any()
        self.live[at] = False
        for row in ordered.tolist() if self.token_ids else ():
            self.token_ids.pop(row, None)
        # Taken again in ascending order: spans that follow each other should stand in rows that do.
        self._unused.extend(ordered[::-1])

    def pin(self, rows: RowArray | Sequence[int]) -> None:
        """One more holder for each row (a row may be named twice)."""
        self._count(self.pins, np.asarray(rows, np.int64), 1)

    def unpin(self, rows: RowArray | Sequence[int]) -> None:
        """One holder less; below zero is our own bug."""
        index = np.asarray(rows, np.int64)
        self._count(self.pins, index, -1)
        left = self.pins[index[0]] if len(index) == 1 else self.pins[as_range(index)].min(initial=0)
        assert left >= 0, "a span was unpinned once too often"

    def _count(self, counts: npt.NDArray[np.int32], rows: RowArray, more: int) -> None:
        """Adds to the rows' counts, as often as a row is named."""
        if len(rows) <= 1:
            for row in rows.tolist():
                counts[row] += more
            return
        at = as_range(rows)
        if isinstance(at, slice):
            counts[at] += more
        else:
            np.add.at(counts, rows, np.int32(more))  # typed: many times faster

    def anchor(self, rows: RowArray) -> None:
        """Says that one pin of each row needs none of its copies (a row may be named twice)."""
        self._count(self.anchored, rows, 1)

    def unanchor(self, rows: RowArray) -> None:
        """Takes it back, before the pins themselves go."""
        self._count(self.anchored, rows, -1)
        assert len(rows) == 0 or self.anchored[rows].min() >= 0, "a span lost one anchor too many"

    def hold_host(self, rows: RowArray) -> None:
        """One more reader of the host copies of distinct spans."""
        self.host_readers[rows] += 1

    def let_host_go(self, rows: RowArray) -> None:
        """Takes it back, before the pins themselves go."""
        self.host_readers[rows] -= 1
        assert len(rows) == 0 or self.host_readers[rows].min() >= 0, "a host copy lost one reader too many"

    def below(self, marked: BoolArray) -> BoolArray:
        """The marked spans and all below them (bool[rows])."""
        # Pointer doubling: `ahead[row]` is 1, 2, 4, ... steps towards the root; the last entry stands for "none".
        none = len(marked)
        ahead = np.append(np.where(self.parent == NO_SPAN, none, self.parent), none)
        found = np.append(marked, False)
        while any_true(ahead != none):
            found |= found[ahead]
            ahead = ahead[ahead]
        return found[:none]

    def rows(self) -> npt.NDArray[np.int64]:
        """Live rows, ascending."""
        return places(self.live)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows().tolist())
