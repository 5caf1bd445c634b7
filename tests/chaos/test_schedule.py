"""The schedule of kills is data: complete, reproducible, and of processes that there are."""

import random
from itertools import islice

from kvmanager.killpoints import POINTS
from tests.chaos.schedule import (
    PLACES,
    ROLES,
    SIMULATED,
    WIDEST,
    Kill,
    at_point,
    matrix,
    random_kills,
    sides_of,
    simulated,
)


def test_the_matrix_has_every_point_on_every_side_and_every_role_at_any_time():
    kills = matrix(1)
    pairs = [(kill.side, kill.point) for kill in kills if kill.point]
    assert sorted(pairs) == sorted((side, point) for point in POINTS for side in sides_of(point))
    assert {(kill.side, kill.role) for kill in kills if not kill.point} == set(PLACES)
    assert len(kills) == len(set(kills))


def test_a_seed_gives_the_same_kills():
    assert matrix(3) == matrix(3) != matrix(4)
    first = list(islice(random_kills(3), 50))
    assert first == list(islice(random_kills(3), 50))
    assert first != list(islice(random_kills(4), 50))


def test_random_kills_come_to_every_point_and_role():
    kills = list(islice(random_kills(0), 2000))
    assert {kill.point for kill in kills if kill.point} == set(POINTS)
    assert {(kill.side, kill.role) for kill in kills if not kill.point} == set(PLACES)
    assert all(kill.passage >= 1 and 0 <= kill.delay_s <= 0.5 for kill in kills)


def test_twenty_points_are_named_for_the_default_tests():
    assert len({(kill.side, kill.point) for kill in WIDEST}) == len(WIDEST) == 20
    assert {kill.role for kill in WIDEST} == set(ROLES)


def test_only_a_keeper_that_dies_with_its_daemon_costs_the_cache():
    assert at_point("source", "keeper.reclaim").costs_the_cache
    assert not at_point("source", "keeper.start_child").costs_the_cache
    assert not Kill("source", "daemon").costs_the_cache


def test_the_simulator_kills_its_daemon_at_each_of_its_points():
    draw = random.Random(0)
    kills = [simulated(draw) for _ in range(100)]
    assert {kill.point for kill in kills} == set(SIMULATED) <= set(POINTS)
    assert all(kill.role == "daemon" for kill in kills)
