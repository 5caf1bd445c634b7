"""Fixed pages and slabs against naive models: sets of page numbers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmanager.allocators.fixed import FixedPages
from kvmanager.allocators.slabs import UNOWNED, Slabs
from kvmanager.core.pool import Pool, Want

PAGES = 24
PER_SLAB = {"latent": 1, "indexer": 3, "half": 2}
NESTED = {"latent": 1, "indexer": 6, "half": 2}
SLABS = 6


class FixedModel(RuleBasedStateMachine):
    """A set of taken pages."""

    def __init__(self) -> None:
        super().__init__()
        self.real = FixedPages(PAGES)
        self.taken: set[int] = set()

    @rule(count=st.integers(0, PAGES + 2))
    def take(self, count: int) -> None:
        free = set(range(PAGES)) - self.taken
        runs = "".join("x" if page in free else " " for page in range(PAGES)).split()
        pages = self.real.take(count)
        if count > len(free):
            assert pages is None
            return
        assert len(set(pages.tolist())) == count
        assert set(pages.tolist()) <= free
        if count and any(len(run) >= count for run in runs):
            assert (np.diff(pages) == 1).all()
        self.taken |= set(pages.tolist())

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        self.real.give(np.array(pages, np.int64))
        self.taken -= set(pages)

    @rule(data=st.data())
    def give_wrong(self, data: st.DataObject) -> None:
        """Some page twice, free or out of range: refused as a whole."""
        good = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True)) if self.taken else []
        bad = data.draw(st.integers(-1, PAGES).filter(lambda page: page not in self.taken or page in good))
        try:
            self.real.give(np.array([*good, bad], np.int64))
        except AssertionError:
            return
        raise RuntimeError(f"{good} and {bad} were taken back")

    @invariant()
    def same_pages_free(self) -> None:
        assert self.real.free == PAGES - len(self.taken)
        assert self.real.free_pages().tolist() == sorted(set(range(PAGES)) - self.taken)


class SlabModel(RuleBasedStateMachine):
    """For each class the set of taken pages; a slab belongs to whoever has pages in it."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Slabs(SLABS, PER_SLAB)
        self.taken: dict[str, set[int]] = {c: set() for c in PER_SLAB}

    def owned(self, page_class: str) -> set[int]:
        return {page // PER_SLAB[page_class] for page in self.taken[page_class]}

    def free_slabs(self) -> int:
        return SLABS - sum(len(self.owned(c)) for c in PER_SLAB)

    @rule(page_class=st.sampled_from(sorted(PER_SLAB)), count=st.integers(0, 12))
    def take(self, page_class: str, count: int) -> None:
        per_slab = PER_SLAB[page_class]
        places = len(self.owned(page_class)) * per_slab - len(self.taken[page_class])
        needed = max(0, -(-(count - places) // per_slab))
        assert self.real.slabs_needed({page_class: count}) == needed
        pages = self.real.take(page_class, count)
        if needed > self.free_slabs():
            assert pages is None
            return
        new = set(pages.tolist())
        assert len(new) == count
        assert not new & self.taken[page_class]
        before = self.free_slabs()
        self.taken[page_class] |= new
        assert self.free_slabs() == before - needed

    @rule(page_class=st.sampled_from(sorted(PER_SLAB)), data=st.data())
    def give(self, page_class: str, data: st.DataObject) -> None:
        if not self.taken[page_class]:
            return
        pages = data.draw(st.lists(st.sampled_from(sorted(self.taken[page_class])), unique=True))
        self.real.give(page_class, np.array(pages, np.int64))
        self.taken[page_class] -= set(pages)

    @invariant()
    def no_slab_has_two_owners(self) -> None:
        owners = [slab for c in PER_SLAB for slab in self.owned(c)]
        assert len(set(owners)) == len(owners)
        assert self.real.free_slabs == self.free_slabs()
        for c, per_slab in PER_SLAB.items():
            places = len(self.owned(c)) * per_slab - len(self.taken[c])
            assert self.real.free_pages(c) == places + self.free_slabs() * per_slab
            counted = np.bincount([page // per_slab for page in self.taken[c]], minlength=SLABS)
            assert (counted == self.real.used_in_slabs(c)).all()
        assert int((self.real.owner == UNOWNED).sum()) == self.free_slabs()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_how_many_gives_it_takes_until_pages_fit(data: st.DataObject) -> None:
    """The answer beforehand is what giving the pages back step by step finds."""
    pool = Pool("p/hbm", "device", 1, SLABS, NESTED, 6)
    held = []
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(sorted(NESTED)))
        pages = pool.take(name, data.draw(st.integers(1, 5)))
        held += [(name, page) for page in (pages if pages is not None else [])]
    held = data.draw(st.permutations(held))[: data.draw(st.integers(0, len(held)))]
    steps = data.draw(st.integers(1, 6))
    at = sorted(data.draw(st.lists(st.integers(0, steps - 1), min_size=len(held), max_size=len(held))))
    given_pages = {}
    for name in NESTED:
        mine = [(page, step) for (owner, page), step in zip(held, at, strict=True) if owner == name]
        given_pages[name] = tuple(np.array([pair[i] for pair in mine], np.int64) for i in range(2))
    pages_wanted = data.draw(st.dictionaries(st.sampled_from(sorted(NESTED)), st.integers(1, 14)))
    want = Want(pages_wanted, data.draw(st.integers(0, 2)))
    found = pool.gives_until_fit(want, given_pages, steps)
    for step in range(steps):
        for name, (pages, when) in given_pages.items():
            pool.give(name, pages[when == step])
        if pool.lacking_slabs(want) <= 0:
            assert found == step + 1
            return
    assert found == steps + 1


TestFixedPages = FixedModel.TestCase
TestSlabs = SlabModel.TestCase
TestFixedPages.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestSlabs.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
