"""One region of equal slabs shared by several page classes; a slab belongs to one class at a time.

A page of class `c` has index `slab * per_slab[c] + place`, so that its byte offset is
`index * (slab_bytes / per_slab[c])` for classes that fill the slab exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import FixedPages, PageArray, as_place

UNOWNED = 255


class Slabs:
    """`slabs` slabs; class `c` fits `per_slab[c]` pages into one.

    `owner[slab]`: index of the class that has it, UNOWNED when free.
    `_used[c][slab]`: pages of class c taken in that slab, 0 when it belongs to another.
    `_open[c]`: bool, one entry a page index: free, and inside a slab that class c owns already. `_opened[c]`: how many.
    """

    def __init__(self, slabs: int, per_slab: Mapping[str, int]) -> None:
        assert len(per_slab) < UNOWNED
        self.slabs = slabs
        self.per_slab = dict(per_slab)
        self.classes = tuple(per_slab)
        self._number = {name: number for number, name in enumerate(per_slab)}
        self._whole = FixedPages(slabs)
        self.owner: npt.NDArray[np.uint8] = np.full(slabs, UNOWNED, np.uint8)
        self._used: dict[str, npt.NDArray[np.int32]] = {c: np.zeros(slabs, np.int32) for c in per_slab}
        self._open: dict[str, npt.NDArray[np.bool_]] = {c: np.zeros(slabs * n, bool) for c, n in per_slab.items()}
        self._opened: dict[str, int] = dict.fromkeys(per_slab, 0)

    @property
    def free_slabs(self) -> int:
        """Slabs that no class owns."""
        return self._whole.free

    def hide(self, first: int, end: int) -> None:
        """Takes slabs [first, end), all of them free, out of use."""
        self._whole.take_range(first, end)

    def show(self, first: int, end: int) -> None:
        """Puts slabs [first, end), all of them hidden, into use."""
        self._whole.give(np.arange(first, end, dtype=np.int64))

    def free_range(self, first: int, end: int) -> bool:
        """Whether slabs [first, end) are all free and in use."""
        return self._whole.free_in(first, end) == end - first

    def opened(self, page_class: str) -> int:
        """Free pages of a class inside slabs that it owns already."""
        return self._opened[page_class]

    def free_pages(self, page_class: str) -> int:
        """Pages of a class that could be taken now if no other class took a slab."""
        return self._opened[page_class] + self._whole.free * self.per_slab[page_class]

    def slabs_needed(self, pages: Mapping[str, int]) -> int:
        """Free slabs that taking these pages would consume."""
        total = 0
        for page_class, count in pages.items():
            beyond = count - self._opened[page_class]
            total += max(0, -(-beyond // self.per_slab[page_class]))
        return total

    def take(self, page_class: str, count: int) -> PageArray | None:
        """`count` pages, from slabs the class owns first; None when they don't fit (nothing is taken)."""
        per_slab = self.per_slab[page_class]
        if per_slab == 1:
            return self._take_whole(page_class, count)
        slabs = self._whole.take(self.slabs_needed({page_class: count}))
        if slabs is None:
            return None
        places = self._open[page_class]
        self.owner[slabs] = self._number[page_class]
        places.reshape(-1, per_slab)[slabs] = True
        taken = np.flatnonzero(places)[:count]
        places[taken] = False
        self._opened[page_class] += len(slabs) * per_slab - count
        touched, counts = np.unique(taken // per_slab, return_counts=True)
        self._used[page_class][touched] += counts.astype(np.int32)
        return taken

    def _take_whole(self, page_class: str, count: int) -> PageArray | None:
        """`take` where a page is a whole slab."""
        slabs = self._whole.take(count)
        if slabs is not None:
            at = as_place(slabs)
            self.owner[at] = self._number[page_class]
            self._used[page_class][at] = 1
        return slabs

    def _give_whole(self, page_class: str, pages: PageArray) -> None:
        """`give` where a page is a whole slab. Pages that are free, or of another class, are refused first."""
        at = as_place(pages)
        least, most = (pages.min(), pages.max()) if isinstance(at, np.ndarray) else (pages[0], pages[-1])
        assert least >= 0, "a page below none"
        assert most < self.slabs, "a page beyond all"
        ours = self.owner[at] == self._number[page_class]
        assert ours if isinstance(at, int) else ours.all(), f"pages {pages} are free or of another class"
        self._whole.give(pages)
        self.owner[at] = UNOWNED
        self._used[page_class][at] = 0

    def give(self, page_class: str, pages: PageArray) -> None:
        """Takes pages back; a slab whose last page returns becomes free for every class."""
        if len(pages) == 0:
            return
        per_slab = self.per_slab[page_class]
        if per_slab == 1:
            self._give_whole(page_class, pages)
            return
        places = self._open[page_class]
        self._check_taken(page_class, pages)
        places[pages] = True
        touched, counts = np.unique(pages // per_slab, return_counts=True)
        used = self._used[page_class]
        used[touched] -= counts.astype(np.int32)
        empty = touched[used[touched] == 0]
        places.reshape(-1, per_slab)[empty] = False
        self._opened[page_class] += len(pages) - len(empty) * per_slab
        self.owner[empty] = UNOWNED
        self._whole.give(empty)

    def _check_taken(self, page_class: str, pages: PageArray) -> None:
        """Distinct pages of slabs that the class owns, none of them free."""
        per_slab = self.per_slab[page_class]
        ordered = np.sort(pages)
        inside = ordered[0] >= 0 and ordered[-1] < self.slabs * per_slab
        assert inside, f"pages {pages} of {self.slabs} slabs"
        assert np.diff(ordered).all(), "a page is given twice in one call"
        free = ordered[self._open[page_class][ordered]]
        assert len(free) == 0, f"pages {free.tolist()} are free already"
        ours = self.owner[ordered // per_slab] == self._number[page_class]
        assert ours.all(), "a page of another class"

    def used_in_slabs(self, page_class: str) -> npt.NDArray[np.int32]:
        """Pages of the class taken in each slab, int32[slabs]."""
        return self._used[page_class]
