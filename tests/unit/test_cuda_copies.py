"""How strided copies become batched runs and 3-D copies, without a GPU: the shapes carry the same bytes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvmanager.core.plans import CopyPlan, Purpose, StridedCopies
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, native_layout
from kvmanager.transport.cuda_copies import LONG_ROW_BYTES, Box, as_box, cut_at
from kvmanager.transport.pinned import chunk_bounds
from kvmanager.transport.runs import spread
from kvmanager.units import GIB

MAX_PITCH = 2**31 - 1


def never(_: StridedCopies) -> bool:
    return False


def pairs(c: StridedCopies) -> set[tuple[int, int, int]]:
    """(source, target, bytes) of every row."""
    source = spread(c.source_offsets, c.counts, c.source_strides)
    target = spread(c.target_offsets, c.counts, c.target_strides)
    return {(s, t, c.row_bytes) for s, t in zip(source.tolist(), target.tolist(), strict=True)}


def box_pairs(part: StridedCopies, box: Box) -> set[tuple[int, int, int]]:
    """What the driver copies for each offset: depth slices of height rows, a slice `heights` rows of `pitch` long."""
    found = set()
    for s, t in zip(part.source_offsets.tolist(), part.target_offsets.tolist(), strict=True):
        for z in range(box.depth):
            for y in range(box.height):
                places = [
                    start + (z * height + y) * pitch
                    for start, height, pitch in zip((s, t), box.heights, box.pitches, strict=True)
                ]
                found.add((places[0], places[1], box.width))
    return found


def _stride(rng: random.Random, pitch: int) -> int:
    """Whole pitches, few or many, or any number of bytes."""
    return rng.choice((pitch * rng.randint(1, 5), pitch * rng.randint(1, 40), rng.randint(-3000, 9000)))


@pytest.mark.parametrize("seed", range(200))
def test_a_box_copies_the_rows_of_its_set(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    row = rng.choice((1, 128, 656))
    counts = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
    strides = []
    for _ in range(2):
        pitch = row * rng.randint(1, 3)
        strides.append(tuple(_stride(rng, pitch) for _ in counts))
    offsets = np.array(rng.sample(range(10**6, 2 * 10**6), 3))
    c = StridedCopies(1, 2, offsets, offsets[::-1].copy(), counts, strides[0], strides[1], row)
    part, box = as_box(c, MAX_PITCH, never)
    if box is None:
        assert part is c
        return
    assert box.height * box.depth > 1
    for pitch, height in zip(box.pitches, box.heights, strict=True):
        assert row <= pitch <= MAX_PITCH
        assert height >= box.height
    assert box_pairs(part, box) == pairs(c)


def test_the_permute_of_a_page_goes_as_boxes_of_many_groups() -> None:
    """DCP8 interleave 1 to sequential: per page pair one box for all groups of four layers, few for the rest."""
    layout = native_layout(GLM53, 64)
    source = SpanRun(0, TokenOrder(8, 1), (1,), np.arange(8))
    copies = copy_spans(layout, layout, [source], [SpanRun(0, SEQUENTIAL, (2,), np.arange(8))], 512)
    together = list(CopyPlan(1, Purpose.PLACE, copies).pieces())
    assert sum(c.total_bytes for c in together) == 8 * layout.page_bytes
    calls = rows = 0
    for c in together:
        part, box = as_box(c, MAX_PITCH, never)
        if box is not None:
            calls += len(part.source_offsets)
            rows += len(part.source_offsets) * box.height * box.depth
    assert rows > 40 * calls, f"{rows} rows in {calls} calls"
    assert calls == 64 * (1 + 1 + 1 + 8 + 1), "index values lie so that only one extent fits a 3-D copy"


def test_long_rows_and_what_crosses_a_bound_go_as_runs() -> None:
    zero = np.zeros(1, np.int64)
    strides = ((2 * LONG_ROW_BYTES,), (LONG_ROW_BYTES,))
    long = StridedCopies(1, 2, zero, zero, (4,), *strides, LONG_ROW_BYTES)
    assert as_box(long, MAX_PITCH, never) == (long, None)
    short = StridedCopies(1, 2, zero, zero, (4,), *strides, 656)
    assert as_box(short, MAX_PITCH, never)[1] is not None
    assert as_box(short, MAX_PITCH, lambda _: True) == (short, None)
    assert as_box(short, 2 * LONG_ROW_BYTES - 1, never) == (short, None), "a pitch that the device can't have"


@pytest.mark.parametrize("seed", range(50))
def test_cut_runs_cover_the_same_bytes_and_cross_no_bound(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, 12)
    source, target = (rng.permutation(12) * 40 + int(shift) for shift in rng.integers(0, 30, 2))
    limits = [tuple(sorted(set(rng.integers(1, 500, 3).tolist()))) for _ in range(2)]
    cut = cut_at(source, target, lengths, *limits)

    def covered(runs) -> set[tuple[int, int]]:
        return {(s + i, t + i) for s, t, n in zip(*(a.tolist() for a in runs), strict=True) for i in range(n)}

    assert covered(cut) == covered((source, target, lengths))
    assert cut[2].sum() == lengths.sum()
    for starts, bounds in zip(cut[:2], limits, strict=True):
        for start, length in zip(starts.tolist(), cut[2].tolist(), strict=True):
            assert not any(start < bound < start + length for bound in bounds)


def test_chunks_end_with_pages_of_both_kinds() -> None:
    page = native_layout(GLM53, 64).page_bytes
    size = 5000 * 8 * page
    bounds = chunk_bounds(size, page)
    assert bounds
    edges = (0, *bounds, size)
    assert all(0 < b - a <= 64 * GIB for a, b in itertools.pairwise(edges))
    assert all(b % page == 0 and b % 4096 == 0 for b in bounds)
    assert chunk_bounds(64 * GIB, page) == ()
    with pytest.raises(InvalidArgument, match="no bound"):
        chunk_bounds(10 * page, page, page)
