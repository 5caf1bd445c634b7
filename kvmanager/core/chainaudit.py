"""Invariants of one chain's spans and of the index over them, all spans and all runs at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmanager.core.group import Chain
from kvmanager.core.pool import PageState
from kvmanager.core.rows import BoolArray, RowArray, all_true, no_rows
from kvmanager.core.spans import ABSENT, FILLING, NO_PAGE, NO_SPAN, READY, TOKEN_ID_BYTES
from kvmanager.core.spec import Placement
from kvmanager.errors import InvariantViolation

_PAGE_READY = int(PageState.READY)

Int64Array = npt.NDArray[np.int64]
Passed = dict[str, object]
"""By check, what it looked at when it last held: looking at the same again would find the same."""


def _contents(*columns: npt.NDArray[Any]) -> list[bytes]:
    """What arrays hold."""
    return [column.tobytes() for column in columns]


class ChainAudit:
    """Looks at one chain as it is now. `where`: its name in a story."""

    def __init__(self, chain: Chain, where: str) -> None:
        self._chain, self._table, self._where = chain, chain.table, where

    @cached_property
    def rows(self) -> RowArray:
        """Its live spans, ascending."""
        return self._table.rows()

    @cached_property
    def _pages(self) -> Int64Array:
        return self._table.pages[:, :, self.rows]

    @cached_property
    def _copies(self) -> npt.NDArray[np.uint8]:
        return self._table.copies[:, :, self.rows]

    def _each(self, holds: BoolArray, what: str) -> None:
        """`holds`: one entry a live span."""
        if b"\0" in holds.tobytes():  # `all_true`, which is asked here a dozen times an audit
            raise InvariantViolation(f"{self._where} span {int(self.rows[np.argmin(holds)])}: {what}")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantViolation(f"{self._where}: {what}")

    def owned(self) -> list[tuple[int, int, Int64Array]]:
        """(class, tier, pages) of all copies."""
        held = self._pages != NO_PAGE
        return [(c, tier, self._pages[c, tier][held[c, tier]]) for c, tier in self._chain.spec.class_tiers]

    def spans(self) -> None:
        """Each span's keys, pages and uids are those that it should have."""
        table, rows, chain = self._table, self.rows, self._chain
        valid, segments = table.valid[rows], table.segments[rows]
        self._each((valid >= 0) & (valid <= segments), "more segments valid than it has")
        keys_bytes = valid.astype(np.int64) * chain.index.key_bytes
        self._each(table.keys.lengths(rows) == keys_bytes, "keys do not cover its segments")
        if table.token_ids:
            told = np.fromiter(table.token_ids, np.int64)
            ids_bytes = np.fromiter(map(len, table.token_ids.values()), np.int64)
            self._check(all_true(table.live[told]), "token ids of a span that is gone")
            said = table.valid[told] == ids_bytes // (chain.spec.page_rows * TOKEN_ID_BYTES)
            self._check(all_true(said), "token ids of other segments")
        uids = np.sort(table.uids[rows], axis=None)
        self._check(len(uids) == 0 or int(uids[-1]) < table.next_uid, "a uid that is still to be given")
        self._check(all_true(uids[1:] != uids[:-1]), "a uid was given twice")
        widths = segments // chain.spec.ranks if chain.spec.placement is Placement.SHARDED else segments
        held = (self._pages != NO_PAGE).sum(axis=3)
        as_said = held == np.where(self._copies != ABSENT, widths, 0)
        if not all_true(as_said):
            self._each(as_said.all(axis=(0, 1)), "a copy has other than its number of pages")
        for c, tier in self._chain.spec.class_tiers:
            name = chain.spec.classes[c].name
            ready = self._pages[c, tier][self._copies[c, tier] == READY]
            states = chain.pool(c, tier).spaces[name].state[ready[ready != NO_PAGE]]
            self._check(all_true(states == _PAGE_READY), f"{name}: a ready copy on pages that are not ready")

    def _overlays(self) -> None:
        """What overlays say of copies is true of them."""
        redundant, busy = self._table.redundant[self.rows], self._table.busy[self.rows] > 0
        for device, host in self._copies:
            complete = (device == READY) & (host == READY)
            self._each(complete | ~redundant, "redundant, but not complete in both tiers")
            self._each((host != FILLING) | busy, "its host copy is being filled by nobody")

    def index(self) -> None:
        """What can be found is somewhere, and was used no later than what it is below; overlays are true."""
        table, rows = self._table, self.rows
        self._each((table.pins[rows] >= 0) & (table.busy[rows] >= 0), "negative pins or plans")
        self._overlays()
        published = table.published[rows]
        held = (table.pins[rows] > 0) | (table.busy[rows] > 0)
        self._each(published | held, "neither findable nor held")
        for device, host in self._copies:
            somewhere = (device != ABSENT) | (host != ABSENT)
            self._each(somewhere | ~published, "findable, but some class of it is nowhere")
        self._each(~published | (table.valid[rows] > 0), "findable, but nothing of it is valid")
        found = rows[published]
        parents = table.parent[found]
        below, above = found[parents != NO_SPAN], parents[parents != NO_SPAN]
        self._check(all_true(table.last_used[above] >= table.last_used[below]), "used later than its parent")

    def unless_seen(self, name: str, check: Callable[[], None], looks_at: Callable[[], object], passed: Passed) -> None:
        """A check, unless all that it looks at is as it was when it last held."""
        key, seen = f"{self._where} {name}", looks_at()
        if passed.get(key) != seen:
            check()
            passed[key] = seen

    def checks(self, passed: Passed) -> Iterator[tuple[str, Callable[[], None]]]:
        """(what is checked, a function that raises InvariantViolation)."""
        for name, check, looks_at in (
            ("spans, pages and uids", self.spans, self._seen_of_spans),
            ("index", self.index, self._seen_of_index),
            ("runs", self.structure, self._seen_of_structure),
        ):
            yield f"{name} of {self._where}", partial(self.unless_seen, name, check, looks_at, passed)

    def structure(self) -> None:
        """What can be found stands below what can be found, and in one run."""
        table, rows = self._table, self.rows
        found = rows[table.published[rows]]
        parents = table.parent[found]
        above = parents[parents != NO_SPAN]
        self._check(all_true(table.published[above]), "a span's parent can't be found")
        self._check(all_true(table.valid[above] == table.segments[above]), "a span stands below one that is not full")
        counted = np.bincount(above, minlength=len(table.live))
        self._each(counted[rows] == table.children[rows], "children differ from what parents say")
        self._check(self._runs().tobytes() == found.tobytes(), "runs hold other spans than the published ones")
        self._no_twins(found)
        sizes = {size: count for size, count in enumerate(np.bincount(table.segments[found]).tolist()) if count}
        self._check(dict(self._chain.index.sizes) == sizes, "sizes differ from the spans'")

    def _seen_of_spans(self) -> object:
        """All that `spans` looks at, as values."""
        table, chain = self._table, self._chain
        spaces = [chain.pool(c, tier).spaces[chain.spec.classes[c].name] for c, tier in chain.spec.class_tiers]
        told = [(row, len(ids)) for row, ids in table.token_ids.items()]
        contents = _contents(
            table.live, table.valid, table.segments, table.keys.columns[1], table.uids, table.pages, table.copies,
            *(space.state for space in spaces),
        )  # fmt: skip
        return chain.index.key_bytes, table.next_uid, told, contents

    def _seen_of_index(self) -> object:
        """All that `index` looks at, as values."""
        table = self._table
        return _contents(
            table.live, table.published, table.pins, table.busy, table.copies, table.valid, table.parent,
            table.last_used, table.redundant,
        )  # fmt: skip

    def _seen_of_structure(self) -> object:
        """All that `structure` looks at, as values."""
        table, index = self._table, self._chain.index
        columns = (
            table.live, table.published, table.parent, table.children, table.segments, table.valid, table.namespace,
            table.run, table.place, *table.keys.columns,
        )  # fmt: skip
        runs = [
            (number, run.namespace, run.segments, run.at, run.parent, run.spans, run.rows.tobytes())
            for number, run in index.runs.items()
        ]
        heads = [(head, *numbers) for head, numbers in index.heads.items()]
        return index.key_bytes, dict(index.sizes), heads, runs, _contents(*columns)

    def _runs(self) -> RowArray:
        """Every run is a path of alike spans, where it says, and under its first key. The rows of all, ascending."""
        table, runs = self._table, self._chain.index.runs
        if not runs:
            self._check(not self._chain.index.heads, "heads name runs that are not there")
            return no_rows()
        numbers = np.fromiter(runs, np.int64, len(runs))
        said = [(run.namespace, run.segments, run.at, run.parent, run.spans) for run in runs.values()]
        namespace, segments, at, parent, spans = np.array(said, np.int64).T
        which = np.repeat(np.arange(len(runs)), spans)

        def each(holds: BoolArray, what: str, of: Int64Array | slice = which) -> None:
            if not all_true(holds):
                raise InvariantViolation(f"{self._where} run {int(numbers[of][np.argmin(holds)])} {what}")

        each(spans > 0, "is empty", slice(None))
        rows = np.concatenate([run.rows[: run.spans] for run in runs.values()])
        first = np.cumsum(spans) - spans
        place = np.arange(len(rows)) - first[which]
        each(table.run[rows] == numbers[which], "holds spans of another")
        each(table.place[rows] == place, "has spans in other places")
        before = np.concatenate(([NO_SPAN], rows[:-1]))
        before[first] = parent
        each(table.parent[rows] == before, "is no path below the span that it says")
        alike = (table.segments[rows] == segments[which]) & (table.namespace[rows] == namespace[which])
        each(alike, "mixes sizes or namespaces")
        each((spans[which] == 1) | (table.valid[rows] == segments[which]), "has spans that are not full")
        ends = np.full(len(table.live) + 1, -1, np.int64)
        ends[rows] = at[which] + (place + 1) * segments[which]
        ends[NO_SPAN] = 0  # the last entry
        each(ends[parent] == at, "starts where the span before it does not end", slice(None))
        self._heads(numbers, namespace, rows[first])
        return np.sort(rows)

    def _heads(self, numbers: Int64Array, namespace: Int64Array, firsts: RowArray) -> None:
        """Every run is under the first key of its first span, and nothing else is there."""
        width, heads = self._chain.index.key_bytes, self._chain.index.heads
        names = zip(numbers.tolist(), namespace.tolist(), self._table.keys.texts(firsts), strict=True)
        for number, space, text in names:
            if heads.get((space, text[:width]), []).count(number) != 1:
                raise InvariantViolation(f"{self._where} run {number} is not under its first key")
        self._check(sum(map(len, heads.values())) == len(numbers), "heads name runs that are not there")

    def _no_twins(self, found: RowArray) -> None:
        """No two full spans below one parent have the same keys."""
        table = self._table
        full = found[table.valid[found] == table.segments[found]]
        about = (column[full].tolist() for column in (table.parent, table.namespace, table.segments))
        distinct = set(zip(*about, table.keys.texts(full), strict=True))
        self._check(len(distinct) == len(full), "equal spans stand below one parent")
