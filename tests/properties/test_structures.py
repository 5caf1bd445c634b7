"""Pools, span tables and the prefix index under any order of calls, against dictionaries and sets."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager.core.pool import PageState, Pool
from kvmanager.core.prefix import PrefixIndex
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, CopyState, SpanTable
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from tests.properties.core_model import Words, chained, common

PER_SLAB = {"latent": 1, "indexer": 4, "half": 2}
SLABS = 5
TAKEN_STATES = [state for state in PageState if state is not PageState.FREE]


class PoolMachine(RuleBasedStateMachine):
    """State and generation of every page by (class, page); a slab has one class at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Pool("p", "device", 3, SLABS, PER_SLAB, 8)
        self.state: dict[tuple[str, int], PageState] = {}
        self.generation: dict[tuple[str, int], int] = {}

    def some(self, data: st.DataObject, page_class: str) -> list[int]:
        mine = sorted(page for name, page in self.state if name == page_class)
        return data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []

    @rule(page_class=st.sampled_from(sorted(PER_SLAB)), count=st.integers(0, 9))
    def take(self, page_class: str, count: int) -> None:
        pages = self.real.take(page_class, count)
        if pages is None:
            owned = {(name, page // PER_SLAB[name]) for name, page in self.state}
            mine = sum(name == page_class for name, _ in owned) * PER_SLAB[page_class]
            mine -= sum(name == page_class for name, _ in self.state)
            assert count > mine + (SLABS - len(owned)) * PER_SLAB[page_class], "refused although they fit"
            return
        assert len(pages) == count
        for page in pages.tolist():
            key = (page_class, page)
            assert key not in self.state, "a page in use was handed out"
            self.state[key] = PageState.RESERVED
            self.generation[key] = self.generation.get(key, 0) + 1

    @rule(page_class=st.sampled_from(sorted(PER_SLAB)), data=st.data())
    def give(self, page_class: str, data: st.DataObject) -> None:
        pages = self.some(data, page_class)
        self.real.give(page_class, np.array(pages, np.int64))
        for page in pages:
            del self.state[page_class, page]

    @rule(page_class=st.sampled_from(sorted(PER_SLAB)), data=st.data(), new=st.sampled_from(TAKEN_STATES))
    def settle(self, page_class: str, data: st.DataObject, new: PageState) -> None:
        pages = self.some(data, page_class)
        self.real.settle(page_class, np.array(pages, np.int64), new)
        self.state.update({(page_class, page): new for page in pages})

    @rule(page_class=st.sampled_from(sorted(PER_SLAB)), data=st.data(), give=st.booleans())
    def free_pages_can_not_move(self, page_class: str, data: st.DataObject, give: bool) -> None:
        pages = self.some(data, page_class)
        free = [p for p in range(SLABS * PER_SLAB[page_class]) if (page_class, p) not in self.state]
        if not free:
            return
        named = np.array([*pages, data.draw(st.sampled_from(free))], np.int64)
        move = self.real.give if give else partial(self.real.settle, target=PageState.READY)
        with pytest.raises(AssertionError):
            move(page_class, named)

    @invariant()
    def the_account_is_the_pages(self) -> None:
        finest = max(PER_SLAB.values())
        units = dict.fromkeys(PageState, 0)
        for (name, _), state in self.state.items():
            units[state] += finest // PER_SLAB[name]
        units[PageState.FREE] = SLABS * finest - sum(units.values())
        assert {state: self.real.units(state) for state in PageState} == units
        assert self.real.account() == {state: count * (8 // finest) * 3 for state, count in units.items()}
        for name, space in self.real.spaces.items():
            for page in range(space.pages):
                assert space.state[page] == self.state.get((name, page), PageState.FREE)
                assert space.generation[page] == self.generation.get((name, page), 0)


class SpanMachine(RuleBasedStateMachine):
    """Rows as dictionaries: copies, pins and uids."""

    def __init__(self) -> None:
        super().__init__()
        self.real = SpanTable(2, 3)
        self.copies: dict[int, dict[tuple[int, int], list[int]]] = {}
        self.pins: dict[int, int] = {}
        self.widths: dict[int, int] = {}
        self.uids: set[int] = set()
        self.next_page = 0

    def some(self, data: st.DataObject, rows: list[int], least: int = 0) -> list[int]:
        return data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=least)) if rows else []

    @rule(widths=st.lists(st.integers(1, 3), min_size=1, max_size=40), together=st.booleans())
    def add(self, widths: list[int], together: bool) -> None:
        orders = [TokenOrder(width, 1) for width in widths]
        if together:
            widths = [widths[0]] * len(widths)
            orders = [orders[0]] * len(widths)
            rows = self.real.add_many(np.arange(len(widths)), orders[0], 7, 3, 5).tolist()
        else:
            rows = [self.real.add(i, order, 7, 3, 5) for i, order in enumerate(orders)]
        assert not set(rows) & set(self.copies), "a live row was handed out"
        for i, row in enumerate(rows):
            self.copies[row], self.pins[row], self.widths[row] = {}, 0, widths[i]
            assert self.real.order(row) == orders[i]
            assert (self.real.first_token[row], self.real.namespace[row], self.real.owner[row]) == (i, 3, 5)
            fresh = (self.real.busy, self.real.valid, self.real.children, self.real.dead, self.real.published)
            assert not any(column[row] for column in fresh)
            assert self.real.keys[row] == b""
            new = set(self.real.uids[row].tolist())
            assert len(new) == 3
            assert not new & self.uids, "a uid was given twice"
            self.uids |= new

    @rule(data=st.data(), c=st.integers(0, 1), tier=st.sampled_from([DEVICE, HOST]))
    def put(self, data: st.DataObject, c: int, tier: int) -> None:
        rows = self.some(data, [row for row, copies in self.copies.items() if (c, tier) not in copies])
        widths = np.array([self.widths[row] for row in rows], np.int64)
        pages = np.arange(self.next_page, self.next_page + int(widths.sum()))
        self.next_page += len(pages)
        if len(rows) == 1:
            self.real.put(c, tier, rows[0], pages, CopyState.FILLING)
        else:
            self.real.put_many(c, tier, np.array(rows, np.int64), widths, pages, CopyState.FILLING)
        for row, part in zip(rows, np.split(pages, np.cumsum(widths)[:-1]) if rows else [], strict=True):
            self.copies[row][c, tier] = part.tolist()

    @rule(data=st.data(), c=st.integers(0, 1), tier=st.sampled_from([DEVICE, HOST]))
    def drop(self, data: st.DataObject, c: int, tier: int) -> None:
        rows = self.some(data, [row for row, copies in self.copies.items() if (c, tier) in copies])
        pages = self.real.drop_many(c, tier, np.array(rows, np.int64)).tolist()
        assert pages == [page for row in rows for page in self.copies[row].pop((c, tier))]

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.pins)))) if self.pins else []
        self.real.pin(rows)
        for row in rows:
            self.pins[row] += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        held = [row for row, count in self.pins.items() for _ in range(count)]
        at = data.draw(st.lists(st.sampled_from(range(len(held))), unique=True)) if held else []
        self.real.unpin([held[i] for i in at])
        for i in at:
            self.pins[held[i]] -= 1

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        free = [row for row in self.copies if not self.copies[row] and not self.pins[row]]
        rows = self.some(data, free)
        self.real.remove_many(np.array(rows, np.int64))
        for row in rows:
            del self.copies[row], self.pins[row], self.widths[row]

    @precondition(lambda self: any(self.copies.values()) or any(self.pins.values()))
    @rule(data=st.data(), one=st.booleans())
    def held_rows_stay(self, data: st.DataObject, one: bool) -> None:
        held = [row for row in self.copies if self.copies[row] or self.pins[row]]
        row = data.draw(st.sampled_from(held))
        remove = partial(self.real.remove, row) if one else partial(self.real.remove_many, np.array([row]))
        with pytest.raises(AssertionError):
            remove()

    @invariant()
    def same_rows(self) -> None:
        assert set(self.real) == set(self.copies)
        for row, copies in self.copies.items():
            assert self.real.pins[row] == self.pins[row]
            for c in range(2):
                for tier in (DEVICE, HOST):
                    expected = copies.get((c, tier), [])
                    assert self.real.page_list(c, tier, row).tolist() == expected
                    assert (self.real.pages[c, tier, row] != NO_PAGE).sum() == len(expected)
                    assert (self.real.copies[c, tier, row] != CopyState.ABSENT) == bool(expected)


class IndexMachine(RuleBasedStateMachine):
    """Published spans as (words before, words with it): what they spell, and who stands below whom."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SpanTable(1, 3)
        self.real = PrefixIndex(self.table, 16)
        self.spans: dict[int, tuple[Words, Words, int]] = {}  # row -> (before, text, segments when full)
        self.now = 0

    def canonical(self, text: Words) -> int:
        """The full span that ends a text."""
        found = [row for row, (before, mine, size) in self.spans.items() if mine == text and self.full(row)]
        assert len(found) < 2
        return found[0] if found else NO_SPAN

    def full(self, row: int) -> bool:
        before, text, size = self.spans[row]
        return len(text) - len(before) == size

    @rule(data=st.data(), words=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), size=st.integers(1, 3))
    def publish(self, data: st.DataObject, words: Words, size: int) -> None:
        """A span below some full one, full or not."""
        above = data.draw(st.sampled_from([NO_SPAN, *sorted(row for row in self.spans if self.full(row))]))
        before = () if above == NO_SPAN else self.spans[above][1]
        text = before + words[:size]
        if len(text) > 9 or (len(words[:size]) == size and self.canonical(text) != NO_SPAN):
            return
        self.now += 1
        row = self.table.add(len(before), SEQUENTIAL if size == 1 else TokenOrder(size, 1), self.now)
        self.table.keys[row] = chained(text)[len(before) * 16 :]
        self.table.valid[row] = len(text) - len(before)
        self.real.publish(row, above)
        self.spans[row] = (before, text, size)

    @precondition(lambda self: any(not self.full(row) for row in self.spans))
    @rule(data=st.data(), word=st.integers(0, 1))
    def grow(self, data: st.DataObject, word: int) -> None:
        """A partial span gets a segment more."""
        row = data.draw(st.sampled_from([row for row in self.spans if not self.full(row)]))
        before, text, size = self.spans[row]
        longer = (*text, word)
        if len(longer) - len(before) == size and self.canonical(longer) != NO_SPAN:
            return
        self.table.keys[row] = chained(longer)[len(before) * 16 :]
        self.table.valid[row] += 1
        self.spans[row] = (before, longer, size)
        if self.full(row):
            self.real.complete(row)

    @precondition(lambda self: self.spans)
    @rule(data=st.data(), many=st.booleans())
    def leave(self, data: st.DataObject, many: bool) -> None:
        """A span and all below it, children first."""
        row = data.draw(st.sampled_from(sorted(self.spans)))
        below = self.real.descendants(row)
        text = self.spans[row][1]
        expected = {r for r, (before, _, _) in self.spans.items() if self.full(row) and before[: len(text)] == text}
        # Below an equal boundary of other spans is below this one only where the parents lead here.
        assert set(below) <= expected
        gone = [*below, row]
        if many:
            self.real.unpublish_many(np.array(gone))
        else:
            for each in gone:
                self.real.unpublish(each)
        for each in gone:
            self.table.remove(each)
            del self.spans[each]

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        if not self.spans:
            return
        self.now += 1
        row = data.draw(st.sampled_from(sorted(self.spans)))
        self.real.touch([row], self.now)
        while row != NO_SPAN:
            assert self.table.last_used[row] == self.now
            row = int(self.table.parent[row])

    @rule(words=st.lists(st.integers(0, 1), max_size=9).map(tuple))
    def match(self, words: Words) -> None:
        keys = chained(words)
        found = self.real.match(keys, len(words))
        whole = self.real.match_whole(keys, len(words))
        ends = {()}
        for before, text, size in sorted(self.spans.values(), key=lambda span: len(span[0])):
            if before in ends and len(text) - len(before) == size:
                ends.add(text)
        reached = {len(end) for end in ends if words[: len(end)] == end}
        assert whole.segments == max(reached)
        best = max(reached)
        for before, text, _ in self.spans.values():
            if words[: len(before)] == before:
                best = max(best, common(words, text))
        assert found.segments + found.donor_segments == best
        for match in (found, whole):
            starts = [self.spans[row][0] for row in match.spans]
            assert starts == [(), *(self.spans[row][1] for row in match.spans)][: len(match.spans)]
            assert all(words[: len(self.spans[row][1])] == self.spans[row][1] for row in match.spans)

    @invariant()
    def parents_are_older_never(self) -> None:
        children: dict[int, int] = {}
        for row in self.spans:
            parent = int(self.table.parent[row])
            if parent != NO_SPAN:
                children[parent] = children.get(parent, 0) + 1
                assert self.spans[parent][1] == self.spans[row][0]
                assert self.table.last_used[parent] >= self.table.last_used[row]
        assert all(self.table.children[row] == children.get(row, 0) for row in self.spans)


TestPool = PoolMachine.TestCase
TestSpans = SpanMachine.TestCase
TestIndex = IndexMachine.TestCase
TestPool.settings = TestSpans.settings = TestIndex.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
