"""Windows for kernels: all launches of a pass together, then none until the pause is over."""

from __future__ import annotations

import itertools
import random

import pytest

from kvmanager.transport.kernel_windows import PAUSE_NS, KernelWindows, pause_bridged_by
from kvmanager.units import GIB, MIB


class Clock:
    now_ns = 5

    def __call__(self) -> int:
        return self.now_ns


def test_a_pass_launches_all_it_has_and_the_next_waits() -> None:
    clock = Clock()
    windows = KernelWindows(100, clock)
    windows.begin_pass()
    for _ in range(3):
        assert windows.open
        windows.launched()
        clock.now_ns += 10
    windows.end_pass()
    assert not windows.open
    windows.begin_pass()
    assert not windows.open
    windows.end_pass()
    clock.now_ns = 104
    assert not windows.open
    clock.now_ns = 105
    assert windows.open


@pytest.mark.parametrize("seed", range(20))
def test_windows_never_begin_within_a_pause(seed: int) -> None:
    draw, clock = random.Random(seed), Clock()
    pause = draw.choice([0, 1, 70, 1000])
    windows = KernelWindows(pause, clock)
    begun: list[int] = []
    for _ in range(300):
        clock.now_ns += draw.randint(0, 300)
        windows.begin_pass()
        opened, first = windows.open, clock.now_ns
        launches = draw.randint(0, 3)
        for _ in range(launches if opened else 0):
            assert windows.open, "a window lasts as long as the pass"
            windows.launched()
            clock.now_ns += draw.randint(0, 2)
        windows.end_pass()
        if opened and launches:
            begun.append(first)
        assert opened or begun, "nothing was launched before: it is open"
    assert len(begun) > 10
    assert all(later - earlier >= pause for earlier, later in itertools.pairwise(begun))


def test_a_pass_longer_than_the_pause_begins_another_one() -> None:
    clock = Clock()
    windows = KernelWindows(100, clock)
    windows.begin_pass()
    windows.launched()
    clock.now_ns = 300
    assert windows.open
    windows.launched()
    windows.end_pass()
    clock.now_ns = 399
    assert not windows.open


def test_a_pause_that_a_small_ring_can_bridge_is_short() -> None:
    assert pause_bridged_by(0) == 0
    assert 500_000 < pause_bridged_by(64 * MIB) < 700_000
    assert pause_bridged_by(8 * GIB) == PAUSE_NS
