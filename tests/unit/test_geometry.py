"""Placement against the published round-robin formula and worked vectors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.errors import InvalidArgument
from kvmanager.geometry import SEQUENTIAL, ShardGeometry, TokenOrder


@pytest.mark.parametrize(
    ("interleave", "position", "place"),
    [
        (1, 0, (0, 0, 0)), (1, 8, (0, 0, 1)), (1, 63, (0, 7, 7)), (1, 64, (0, 0, 8)), (1, 511, (0, 7, 63)),
        (1, 519, (1, 7, 0)), (1, 1002, (1, 2, 61)),
        (64, 63, (0, 0, 63)), (64, 64, (0, 1, 0)), (64, 519, (1, 0, 7)), (64, 1002, (1, 7, 42)),
    ],
)  # fmt: skip
def test_place_of_a_position_on_eight_ranks(interleave, position, place):
    geometry = ShardGeometry(8, 64, interleave)
    assert tuple(int(part[0]) for part in geometry.place(np.array([position]))) == place


@pytest.mark.parametrize(
    ("interleave", "tokens", "rows"),
    [
        (1, 5, [1] * 5 + [0] * 3),
        (64, 5, [5] + [0] * 7),
        (1, 513, [65] + [64] * 7),
        (1, 1003, [126] * 3 + [125] * 5),
        (64, 1003, [128] * 7 + [107]),
        (1, 4173, [522] * 5 + [521] * 3),
        (64, 4173, [576, 525] + [512] * 6),
    ],
)
def test_rows_on_each_rank(interleave, tokens, rows):
    geometry = ShardGeometry(8, 64, interleave)
    assert [geometry.rows_on_rank(tokens, rank) for rank in range(8)] == rows


def test_pages_and_full_spans():
    geometry = ShardGeometry(8, 64, 1)
    assert geometry.span_tokens == 512
    assert [geometry.spans(tokens) for tokens in (1, 512, 513, 1003, 4173, 1_048_576)] == [1, 1, 2, 2, 9, 2048]
    assert 4173 // geometry.span_tokens == 8


geometries = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5)).map(
    lambda values: ShardGeometry(values[0], values[1] * values[2], values[2])
)


@given(geometries, st.integers(0, 400))
def test_every_position_has_its_own_place_and_the_formula_agrees(geometry, tokens):
    ranks, rows, run = geometry.ranks, geometry.page_rows, geometry.interleave
    span, rank, slot = geometry.place(np.arange(tokens))
    assert len(set(zip(span.tolist(), rank.tolist(), slot.tolist(), strict=True))) == tokens
    assert tokens == 0 or slot.max() < rows
    for p in range(tokens):
        v, o = divmod(p, rows * ranks)
        assert (span[p], rank[p], slot[p]) == (v, o // run % ranks, o // (run * ranks) * run + o % run)
    counted = [int((rank == r).sum()) for r in range(ranks)]
    assert counted == [geometry.rows_on_rank(tokens, r) for r in range(ranks)]


def test_a_full_span_read_in_token_order_needs_a_permutation():
    """Destination page j, slot s holds position 64 j + s: rank s % 8, source slot 8 j + s // 8."""
    page, slot = TokenOrder(8, 1).place(np.arange(512))
    j, s = np.divmod(np.arange(512), 64)
    assert (page == s % 8).all()
    assert (slot == 8 * j + s // 8).all()


def test_bad_geometries_name_their_values():
    with pytest.raises(InvalidArgument, match=r"\(0, 1\)"):
        TokenOrder(0, 1)
    with pytest.raises(InvalidArgument, match="interleave 3 does not divide a page of 64 rows"):
        ShardGeometry(8, 64, 3)
    with pytest.raises(InvalidArgument, match="0 ranks"):
        ShardGeometry(0, 64, 1)
    assert TokenOrder(1, 1) == SEQUENTIAL
