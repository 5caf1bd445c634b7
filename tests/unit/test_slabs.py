"""Slabs shared by page classes."""

import numpy as np
import pytest

from kvmanager.allocators.slabs import UNOWNED, Slabs


def make() -> Slabs:
    return Slabs(4, {"latent": 1, "indexer": 18})


def test_classes_share_the_slabs():
    slabs = make()
    assert slabs.take("indexer", 2).tolist() == [0, 1]
    assert slabs.take("latent", 2).tolist() == [1, 2]
    assert slabs.free_slabs == 1
    assert slabs.free_pages("indexer") == 16 + 18
    assert slabs.slabs_needed({"indexer": 17, "latent": 1}) == 2
    assert slabs.take("indexer", 35) is None
    assert slabs.take("indexer", 34).tolist() == [*range(2, 18), *range(54, 72)]
    assert slabs.take("latent", 1) is None


def test_a_slab_is_everybodys_again_when_its_last_page_returns():
    slabs = make()
    pages = slabs.take("indexer", 3)
    slabs.give("indexer", pages[:2])
    assert slabs.owner[0] == 1
    assert slabs.free_slabs == 3
    slabs.give("indexer", pages[2:])
    assert slabs.owner[0] == UNOWNED
    assert slabs.take("latent", 4).tolist() == [0, 1, 2, 3]
    assert slabs.used_in_slabs("latent").tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("page_class", "pages"), [("latent", [3]), ("indexer", [1, 1]), ("indexer", [5]), ("latent", [0]), ("latent", [9])]
)
def test_wrong_pages_are_refused_and_change_nothing(page_class, pages):
    slabs = make()
    slabs.take("indexer", 3)
    before = (slabs.free_slabs, slabs.free_pages("indexer"), slabs.owner.tolist())
    with pytest.raises((AssertionError, IndexError)):
        slabs.give(page_class, np.array(pages))
    assert (slabs.free_slabs, slabs.free_pages("indexer"), slabs.owner.tolist()) == before
