"""Copy plans between any two layouts, executed by the cpu executor and compared byte by byte.

The model knows nothing of plans: it deals tokens out one at a time and copies each component of each
token on its own.
"""

import itertools
import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvmanager.allocators.backing import map_fd
from kvmanager.core.plans import CopyPlan, Purpose, Rows, StridedCopies, copy_rows, copy_whole_pages
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import ShardGeometry, TokenOrder
from kvmanager.layout import (
    GLM53,
    GLM53_TINY,
    KVFormat,
    indexer_layout,
    latent_layout,
    layer_major_layout,
    layer_outermost_layout,
    native_layout,
)
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.runs import plan_runs, slices
from kvmanager.wire import plan_from_proto, plan_to_proto

POISON = 0xA5
SMALL = KVFormat(
    "small", ((0,), (1, 2), (3, 4, 5), (6,)), latent_row_bytes=12, index_value_bytes=8, index_scale_bytes=4
)

WHOLE = {
    "native": lambda f, rows, _: native_layout(f, rows),
    "layer-major": lambda f, rows, _: layer_major_layout(f, rows),
    "layer-outermost": layer_outermost_layout,
}
PARTS = {
    "latent": lambda f, rows, _: latent_layout(f, rows),
    "indexer": lambda f, rows, _: indexer_layout(f, rows),
}


@dataclass(frozen=True)
class Side:
    """One side of a copy: a layout, `ranks` regions of `pages` pages, and where each token lies."""

    layout: object
    pages: int
    ranks: int
    places: list  # (rank, page, slot) of each token

    def region_bytes(self) -> int:
        return max(c.offset + self.pages * c.page_stride for c in self.layout.components)

    def rows(self, first_region: int, keep: list[int]) -> Rows:
        rank, page, slot = np.array([self.places[k] for k in keep], dtype=np.int64).reshape(-1, 3).T
        return Rows((rank + first_region).astype(np.int32), page, slot)


def _deal(tokens: int, piles: int, rows: int, interleave: int) -> list[tuple[int, int, int]]:
    """(span, pile, slot) of each token, dealt like cards: `interleave` to a pile, then the next pile."""
    places, span, pile, filled = [], 0, 0, [0] * piles
    in_turn = 0
    for _ in range(tokens):
        places.append((span, pile, filled[pile]))
        filled[pile] += 1
        in_turn += 1
        if in_turn == interleave:
            pile, in_turn = (pile + 1) % piles, 0
        if filled == [rows] * piles:
            span, pile, in_turn, filled = span + 1, 0, 0, [0] * piles
    return places


def _side(rng: random.Random, layout_name: str, format_, tokens: int) -> Side:
    """A side with a random geometry: piles are ranks of a shard group, or pages of one rank."""
    rows = rng.choice((2, 4, 8, 16))
    piles = rng.choice((1, 1, 2, 3, 8))
    interleave = rng.choice([i for i in (1, 2, 4, 8, 16) if rows % i == 0])
    sharded = rng.random() < 0.5
    dealt = _deal(tokens, piles, rows, interleave)
    spans = dealt[-1][0] + 1 if dealt else 0
    pages = spans * (1 if sharded else piles) + rng.randint(1, 3)
    names = rng.sample(range(pages), pages)
    if sharded:
        places = [(pile, names[span], slot) for span, pile, slot in dealt]
    else:
        places = [(0, names[span * piles + pile], slot) for span, pile, slot in dealt]
    return Side({**WHOLE, **PARTS}[layout_name](format_, rows, pages), pages, piles if sharded else 1, places)


def _run(plan: CopyPlan, regions: RegionMap) -> None:
    executor = CpuExecutor(regions)
    executor.submit(plan)
    completions = []
    while executor.outstanding():
        completions += executor.poll()
    (completion,) = completions
    assert completion.outcome is Outcome.DONE, completion.error
    assert completion.moved_bytes == plan.total_bytes


def _component_bytes(layout, place: tuple[int, int, int], key) -> tuple[int, slice]:
    c = layout.by_key[key]
    rank, page, slot = place
    start = c.offset + page * c.page_stride + slot * c.slot_stride
    return rank, slice(start, start + c.row_bytes)


def _check(source: Side, target: Side, keep: list[int], seed: int) -> CopyPlan:
    """Runs the plan for the tokens in `keep` (in this order) and compares all target bytes with the model's."""
    rng = np.random.default_rng(seed)
    regions = RegionMap()
    for rank in range(source.ranks):
        regions.add(1 + rank, rng.integers(0, 256, source.region_bytes(), dtype=np.uint8))
    for rank in range(target.ranks):
        regions.add(100 + rank, np.full(target.region_bytes(), POISON, dtype=np.uint8))
    expected = [regions[100 + rank].copy() for rank in range(target.ranks)]
    for token in keep:
        for key in target.layout.by_key:
            source_rank, source_bytes = _component_bytes(source.layout, source.places[token], key)
            target_rank, target_bytes = _component_bytes(target.layout, target.places[token], key)
            expected[target_rank][target_bytes] = regions[1 + source_rank][source_bytes]
    copies = copy_rows(source.layout, target.layout, source.rows(1, keep), target.rows(100, keep))
    plan = plan_from_proto(plan_to_proto(CopyPlan(1, Purpose.PLACE, copies)))
    assert plan.total_bytes == len(keep) * sum(c.row_bytes for c in target.layout.components)
    _run(plan, regions)
    for rank in range(target.ranks):
        assert np.array_equal(regions[100 + rank], expected[rank]), f"rank {rank}"
    return plan


@settings(max_examples=120, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    source_name=st.sampled_from(sorted(WHOLE)),
    target_name=st.sampled_from(sorted({**WHOLE, **PARTS})),
    tokens=st.integers(0, 90),
    skipped=st.integers(0, 40),
)
def test_any_layout_into_any_other(seed, source_name, target_name, tokens, skipped):
    note(f"seed {seed}")
    rng = random.Random(seed)
    source = _side(rng, source_name, SMALL, tokens)
    target = _side(rng, target_name, SMALL, tokens)
    keep = list(range(min(skipped, tokens), tokens))
    if rng.random() < 0.3:
        keep = [token for token in keep if rng.random() < 0.7]
    if rng.random() < 0.3:
        rng.shuffle(keep)
    _check(source, target, keep, seed)


@settings(max_examples=15, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 300), split=st.sampled_from(["latent", "indexer"]))
def test_the_tiny_formats_prefill_pages_split_into_a_decode_ranks_classes(seed, tokens, split):
    """8 ranks x 16 rows, interleave 1, into sequential latent or indexer pages of one rank."""
    note(f"seed {seed}")
    rng = random.Random(seed)
    spans = -(-tokens // 128)
    source_names, target_names = rng.sample(range(spans + 2), spans), rng.sample(range(spans * 8 + 3), spans * 8)
    source = Side(
        native_layout(GLM53_TINY, 16),
        spans + 2,
        8,
        [(r, source_names[s], slot) for s, r, slot in _deal(tokens, 8, 16, 1)],
    )
    target = Side(
        PARTS[split](GLM53_TINY, 16, 0), spans * 8 + 3, 1, [(0, target_names[p // 16], p % 16) for p in range(tokens)]
    )
    _check(source, target, list(range(tokens)), seed)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1), valid=st.integers(0, 32), ranks=st.sampled_from([1, 2, 4]))
def test_copy_on_write_takes_the_valid_slots_and_no_other(seed, valid, ranks):
    note(f"seed {seed}")
    layout = native_layout(SMALL, 8)
    valid = min(valid, 8 * ranks)
    donor, mine = random.Random(seed).sample(range(5), 2)
    dealt = _deal(valid, ranks, 8, 1)
    source = Side(layout, 5, ranks, [(r, donor, slot) for _, r, slot in dealt])
    target = Side(layout, 5, ranks, [(r, mine, slot) for _, r, slot in dealt])
    _check(source, target, list(range(valid)), seed)


def test_ranks_that_own_nothing_get_no_copies_and_the_plan_still_completes():
    layout = native_layout(SMALL, 8)
    places = _deal(3, 8, 8, 1)
    side = Side(layout, 2, 8, [(r, s, slot) for s, r, slot in places])
    plan = _check(side, side, [0, 1, 2], seed=1)
    assert {c.source_region for c in plan.copies} == {1, 2, 3}
    assert _check(side, side, [], seed=1).copies == ()


@settings(max_examples=100, deadline=None, print_blob=True)
@given(
    ranks=st.sampled_from([1, 2, 3, 8]),
    rows=st.sampled_from([1, 2, 4, 8, 16]),
    interleave=st.sampled_from([1, 2, 4, 8, 16]),
    tokens=st.integers(0, 200),
)
def test_geometry_deals_tokens_as_cards_are_dealt(ranks, rows, interleave, tokens):
    """The formula that the daemon uses against the model that these tests use."""
    interleave = min(interleave, rows)
    dealt = _deal(tokens, ranks, rows, interleave)
    geometry = ShardGeometry(ranks, rows, interleave)
    span, rank, slot = geometry.place(np.arange(tokens))
    assert list(zip(span.tolist(), rank.tolist(), slot.tolist(), strict=True)) == dealt
    for r in range(ranks):
        assert geometry.rows_on_rank(tokens, r) == sum(pile == r for _, pile, _ in dealt)
    in_span = TokenOrder(ranks, interleave).place(np.arange(min(tokens, ranks * rows)))
    assert list(zip(*(a.tolist() for a in in_span), strict=True)) == [(p, s) for _, p, s in dealt[: ranks * rows]]


@settings(max_examples=60, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1), pages=st.integers(0, 40))
def test_whole_pages_move_and_neighbours_are_joined(seed, pages):
    note(f"seed {seed}")
    rng = np.random.default_rng(seed)
    page = 96
    regions = RegionMap()
    for rank in (0, 1):
        regions.add(1 + rank, rng.integers(0, 256, 64 * page, dtype=np.uint8))
        regions.add(100 + rank, np.full(64 * page, POISON, dtype=np.uint8))
    expected = [regions[100 + rank].reshape(64, page).copy() for rank in (0, 1)]
    if seed % 2:
        source, target = rng.permutation(64)[:pages], rng.permutation(64)[:pages]
    else:
        source, target = np.arange(pages), np.arange(pages) + 3
    for rank in (0, 1):
        expected[rank][target] = regions[1 + rank].reshape(64, page)[source]
    plan = CopyPlan(1, Purpose.OFFLOAD, copy_whole_pages(page, (1, 2), source, (100, 101), target))
    _run(plan, regions)
    for rank in (0, 1):
        assert np.array_equal(regions[100 + rank].reshape(64, page), expected[rank])
    if pages and not seed % 2:
        assert plan.runs == 2, "one run a rank"


@settings(max_examples=60, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1), most_bytes=st.integers(1, 3000), most_runs=st.integers(1, 50))
def test_slices_and_runs_cover_a_plan_exactly_once(seed, most_bytes, most_runs):
    """Both ways of taking a plan apart write each byte of the target once, from the right source byte."""
    note(f"seed {seed}")
    rng = random.Random(seed)
    source, target = _side(rng, "native", SMALL, 40), _side(rng, "layer-major", SMALL, 40)
    keep = list(range(40))
    copies = copy_rows(source.layout, target.layout, source.rows(1, keep), target.rows(100, keep))

    def pairs(parts):
        found = {}
        for runs in plan_runs(CopyPlan(1, Purpose.PLACE, tuple(parts))):
            for s, t, n in zip(runs.source.tolist(), runs.target.tolist(), runs.lengths.tolist(), strict=True):
                for byte in range(n):
                    assert found.setdefault((runs.target_region, t + byte), (runs.source_region, s + byte)) == (
                        runs.source_region,
                        s + byte,
                    )
        return found

    pieces = [piece for c in copies for piece in slices(c, most_bytes, most_runs)]
    assert all(p.total_bytes <= most_bytes and p.runs <= most_runs for p in pieces)
    assert sum(p.total_bytes for p in pieces) == sum(c.total_bytes for c in copies)
    assert pairs(pieces) == pairs(copies)
    assert len(pairs(copies)) == sum(c.total_bytes for c in copies)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    counts=st.lists(st.integers(1, 6), max_size=3),
    row_bytes=st.integers(1, 40),
    copies=st.integers(0, 5),
    most_bytes=st.integers(1, 400),
    most_runs=st.integers(1, 20),
)
def test_slices_of_any_box_are_its_bytes_in_order(seed, counts, row_bytes, copies, most_bytes, most_runs):
    note(f"seed {seed}")
    rng = random.Random(seed)
    offsets = [np.array([rng.randrange(10**12) for _ in range(copies)], dtype=np.int64) for _ in range(2)]
    strides = [tuple(rng.randrange(-(10**9), 10**9) for _ in counts) for _ in range(2)]
    whole = StridedCopies(1, 2, *offsets, tuple(counts), *strides, row_bytes)

    def pairs(c):
        """(source, target) of every byte, by nested loops."""
        found = []
        for s, t in zip(c.source_offsets.tolist(), c.target_offsets.tolist(), strict=True):
            for index in itertools.product(*map(range, c.counts), range(c.row_bytes)):
                steps = list(zip(index, (*c.source_strides, 1), (*c.target_strides, 1), strict=True))
                found.append((s + sum(i * a for i, a, _ in steps), t + sum(i * b for i, _, b in steps)))
        return found

    pieces = list(slices(whole, most_bytes, most_runs))
    assert [pair for piece in pieces for pair in pairs(piece)] == pairs(whole)
    assert all(p.total_bytes <= most_bytes and p.runs <= most_runs for p in pieces)


def test_a_section_left_behind_is_refused():
    rows = Rows(np.zeros(1, np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(LayoutMismatch):
        copy_rows(latent_layout(SMALL, 8), native_layout(SMALL, 8), rows, rows)


_PAGE_613_AND_ON = [612, 613, 614, 1225, 1226, 1227, 1300]


def test_offsets_of_pages_beyond_two_to_the_31_and_32_are_exact():
    layout = native_layout(GLM53, 64)
    assert layout.page_bytes == 3_502_592
    pages = np.array(_PAGE_613_AND_ON)
    plan = CopyPlan(1, Purpose.OFFLOAD, copy_whole_pages(layout.page_bytes, (1,), pages, (2,), pages[::-1].copy()))
    found = {}
    for c in plan.copies:
        assert c.source_offsets.dtype == c.target_offsets.dtype == np.int64
        found |= dict(zip(c.source_offsets.tolist(), c.target_offsets.tolist(), strict=True))
    expected = dict(zip(_PAGE_613_AND_ON, reversed(_PAGE_613_AND_ON), strict=True))
    assert found == {s * 3_502_592: t * 3_502_592 for s, t in expected.items()}
    rows = Rows(np.ones(7, np.int32), pages, np.full(7, 63))
    runs = plan_runs(CopyPlan(1, Purpose.PLACE, copy_rows(layout, layout, rows, rows)))
    starts = {s for r in runs for s in r.source.tolist()}
    for page in _PAGE_613_AND_ON:
        for c in layout.components:
            start = c.offset + page * 3_502_592 + 63 * c.slot_stride
            assert any(s <= start < s + int(n) for r in runs for s, n in zip(r.source, r.lengths, strict=True)), page
    assert max(starts) > 2**32


@pytest.fixture
def sparse_regions():
    """Regions 1 and 2 of 5 GiB each of which only what is touched takes memory."""
    regions = RegionMap()
    for region in (1, 2):
        fd = os.memfd_create(f"sparse-{region}", os.MFD_CLOEXEC)
        os.ftruncate(fd, 5 << 30)
        regions.add(region, map_fd(fd, 5 << 30))
        os.close(fd)
    return regions


def test_rows_of_pages_beyond_two_to_the_31_and_32_arrive(sparse_regions):
    layout = native_layout(GLM53, 64)
    places = [(0, page, slot) for page in _PAGE_613_AND_ON for slot in (0, 31, 32, 63)]
    shuffled = random.Random(4).sample(places, len(places))
    source, target = Side(layout, 1400, 1, places), Side(layout, 1400, 1, shuffled)
    mark = np.random.default_rng(4)
    expected = {}
    for token, (_, page, slot) in enumerate(places):
        for key in layout.by_key:
            _, at = _component_bytes(layout, (0, page, slot), key)
            expected[token, key] = mark.integers(1, 256, at.stop - at.start, dtype=np.uint8)
            sparse_regions[1][at] = expected[token, key]
    keep = list(range(len(places)))
    plan = CopyPlan(1, Purpose.PLACE, copy_rows(layout, layout, source.rows(1, keep), target.rows(2, keep)))
    _run(plan, sparse_regions)
    for (token, key), row in expected.items():
        _, at = _component_bytes(layout, shuffled[token], key)
        assert np.array_equal(sparse_regions[2][at], row), (token, key)
    untouched = _component_bytes(layout, (0, 613, 1), next(iter(layout.by_key)))[1]
    assert not sparse_regions[2][untouched].any()
