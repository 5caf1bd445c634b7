"""Chunks of a pull against a byte-by-byte model: every wanted position once, nothing else read or written."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.core.events import PullTarget
from kvmanager.core.plans import Rows
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import TokenOrder
from kvmanager.groups import STAGING_REGION
from kvmanager.layout import KVFormat, indexer_layout, latent_layout, native_layout
from kvmanager.pulls import SourceSpans, Staging, TargetClass, build_chunks, locate
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.wire import plan_from_proto, unpack_u64

FORMAT = KVFormat("test", ((0,), (1, 2), (3,)), latent_row_bytes=6, index_value_bytes=4, index_scale_bytes=2)
ROWS = 4
SOURCE = native_layout(FORMAT, ROWS)
SLAB = FORMAT.slab_bytes(ROWS)
LATENT, INDEXER = latent_layout(FORMAT, ROWS), indexer_layout(FORMAT, ROWS)
LATENT_REGION, HOST_REGION, INDEXER_REGION = 10, 11, 12
REGION_PAGES = 64
BASES = [1 << 40, (1 << 41) + 12345, 1 << 42]
SEEDS = range(25)


class Source:
    """Spans of mixed orders on `ranks` ranks, random pages, random bytes."""

    def __init__(self, rng: np.random.Generator, ranks: int, orders: list[tuple[int, int]]) -> None:
        widths = [segments // ranks for segments, _ in orders]
        starts = np.cumsum([0] + [segments * ROWS for segments, _ in orders])
        pages = rng.permutation(REGION_PAGES)[: sum(widths)].astype(np.int64)
        self.orders = orders
        self.ranks = ranks
        self.tokens = int(starts[-1])
        self.memory = rng.integers(0, 256, (ranks, REGION_PAGES * SOURCE.page_bytes), np.uint8)
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
        at = c.offset + page * c.page_stride + slot * c.slot_stride
        return self.memory[rank, at : at + c.row_bytes]


def run(source: Source, targets: list[TargetClass], staging: Staging, first_slot: int) -> dict[int, np.ndarray]:
    """Carries the chunks out; the target regions afterwards. Checks what is read on the way."""
    regions = {
        STAGING_REGION: np.zeros(staging.slots * staging.chunk_pages * SOURCE.page_bytes, np.uint8),
        LATENT_REGION: np.zeros(REGION_PAGES * SLAB, np.uint8),
        HOST_REGION: np.zeros(REGION_PAGES * SLAB, np.uint8),
        INDEXER_REGION: np.zeros(REGION_PAGES * INDEXER.page_bytes, np.uint8),
    }
    mapped = RegionMap()
    for region, memory in regions.items():
        mapped.add(region, memory)
    chunks = build_chunks(7, SOURCE, source.spans, BASES[: source.ranks], targets, staging, first_slot)
    read = set()
    for number, chunk in enumerate(chunks):
        regions[STAGING_REGION][:] = 0xEE  # a chunk must not lean on an earlier one
        slot = (first_slot + number) % staging.slots
        addresses = unpack_u64(chunk.remote_addresses, "")
        offsets = unpack_u64(chunk.staging_offsets, "").astype(np.int64)
        lengths = unpack_u64(chunk.lengths, "")
        assert 0 < len(addresses) <= staging.chunk_pages
        assert offsets.tolist() == [
            (slot * staging.chunk_pages + n) * SOURCE.page_bytes for n in range(len(addresses))
        ], "slots of the ring in order"
        for address, offset, length in zip(addresses.tolist(), offsets.tolist(), lengths.tolist(), strict=True):
            (rank,) = [r for r in range(source.ranks) if 0 <= address - BASES[r] < source.memory.shape[1]]
            at = address - BASES[rank]
            assert length == SOURCE.page_bytes
            assert at % SOURCE.page_bytes == 0
            assert (rank, at) not in read, "read once"
            read.add((rank, at))
            regions[STAGING_REGION][offset : offset + length] = source.memory[rank, at : at + length]
        plan = plan_from_proto(chunk.placement)
        assert plan.plan_id == 7
        executor = CpuExecutor(mapped)
        executor.submit(plan)
        (done,) = [c for _ in range(1000) for c in executor.poll()]
        assert done.outcome is Outcome.DONE
    wanted = {source.place(int(p)) for t in targets for p in t.target.positions}
    assert read == {(rank, page * SOURCE.page_bytes) for rank, page, _ in wanted}, "no page without a wanted position"
    del regions[STAGING_REGION]
    return regions


def expected(source: Source, targets: list[TargetClass], sizes: dict[int, int]) -> dict[int, np.ndarray]:
    """The same by single rows."""
    regions = {region: np.zeros(size, np.uint8) for region, size in sizes.items()}
    for each in targets:
        rows = each.target.rows
        for n, position in enumerate(each.target.positions.tolist()):
            for key, c in each.layout.by_key.items():
                at = c.offset + int(rows.page[n]) * c.page_stride + int(rows.slot[n]) * c.slot_stride
                regions[int(rows.region[n])][at : at + c.row_bytes] = source.row(position, key)
    return regions


def sequential(rng: np.random.Generator, positions: np.ndarray, regions: tuple[int, int]) -> Rows:
    """Pages in order of position; the pages at the end lie in the second region."""
    first = int(positions[0]) // ROWS
    count = int(positions[-1]) // ROWS - first + 1
    pages = rng.permutation(REGION_PAGES)[:count].astype(np.int64)
    split = int(rng.integers(0, count + 1))
    where = np.where(np.arange(count) < split, regions[0], regions[1])
    page = positions // ROWS - first
    return Rows(where[page].astype(np.int32), pages[page], positions % ROWS)


def kept(rng: np.random.Generator, source: Source, positions: np.ndarray, regions: tuple[int, int]) -> Rows:
    """Every source page becomes a page of the target, slots as they are."""
    ordinals = locate(source.spans, ROWS, positions).ordinal
    slots = np.array([source.place(int(p))[2] for p in positions], np.int64)
    pages = rng.permutation(REGION_PAGES)[: int(ordinals.max()) + 1].astype(np.int64)
    where = np.where(pages % 2, regions[0], regions[1])
    return Rows(where[ordinals].astype(np.int32), pages[ordinals], slots)


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_do_what_single_rows_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 4))
    orders = [
        (ranks * int(rng.integers(1, 3)), int(rng.choice([1, 2, 4]))) for _ in range(int(rng.integers(1, 6)))
    ]
    source = Source(rng, ranks, orders)
    first = int(rng.integers(0, source.tokens))
    positions = np.arange(first, int(rng.integers(first, source.tokens)) + 1, dtype=np.int64)
    keep = bool(rng.integers(0, 2))

    def places(regions: tuple[int, int]) -> Rows:
        return kept(rng, source, positions, regions) if keep else sequential(rng, positions, regions)

    targets = [
        TargetClass(LATENT, PullTarget("latent", positions, places((LATENT_REGION, HOST_REGION)))),
        TargetClass(INDEXER, PullTarget("indexer", positions, places((INDEXER_REGION, INDEXER_REGION)))),
    ]
    if rng.integers(0, 2):  # one class may want less than the other
        rows = targets[1].target.rows
        n = max(1, len(positions) // 2)
        fewer = Rows(rows.region[-n:], rows.page[-n:], rows.slot[-n:])
        targets[1] = TargetClass(INDEXER, PullTarget("indexer", positions[-n:], fewer))
    staging = Staging(slots=int(rng.integers(1, 4)), chunk_pages=int(rng.integers(1, 5)))
    made = run(source, targets, staging, first_slot=int(rng.integers(0, staging.slots)))
    wanted = expected(source, targets, {region: len(memory) for region, memory in made.items()})
    for region, memory in made.items():
        assert np.array_equal(memory, wanted[region]), f"seed {seed}, region {region}"


def test_locate_counts_like_the_token_order() -> None:
    source = Source(np.random.default_rng(0), 2, [(2, 1), (4, 2), (2, 4)])
    positions = np.arange(source.tokens, dtype=np.int64)
    found = locate(source.spans, ROWS, positions)
    for p in positions.tolist():
        assert (int(found.rank[p]), int(found.page[p]), int(found.slot[p])) == source.place(p)
    assert TokenOrder(2, 1).place(positions[:1])[0].tolist() == [0]


@pytest.mark.parametrize("position", [-1, 8, 100])
def test_a_position_that_the_source_does_not_have(position: int) -> None:
    source = Source(np.random.default_rng(0), 1, [(1, 1), (1, 1)])
    with pytest.raises(LayoutMismatch, match=rf"position {position} is in none of the 2 source spans"):
        locate(source.spans, ROWS, np.array([position], np.int64))


def test_staging_that_holds_no_page() -> None:
    assert Staging.of(1000, 300, 100) == Staging(slots=3, chunk_pages=3)
    assert Staging.of(250, 1000, 100) == Staging(slots=1, chunk_pages=2)
    with pytest.raises(LayoutMismatch, match="a source page of 301 B does not fit in a chunk of 300 B; raise"):
        Staging.of(1000, 300, 301)
