"""Equal pages of one kind, handed out as extents.

Integers only: nothing here knows what memory is. Used for pools and, through `slabs`, for slabs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int64]


class FixedPages:
    """Free pages `0 .. pages - 1` as sorted, disjoint, non-touching extents.

    `_starts[i] <= page < _ends[i]` is free; both lists are sorted and of equal length.
    Taking prefers one extent that holds the whole request, so that copies stay long runs.
    """

    def __init__(self, pages: int) -> None:
        assert pages >= 0
        self.pages = pages
        self._starts = [0] if pages else []
        self._ends = [pages] if pages else []
        self.free = pages

    def take(self, count: int) -> PageArray | None:
        """`count` page indexes, ascending within each extent; None when fewer are free (nothing is taken)."""
        assert count >= 0
        if count > self.free:
            return None
        whole = next((i for i, (a, b) in enumerate(zip(self._starts, self._ends, strict=True)) if b - a >= count), None)
        self.free -= count
        if whole is not None and count:
            return self._cut(whole, count)
        parts: list[PageArray] = []
        while count:
            size = min(count, self._ends[0] - self._starts[0])
            parts.append(self._cut(0, size))
            count -= size
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _cut(self, extent: int, count: int) -> PageArray:
        start = self._starts[extent]
        self._starts[extent] += count
        if self._starts[extent] == self._ends[extent]:
            del self._starts[extent], self._ends[extent]
        return np.arange(start, start + count, dtype=np.int64)

    def give(self, pages: PageArray) -> None:
        """Takes pages back. A page that is free already, twice in the call or out of range is our own bug.

        Nothing changes then: all pages are looked at before the first is taken back.
        """
        ordered = np.sort(pages)
        if len(ordered) == 0:
            return
        assert ordered[0] >= 0, f"page {ordered[0]} is not one of {self.pages}"
        assert ordered[-1] < self.pages, f"page {ordered[-1]} is not one of {self.pages}"
        twice = ordered[1:][np.diff(ordered) == 0]
        assert len(twice) == 0, f"pages {twice.tolist()} are given twice in one call"
        breaks = np.flatnonzero(np.diff(ordered) != 1)
        starts = ordered[np.concatenate(([0], breaks + 1))]
        ends = ordered[np.concatenate((breaks, [len(ordered) - 1]))] + 1
        runs = list(zip(starts.tolist(), ends.tolist(), strict=True))
        for start, end in runs:
            self._check_taken(start, end)
        for start, end in runs:
            self._merge(start, end)
        self.free += len(ordered)

    def _check_taken(self, start: int, end: int) -> None:
        at = bisect_left(self._starts, start)
        assert at == 0 or self._ends[at - 1] <= start, f"page {start} is free already"
        assert at == len(self._starts) or end <= self._starts[at], f"page {self._starts[at]} is free already"

    def _merge(self, start: int, end: int) -> None:
        at = bisect_left(self._starts, start)
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)

    def is_free(self, page: int) -> bool:
        """Whether `page` is free."""
        at = bisect_right(self._starts, page) - 1
        return at >= 0 and page < self._ends[at]

    def free_pages(self) -> PageArray:
        """All free page indexes, ascending (for the audit)."""
        parts = [np.arange(a, b, dtype=np.int64) for a, b in zip(self._starts, self._ends, strict=True)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
