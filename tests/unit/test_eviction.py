"""Policies as pure functions, the rule that children go before parents, and rankings against a full sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.core.eviction import DEAD_SHARE, POLICIES, Kinds, joint_owner, leaf_first_lru, ranks, return_rate
from kvmanager.core.ranking import Ranking, children_first, numbered, policy_ranks
from kvmanager.core.return_rate import SessionBook
from kvmanager.core.spans import NO_OWNER, NO_SPAN, SHARED, SpanTable
from kvmanager.core.spec import MissCosts
from kvmanager.geometry import SEQUENTIAL

Array = npt.NDArray[Any]
Columns = dict[str, Array]
COSTS = MissCosts(0.3, 1.0)


def _kinds(*rows: tuple[int, bool, float, bool]) -> Kinds:
    """Rows of (owner, dead, rate, reloadable)."""
    owner, dead, rate, reloadable = zip(*rows, strict=True)
    return Kinds(
        np.array(owner, np.int32),
        np.array(dead),
        np.array(rate, np.float64),
        np.array(reloadable),
        np.ones(len(rows)),
    )


def test_for_lru_only_a_second_copy_makes_a_difference() -> None:
    told = _kinds((7, False, 0.5, False), (NO_OWNER, True, 0, False), (8, False, 0.1, True))
    assert leaf_first_lru(told).tolist() == [1, 1, 0]


def test_return_rate_takes_dead_then_unlikely_then_shared() -> None:
    shared, likely, unlikely, as_unlikely, dead, unclaimed = range(6)
    told = _kinds(
        (SHARED, False, 0.0, False),
        (7, False, 0.5, False),
        (8, False, 0.1, False),
        (9, False, 0.1, False),
        (7, True, 0.5, False),
        (NO_OWNER, False, 0.0, False),
    )
    found = return_rate(told)
    assert np.argsort(found, kind="stable").tolist() == [dead, unlikely, as_unlikely, likely, shared, unclaimed]
    assert found[unlikely] == found[as_unlikely]
    assert found[shared] == found[unclaimed]


def test_ranks_have_no_gaps_and_the_last_key_counts_most() -> None:
    assert ranks(np.array([0.5, 0.1, 0.5]), np.array([2, 2, 1])).tolist() == [2, 1, 0]
    assert ranks(np.array([0.5, 0.5, 0.1])).tolist() == [1, 1, 0]
    assert ranks(np.array([])).tolist() == []


def test_a_second_session_makes_spans_shared_for_good() -> None:
    once = joint_owner(np.array([NO_OWNER, 3, 4, SHARED], np.int32), 3)
    assert once.tolist() == [3, 3, SHARED, SHARED]


@given(st.lists(st.one_of(st.integers(-2, 5), st.integers(-2, 2**31 - 1))))
def test_values_are_numbered(values: list[int]) -> None:
    distinct, which = numbered(np.array(values, np.int32))
    assert distinct.tolist() == sorted(set(values))
    assert distinct[which].tolist() == values


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


def _tier_and_rate(spans: Columns) -> tuple[Array, Array]:
    claimed = (spans["owner"] >= 0) & ~spans["dead"]
    return np.where(spans["dead"], 0, np.where(claimed, 1, 2)), np.where(claimed, spans["rate"], 0.0)


def _full_sort(name: str, spans: Columns) -> Array:
    """What policies were before they ranked kinds: one sort of all spans by all keys."""
    tier, rate = _tier_and_rate(spans)
    chance = np.where(spans["dead"], DEAD_SHARE * spans["rate"], np.where(tier == 2, rate.max(initial=0.0), rate))
    cost = chance * np.where(spans["reloadable"], COSTS.reload_s, COSTS.prefill_s)
    lost = ~spans["reloadable"]
    keys = {"lru": (lost,), "return-rate": (rate, tier, lost), "return-cost": (cost, (tier == 2) & lost)}[name]
    return np.lexsort((-spans["first_token"], spans["last_used"], *keys))


class _Book(SessionBook):
    """Sessions with rates that were drawn."""

    def __init__(self, rates: list[float]) -> None:
        super().__init__()
        self._rates = rates

    def indexes(self, numbers: Array, now_ns: int) -> Array:
        del now_ns
        return np.array([self._rates[n] if n >= 0 else 0.0 for n in numbers.tolist()])


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
def test_the_first_of_a_ranking_are_those_of_a_full_sort(name: str, data: st.DataObject) -> None:
    """Every prefix, over random trees, sessions that meet in any way, and candidates with gaps between them."""
    spans, sessions = data.draw(st.integers(1, 40)), 4
    table = SpanTable(1, 1)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = np.array([table.add(int(draw.integers(3)), SEQUENTIAL, int(draw.integers(4))) for _ in range(spans)])
    table.parent[rows] = [rows[draw.integers(i)] if i and draw.random() < 0.8 else NO_SPAN for i in range(spans)]
    table.owner[rows] = draw.integers(-2, sessions, spans)
    table.dead[rows] = draw.random(spans) < 0.2
    stays = np.zeros(len(table.live), bool)
    stays[rows] = draw.random(spans) < data.draw(st.sampled_from([0.0, 0.3]))
    rates = draw.choice([0.0, 0.1, 0.5], sessions).tolist()
    some = np.sort(rows[draw.random(spans) < data.draw(st.sampled_from([0.5, 1.0]))])

    rank = policy_ranks(POLICIES[name], _Book(rates), COSTS, table, some, stays[some], 0)
    parent = np.where(stays[table.parent], NO_SPAN, table.parent)
    ranking = Ranking(table, some, rank, parent)

    columns = {field: getattr(table, field)[some] for field in ("first_token", "last_used", "owner", "dead")}
    columns |= {"rate": _Book(rates).indexes(columns["owner"], 0), "reloadable": stays[some]}
    expected = some[children_first(_full_sort(name, columns), some, parent)].tolist()
    assert len(ranking) == len(expected)
    for count in range(len(some) + 2):
        assert ranking.first(count).tolist() == expected[:count]
