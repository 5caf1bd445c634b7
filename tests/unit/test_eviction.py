"""Policies as pure functions, and the rule that children go before parents whatever a policy says."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.core.eviction import Candidates, joint_owner, leaf_first_lru, return_rate
from kvmanager.core.reclaim import children_first
from kvmanager.core.spans import NO_OWNER, NO_SPAN, SHARED


def _candidates(*rows: tuple[int, int, int, bool, float]) -> Candidates:
    """Rows of (last used, first token, owner, dead, rate)."""
    used, first, owner, dead, rate = zip(*rows, strict=True)
    return Candidates(
        np.array(used),
        np.array(first),
        np.array(owner, np.int32),
        np.array(dead),
        np.array(rate, np.float64),
        np.zeros(len(rows), bool),
        np.ones(len(rows)),
    )


def test_lru_takes_the_deepest_of_the_oldest() -> None:
    order = leaf_first_lru(_candidates((5, 0, 0, False, 0), (5, 64, 0, False, 0), (1, 0, 0, False, 0)))
    assert order.tolist() == [2, 1, 0]


def test_return_rate_takes_dead_then_unlikely_then_shared() -> None:
    rows = [
        (9, 0, SHARED, False, 0.0),
        (9, 512, 7, False, 0.5),
        (9, 1024, 7, False, 0.5),
        (9, 512, 8, False, 0.1),
        (9, 512, 7, True, 0.5),
        (2, 0, NO_OWNER, False, 0.0),
    ]
    assert return_rate(_candidates(*rows)).tolist() == [4, 3, 2, 1, 5, 0]


def test_a_second_session_makes_spans_shared_for_good() -> None:
    once = joint_owner(np.array([NO_OWNER, 3, 4, SHARED], np.int32), 3)
    assert once.tolist() == [3, 3, SHARED, SHARED]


@given(st.data())
def test_children_first(data: st.DataObject) -> None:
    """Against the definition, over random trees, candidate sets and orders; and nothing moves without need."""
    spans = data.draw(st.integers(1, 14))
    parent = np.array([data.draw(st.integers(-1, row - 1)) for row in range(spans)], np.int32)
    rows = np.array(sorted(data.draw(st.sets(st.integers(0, spans - 1), min_size=1))))
    order = np.array(data.draw(st.permutations(range(len(rows)))))
    result = rows[children_first(order, rows, parent)].tolist()
    assert sorted(result) == rows.tolist()
    place = {row: at for at, row in enumerate(result)}
    for row in result:
        above = int(parent[row])
        if above != NO_SPAN and above in place:
            assert place[row] < place[above]
    given_place = {row: at for at, row in enumerate(rows[order].tolist())}
    if all(p == NO_SPAN or p not in given_place or given_place[r] < given_place[p] for r, p in enumerate(parent)
           if r in given_place):  # fmt: skip
        assert result == rows[order].tolist()
