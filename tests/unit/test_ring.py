"""A pull cut into chunks: each pair of pages in one chunk, whatever the pattern; and what makes no sense is refused."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvmanager.core.plans import Box, CopyPlan, PagedCopies, PlacedPages, Purpose
from kvmanager.errors import InvalidArgument
from kvmanager.transport.executor import RegionMap
from kvmanager.transport.ring import RingPull

STAGING, TARGET = 1, 2
PAGE = 48


def _pattern(rng: random.Random, pages: int) -> PagedCopies:
    """Any pattern whose source pages are read: not in order, groups that share entries, or none at all."""
    placements, groups, advance = rng.randint(1, 5), rng.randint(0, 6), rng.randint(0, 4)
    entries = advance * max(groups - 1, 0) + 4
    source = [rng.randrange(pages) for _ in range(entries)]
    if rng.random() < 0.5:
        source.sort()
    sides = [
        PlacedPages(
            np.array(numbers, np.int64),
            advance,
            np.array([rng.randrange(4) for _ in range(placements)]),
            np.array([rng.randrange(3) for _ in range(placements)]),
        )
        for numbers in (source, range(100, 100 + entries))
    ]
    box = Box(rng.randrange(8), 7, 4, 5, PAGE, 1000, (2,), (8,), (16,), 4)
    return PagedCopies(STAGING, TARGET, groups, sides[0], sides[1], (box,))


def _moves(plan: CopyPlan) -> list[tuple[int, int, int]]:
    """(source, target, bytes) of every row."""
    found = []
    for c in plan.pieces():
        for source, target in zip(c.source_offsets.tolist(), c.target_offsets.tolist(), strict=True):
            for step in range(c.counts[0]):
                row = source + step * c.source_strides[0], target + step * c.target_strides[0], c.row_bytes
                found.append(row)
    return found


@settings(max_examples=200, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    pages=st.integers(1, 30),
    chunk_pages=st.integers(1, 9),
    slots=st.integers(1, 4),
    offset=st.sampled_from([0, 5, 2**31 - 3, 2**33]),
)
def test_chunks_are_the_placement_moved_to_where_the_pages_were_read(seed, pages, chunk_pages, slots, offset):
    note(f"seed {seed}")
    rng = random.Random(seed)
    placement = CopyPlan(9, Purpose.PLACE, tuple(_pattern(rng, pages) for _ in range(rng.randint(0, 3))))
    addresses = np.array([rng.randrange(2**63) for _ in range(pages)], np.uint64)
    ring = RingPull(addresses, PAGE, offset, slots, chunk_pages, rng.randrange(slots), placement)
    assert ring.chunks == -(-pages // chunk_pages)
    read, moved = [], []
    for chunk in range(ring.chunks):
        low, high = ring.staging_range(chunk)
        assert low == offset + (ring.first_slot + chunk) % slots * chunk_pages * PAGE
        at, offsets, lengths = ring.reads(chunk)
        assert (offsets.tolist(), set(lengths.tolist())) == (list(range(low, high, PAGE)), {PAGE})
        read += at.tolist()
        for source, target, size in _moves(ring.placed(chunk)):
            assert low <= source < source + size <= high, "out of this chunk's own place"
            moved.append((source - low + chunk * chunk_pages * PAGE, target, size))
    assert read == addresses.tolist()
    assert sorted(moved) == sorted(_moves(placement))


def _good() -> RingPull:
    sides = [PlacedPages(np.arange(4), 1, np.zeros(1, np.int64), np.zeros(1, np.int64)) for _ in range(2)]
    copies = PagedCopies(STAGING, TARGET, 4, sides[0], sides[1], (Box(0, 0, 0, 0, PAGE, PAGE, (), (), (), PAGE),))
    return RingPull(np.zeros(4, np.uint64), PAGE, 0, 2, 2, 1, CopyPlan(1, Purpose.PLACE, (copies,)))


def _with(**changes: object) -> RingPull:
    good = _good()
    (copies,) = good.placement.copies
    return replace(good, placement=replace(good.placement, copies=(replace(copies, **changes),)))


_BOX = _good().placement.copies[0].boxes[0]


@pytest.mark.parametrize(
    ("ring", "text"),
    [
        (replace(_good(), page_bytes=0), "each is at least 1"),
        (replace(_good(), slots=0), "each is at least 1"),
        (replace(_good(), chunk_pages=0), "each is at least 1"),
        (replace(_good(), first_slot=2), "slot 2 of a ring of 2"),
        (replace(_good(), slots=3), "leaves region 1 of 192 bytes"),
        (replace(_good(), offset=1), "leaves region 1"),
        (replace(_good(), addresses=np.zeros(3, np.uint64)), "page 3 is placed, which the pull does not read"),
        (_with(target_region=STAGING), "placement goes from staging"),
        (_with(source_region=TARGET), "placement goes from staging"),
        (_with(target_region=7), "region 7 is not mapped"),
        (_with(boxes=(replace(_BOX, source_page_stride=PAGE - 1),)), "of a page"),
        (_with(boxes=(replace(_BOX, row_bytes=PAGE + 1),)), "of a page"),
        (_with(boxes=(replace(_BOX, source_offset=-1),)), "of a page"),
        (_with(boxes=(replace(_BOX, target_offset=1),)), "leave region 2"),
        (_with(boxes=(replace(_BOX, target_page_stride=2**61),)), "leave region 2"),
    ],
)
def test_what_would_leave_its_place_is_refused(ring, text):
    regions = RegionMap()
    for region in (STAGING, TARGET):
        regions.add(region, np.zeros(4 * PAGE, np.uint8))
    _good().check(STAGING, regions)
    with pytest.raises(InvalidArgument, match=text):
        ring.check(STAGING, regions)
