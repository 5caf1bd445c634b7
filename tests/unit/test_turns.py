"""Whose turn it is: urgency first, a ring among equals, and a stated share for who would starve."""

import random

import pytest

from kvmanager.core.plans import Purpose, Urgency
from kvmanager.transport.turns import FAIR_TURNS, Turns


def filled(*purposes):
    turns = Turns()
    for number, purpose in enumerate(purposes):
        turns.put(purpose, number)
    return turns


def taken(turns):
    order = []
    while turns:
        order.append(turns.take(turns.purposes)[1])
    return order


def test_the_urgent_go_first_and_equals_in_their_order():
    turns = filled(Purpose.MIRROR, Purpose.SPILL, Purpose.OFFLOAD, Purpose.ONBOARD, Purpose.SPILL)
    order = taken(turns)
    assert order[:3] == [3, 1, 4]
    assert sorted(order[3:]) == [0, 2]


def test_every_purpose_has_an_urgency():
    assert {purpose.urgency for purpose in Purpose} == set(Urgency)


def test_purposes_of_one_urgency_take_turns():
    turns = filled(*[Purpose.OFFLOAD] * 6, *[Purpose.MIRROR] * 6)
    order = taken(turns)
    assert all(abs(sum(n < 6 for n in order[:k]) - k / 2) <= 1 for k in range(len(order)))


def test_of_seventeen_turns_one_is_of_who_waits_behind():
    """Endless rings of all three urgencies: the less urgent keep their share, the urgent nearly all."""
    turns = filled(Purpose.ONBOARD, Purpose.SPILL, Purpose.OFFLOAD)
    counts = dict.fromkeys((Purpose.ONBOARD, Purpose.SPILL, Purpose.OFFLOAD), 0)
    longest, since = 0, 0
    for _ in range(1700):
        purpose, item = turns.take(turns.purposes)
        turns.put(purpose, item)
        counts[purpose] += 1
        since = 0 if purpose is Purpose.OFFLOAD else since + 1
        longest = max(longest, since)
    assert longest <= FAIR_TURNS + 1
    assert counts[Purpose.SPILL] >= 1700 // (FAIR_TURNS + 2)
    assert counts[Purpose.ONBOARD] > 1400


@pytest.mark.parametrize("seed", range(5))
def test_nobody_waits_longer_than_stated(seed):
    """Whatever comes and may start: who waits and may start all the time is taken within a bounded count of turns."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    purposes = list(Purpose)
    turns, waits = Turns(), dict.fromkeys(purposes, 0)
    for step in range(3000):
        for purpose in draw.choices(purposes, k=draw.randint(0, 2)):
            turns.put(purpose, step)
        if not turns:
            continue
        may_start = [p for p in turns.purposes if draw.random() < 0.8]
        if not may_start:
            continue
        chosen, _ = turns.take(may_start)
        assert chosen in may_start
        for purpose in purposes:
            waits[purpose] = waits[purpose] + 1 if purpose in may_start and purpose is not chosen else waits[purpose]
        waits[chosen] = 0
        for purpose in set(purposes) - set(turns.purposes):
            waits[purpose] = 0
        assert max(waits.values()) <= FAIR_TURNS + len(purposes)


def test_what_may_not_start_is_passed_over_for_nothing():
    turns = filled(Purpose.OFFLOAD)
    for _ in range(3 * FAIR_TURNS):
        turns.put(Purpose.ONBOARD, 1)
        assert turns.take([Purpose.ONBOARD]) == (Purpose.ONBOARD, 1)
    turns.put(Purpose.ONBOARD, 2)
    assert turns.take(turns.purposes) == (Purpose.ONBOARD, 2), "it saved up no turns"


def test_dropping_takes_all_that_are_meant():
    turns = filled(Purpose.OFFLOAD, Purpose.ONBOARD, Purpose.OFFLOAD)
    assert turns.drop(lambda number: number != 2) == 2
    assert list(turns) == [2]
    assert turns.drop(lambda number: number == 2) == 1
    assert not turns
