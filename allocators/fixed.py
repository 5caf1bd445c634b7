"""Equal pages of one kind, handed out as extents.

Integers only: nothing here knows what memory is. Used for pools and, through `slabs`, for slabs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int64]


_FEW = 16
"""Up to here looking for a range costs more than it saves."""


def as_range(indexes: PageArray) -> PageArray | slice:
    """The same indexes, as a slice where they are consecutive: one that numpy follows many times faster."""
    count = len(indexes)
    if count == 1:
        only = int(indexes[0])
        return slice(only, only + 1)
    if count > _FEW and indexes[-1] - indexes[0] == count - 1 and b"\0" not in (indexes[1:] > indexes[:-1]).tobytes():
        return slice(int(indexes[0]), int(indexes[0]) + count)
    return indexes


def as_place(indexes: PageArray) -> PageArray | slice | int:
    """As `as_range`, and a plain number for one index: for writing one value to all of them."""
    return int(indexes[0]) if len(indexes) == 1 else as_range(indexes)


def _expand(starts: PageArray, ends: PageArray) -> PageArray:
    """Every page of the extents, in their order."""
    sizes = ends - starts
    before = np.cumsum(sizes) - sizes
    pages: PageArray = np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(starts - before, sizes)
    return pages


def _runs(ordered: PageArray) -> tuple[PageArray, PageArray]:
    """Where runs of ascending pages start and end; a page named twice is our own bug."""
    steps = np.diff(ordered)
    assert steps.all(), f"pages {ordered[1:][steps == 0].tolist()} are given twice in one call"
    breaks = np.flatnonzero(steps != 1)
    starts = ordered[np.concatenate(([0], breaks + 1))]
    ends = ordered[np.concatenate((breaks, [len(ordered) - 1]))] + 1
    return starts, ends


def _inserted(values: PageArray, at: int, value: int) -> PageArray:
    """The values with one more at a place."""
    more: PageArray = np.empty(len(values) + 1, np.int64)
    more[:at], more[at], more[at + 1 :] = values[:at], value, values[at:]
    return more


class FixedPages:
    """Free pages `0 .. pages - 1` as sorted, disjoint, non-touching extents.

    `_starts[i] <= page < _ends[i]` is free; both arrays are sorted and of equal length (int64).
    Taking prefers one extent that holds the whole request, so that copies stay long runs.
    """

    def __init__(self, pages: int) -> None:
        assert pages >= 0
        self.pages = pages
        self._starts: PageArray = np.zeros(1 if pages else 0, np.int64)
        self._ends: PageArray = np.full(len(self._starts), pages, np.int64)
        self.free = pages

    def take(self, count: int) -> PageArray | None:
        """`count` page indexes, ascending; None when fewer are free (nothing is taken)."""
        assert count >= 0
        if count > self.free:
            return None
        if count == 0:
            return np.empty(0, np.int64)
        if count == 1:
            return self._take_one()
        sizes = self._ends - self._starts
        whole = int(np.argmax(sizes >= count))
        self.free -= count
        if sizes[whole] >= count:
            start = int(self._starts[whole])
            self._cut(whole, whole, count)
            return np.arange(start, start + count, dtype=np.int64)
        last = int(np.searchsorted(np.cumsum(sizes), count))
        rest = count - int(sizes[:last].sum())
        ends = np.append(self._ends[:last], self._starts[last] + rest)
        pages = _expand(self._starts[: last + 1], ends)
        self._cut(0, last, rest)
        return pages

    def take_range(self, first: int, end: int) -> None:
        """Takes pages [first, end), all of which must be free: anything else is our own bug."""
        assert 0 <= first < end <= self.pages, f"pages {first} to {end} of {self.pages}"
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        assert at >= 0, f"page {first} is not free"
        start, stop = int(self._starts[at]), int(self._ends[at])
        assert end <= stop, f"pages {first} to {end} are not all free"
        rest = np.array([(a, b) for a, b in ((start, first), (end, stop)) if a < b], np.int64).reshape(-1, 2)
        self._starts = np.concatenate((self._starts[:at], rest[:, 0], self._starts[at + 1 :]))
        self._ends = np.concatenate((self._ends[:at], rest[:, 1], self._ends[at + 1 :]))
        self.free -= end - first

    def _take_one(self) -> PageArray:
        """The lowest free page."""
        starts = self._starts
        taken = starts[:1].copy()
        page = int(taken[0])
        self.free -= 1
        if page + 1 == self._ends[0]:
            self._starts, self._ends = starts[1:], self._ends[1:]
        else:
            starts[0] = page + 1
        return taken

    def _cut(self, first: int, last: int, count: int) -> None:
        """Takes extents [first, last) away, and `count` pages from the head of extent `last`."""
        self._starts[last] += count
        if self._starts[last] == self._ends[last]:
            last += 1
        if first != last:
            self._starts = np.concatenate((self._starts[:first], self._starts[last:]))
            self._ends = np.concatenate((self._ends[:first], self._ends[last:]))

    def give(self, pages: PageArray) -> None:
        """Takes pages back. A page that is free already, twice in the call or out of range is our own bug.

        Nothing changes then: all pages are looked at before the first is taken back.
        """
        if len(pages) <= 1:
            if len(pages):
                self._give_one(int(pages[0]))
            return
        run = as_range(pages)
        ordered = pages if isinstance(run, slice) else np.sort(pages)
        assert ordered[0] >= 0, f"page {ordered[0]} is not one of {self.pages}"
        assert ordered[-1] < self.pages, f"page {ordered[-1]} is not one of {self.pages}"
        if isinstance(run, slice):
            starts, ends = np.array([run.start], np.int64), np.array([run.stop], np.int64)
        else:
            starts, ends = _runs(ordered)
        self._check_taken(starts, ends)
        self._merge(starts, ends)
        self.free += len(ordered)

    def _give_one(self, page: int) -> None:
        """`give` for a single page."""
        starts, ends = self._starts, self._ends
        assert 0 <= page < self.pages, f"page {page} is not one of {self.pages}"
        at = int(starts.searchsorted(page, side="right"))
        before = int(ends[at - 1]) if at else -1
        assert before <= page, f"page {page} is free already"
        joins_next = at < len(starts) and starts[at] == page + 1
        if before == page and joins_next:
            self._starts = np.concatenate((starts[:at], starts[at + 1 :]))
            self._ends = np.concatenate((ends[: at - 1], ends[at:]))
        elif before == page:
            ends[at - 1] = page + 1
        elif joins_next:
            starts[at] = page
        else:
            self._starts, self._ends = _inserted(starts, at, page), _inserted(ends, at, page + 1)
        self.free += 1

    def _check_taken(self, starts: PageArray, ends: PageArray) -> None:
        """No run touches a free page: the extent before it ends at or before its start, the next starts at its end."""
        at = np.searchsorted(self._starts, starts)
        inside = np.concatenate(([0], self._ends))[at] > starts
        assert not inside.any(), f"pages {starts[inside].tolist()} are free already"
        behind = np.concatenate((self._starts, [self.pages]))[at]
        assert (ends <= behind).all(), f"pages {behind[ends > behind].tolist()} are free already"

    def _merge(self, starts: PageArray, ends: PageArray) -> None:
        """Adds disjoint runs and joins what touches."""
        starts = np.sort(np.concatenate((self._starts, starts)))
        ends = np.sort(np.concatenate((self._ends, ends)))
        apart = starts[1:] != ends[:-1]
        self._starts = starts[np.concatenate(([True], apart))]
        self._ends = ends[np.concatenate((apart, [True]))]

    def is_free(self, page: int) -> bool:
        """Whether `page` is free."""
        at = int(np.searchsorted(self._starts, page, side="right")) - 1
        return at >= 0 and bool(page < self._ends[at])

    def free_in(self, first: int, end: int) -> int:
        """How many pages of [first, end) are free."""
        overlaps = np.minimum(self._ends, end) - np.maximum(self._starts, first)
        return int(np.maximum(overlaps, 0).sum())

    def free_pages(self) -> PageArray:
        """All free page indexes, ascending (for the audit)."""
        return _expand(self._starts, self._ends)
