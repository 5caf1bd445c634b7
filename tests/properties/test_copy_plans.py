"""Copy plans between any two layouts, executed by the cpu executor and compared byte by byte.

The model knows nothing of plans: it deals tokens out one at a time and copies each component of each
token on its own.
"""

import itertools
import os
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from kvmanager.allocators.backing import map_fd
from kvmanager.core.plans import CopyPlan, Purpose, StridedCopies
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import SEQUENTIAL, ShardGeometry, TokenOrder
from kvmanager.layout import (
    GLM53,
    GLM53_BF16,
    GLM53_TINY,
    KVFormat,
    KVLayout,
    indexer_layout,
    latent_layout,
    layer_major_layout,
    layer_outermost_layout,
    native_layout,
)
from kvmanager.planwire import plan_from_proto, plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.runs import plan_runs, slices
from tests.plans import copy_whole_pages

POISON = 0xA5
SMALL = KVFormat(
    "small", ((0,), (1, 2), (3, 4, 5), (6,)), latent_row_bytes=12, index_value_bytes=8, index_scale_bytes=4
)
WIDE = replace(SMALL, name="small-bf16", latent_row_bytes=22)

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
    """One side of a copy: a layout, `ranks` regions of `pages` pages, spans, and where each token lies."""

    layout: KVLayout
    pages: int
    runs: list[SpanRun]
    places: dict[int, tuple[int, int, int]]  # position -> (region, page, slot)

    def region_bytes(self) -> int:
        return max(c.offset + self.pages * c.page_stride for c in self.layout.components)

    @property
    def regions(self) -> list[int]:
        return sorted({region for run in self.runs for region in run.regions})


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


def _side(rng: random.Random, layout_name: str, format_, first: int, end: int, first_region: int) -> Side:
    """Spans of random orders over [first, end) and perhaps beyond, on random pages of one to eight ranks."""
    rows = rng.choice((2, 4, 8, 16))
    ranks = rng.choice((1, 1, 2, 3, 8))
    names = rng.sample(range(400), 400) if rng.random() < 0.7 else list(range(400))
    one_order = rng.random() < 0.6
    runs, places, at, order = [], {}, first, None
    while at < end or not runs:
        if order is None or not one_order:
            interleave = rng.choice([i for i in (1, 2, 4, 8, 16) if rows % i == 0])
            order = TokenOrder(ranks * rng.choice((1, 1, 2, 3)), interleave)
        span_tokens = order.segments * rows
        wanted = -(-(end - at) // span_tokens)
        spans = wanted if one_order else min(wanted, rng.randint(1, 3))
        width = order.segments // ranks
        pages, names = names[: spans * width], names[spans * width :]
        regions = tuple(range(first_region, first_region + ranks))
        runs.append(SpanRun(at, order, regions, np.array(pages, np.int64)))
        dealt = _deal(spans * span_tokens, order.segments, rows, order.interleave)
        for token, (span, pile, slot) in enumerate(dealt):
            places[at + token] = regions[pile % ranks], pages[span * width + pile // ranks], slot
        at += spans * span_tokens
    used = [page for _, page, _ in places.values()]
    pages = max(used, default=0) + 1
    return Side({**WHOLE, **PARTS}[layout_name](format_, rows, pages), pages, runs, places)


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


def _check(source: Side, target: Side, end: int, seed: int) -> CopyPlan:
    """Runs the plan for the target's positions below `end` and compares all target bytes with the model's."""
    rng = np.random.default_rng(seed)
    regions = RegionMap()
    for region in source.regions:
        regions.add(region, rng.integers(0, 256, source.region_bytes(), dtype=np.uint8))
    for region in target.regions:
        regions.add(region, np.full(target.region_bytes(), POISON, dtype=np.uint8))
    expected = {region: regions[region].copy() for region in target.regions}
    wanted = [token for token in target.places if token < end]
    for token in wanted:
        for key in target.layout.by_key:
            source_region, source_bytes = _component_bytes(source.layout, source.places[token], key)
            target_region, target_bytes = _component_bytes(target.layout, target.places[token], key)
            expected[target_region][target_bytes] = regions[source_region][source_bytes]
    copies = copy_spans(source.layout, target.layout, source.runs, target.runs, end)
    message = plan_to_proto(CopyPlan(1, Purpose.PLACE, copies)).SerializeToString()
    plan = plan_from_proto(pb.Plan.FromString(message))
    assert plan.total_bytes == len(wanted) * sum(c.row_bytes for c in target.layout.components)
    _run(plan, regions)
    for region in target.regions:
        assert np.array_equal(regions[region], expected[region]), f"region {region}"
    return plan


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    source_name=st.sampled_from(sorted(WHOLE)),
    target_name=st.sampled_from(sorted({**WHOLE, **PARTS})),
    tokens=st.integers(0, 200),
    skipped=st.integers(0, 60),
    format_=st.sampled_from([SMALL, WIDE]),
)
def test_any_layout_into_any_other(seed, source_name, target_name, tokens, skipped, format_):
    """Any page rows, orders and ranks on both sides; a prefix is there already, and the last span is torn."""
    note(f"seed {seed}")
    rng = random.Random(seed)
    source = _side(rng, source_name, format_, 0, tokens, 1)
    target = _side(rng, target_name, format_, min(skipped, tokens), tokens, 100)
    _check(source, target, tokens, seed)


@settings(max_examples=15, deadline=None, print_blob=True)
@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 600), split=st.sampled_from(["latent", "indexer"]))
def test_the_tiny_formats_prefill_pages_split_into_a_decode_ranks_classes(seed, tokens, split):
    """8 ranks x 16 rows, interleave 1, into sequential latent or indexer pages of one rank."""
    note(f"seed {seed}")
    rng = random.Random(seed)
    spans = -(-tokens // 128)
    names = rng.sample(range(spans + 2), spans), rng.sample(range(spans * 8 + 3), spans * 8)
    regions = tuple(range(1, 9))
    source = Side(
        native_layout(GLM53_TINY, 16),
        spans + 2,
        [SpanRun(0, TokenOrder(8, 1), regions, np.array(names[0]))],
        {n: (1 + r, names[0][s], slot) for n, (s, r, slot) in enumerate(_deal(tokens, 8, 16, 1))},
    )
    target = Side(
        PARTS[split](GLM53_TINY, 16, 0),
        spans * 8 + 3,
        [SpanRun(0, SEQUENTIAL, (100,), np.array(names[1]))],
        {p: (100, names[1][p // 16], p % 16) for p in range(tokens)},
    )
    _check(source, target, tokens, seed)


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    valid=st.integers(0, 32),
    ranks=st.sampled_from([1, 2, 4]),
    interleave=st.sampled_from([1, 2, 8]),
)
def test_copy_on_write_takes_the_valid_slots_and_no_other(seed, valid, ranks, interleave):
    note(f"seed {seed}")
    valid = min(valid, 8 * ranks)
    donor, mine = random.Random(seed).sample(range(5), 2)
    source, target = (_span(page, ranks, interleave, valid, region) for page, region in ((donor, 1), (mine, 100)))
    _check(source, target, valid, seed)


def _span(page: int, ranks: int, interleave: int, tokens: int, first_region: int) -> Side:
    """One span of pages of 8 rows, with its first tokens."""
    regions = tuple(range(first_region, first_region + ranks))
    places = {n: (first_region + r, page, s) for n, (_, r, s) in enumerate(_deal(tokens, ranks, 8, interleave))}
    run = SpanRun(0, TokenOrder(ranks, interleave), regions, np.array([page]))
    return Side(native_layout(SMALL, 8), 5, [run], places)


def test_ranks_that_own_nothing_get_no_copies_and_the_plan_still_completes():
    plan = _check(_span(0, 8, 1, 3, 1), _span(1, 8, 1, 3, 100), 3, seed=1)
    assert {c.source_region for c in plan.copies} == {1, 2, 3}
    assert _check(_span(0, 8, 1, 0, 1), _span(1, 8, 1, 0, 100), 0, seed=1).copies == ()


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
def test_slices_runs_and_parts_cover_a_plan_exactly_once(seed, most_bytes, most_runs):
    """All ways of taking a plan apart write each byte of the target once, from the right source byte."""
    note(f"seed {seed}")
    rng = random.Random(seed)
    source, target = _side(rng, "native", SMALL, 0, 60, 1), _side(rng, "layer-major", SMALL, 0, 60, 100)
    copies = copy_spans(source.layout, target.layout, source.runs, target.runs, 60)
    plan = CopyPlan(1, Purpose.PLACE, copies)

    def pairs(parts):
        found = {}
        for c in parts:
            source_at = c.source_offsets
            target_at = c.target_offsets
            for count, a, b in zip(c.counts, c.source_strides, c.target_strides, strict=True):
                steps = np.arange(count)
                source_at, target_at = np.add.outer(source_at, steps * a), np.add.outer(target_at, steps * b)
            for s, t in zip(source_at.ravel().tolist(), target_at.ravel().tolist(), strict=True):
                for byte in range(c.row_bytes):
                    assert (c.target_region, t + byte) not in found, "written twice"
                    found[c.target_region, t + byte] = c.source_region, s + byte
        return found

    expected = pairs(plan.pieces())
    assert len(expected) == plan.total_bytes
    pieces = [piece for c in plan.pieces() for piece in slices(c, most_bytes, most_runs)]
    assert all(p.total_bytes <= most_bytes and p.runs <= most_runs for p in pieces)
    assert pairs(pieces) == expected
    few = [piece for c in copies for box in c.boxes for piece in c.pieces(box, most_runs)]
    assert all(len(piece.source_offsets) <= max(most_runs, 1) for piece in few)
    assert pairs(few) == expected
    parts = [part for c in copies for part in c.parts(most_runs)]
    assert all(part.pairs <= max(most_runs, part.placements) for part in parts)
    assert pairs(CopyPlan(1, Purpose.PLACE, tuple(parts)).pieces()) == expected
    joined = {
        (r.target_region, t + byte): (r.source_region, s + byte)
        for r in plan_runs(plan)
        for s, t, n in zip(r.source.tolist(), r.target.tolist(), r.lengths.tolist(), strict=True)
        for byte in range(n)
    }
    assert joined == expected
    assert sum(len(r.lengths) for r in plan_runs(plan)) <= plan.runs


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


_ONE_PAGE = SpanRun(0, SEQUENTIAL, (1,), np.zeros(1, np.int64))


_REFUSED = {
    "a section left behind": (
        latent_layout(SMALL, 8), native_layout(SMALL, 8), "latent/small has no index_value of layer 0",
    ),
    "a layer left behind": (native_layout(GLM53_TINY, 8), native_layout(GLM53, 8), "has no latent of layer 7"),
    "other row bytes": (
        native_layout(GLM53, 64), native_layout(GLM53_BF16, 64),
        "latent rows of layer 0: 656 B in native/glm-5.3-fp8_ds_mla, 1152 B in native/glm-5.3-bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_layouts_that_have_nothing_in_common_are_refused_by_name(case):
    source, target, text = _REFUSED[case]
    with pytest.raises(LayoutMismatch, match=text):
        copy_spans(source, target, [_ONE_PAGE], [_ONE_PAGE], 8)


def test_orders_that_do_not_fit_are_refused_by_name():
    layout = native_layout(SMALL, 8)
    three = SpanRun(0, TokenOrder(1, 3), (1,), np.zeros(1, np.int64))
    with pytest.raises(LayoutMismatch, match=r"token order \(1, 3\) does not fit pages of 8 rows of native/small"):
        copy_spans(layout, layout, [three], [_ONE_PAGE], 8)
    uneven = SpanRun(0, TokenOrder(3, 1), (1, 2), np.zeros(3, np.int64))
    with pytest.raises(LayoutMismatch, match=r"token order \(3, 1\) does not fit 2 ranks"):
        copy_spans(layout, layout, [_ONE_PAGE], [uneven], 8)


def test_a_position_without_a_source_is_refused():
    layout = native_layout(SMALL, 8)
    for first, missing in ((0, 8), (16, 16)):
        target = SpanRun(first, SEQUENTIAL, (2,), np.arange(3))
        with pytest.raises(LayoutMismatch, match=f"position {missing} is in none of the source's spans"):
            copy_spans(layout, layout, [_ONE_PAGE], [target], first + 24)


def test_a_plan_for_many_spans_is_as_small_as_for_few_but_for_the_page_numbers():
    sizes = []
    layout = native_layout(GLM53_TINY, 8)
    for spans in (4, 400):
        source = SpanRun(0, TokenOrder(8, 1), tuple(range(1, 9)), np.random.default_rng(1).permutation(spans))
        target = SpanRun(0, SEQUENTIAL, (100,), np.random.default_rng(2).permutation(8 * spans))
        plan = CopyPlan(1, Purpose.PLACE, copy_spans(layout, layout, [source], [target], 64 * spans))
        assert plan.total_bytes == 8 * spans * layout.page_bytes
        assert {c.source.pages.size for c in plan.copies} == {spans}
        sizes.append(len(plan_to_proto(plan).SerializeToString()) - 4 * 9 * spans)
    assert abs(sizes[1] - sizes[0]) < 100, "lengths of fields alone"


def test_pages_of_one_layout_and_order_are_copied_whole_and_neighbours_joined():
    layout = native_layout(GLM53_TINY, 8)
    source = SpanRun(0, TokenOrder(4, 1), (1,), np.arange(40))
    target = SpanRun(0, TokenOrder(4, 1), (2,), np.r_[np.arange(5, 25), np.arange(30, 50)])
    plan = CopyPlan(7, Purpose.PLACE, copy_spans(layout, layout, [source], [target], 320))
    page = layout.page_bytes
    assert [(c.row_bytes, c.source_offsets.tolist()) for c in plan.pieces()] == [(20 * page, [0, 20 * page])]
    assert plan.runs == 2
    text = str(plan).splitlines()
    assert text[0] == f"plan 7 place: {40 * page:,} B in 2 runs"
    assert text[1] == (
        f"  region 1 -> 2: 10 x 4 page pairs (40 pages 0..39 -> 40 pages 5..49) x 1 boxes, {40 * page:,} B in 2 runs "
        f"of {20 * page:,} B"
    )


_PAGE_613_AND_ON = [612, 613, 614, 1225, 1226, 1227, 1300]


def test_offsets_of_pages_beyond_two_to_the_31_and_32_are_exact():
    layout = native_layout(GLM53, 64)
    assert layout.page_bytes == 3_502_592
    pages = np.array(_PAGE_613_AND_ON)
    whole = CopyPlan(1, Purpose.OFFLOAD, copy_whole_pages(layout.page_bytes, (1,), pages, (2,), pages[::-1].copy()))
    plan = plan_from_proto(plan_to_proto(whole))
    found = {}
    for c in plan.pieces():
        assert c.source_offsets.dtype == c.target_offsets.dtype == np.int64
        found |= dict(zip(c.source_offsets.tolist(), c.target_offsets.tolist(), strict=True))
    expected = dict(zip(_PAGE_613_AND_ON, reversed(_PAGE_613_AND_ON), strict=True))
    assert found == {s * 3_502_592: t * 3_502_592 for s, t in expected.items()}


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


@pytest.mark.parametrize("target_name", ["native", "layer-major", "layer-outermost"])
def test_rows_of_pages_beyond_two_to_the_31_and_32_arrive(sparse_regions, target_name):
    """Pages across the borders in another order, and a torn one behind them."""
    layout, pages = native_layout(GLM53, 64), np.array(_PAGE_613_AND_ON)
    target_layout = WHOLE[target_name](GLM53, 64, 1400)
    source = SpanRun(0, SEQUENTIAL, (1,), pages)
    target = SpanRun(0, TokenOrder(7, 1), (2,), np.random.default_rng(4).permutation(pages))
    tokens = 7 * 64 - 5
    dealt = _deal(tokens, 7, 64, 1)
    mark, expected = np.random.default_rng(4), {}
    for token in [*range(0, tokens, 37), tokens - 1]:
        for key in layout.by_key:
            _, at = _component_bytes(layout, (0, int(pages[token // 64]), token % 64), key)
            row = mark.integers(1, 256, at.stop - at.start, dtype=np.uint8)
            sparse_regions[1][at] = row
            expected[token, key] = row
    plan = CopyPlan(1, Purpose.PLACE, copy_spans(layout, target_layout, [source], [target], tokens))
    _run(plan_from_proto(plan_to_proto(plan)), sparse_regions)
    for (token, key), row in expected.items():
        _, pile, slot = dealt[token]
        _, at = _component_bytes(target_layout, (0, int(target.pages[pile]), slot), key)
        assert np.array_equal(sparse_regions[2][at], row), (token, key)
    untouched = _component_bytes(target_layout, (0, int(target.pages[6]), 63), next(iter(layout.by_key)))[1]
    assert not sparse_regions[2][untouched].any()
