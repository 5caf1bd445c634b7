"""The staging ring against a model of bytes in use."""

import random

import pytest

from kvmanager.allocators.bump import StagingRing
from kvmanager.errors import InvalidArgument


def test_blocks_come_in_order_and_wrap_when_the_oldest_end():
    ring = StagingRing(1024)
    assert [ring.take(256) for _ in range(5)] == [0, 256, 512, 768, None]
    ring.give_back(256)
    assert ring.take(256) is None, "the oldest block still holds the ring"
    ring.give_back(0)
    assert ring.take(512) == 0
    assert ring.take(1) is None
    assert len(ring) == 3
    assert ring.held_bytes == 1024


def test_an_empty_ring_takes_its_whole_size_wherever_it_stood():
    ring = StagingRing(1024)
    ring.give_back(ring.take(300))
    ring.give_back(ring.take(700))
    assert ring.take(1024) == 0
    assert ring.take(1) is None


def test_a_short_end_is_left_out():
    ring = StagingRing(1024)
    first, second = ring.take(512), ring.take(256)
    ring.give_back(first)
    assert ring.take(512) == 0, "256 bytes at the end are too short"
    assert ring.take(256) is None
    ring.give_back(second)
    ring.give_back(0)
    assert len(ring) == ring.held_bytes == 0


@pytest.mark.parametrize("size", [0, -1, 1025])
def test_sizes_it_can_never_hold(size):
    with pytest.raises(InvalidArgument):
        StagingRing(1024).take(size)


@pytest.mark.parametrize(("capacity", "align"), [(0, 256), (1000, 256), (1024, 0)])
def test_rings_that_can_not_be(capacity, align):
    with pytest.raises(InvalidArgument):
        StagingRing(capacity, align)


def test_a_block_ends_once():
    ring = StagingRing(1024)
    ring.take(1)
    ring.take(1)
    ring.give_back(256)
    with pytest.raises(AssertionError):
        ring.give_back(256)
    with pytest.raises(KeyError):
        ring.give_back(512)


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_out_twice(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    ring = StagingRing(4096, 64)
    out: dict[int, int] = {}
    refusals = 0
    for _ in range(2000):
        if out and rng.random() < 0.48:
            offset = rng.choice(list(out))
            del out[offset]
            ring.give_back(offset)
        else:
            size = rng.choice((1, 64, 65, 500, 1500, 4096))
            offset = ring.take(size)
            if offset is None:
                refusals += 1
                continue
            assert offset % 64 == 0
            assert 0 <= offset <= 4096 - size
            assert all(offset + size <= other or other + length <= offset for other, length in out.items())
            out[offset] = size
        assert len(ring) == len(out)
    assert refusals, "a ring that never fills proves nothing"
    for offset in list(out):
        ring.give_back(offset)
    assert ring.take(4096) == 0
