"""Fixed pages: extents merge, and what is wrong is caught at once."""

import numpy as np
import pytest

from kvmanager.allocators.fixed import FixedPages


def test_takes_one_run_where_one_holds_it_all():
    pages = FixedPages(10)
    assert pages.take(4).tolist() == [0, 1, 2, 3]
    assert pages.take(3).tolist() == [4, 5, 6]
    pages.give(np.array([1, 2]))
    assert pages.take(3).tolist() == [7, 8, 9]
    assert pages.take(2).tolist() == [1, 2]
    assert pages.take(1) is None
    assert pages.free == 0


def test_pieces_are_gathered_when_no_run_is_long_enough():
    pages = FixedPages(6)
    pages.take(6)
    pages.give(np.array([4, 0, 2]))
    assert pages.take(3).tolist() == [0, 2, 4]


def test_nothing_and_everything():
    pages = FixedPages(3)
    assert pages.take(0).tolist() == []
    assert pages.take(4) is None
    assert pages.free == 3
    pages.give(np.empty(0, np.int64))
    assert FixedPages(0).take(1) is None
    assert pages.free_pages().tolist() == [0, 1, 2]


@pytest.mark.parametrize("wrong", [[0], [1, 1], [1, 2, 1], [-1], [8], [1, 0]])
def test_a_wrong_page_is_refused_and_changes_nothing(wrong):
    pages = FixedPages(8)
    pages.take(8)
    pages.give(np.array([0]))
    with pytest.raises(AssertionError):
        pages.give(np.array(wrong))
    assert pages.free == 1
    assert pages.free_pages().tolist() == [0]
    assert [page for page in range(8) if pages.is_free(page)] == [0]
