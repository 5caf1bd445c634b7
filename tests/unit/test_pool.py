"""Page states and the account of a pool."""

import numpy as np
import pytest

from kvmanager.core.audit import ledger_holds
from kvmanager.core.pool import PageState, Pool

SLAB_BYTES = 180


def make() -> Pool:
    return Pool("d/hbm", "device", 2, 4, {"latent": 1, "indexer": 18}, SLAB_BYTES)


def test_every_state_is_in_the_account_and_sums_to_capacity():
    pool = make()
    assert pool.capacity_bytes == 2 * 4 * SLAB_BYTES
    pages = [pool.take("latent", 1) for _ in range(3)]
    few = pool.take("indexer", 2)
    pool.settle("latent", pages[0], PageState.FILLING)
    pool.settle("latent", pages[1], PageState.READY)
    pool.settle("latent", pages[2], PageState.DRAINING)
    pool.settle("indexer", few[:1], PageState.QUARANTINED)
    account = pool.account()
    assert account[PageState.FILLING] == account[PageState.READY] == account[PageState.DRAINING] == 2 * SLAB_BYTES
    assert account[PageState.RESERVED] == account[PageState.QUARANTINED] == 2 * 10
    assert account[PageState.FREE] == 2 * (SLAB_BYTES - 20)
    assert ledger_holds(pool)


def test_a_page_gets_a_new_generation_each_time_it_is_taken():
    pool = make()
    pages = pool.take("latent", 2)
    first = pool.spaces["latent"].generation[pages].tolist()
    pool.give("latent", pages)
    again = pool.take("latent", 2)
    assert again.tolist() == pages.tolist()
    assert pool.spaces["latent"].generation[again].tolist() == [g + 1 for g in first]


def test_what_does_not_fit_takes_nothing():
    pool = make()
    assert pool.take("latent", 5) is None
    assert pool.free_slabs == 4
    assert pool.account()[PageState.FREE] == pool.capacity_bytes


def test_giving_what_is_free_is_our_own_bug():
    pool = make()
    pages = pool.take("latent", 1)
    pool.give("latent", pages)
    with pytest.raises(AssertionError):
        pool.give("latent", pages)
    with pytest.raises(AssertionError, match="a free page can't become READY"):
        pool.settle("latent", pages, PageState.READY)
    with pytest.raises(AssertionError, match="page 1 is FREE, not READY"):
        pool.spaces["latent"].move(np.array([1]), PageState.READY, PageState.DRAINING)


def test_classes_must_nest():
    with pytest.raises(AssertionError, match="nest"):
        Pool("x", "device", 1, 4, {"a": 2, "b": 3}, 60)
