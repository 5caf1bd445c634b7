"""BL-05: the same page twice in one free must not put it on the free list twice."""

import numpy as np
import pytest

from kvmanager.allocators.fixed import FixedPages
from kvmanager.core.pool import PageState, Pool


@pytest.mark.parametrize("wrong", [[3, 3, 5], [5, 3, 5], [3, 5, -1], [3, 5, 8], [3, 4]])
def test_rejected_as_a_whole(wrong: list[int]) -> None:
    pool = Pool("p", "device", 8, 8, {"kv": 1}, 64)
    taken = pool.take("kv", 8)
    pool.give("kv", taken[4:5])
    with pytest.raises((AssertionError, IndexError)):
        pool.give("kv", np.array(wrong))
    assert pool.units(PageState.FREE) == 1
    pool.give("kv", np.array([3, 5]))
    pages = [int(pool.take("kv", 1)[0]) for _ in range(3)]
    assert sorted(pages) == [3, 4, 5]
    assert pool.take("kv", 1) is None


def test_the_error_names_the_page() -> None:
    pages = FixedPages(8)
    pages.take(8)
    with pytest.raises(AssertionError, match=r"pages \[3\] are given twice"):
        pages.give(np.array([3, 3, 5]))
    assert pages.free == 0
