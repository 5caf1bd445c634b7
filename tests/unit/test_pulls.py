"""Pulls against a byte-by-byte model: every wanted position once, nothing else read or written, chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.configuration.groups import STAGING_REGION
from kvmanager.core.checksums import SUM_WORDS, sections_of
from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.pulls import ON_HOST, SourceSpans, Staging, TargetClass, build_pull, expected_sums
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import KVFormat, KVLayout, indexer_layout, latent_layout, native_layout
from kvmanager.planwire import ring_from_proto, ring_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.wire import pack_u32, pack_u64

FORMAT = KVFormat("test", ((0,), (1, 2), (3,)), latent_row_bytes=6, index_value_bytes=4, index_scale_bytes=2)
ROWS = 4
SOURCE = native_layout(FORMAT, ROWS)
SLAB = FORMAT.slab_bytes(ROWS)
LATENT, INDEXER = latent_layout(FORMAT, ROWS), indexer_layout(FORMAT, ROWS)
LATENT_REGION, HOST_REGION, INDEXER_REGION = 10, 11, 12
REGION_PAGES = 64
BASES = [1 << 40, (1 << 41) + 12345, 1 << 42]
HOST_BASES = [(1 << 43) + 77, 1 << 44, 1 << 45]
SEEDS = range(60)


class Source:
    """Spans of mixed orders on `ranks` ranks, random pages on the device or the host, random bytes."""

    def __init__(self, rng: np.random.Generator, ranks: int, orders: list[tuple[int, int]]) -> None:
        widths = [segments // ranks for segments, _ in orders]
        starts = np.cumsum([0] + [segments * ROWS for segments, _ in orders])
        pages = rng.permutation(REGION_PAGES)[: sum(widths)].astype(np.int64)
        on_host = rng.random(len(widths)) < rng.choice([0.0, 0.5, 1.0])
        pages[on_host.repeat(widths)] += ON_HOST
        self.orders = orders
        self.ranks = ranks
        self.tokens = int(starts[-1])
        self.memory = rng.integers(0, 256, (2, ranks, REGION_PAGES * SOURCE.page_bytes), np.uint8)
        self.spans = SourceSpans(
            ranks,
            starts[:-1].astype(np.int64),
            np.array([segments for segments, _ in orders], np.int64),
            np.array([interleave for _, interleave in orders], np.int64),
            pages,
        )

    def place(self, position: int) -> tuple[int, int, int]:
        """(rank, page, slot), by counting."""
        first_entry = 0
        start = 0
        for segments, interleave in self.orders:
            if position < start + segments * ROWS:
                counters = [0] * segments
                for offset in range(position - start + 1):
                    page = offset // interleave % segments
                    slot = counters[page]
                    counters[page] += 1
                return page % self.ranks, int(self.spans.pages[first_entry + page // self.ranks]), slot
            start += segments * ROWS
            first_entry += segments // self.ranks
        raise AssertionError(position)

    def row(self, position: int, key: object) -> np.ndarray:
        """A component's bytes at a position."""
        rank, page, slot = self.place(position)
        c = SOURCE.by_key[key]
        tier, page = divmod(page, ON_HOST)
        at = c.offset + page * c.page_stride + slot * c.slot_stride
        return self.memory[tier, rank, at : at + c.row_bytes]


def run(source: Source, targets: list[TargetClass], staging: Staging, first_slot: int) -> dict[int, np.ndarray]:
    """Carries the pull out; the target regions afterwards. Checks what is read on the way."""
    regions = {
        STAGING_REGION: np.zeros(staging.slots * staging.chunk_pages * SOURCE.page_bytes, np.uint8),
        LATENT_REGION: np.zeros(REGION_PAGES * SLAB, np.uint8),
        HOST_REGION: np.zeros(REGION_PAGES * SLAB, np.uint8),
        INDEXER_REGION: np.zeros(REGION_PAGES * INDEXER.page_bytes, np.uint8),
    }
    mapped = RegionMap()
    for region, memory in regions.items():
        mapped.add(region, memory)
    bases = BASES[: source.ranks], HOST_BASES[: source.ranks]
    made = build_pull(7, SOURCE, source.spans, bases[0], targets, staging, first_slot, host_addresses=bases[1])
    ring = ring_from_proto(pb.Pull.FromString(ring_to_proto(made).SerializeToString()))
    ring.check(STAGING_REGION, mapped)
    read = set()
    moved = 0
    for number in range(ring.chunks):
        regions[STAGING_REGION][:] = 0xEE  # a chunk must not lean on an earlier one
        slot = (first_slot + number) % ring.slots
        addresses, offsets, lengths = ring.reads(number)
        assert 0 < len(addresses) <= ring.chunk_pages <= staging.chunk_pages
        assert offsets.tolist() == [
            (slot * ring.chunk_pages + n) * SOURCE.page_bytes for n in range(len(addresses))
        ], "slots of the ring in order"
        assert ring.staging_range(number) == (int(offsets[0]), int(offsets[-1]) + SOURCE.page_bytes)
        for address, offset, length in zip(addresses.tolist(), offsets.tolist(), lengths.tolist(), strict=True):
            ((tier, rank, at),) = [
                (tier, rank, address - base)
                for tier, of_ranks in enumerate(bases)
                for rank, base in enumerate(of_ranks)
                if 0 <= address - base < source.memory.shape[2]
            ]
            assert length == SOURCE.page_bytes
            assert at % SOURCE.page_bytes == 0
            assert (tier, rank, at) not in read, "read once"
            read.add((tier, rank, at))
            regions[STAGING_REGION][offset : offset + length] = source.memory[tier, rank, at : at + length]
        plan = ring.placed(number)
        assert plan.plan_id == 7
        moved += plan.total_bytes
        executor = CpuExecutor(mapped)
        executor.submit(plan)
        (done,) = [c for _ in range(1000) for c in executor.poll()]
        assert done.outcome is Outcome.DONE, done.error
    assert moved == ring.placement.total_bytes
    wanted = {source.place(p) for t in targets for p in positions_of(t)}
    named = {(page // ON_HOST, rank, page % ON_HOST * SOURCE.page_bytes) for rank, page, _ in wanted}
    assert read == named, "no page without a wanted position"
    del regions[STAGING_REGION]
    return regions


def positions_of(each: TargetClass) -> list[int]:
    spans = each.target.spans
    return [p for s in spans for p in range(s.first_token, min(each.target.end, s.first_token + s.tokens(ROWS)))]


def dealt(run_: SpanRun, position: int) -> tuple[int, int, int]:
    """(region, page, slot) of a position, by counting."""
    offset = position - run_.first_token
    segments = run_.order.segments
    span, offset = divmod(offset, segments * ROWS)
    filled = [0] * segments
    for token in range(offset + 1):
        page = token // run_.order.interleave % segments
        filled[page] += 1
    ranks = len(run_.regions)
    entry = span * (segments // ranks) + page // ranks
    return run_.regions[page % ranks], int(run_.pages[entry]), filled[page] - 1


def expected(source: Source, targets: list[TargetClass], sizes: dict[int, int]) -> dict[int, np.ndarray]:
    """The same by single rows."""
    regions = {region: np.zeros(size, np.uint8) for region, size in sizes.items()}
    for each in targets:
        for run_ in each.target.spans:
            for position in range(run_.first_token, min(each.target.end, run_.first_token + run_.tokens(ROWS))):
                region, page, slot = dealt(run_, position)
                for key, c in each.layout.by_key.items():
                    at = c.offset + page * c.page_stride + slot * c.slot_stride
                    regions[region][at : at + c.row_bytes] = source.row(position, key)
    return regions


def target_runs(
    rng: np.random.Generator, source: Source, first: int, end: int, regions: tuple[int, int], kept: bool
) -> tuple[SpanRun, ...]:
    """Spans that cover [first, end) in the source's orders or in another, each run in one of the regions."""
    pages = iter(rng.permutation(REGION_PAGES).tolist())
    runs, orders, at = [], list(source.orders), first
    starts = np.cumsum([0] + [segments * ROWS for segments, _ in source.orders])
    while at < end:
        if kept:
            order = TokenOrder(*orders[int(np.searchsorted(starts, at, "right")) - 1])
        else:
            order = SEQUENTIAL if rng.random() < 0.5 else TokenOrder(int(rng.integers(1, 4)), 2)
        most = 1 if kept else int(rng.integers(1, 4))
        spans = min(most, -(-(end - at) // (order.segments * ROWS)))
        mine = np.array([next(pages) for _ in range(spans * order.segments)], np.int64)
        runs.append(SpanRun(at, order, (regions[int(rng.integers(0, 2))],), mine))
        at += spans * order.segments * ROWS
    return tuple(runs)


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_do_what_single_rows_would(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 4))
    orders = [
        (ranks * int(rng.integers(1, 3)), int(rng.choice([1, 2, 4]))) for _ in range(int(rng.integers(1, 6)))
    ]
    if rng.random() < 0.5:
        orders = orders[:1] * len(orders)
    source = Source(rng, ranks, orders)
    kept = bool(rng.integers(0, 2))
    starts = [0, *np.cumsum([segments * ROWS for segments, _ in orders])[:-1].tolist()]
    first = int(rng.choice(starts)) if kept else int(rng.integers(0, source.tokens // ROWS)) * ROWS
    end = int(rng.integers(first, source.tokens)) + 1

    def target(layout: KVLayout, name: str, start: int, regions: tuple[int, int]) -> TargetClass:
        return TargetClass(layout, PullTarget(name, target_runs(rng, source, start, end, regions, kept), end))

    targets = [
        target(LATENT, "latent", first, (LATENT_REGION, HOST_REGION)),
        target(INDEXER, "indexer", first, (INDEXER_REGION, INDEXER_REGION)),
    ]
    if rng.integers(0, 2):  # one class may want less than the other
        later = [at for at in (starts if kept else range(0, end, ROWS)) if first <= at < end]
        targets[1] = target(INDEXER, "indexer", int(rng.choice(later)), (INDEXER_REGION, INDEXER_REGION))
    if rng.integers(0, 2):  # what has its bytes already is left out in the middle too
        spans = targets[0].target.spans
        targets[0] = TargetClass(LATENT, PullTarget("latent", spans[::2], end))
    staging = Staging(slots=int(rng.integers(1, 4)), chunk_pages=int(rng.integers(1, 9)))
    made = run(source, targets, staging, first_slot=int(rng.integers(0, staging.slots)))
    wanted = expected(source, targets, {region: len(memory) for region, memory in made.items()})
    for region, memory in made.items():
        assert np.array_equal(memory, wanted[region]), f"seed {seed}, region {region}"


def test_host_pages_of_a_replicated_chain_lie_in_shares_in_turn() -> None:
    """One rank is read; of three host shares, page i lies in share i mod 3."""
    pages = np.array([4, ON_HOST + 7, ON_HOST + 3, 1, ON_HOST + 5])
    ones = np.ones(len(pages), np.int64)
    source = SourceSpans(1, np.arange(len(pages)) * ROWS, ones, ones, pages)
    spans = (SpanRun(0, SEQUENTIAL, (LATENT_REGION,), np.arange(len(pages))),)
    wanted = [TargetClass(LATENT, PullTarget("latent", spans, len(pages) * ROWS))]
    made = build_pull(1, SOURCE, source, BASES[:1], wanted, Staging(2, 2), 0, host_addresses=HOST_BASES)
    page = SOURCE.page_bytes
    assert made.addresses.tolist() == [
        BASES[0] + 4 * page, HOST_BASES[1] + 2 * page, HOST_BASES[0] + page, BASES[0] + page, HOST_BASES[2] + page,
    ]  # fmt: skip
    words = len(sections_of(SOURCE)) * SUM_WORDS
    chain = pb.SourceChain(
        summed_pages=pack_u32([1]), summed_host_pages=pack_u32([5, 7]), sums=pack_u64(np.arange(3 * words))
    )
    known = expected_sums(chain, SOURCE, BASES[:1], HOST_BASES, made.addresses)
    assert known is not None
    assert known.pages.tolist() == [1, 3, 4]
    assert (known.sums[:, 0] // words).tolist() == [2, 0, 1]


def test_a_position_that_the_source_does_not_have() -> None:
    source = Source(np.random.default_rng(0), 1, [(1, 1), (1, 1)])
    for first in (-4, 8, 100):
        spans = (SpanRun(first, SEQUENTIAL, (LATENT_REGION,), np.arange(1)),)
        with pytest.raises(LayoutMismatch, match=rf"position {first} is in none of the source's spans"):
            build_pull(
                1, SOURCE, source.spans, BASES[:1], [TargetClass(LATENT, PullTarget("latent", spans, 200))],
                Staging(1, 1), 0,
            )  # fmt: skip


def test_source_spans_that_do_not_list_their_pages() -> None:
    ones = np.ones(2, np.int64)
    for segments, pages in ((2 * ones, 3), (3 * ones, 3)):
        uneven = SourceSpans(2, np.array([0, 8]), segments, ones, np.arange(pages))
        with pytest.raises(LayoutMismatch, match="source spans of"):
            uneven.runs(ROWS)


def test_staging_that_holds_no_page() -> None:
    assert Staging.of(1000, 300, 100) == Staging(slots=3, chunk_pages=3)
    assert Staging.of(250, 1000, 100) == Staging(slots=1, chunk_pages=2)
    with pytest.raises(LayoutMismatch, match="a source page of 301 B does not fit in a chunk of 300 B; raise"):
        Staging.of(1000, 300, 301)
