r"""Pools of pages and the account of every byte in them.

A page is always in exactly one state; the six states sum to the pool's capacity at every event:

    free -> reserved -> filling -> ready -> free
                \________ draining / quarantined ________/

reserved: taken, nobody writes yet. filling: an engine or a copy may write. ready: holds committed
content. draining: given up, but work issued earlier may still touch it. quarantined: a copy of unknown
fate may still touch it. Pins, copies in flight and clean or dirty are overlays kept by span
(`core.spans`), not states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.fixed import PageArray, as_place
from kvmanager.allocators.slabs import Slabs
from kvmanager.core.rows import all_alike
from kvmanager.core.writers import Writers


class PageState(IntEnum):
    """Exclusive states of a page."""

    FREE = 0
    RESERVED = 1
    FILLING = 2
    READY = 3
    DRAINING = 4
    QUARANTINED = 5


STATES = len(PageState)
_FREE = PageState.FREE  # looking a member up by name takes as long as the work on one page
_RESERVED = PageState.RESERVED
_TAKEN = tuple(state for state in PageState if state is not PageState.FREE)


@dataclass
class PageSpace:
    """Per-page arrays of one class: state uint8, generation uint32 (how often the page was taken).

    `units`: how many of the pool's accounting units one page takes.
    """

    name: str
    pages: int
    units: int
    state: npt.NDArray[np.uint8] = field(init=False)
    generation: npt.NDArray[np.uint32] = field(init=False)
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.state = np.zeros(self.pages, np.uint8)
        self.generation = np.zeros(self.pages, np.uint32)
        self.counts = [0] * STATES
        self.counts[PageState.FREE] = self.pages

    def move(self, pages: PageArray, source: PageState, target: PageState) -> None:
        """Moves distinct pages from one state to another; any page elsewhere is our own bug."""
        self._move(as_place(pages), pages, source, target)

    def take(self, pages: PageArray) -> None:
        """Distinct free pages are reserved, and get a new generation."""
        at = as_place(pages)
        self._move(at, pages, _FREE, _RESERVED)
        self.generation[at] += 1

    def _move(self, at: PageArray | slice | int, pages: PageArray, source: PageState, target: PageState) -> None:
        wrong = self.state[at] != int(source)
        if wrong if isinstance(at, int) else wrong.any():
            page = int(pages[np.argmax(wrong)])
            found = PageState(int(self.state[page])).name
            raise AssertionError(f"{self.name}: page {page} is {found}, not {source.name}")
        self.state[at] = int(target)  # numpy looks long at an enum
        self.counts[source] -= len(pages)
        self.counts[target] += len(pages)

    def leave(self, pages: PageArray, target: PageState) -> None:
        """Moves distinct pages to `target` from whatever non-free state each is in."""
        if len(pages) == 0:
            return
        at = as_place(pages)
        if isinstance(at, int):
            left = {self.state.item(at): 1}
        elif all_alike(held := self.state[at]):
            left = {held.item(0): len(held)}
        else:
            left = dict(enumerate(np.bincount(held, minlength=STATES).tolist()))
        assert not left.get(_FREE), f"{self.name}: a free page can't become {target.name}"
        self.state[at] = int(target)
        for state, count in left.items():
            self.counts[state] -= count
            self.counts[target] += count


@dataclass(frozen=True)
class Want:
    """Room that is asked for: pages by class that must fit, and slabs that stay free beside them."""

    pages: Mapping[str, int]
    spare_slabs: int = 0


class Pool:
    """Pages of one or several classes over `ranks` equal regions, one page index meaning all ranks.

    `unit_bytes`: bytes of one accounting unit on one rank (the finest page class). `promised_slabs`: promised to
    admitted requests and not taken yet (an overlay); `promised_of`: the same by tenant. `overbooked_slabs`: how many
    may be promised beyond what is there.
    `most_slabs`: as many as can ever be the pool's.
    """

    def __init__(
        self, name: str, tier: str, ranks: int, slabs: int, per_slab: Mapping[str, int], slab_bytes: int
    ) -> None:
        self.name = name
        self.tier = tier
        self.ranks = ranks
        self._slabs = Slabs(slabs, per_slab)
        finest = max(per_slab.values())
        assert all(finest % count == 0 for count in per_slab.values()), "page classes must nest"
        assert slab_bytes % finest == 0
        self.unit_bytes = slab_bytes // finest
        self.units_per_slab = finest
        self.capacity_units = slabs * finest
        self.condemned: dict[str, set[int]] = {}
        """By class, pages that lost their content; `withheld`: those of them that were given back, for good."""
        self.withheld: dict[str, set[int]] = {}
        self.spaces = {c: PageSpace(f"{name}/{c}", slabs * n, finest // n) for c, n in per_slab.items()}
        self.promised_slabs = 0
        self.promised_of: dict[int, int] = {}
        self.overbooked_slabs = 0
        self.most_slabs = slabs
        self.writers: Writers | None = None

    def note_writers(self) -> None:
        """From the beginning on, whose bytes may lie where is known."""
        self.writers = Writers(self.numbered_slabs * self.units_per_slab)

    def hide(self, first: int, end: int) -> None:
        """Slabs [first, end), all free, are no longer the pool's."""
        self._slabs.hide(first, end)
        self.capacity_units -= (end - first) * self.units_per_slab

    def show(self, first: int, end: int) -> None:
        """Slabs [first, end), which were not the pool's, are."""
        self._slabs.show(first, end)
        if self.writers is not None:
            self.writers.forget(first * self.units_per_slab, end * self.units_per_slab)
        self.capacity_units += (end - first) * self.units_per_slab

    def is_free(self, first: int, end: int) -> bool:
        """Whether slabs [first, end) are the pool's and all free."""
        return self._slabs.free_range(first, end)

    def take(self, page_class: str, count: int, tenant: int = -1) -> PageArray | None:
        """`count` pages, reserved, with a new generation each, for a tenant (-1: unknown); None when they don't fit."""
        pages = self._slabs.take(page_class, count)
        if pages is None:
            return None
        space = self.spaces[page_class]
        space.take(pages)
        if self.writers is not None:
            self.writers.given(pages, space.units, tenant)
        return pages

    def give(self, page_class: str, pages: PageArray) -> None:
        """Frees pages whatever their state was, or withholds them; freeing a free page is our own bug."""
        if page_class in self.condemned:
            pages = self._withhold(page_class, pages)
        self._slabs.give(page_class, pages)
        self.spaces[page_class].leave(pages, _FREE)

    def condemn(self, page_class: str, pages: PageArray) -> bool:
        """These pages are withheld when they are given back: their memory lost what was written. False: known."""
        condemned = self.condemned.setdefault(page_class, set())
        fresh = not condemned.issuperset(pages.tolist())
        condemned.update(pages.tolist())
        return fresh

    def _withhold(self, page_class: str, pages: PageArray) -> PageArray:
        """Keeps condemned pages back, in quarantine; returns the others."""
        kept = np.isin(pages, np.fromiter(self.condemned[page_class], np.int64))
        if kept.any():
            self.settle(page_class, pages[kept], PageState.QUARANTINED)
            self.withheld.setdefault(page_class, set()).update(pages[kept].tolist())
            return pages[~kept]
        return pages

    def settle(self, page_class: str, pages: PageArray, target: PageState) -> None:
        """Moves pages to `target` from whatever non-free state they are in."""
        self.spaces[page_class].leave(pages, target)

    @property
    def slabs(self) -> int:
        """Slabs (pages, in a pool of one class) that are the pool's now."""
        return self.capacity_units // self.units_per_slab

    @property
    def numbered_slabs(self) -> int:
        """Slabs that it has numbers for: more than `slabs` where it shares a region (`core.extents`)."""
        return self._slabs.slabs

    @property
    def free_slabs(self) -> int:
        """Slabs owned by no class."""
        return self._slabs.free_slabs

    def promise(self, tenant: int, slabs: int) -> None:
        """A tenant's requests are promised so many slabs more (below zero: fewer)."""
        self.promised_slabs += slabs
        self.promised_of[tenant] = self.promised_of.get(tenant, 0) + slabs

    @property
    def owed_slabs(self) -> int:
        """Promised slabs that something must stand behind; below zero while less is promised than may be."""
        return self.promised_slabs - self.overbooked_slabs

    def slabs_needed(self, pages: Mapping[str, int]) -> int:
        """Free slabs that taking these pages would consume."""
        return self._slabs.slabs_needed(pages)

    def lacking_slabs(self, want: Want) -> int:
        """Free slabs that the want lacks; 0 or less: it fits."""
        return self.slabs_needed(want.pages) + want.spare_slabs - self.free_slabs

    def gives_until_fit(self, want: Want, given: Mapping[str, tuple[PageArray, PageArray]], steps: int) -> int:
        """How many of `steps` steps must give their pages back until a want fits; one more than all: never.

        given: class -> (pages, the step that gives each, 0 ..). Nothing changes.
        """
        free = np.full(steps, self.free_slabs, np.int64)
        needed = np.full(steps, want.spare_slabs, np.int64)
        opened: dict[str, npt.NDArray[np.int64]] = {}
        for name, (pages, at) in given.items():
            whole = self._whole_slabs(name, pages, at, steps)
            free += whole
            opened[name] = np.cumsum(np.bincount(at, minlength=steps)) - whole * self.per_slab(name)
        for name, count in want.pages.items():
            beyond = count - self._slabs.opened(name) - opened.get(name, 0)
            needed = needed + np.maximum(0, -(-beyond // self.per_slab(name)))
        fit = np.append(needed <= free, True)
        return int(np.argmax(fit)) + 1

    def _whole_slabs(self, page_class: str, pages: PageArray, at: PageArray, steps: int) -> npt.NDArray[np.int64]:
        """Slabs of the class that have given all their pages after each step, int64[steps]."""
        if self.per_slab(page_class) == 1:
            return np.cumsum(np.bincount(at, minlength=steps))
        slabs = pages // self.per_slab(page_class)
        last = np.full(self.numbered_slabs, -1, np.int64)
        np.maximum.at(last, slabs, at)
        emptied = np.bincount(slabs, minlength=self.numbered_slabs) == self.used_in_slabs(page_class)
        return np.cumsum(np.bincount(last[emptied & (last >= 0)], minlength=steps))

    def per_slab(self, page_class: str) -> int:
        """Pages of the class in one slab."""
        return self._slabs.per_slab[page_class]

    def used_in_slabs(self, page_class: str) -> npt.NDArray[np.int32]:
        """Pages of the class taken in each slab, int32[slabs]."""
        return self._slabs.used_in_slabs(page_class)

    def units(self, state: PageState) -> int:
        """Units in a state; FREE is what no page of any class holds."""
        if state is PageState.FREE:
            return self.capacity_units - sum(self.units(s) for s in PageState if s is not PageState.FREE)
        return sum(space.counts[state] * space.units for space in self.spaces.values())

    def account(self) -> dict[PageState, int]:
        """Bytes by state over all ranks."""
        spaces = self.spaces.values()
        taken = [sum(space.counts[state] * space.units for space in spaces) for state in _TAKEN]
        units = [self.capacity_units - sum(taken), *taken]
        return {state: count * self.unit_bytes * self.ranks for state, count in zip(PageState, units, strict=True)}

    @property
    def capacity_bytes(self) -> int:
        """Bytes over all ranks."""
        return self.capacity_units * self.unit_bytes * self.ranks
