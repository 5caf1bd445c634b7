"""Copies whose rows lie side by side in the target are written together, and every row goes where it went."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvmanager.core.plans import StridedCopies
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, native_layout
from kvmanager.transport.cpu import copy_piece, folded
from kvmanager.transport.runs import spread


def rows_of(c: StridedCopies) -> set[tuple[int, int]]:
    """(source, target) of every row."""
    source = spread(c.source_offsets, c.counts, c.source_strides)
    target = spread(c.target_offsets, c.counts, c.target_strides)
    return set(zip(source.tolist(), target.tolist(), strict=True))


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_permuted_page_of_the_deployment_is_written_without_gaps(ranks: int) -> None:
    layout, rng = native_layout(GLM53, 64), np.random.default_rng(ranks)
    source = SpanRun(0, TokenOrder(ranks, 1), (1,), np.arange(3 * ranks))
    target = SpanRun(0, SEQUENTIAL, (2,), rng.permutation(3 * ranks))
    pieces = [
        piece
        for c in copy_spans(layout, layout, [source], [target], 3 * ranks * 64)
        for box in c.boxes
        for piece in c.pieces(box)
    ]
    for piece in pieces:
        wide = folded(piece)
        assert rows_of(wide) == rows_of(piece)
        assert wide.total_bytes == piece.total_bytes
        assert len(wide.source_offsets) * ranks == len(piece.source_offsets), "one a target page"
        assert (wide.counts[-1], wide.target_strides[-1]) == (ranks, wide.row_bytes)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_offsets_no_row_is_lost(seed: int) -> None:
    """Sets that nearly fold: a row out of place, another step, a remainder. Bytes are copied both ways."""
    print("seed", seed)
    draw = random.Random(seed)
    row, inner, beside, apart = draw.choice([4, 24, 300]), draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4)
    groups = draw.randint(1, 3)
    source, target = [], []
    for group in range(groups):
        for k in range(beside):
            for j in range(apart):
                source.append((group * beside + k) * 8_000 + j * 1_000)
                target.append((group * apart + j) * 20_000 + k * row)
    for _ in range(draw.randint(0, 2)):
        place = draw.randrange(len(source))
        source[place] += draw.choice([0, 400])
        if draw.random() < 0.5:
            del source[place], target[place]
            break
    if not source:
        return
    offsets = np.asarray(source, np.int64), np.asarray(target, np.int64)
    c = StridedCopies(1, 2, *offsets, (inner,), (row + 8,), (beside * row,), row)
    assert rows_of(folded(c)) == rows_of(c)
    memory = np.random.default_rng(seed).integers(0, 256, 400_000, np.uint8)
    found, expected = (np.zeros(400_000, np.uint8) for _ in range(2))
    copy_piece(memory, found, folded(c))
    for at, to in rows_of(c):
        expected[to : to + row] = memory[at : at + row]
    assert np.array_equal(found, expected)
