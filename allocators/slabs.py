"""One region of equal slabs shared by several page classes; a slab belongs to one class at a time.

A page of class `c` has index `slab * per_slab[c] + place`, so that its byte offset is
`index * (slab_bytes / per_slab[c])` for classes that fill the slab exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import FixedPages, PageArray

UNOWNED = 255


class Slabs:
    """`slabs` slabs; class `c` fits `per_slab[c]` pages into one.

    `owner[slab]`: index of the class that has it, UNOWNED when free.
    `_used[c][slab]`: pages of class c taken in that slab, 0 when it belongs to another.
    `_places[c]`: free page indexes inside slabs that class c owns already (kept ascending by use of sorted takes).
    """

    def __init__(self, slabs: int, per_slab: Mapping[str, int]) -> None:
        assert len(per_slab) < UNOWNED
        self.slabs = slabs
        self.per_slab = dict(per_slab)
        self.classes = tuple(per_slab)
        self._whole = FixedPages(slabs)
        self.owner: npt.NDArray[np.uint8] = np.full(slabs, UNOWNED, np.uint8)
        self._used: dict[str, npt.NDArray[np.int32]] = {c: np.zeros(slabs, np.int32) for c in per_slab}
        self._places: dict[str, set[int]] = {c: set() for c in per_slab}

    @property
    def free_slabs(self) -> int:
        """Slabs that no class owns."""
        return self._whole.free

    def free_pages(self, page_class: str) -> int:
        """Pages of a class that could be taken now if no other class took a slab."""
        return len(self._places[page_class]) + self._whole.free * self.per_slab[page_class]

    def slabs_needed(self, pages: Mapping[str, int]) -> int:
        """Free slabs that taking these pages would consume."""
        total = 0
        for page_class, count in pages.items():
            beyond = count - len(self._places[page_class])
            total += max(0, -(-beyond // self.per_slab[page_class]))
        return total

    def take(self, page_class: str, count: int) -> PageArray | None:
        """`count` pages, from slabs the class owns first; None when they don't fit (nothing is taken)."""
        per_slab = self.per_slab[page_class]
        slabs = self._whole.take(self.slabs_needed({page_class: count}))
        if slabs is None:
            return None
        self.owner[slabs] = self.classes.index(page_class)
        places = self._places[page_class]
        for slab in slabs.tolist():
            places.update(range(slab * per_slab, (slab + 1) * per_slab))
        taken = np.array(sorted(places)[:count], dtype=np.int64)
        places.difference_update(taken.tolist())
        np.add.at(self._used[page_class], taken // per_slab, 1)
        return taken

    def give(self, page_class: str, pages: PageArray) -> None:
        """Takes pages back; a slab whose last page returns becomes free for every class."""
        per_slab = self.per_slab[page_class]
        places = self._places[page_class]
        values = pages.tolist()
        assert len(set(values)) == len(values), "a page is given twice in one call"
        assert places.isdisjoint(values), f"pages {sorted(places.intersection(values))} are free already"
        assert all(0 <= page < self.slabs * per_slab for page in values), f"pages {values} of {self.slabs} slabs"
        slabs = pages // per_slab
        assert bool((self.owner[slabs] == self.classes.index(page_class)).all()), "a page of another class"
        places.update(values)
        used = self._used[page_class]
        np.subtract.at(used, slabs, 1)
        empty = np.unique(slabs)[used[np.unique(slabs)] == 0]
        for slab in empty.tolist():
            places.difference_update(range(slab * per_slab, (slab + 1) * per_slab))
        self.owner[empty] = UNOWNED
        self._whole.give(empty)

    def used_in_slabs(self, page_class: str) -> npt.NDArray[np.int32]:
        """Pages of the class taken in each slab, int32[slabs]."""
        return self._used[page_class]
