"""The prefix index of one chain: from chained segment keys to spans.

Spans that follow one another are held as runs, so that a long prompt is found, published and forgotten with a few
array operations, and never span by span. A run is a path without a fork: every span in it is the parent of the
next. Keys are chained, so a run need not be split where another prompt leaves it: the other's first key names the
whole prefix, and `heads` finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvmanager.core.rows import RowArray, all_true, any_true, as_range, no_rows, shorter
from kvmanager.core.spans import NO_SPAN, SpanTable

Keys = bytes | bytearray


@dataclass(frozen=True)
class Match:
    """The longest known prefix: whole spans (`rows`, int64), then at most one donor whose first segments agree."""

    rows: RowArray
    segments: int
    donor: int = NO_SPAN
    donor_segments: int = 0

    @property
    def spans(self) -> tuple[int, ...]:
        """The rows as integers."""
        return tuple(self.rows.tolist())


@dataclass
class Run:
    """Spans of one size that follow each other: full ones, or a single one that is not full yet.

    at: segments before the first. parent: the span before it. rows: int64, of which the first `spans` count.
    """

    namespace: int
    segments: int
    at: int
    parent: int
    rows: RowArray
    spans: int

    @property
    def end(self) -> int:
        """Segments up to its end."""
        return self.at + self.spans * self.segments

    def append(self, rows: RowArray) -> None:
        """More spans at the end."""
        spans = self.spans + len(rows)
        if spans > len(self.rows):
            # Room for as many again: a running request adds one span after the other.
            self.rows = np.concatenate((self.rows[: self.spans], rows, np.full(spans, NO_SPAN, np.int64)))
        else:
            self.rows[self.spans : spans] = rows
        self.spans = spans


@dataclass(frozen=True)
class _Donor:
    """A span whose first `common` segments go on at segment `at`."""

    at: int
    common: int
    row: int


_Paths = dict[int, tuple[int, int]]
"""Boundary (in segments) -> the span that ends there, and where it starts."""


def _path(paths: _Paths, at: int) -> RowArray:
    """The spans that lead to a boundary."""
    rows = []
    while at:
        row, at = paths[at]
        rows.append(row)
    return np.asarray(rows[::-1], np.int64)


class PrefixIndex:
    """Published spans of a `SpanTable`, whose columns `run` and `place` say where each is.

    runs: number -> run. heads: (namespace, first key) -> runs that begin with it, oldest first.
    sizes: segments of a span -> published spans as large.
    """

    def __init__(self, table: SpanTable, key_bytes: int) -> None:
        self.table = table
        self.key_bytes = key_bytes
        self.runs: dict[int, Run] = {}
        self.heads: dict[tuple[int, bytes], list[int]] = {}
        self.sizes: Counter[int] = Counter()
        self._next_run = 0

    # -------------------------------------------------------------------------------- looking

    def match(self, keys: Keys, segments: int, namespace: int = 0) -> Match:
        """The longest prefix of the first `segments` keys. Reads only; touches and pins nothing."""
        if len(self.sizes) == 1:
            rows, at = self._descend(keys, 0, segments, NO_SPAN, namespace, next(iter(self.sizes)))
            donor = self._best_donor(keys, at, segments, int(rows[-1]) if len(rows) else NO_SPAN, namespace)
            return Match(rows, at) if donor is None else Match(rows, at, donor.row, donor.common)
        paths, best = self._walk(keys, segments, namespace)
        if best.at + best.common > max(paths):
            return Match(_path(paths, best.at), best.at, best.row, best.common)
        return Match(_path(paths, max(paths)), max(paths))

    def match_whole(self, keys: Keys, segments: int, namespace: int = 0) -> Match:
        """The longest prefix that whole spans make up; as `match`, without a donor."""
        if len(self.sizes) == 1:
            return Match(*self._descend(keys, 0, segments, NO_SPAN, namespace, next(iter(self.sizes))))
        paths = self._walk(keys, segments, namespace)[0]
        return Match(_path(paths, max(paths)), max(paths))

    def follow(self, keys: Keys, rows: RowArray, parent: int) -> RowArray:
        """Published spans equal to the first of `rows`: the longest path below `parent`.

        `keys`: those of the whole prompt; `rows`: full spans of one size that follow `parent`.
        """
        at = self.end(parent)
        size = int(self.table.segments[rows[0]])
        stop = at + len(rows) * size
        return self._descend(keys, at, stop, parent, int(self.table.namespace[rows[0]]), size)[0]

    def end(self, row: int) -> int:
        """Segments up to the end of a published span; 0 at the root."""
        if row == NO_SPAN:
            return 0
        run = self.runs[int(self.table.run[row])]
        return run.at + (int(self.table.place[row]) + 1) * run.segments

    def _descend(
        self, keys: Keys, at: int, stop: int, parent: int, namespace: int, size: int
    ) -> tuple[RowArray, int]:
        """Full spans of one size below `parent` that agree with keys [at, stop), and how far they reach.

        Equal spans are published once below a parent, so there is one way on at most.
        """
        width = self.key_bytes
        assert len(keys) >= stop * width
        found: list[RowArray] = []
        if stop - at < size:
            return no_rows(), at
        wanted = np.frombuffer(keys, np.uint64, stop * width // 8)
        while stop - at >= size:
            step = no_rows()
            for rows in self._next(keys[at * width : (at + 1) * width], at, parent, namespace):
                if self.table.segments[rows[0]] == size and self.table.full(int(rows[0])):
                    step = self._common_spans(rows, wanted[at * width // 8 :], size)
                    if len(step):
                        break
            if len(step) == 0:
                break
            found.append(step)
            at += len(step) * size
            parent = int(step[-1])
        if len(found) == 1:
            return found[0].copy(), at
        return np.concatenate(found) if found else no_rows(), at

    def _next(self, key: Keys, at: int, parent: int, namespace: int) -> Iterator[RowArray]:
        """The ways on from `parent`, which ends at `at`: the rest of its run, and runs below it under the key."""
        if parent != NO_SPAN:
            run = self.runs[int(self.table.run[parent])]
            place = int(self.table.place[parent]) + 1
            if place < run.spans:
                yield run.rows[place : run.spans]
        for number in self.heads.get((namespace, bytes(key)), ()):
            run = self.runs[number]
            if run.parent == parent and run.at == at:
                yield run.rows[: run.spans]

    def _common_spans(self, rows: RowArray, wanted: npt.NDArray[np.uint64], size: int) -> RowArray:
        """The leading rows whose keys all agree with the wanted ones."""
        words = size * self.key_bytes // 8
        some = min(len(rows), len(wanted) // words)
        texts, wanted = self.table.keys, wanted[: some * words].reshape(some, words)
        if some == 0 or not np.array_equal(texts.words(rows[:1], words), wanted[:1]):
            return rows[:0]  # the first decides mostly, and looking at all is dear
        same = texts.words(rows[:some], words) == wanted
        if all_true(same):
            return rows[:some]
        return rows[: int(np.argmin(same.all(axis=1)))]

    def _best_donor(self, keys: Keys, at: int, segments: int, parent: int, namespace: int) -> _Donor | None:
        """The span behind `parent` with the most segments in common; the newest of equals."""
        best: _Donor | None = None
        width = self.key_bytes
        if at < segments:
            for rows in self._next(keys[at * width : (at + 1) * width], at, parent, namespace):
                row = int(rows[0])
                common = self._common(row, keys, at, segments)
                if common and (best is None or common >= best.common):
                    best = _Donor(at, common, row)
        return best

    def _walk(self, keys: Keys, segments: int, namespace: int) -> tuple[_Paths, _Donor]:
        """Every boundary that whole spans reach, and the best donor.

        Spans of several orders may cover the same tokens, so there can be more than one way on: boundaries are
        looked at in ascending order, and each keeps the first way to it. What begins inside a run needs no look of
        its own, for the whole run lies behind its first key.
        """
        width = self.key_bytes
        assert len(keys) >= segments * width
        paths: _Paths = {0: (NO_SPAN, 0)}
        donor = _Donor(0, 0, NO_SPAN)
        waiting = [0]
        while waiting:
            at = heappop(waiting)
            if at >= segments:
                break
            for number in self.heads.get((namespace, bytes(keys[at * width : (at + 1) * width])), ()):
                if self.runs[number].at == at:
                    donor = self._walk_run(self.runs[number], keys, segments, paths, waiting, donor)
        return paths, donor

    def _walk_run(
        self, run: Run, keys: Keys, segments: int, paths: _Paths, waiting: list[int], donor: _Donor
    ) -> _Donor:
        """Notes the boundaries that a run reaches; returns the better donor."""
        at = run.at
        for row in run.rows[: run.spans].tolist():
            common = self._common(row, keys, at, segments)
            if common < run.segments:
                return _Donor(at, common, row) if common and at + common >= donor.at + donor.common else donor
            if at + common not in paths:
                paths[at + common] = (row, at)
                heappush(waiting, at + common)
            at += common
        return donor

    def _common(self, row: int, keys: Keys, at: int, segments: int) -> int:
        """Leading valid segments of the span that equal the prompt's from segment `at` on."""
        width = self.key_bytes
        mine = self.table.keys[row]
        most = max(min(int(self.table.valid[row]), segments - at), 0)
        if mine[: most * width] == keys[at * width : (at + most) * width]:
            return most
        common = 0
        while mine[common * width : (common + 1) * width] == keys[(at + common) * width : (at + common + 1) * width]:
            common += 1
        return common

    def canonical(self, row: int, parent: int) -> int:
        """The other published span below `parent` that equals a full one; NO_SPAN if none."""
        mine, table = self.table.keys[row], self.table
        for rows in self._next(mine[: self.key_bytes], self.end(parent), parent, int(table.namespace[row])):
            other = int(rows[0])
            if other != row and table.segments[other] == table.segments[row] and table.keys[other] == mine:
                return other
        return NO_SPAN

    # ------------------------------------------------------------------------------- changing

    def publish(self, row: int, parent: int) -> None:
        """Makes a span findable below `parent` (its canonical predecessor, NO_SPAN at the root)."""
        table = self.table
        assert not table.published[row]
        assert table.valid[row] > 0
        assert parent == NO_SPAN or table.published[parent]
        table.published[row] = True
        table.touched.append(row)
        table.parent[row] = parent
        if parent != NO_SPAN:
            table.children[parent] += 1
            table.last_used[row] = min(int(table.last_used[row]), int(table.last_used[parent]))
        self.sizes[int(table.segments[row])] += 1
        rows = np.asarray([row], np.int64)
        if not (table.full(row) and self._lengthen(rows, parent)):
            self._begin(rows, parent)

    def publish_run(self, rows: RowArray, parent: int) -> None:
        """`publish` for full spans of one size that follow each other below `parent`; the first has no equal there."""
        table = self.table
        at = as_range(rows)
        assert not any_true(table.published[at])
        assert all_true(table.valid[at] == table.segments[at])
        assert all_true(table.segments[at] == table.segments[rows[0]])
        assert parent == NO_SPAN or table.published[parent]
        assert self.canonical(int(rows[0]), parent) == NO_SPAN, "a span's prefix is known already"
        table.published[at] = True
        table.touched.append(rows)
        table.parent[at] = np.concatenate(([parent], rows[:-1]))
        table.children[shorter(at)] += 1
        used = table.last_used[at]
        if parent != NO_SPAN:
            table.children[parent] += 1
            used[0] = min(int(used[0]), int(table.last_used[parent]))
        if any_true(used[1:] > used[:-1]):
            used = np.minimum.accumulate(used)
        table.last_used[at] = used
        self.sizes[int(table.segments[rows[0]])] += len(rows)
        if not self._lengthen(rows, parent):
            self._begin(rows, parent)

    def _lengthen(self, rows: RowArray, parent: int) -> bool:
        """Adds full spans to the run that ends with `parent`; False when there is none of their kind."""
        if parent == NO_SPAN:
            return False
        number = int(self.table.run[parent])
        run = self.runs[number]
        if self.table.place[parent] != run.spans - 1 or self.table.segments[rows[0]] != run.segments:
            return False
        assert self.table.namespace[rows[0]] == run.namespace
        self._set_places(rows, number, run.spans)
        run.append(rows)
        return True

    def _begin(self, rows: RowArray, parent: int) -> None:
        """A new run below `parent`."""
        number, self._next_run = self._next_run, self._next_run + 1
        first = int(rows[0])
        namespace = int(self.table.namespace[first])
        run = Run(namespace, int(self.table.segments[first]), self.end(parent), parent, rows.copy(), len(rows))
        self.runs[number] = run
        self.heads.setdefault((namespace, self.table.keys[first][: self.key_bytes]), []).append(number)
        self._set_places(rows, number, 0)

    def _set_places(self, rows: RowArray, number: int, first: int) -> None:
        if len(rows) == 1:
            self.table.run[rows[0]], self.table.place[rows[0]] = number, first
            return
        at = as_range(rows)
        self.table.run[at] = number
        self.table.place[at] = np.arange(first, first + len(rows), dtype=np.int32)

    def complete(self, row: int) -> None:
        """A published span became full: it can have children from now on."""
        rows, parent = np.asarray([row], np.int64), int(self.table.parent[row])
        number = int(self.table.run[row])
        if self._lengthen(rows, parent):
            self._forget_run(number, row)

    def unpublish(self, row: int) -> None:
        """Takes a childless span out of the index; its pages are the caller's."""
        self.unpublish_many(np.asarray([row], np.int64))

    def unpublish_many(self, rows: RowArray) -> None:
        """`unpublish` for distinct spans, children before their parents."""
        table = self.table
        if len(rows) == 0:
            return
        assert all_true(table.published[rows])
        parents = table.parent[rows]
        np.subtract.at(table.children, parents[parents != NO_SPAN], np.int32(1))  # typed: many times faster
        assert not table.children[rows].any()
        table.published[rows] = False
        table.touched.append(rows)
        table.parent[rows] = NO_SPAN
        for number, count in _counted(table.run[rows]):
            run = self.runs[number]
            run.spans -= count
            self.sizes[run.segments] -= count
            if self.sizes[run.segments] == 0:
                del self.sizes[run.segments]
            if run.spans == 0:
                self._forget_run(number, int(run.rows[0]))

    def _forget_run(self, number: int, first: int) -> None:
        run = self.runs.pop(number)
        key = run.namespace, self.table.keys[first][: self.key_bytes]
        self.heads[key].remove(number)
        if not self.heads[key]:
            del self.heads[key]

    def touch(self, rows: RowArray | Sequence[int], now: int) -> None:
        """Marks spans as used, and all before them: a parent is never older than its child."""
        table = self.table
        named = np.asarray(rows, np.int64)
        while len(named) == 1:  # a chain of single spans, or one that was touched as a whole
            row = int(named[0])
            table.last_used[row] = now
            parent = int(table.parent[row])
            named = named[:0] if parent == NO_SPAN or table.last_used[parent] >= now else np.array((parent,), np.int64)
        while len(named):
            at = as_range(named)
            table.last_used[at] = now
            parents = table.parent[at]
            if all_true(parents[1:] == named[:-1]):
                parents = parents[:1]  # a path: each but the first stands below one that was touched just now
            parents = parents[parents != NO_SPAN]
            parents = parents[table.last_used[parents] < now]
            named = np.unique(parents) if len(parents) else parents

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


def _counted(numbers: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
    """(number, how often it occurs), ascending."""
    if all_true(numbers == numbers[0]):
        return [(int(numbers[0]), len(numbers))]
    found, counts = np.unique(numbers, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))
