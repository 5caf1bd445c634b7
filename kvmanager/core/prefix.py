"""The prefix index of one chain: from chained segment keys to spans.

Keys are chained, so the last key of a span names the whole prefix that ends there. A flat table of
span-end keys therefore holds the tree: no edges to split or join, no recursion. `heads` finds, by its
first key, a span that shares only its first segments with a prompt (reuse inside a span).

The predecessors of a published span are published too. Where all spans are of one size, the boundaries that a
prompt reaches are therefore its first few, and how many is found by halving.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.core.spans import NO_SPAN, SpanTable


@dataclass(frozen=True)
class Match:
    """The longest known prefix: whole spans, then at most one donor whose first segments agree."""

    spans: tuple[int, ...]
    segments: int
    donor: int = NO_SPAN
    donor_segments: int = 0


@dataclass(frozen=True)
class _Donor:
    """A span whose first `common` segments go on at segment `at`."""

    at: int
    common: int
    row: int


_Paths = dict[int, tuple[int, int]]
"""Boundary (in segments) -> the span that ends there, and where it starts."""


def _path(paths: _Paths, at: int) -> tuple[int, ...]:
    """The spans that lead to a boundary."""
    rows = []
    while at:
        row, at = paths[at]
        rows.append(row)
    return tuple(reversed(rows))


class PrefixIndex:
    """Published spans of a `SpanTable`.

    ends: (namespace, last key) of a full span -> its row (one canonical row a key).
    heads: (namespace, first key) of a published span -> rows, full or partial.
    sizes: segments of a span -> published spans as large.
    """

    def __init__(self, table: SpanTable, key_bytes: int) -> None:
        self.table = table
        self.key_bytes = key_bytes
        self.ends: dict[tuple[int, bytes], int] = {}
        self.heads: dict[tuple[int, bytes], list[int]] = {}
        self.sizes: Counter[int] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        """The rows of both tables; their keys are the rows' own."""
        stored = dict(vars(self))
        stored["ends"] = np.fromiter(self.ends.values(), np.int64, len(self.ends))
        stored["heads"] = (
            np.fromiter(chain.from_iterable(self.heads.values()), np.int64),
            np.fromiter(map(len, self.heads.values()), np.int64, len(self.heads)),
        )
        return stored

    def __setstate__(self, stored: dict[str, Any]) -> None:
        vars(self).update(stored)
        width, keys, namespaces = self.key_bytes, self.table.keys, self.table.namespace.tolist()
        self.ends = {(namespaces[row], keys[row][-width:]): row for row in stored["ends"].tolist()}
        rows, counts = (part.tolist() for part in stored["heads"])
        named = iter(rows)
        listed = (list(islice(named, count)) for count in counts)
        self.heads = {(namespaces[some[0]], keys[some[0]][:width]): some for some in listed}

    def _first(self, row: int) -> tuple[int, bytes]:
        return int(self.table.namespace[row]), self.table.keys[row][: self.key_bytes]

    def _last(self, row: int) -> tuple[int, bytes]:
        return int(self.table.namespace[row]), self.table.keys[row][-self.key_bytes :]

    def match(self, keys: bytes, segments: int, namespace: int = 0) -> Match:
        """The longest prefix of the first `segments` keys. Reads only; touches and pins nothing."""
        if len(self.sizes) == 1:
            whole = self._halve(keys, segments, namespace)
            donor = self._best_donor(keys, whole.segments, segments, namespace)
            return whole if donor is None else Match(whole.spans, whole.segments, donor.row, donor.common)
        paths, best = self._walk(keys, segments, namespace)
        if best.at + best.common > max(paths):
            return Match(_path(paths, best.at), best.at, best.row, best.common)
        return self._whole(paths)

    def match_whole(self, keys: bytes, segments: int, namespace: int = 0) -> Match:
        """The longest prefix that whole spans make up; as `match`, without a donor."""
        if len(self.sizes) == 1:
            return self._halve(keys, segments, namespace)
        return self._whole(self._walk(keys, segments, namespace)[0])

    def _halve(self, keys: bytes, segments: int, namespace: int) -> Match:
        """`match_whole` where all published spans have one size: boundaries are known up to some point, then none."""
        width = self.key_bytes
        assert len(keys) >= segments * width
        size = next(iter(self.sizes))
        stride = size * width
        ends = self.ends
        known, unknown = 0, segments // size + 1
        row = NO_SPAN
        while unknown - known > 1:
            middle = (known + unknown) // 2
            found = ends.get((namespace, keys[middle * stride - width : middle * stride]), NO_SPAN)
            if found == NO_SPAN:
                unknown = middle
            else:
                known, row = middle, found
        # One element at a time, a view of the memory is read faster than the array.
        parents = self.table.parent.data
        spans = []
        while row != NO_SPAN:
            spans.append(row)
            row = parents[row]
        if len(spans) != known:
            return self._whole(self._walk(keys, segments, namespace)[0])  # whoever made these keys did not chain them
        spans.reverse()
        return Match(tuple(spans), known * size)

    def _best_donor(self, keys: bytes, at: int, segments: int, namespace: int) -> _Donor | None:
        """The span behind boundary `at` with the most segments in common; the newest of equals."""
        width = self.key_bytes
        best: _Donor | None = None
        if at < segments:
            for row in self.heads.get((namespace, keys[at * width : (at + 1) * width]), ()):
                common = self._common(row, keys, at, segments)
                if best is None or common >= best.common:
                    best = _Donor(at, common, row)
        return best

    def _whole(self, paths: _Paths) -> Match:
        return Match(_path(paths, max(paths)), max(paths))

    def _walk(self, keys: bytes, segments: int, namespace: int) -> tuple[_Paths, _Donor]:
        """Every boundary that whole spans reach, and the best donor.

        Spans of several orders may cover the same tokens, so there can be more than one way on: boundaries are
        looked at in ascending order, and each keeps the first way to it.
        """
        width = self.key_bytes
        assert len(keys) >= segments * width
        table = self.table
        paths: _Paths = {0: (NO_SPAN, 0)}
        donor = _Donor(0, 0, NO_SPAN)
        waiting = [0]
        while waiting:
            at = heappop(waiting)
            if at >= segments:
                break
            for row in self.heads.get((namespace, keys[at * width : (at + 1) * width]), ()):
                common = self._common(row, keys, at, segments)
                if common == table.segments[row]:
                    if at + common not in paths:
                        paths[at + common] = (row, at)
                        heappush(waiting, at + common)
                elif at + common >= donor.at + donor.common:
                    donor = _Donor(at, common, row)
        return paths, donor

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
            table.last_used[row] = min(int(table.last_used[row]), int(table.last_used[parent]))
        self.heads.setdefault(self._first(row), []).append(row)
        self.sizes[int(table.segments[row])] += 1
        if table.full(row):
            self.complete(row)

    def publish_run(self, rows: Sequence[int], parent: int, ends: Sequence[tuple[int, bytes]]) -> None:
        """`publish` for full spans that follow each other below `parent`.

        `ends`: (namespace, last key) of each, distinct and none of them known.
        """
        table = self.table
        index = np.asarray(rows, np.int64)
        assert not table.published[index].any()
        assert (table.valid[index] == table.segments[index]).all()
        assert parent == NO_SPAN or table.published[parent]
        table.published[index] = True
        table.parent[index[0]] = parent
        table.parent[index[1:]] = index[:-1]
        table.children[index[:-1]] += 1
        if parent != NO_SPAN:
            table.children[parent] += 1
            table.last_used[index[0]] = min(int(table.last_used[index[0]]), int(table.last_used[parent]))
        table.last_used[index] = np.minimum.accumulate(table.last_used[index])
        width, keys, heads = self.key_bytes, table.keys, self.heads
        for row, (namespace, _) in zip(rows, ends, strict=True):
            first = (namespace, keys[row][:width])
            if first in heads:
                heads[first].append(row)
            else:
                heads[first] = [row]
        self.sizes.update(table.segments[index].tolist())
        known = len(self.ends)
        self.ends.update(zip(ends, rows, strict=True))
        assert len(self.ends) == known + len(rows), "a span's prefix is known already"

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
        self._forget_size(int(table.segments[row]), 1)
        self._forget_keys(row)

    def unpublish_many(self, rows: npt.NDArray[np.int64]) -> None:
        """`unpublish` for distinct spans, children before their parents."""
        table = self.table
        assert table.published[rows].all()
        parents = table.parent[rows]
        np.subtract.at(table.children, parents[parents != NO_SPAN], 1)
        assert not table.children[rows].any()
        table.published[rows] = False
        table.parent[rows] = NO_SPAN
        for row in rows.tolist():
            self._forget_keys(row)
        for segments, count in Counter(table.segments[rows].tolist()).items():
            self._forget_size(segments, count)

    def _forget_keys(self, row: int) -> None:
        first = self._first(row)
        rows = self.heads[first]
        rows.remove(row)
        if not rows:
            del self.heads[first]
        last = self._last(row)
        if self.ends.get(last) == row:
            del self.ends[last]

    def _forget_size(self, segments: int, count: int) -> None:
        self.sizes[segments] -= count
        if self.sizes[segments] == 0:
            del self.sizes[segments]

    def touch(self, rows: list[int], now: int) -> None:
        """Marks spans as used, and all before them: a parent is never older than its child."""
        table = self.table
        named = np.asarray(rows, np.int64)
        while len(named):
            table.last_used[named] = now
            parents = table.parent[named]
            parents = parents[parents != NO_SPAN]
            named = np.unique(parents[table.last_used[parents] < now])

    def descendants(self, row: int) -> list[int]:
        """Published spans below `row`, children before their parents (so they can be unpublished in order)."""
        table = self.table
        published = np.flatnonzero(table.published)
        # A parent starts before its child, so one pass in token order meets every parent first.
        below = {row}
        found = []
        for candidate in published[np.argsort(table.first_token[published], kind="stable")].tolist():
            if int(table.parent[candidate]) in below:
                below.add(candidate)
                found.append(candidate)
        return found[::-1]
