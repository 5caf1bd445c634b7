"""The prefix index of one chain: from chained segment keys to spans.

Keys are chained, so the last key of a span names the whole prefix that ends there. A flat table of
span-end keys therefore holds the tree: no edges to split or join, no recursion. `heads` finds, by its
first key, a span that shares only its first segments with a prompt (reuse inside a span).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmanager.core.spans import NO_SPAN, SpanTable


@dataclass(frozen=True)
class Match:
    """The longest known prefix: whole spans, then at most one donor whose first segments agree."""

    spans: tuple[int, ...]
    segments: int
    donor: int = NO_SPAN
    donor_segments: int = 0


class PrefixIndex:
    """Published spans of a `SpanTable`.

    ends: (namespace, last key) of a full span -> its row (one canonical row a key).
    heads: (namespace, first key) of a published span -> rows, full or partial.
    """

    def __init__(self, table: SpanTable, key_bytes: int) -> None:
        self.table = table
        self.key_bytes = key_bytes
        self.ends: dict[tuple[int, bytes], int] = {}
        self.heads: dict[tuple[int, bytes], list[int]] = {}

    def _first(self, row: int) -> tuple[int, bytes]:
        return int(self.table.namespace[row]), self.table.keys[row][: self.key_bytes]

    def _last(self, row: int) -> tuple[int, bytes]:
        return int(self.table.namespace[row]), self.table.keys[row][-self.key_bytes :]

    def match(self, keys: bytes, segments: int, namespace: int = 0) -> Match:
        """The longest prefix of the first `segments` keys. Reads only; touches and pins nothing."""
        width = self.key_bytes
        assert len(keys) >= segments * width
        table = self.table
        found: list[int] = []
        at = 0
        while at < segments:
            best, best_common = NO_SPAN, 0
            for row in self.heads.get((namespace, keys[at * width : (at + 1) * width]), ()):
                common = self._common(row, keys, at, segments)
                whole = table.full(row) and common == table.segments[row]
                if whole:
                    best, best_common = row, common
                    break
                if common > best_common:
                    best, best_common = row, common
            if best == NO_SPAN:
                break
            if not (table.full(best) and best_common == table.segments[best]):
                return Match(tuple(found), at, best, best_common)
            found.append(best)
            at += best_common
        return Match(tuple(found), at)

    def _common(self, row: int, keys: bytes, at: int, segments: int) -> int:
        """Leading valid segments of the span that equal the prompt's from segment `at` on."""
        width = self.key_bytes
        mine = self.table.keys[row]
        most = min(int(self.table.valid[row]), segments - at)
        if mine[: most * width] == keys[at * width : (at + most) * width]:
            return most
        common = 0
        while mine[common * width : (common + 1) * width] == keys[(at + common) * width : (at + common + 1) * width]:
            common += 1
        return common

    def canonical(self, row: int) -> int:
        """The published span that stands for a full span's prefix, itself or an equal one; NO_SPAN if none."""
        return self.ends.get(self._last(row), NO_SPAN)

    def publish(self, row: int, parent: int) -> None:
        """Makes a span findable below `parent` (its canonical predecessor, NO_SPAN at the root)."""
        table = self.table
        assert not table.published[row]
        assert table.valid[row] > 0
        assert parent == NO_SPAN or table.published[parent]
        table.published[row] = True
        table.parent[row] = parent
        if parent != NO_SPAN:
            table.children[parent] += 1
        self.heads.setdefault(self._first(row), []).append(row)
        if table.full(row):
            self.complete(row)

    def complete(self, row: int) -> None:
        """A published span became full: it can have children from now on."""
        key = self._last(row)
        assert key not in self.ends
        self.ends[key] = row

    def unpublish(self, row: int) -> None:
        """Takes a childless span out of the index; its pages are the caller's."""
        table = self.table
        assert table.published[row]
        assert table.children[row] == 0
        table.published[row] = False
        if (parent := int(table.parent[row])) != NO_SPAN:
            table.children[parent] -= 1
        table.parent[row] = NO_SPAN
        first = self._first(row)
        rows = self.heads[first]
        rows.remove(row)
        if not rows:
            del self.heads[first]
        last = self._last(row)
        if self.ends.get(last) == row:
            del self.ends[last]

    def touch(self, rows: list[int], now: int) -> None:
        """Marks spans as used; the caller names whole paths, so parents stay younger than children."""
        self.table.last_used[np.asarray(rows, np.int64)] = now

    def descendants(self, row: int) -> list[int]:
        """Published spans below `row`, children before their parents (so they can be unpublished in order)."""
        table = self.table
        below = [row]
        found: list[int] = []
        while below:
            parents = np.asarray(below)
            rows = np.flatnonzero(table.published & np.isin(table.parent, parents))
            below = rows.tolist()
            found.extend(below)
        return found[::-1]
