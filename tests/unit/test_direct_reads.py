"""Chunks that go straight to their places: what they consist of, which way is chosen, and what a hung peer means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvmanager.configuration.groups import STAGING_REGION
from kvmanager.core.events import PullTarget
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import SpanRun, copy_pages
from kvmanager.daemon.pulls import TargetClass
from kvmanager.errors import TransferFailed, TransferTimeout
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import KVFormat, indexer_layout, latent_layout, native_layout
from kvmanager.transport import paths
from kvmanager.transport.direct_reads import JoinedReads
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.nixl import ReadResult
from kvmanager.transport.paths import SAMPLES, PullPath, PullPaths
from kvmanager.transport.pull_pipeline import RETRY_PAUSE_NS, PullPipeline, PullRequest
from kvmanager.transport.ring import RingPull
from kvmanager.transport.runs import Runs
from tests.pulled import Pulled, SourceMemory

FORMAT = KVFormat("direct", ((0,), (1, 2), (3,)), latent_row_bytes=5, index_value_bytes=4, index_scale_bytes=2)
ROWS = 16
SOURCE, LATENT, INDEXER = native_layout(FORMAT, ROWS), latent_layout(FORMAT, ROWS), indexer_layout(FORMAT, ROWS)
PAGE = 4_096
STAGING, FIRST, SECOND = 1, 2, 3


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_bring_the_same_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept and permuted order, partial tails, a prefix that is there already, reads that fail; rings of some sizes."""
    monkeypatch.setattr(paths, "LEAST_RUN_BYTES", 1)
    rng = np.random.default_rng(seed)
    print("seed", seed)
    ranks = int(rng.choice([1, 2, 4, 8]))
    order = TokenOrder(ranks, int(rng.choice([1, 8])))
    target_order = order if rng.random() < 0.6 else SEQUENTIAL
    span_tokens = order.segments * ROWS
    tokens = int(rng.integers(1, 4 * span_tokens))
    first = int(rng.integers(0, 2)) * span_tokens if tokens > span_tokens else 0
    source = SourceMemory(SOURCE, ranks, order, tokens, rng)
    sizes, targets = {}, []
    for region, layout in ((10, LATENT), (11, INDEXER)):
        count = -(-(tokens - first) // span_tokens) * order.segments
        pages = rng.permutation(count + 1)[:count].astype(np.int64)
        sizes[region] = (count + 1) * layout.page_bytes
        run = SpanRun(first, target_order, (region,), pages)
        targets.append(TargetClass(layout, PullTarget(layout.name, (run,), tokens)))
    found = {}
    for path in PullPath:
        pulled = Pulled([source], sizes, 9 * SOURCE.page_bytes, seed, ahead=2, path=path)
        pulled.submit(1, 0, targets, int(rng.integers(1, 9)), int(rng.integers(0, 3)))
        (ended,) = pulled.run().values()
        if isinstance(ended.error, TransferFailed):
            continue  # drawn to fail three times
        assert ended.outcome is Outcome.DONE, ended
        found[path] = {region: pulled.regions[region].copy() for region in sizes}
        staged = pulled.regions[STAGING_REGION]
        assert (path is PullPath.DIRECT) <= bool((staged == staged[0]).all()), "straight reads leave staging alone"
    for each in found.values():
        for region in sizes:
            assert np.array_equal(each[region], next(iter(found.values()))[region])
    assert len(found) > 1


class HandReader:
    """Reads end when the test says so; `started` lists (read id, region, first byte there)."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int, int]] = []
        self._ended: list[ReadResult] = []
        self._settled: list[int] = []
        self._open: dict[int, int] = {}

    def add_peer(self, name: str, metadata: bytes) -> None:
        pass

    def read(self, _peer, _addresses, region_id, offsets, lengths, _deadline_ns):
        read_id = len(self.started) + 1
        self.started.append((read_id, region_id, int(offsets[0])))
        self._open[read_id] = int(lengths.sum())
        return read_id

    read_packed = read

    def end(self, read_id, outcome=Outcome.DONE, error=None, busy_ns=1_000):
        moved = self._open.pop(read_id) if outcome is Outcome.DONE else 0
        self._ended.append(ReadResult(read_id, outcome, moved, busy_ns, error))

    def settle(self, read_id):
        self._settled.append(read_id)

    def poll(self):
        ended, self._ended = self._ended, []
        return ended

    def settled(self):
        settled, self._settled = self._settled, []
        return settled


class Bench:
    """Pages that go to two regions by halves."""

    def __init__(self) -> None:
        regions = RegionMap()
        for region in (STAGING, FIRST, SECOND):
            regions.add(region, np.zeros(32 * PAGE, np.uint8))
        self.reader, self.now = HandReader(), 0
        self.pipeline = PullPipeline(self.reader, regions, STAGING, lambda: self.now, straight=True)

    def submit(self, pull_id, chunks, path=PullPath.DIRECT, peer="peer", run_bytes=PAGE):
        copies = []
        for half, region in enumerate((FIRST, SECOND)):
            (c,) = copy_pages(run_bytes, STAGING, np.arange(chunks), region, np.arange(chunks)[::-1].copy())
            stretch = {"source_page_stride": 2 * run_bytes, "source_offset": half * run_bytes}
            copies.append(replace(c, boxes=tuple(replace(box, **stretch) for box in c.boxes)))
        addresses = np.arange(chunks, dtype=np.uint64) * np.uint64(10 * PAGE) + np.uint64(10**9)
        placement = CopyPlan(0, Purpose.PLACE, tuple(copies))
        ring = RingPull(addresses, 2 * run_bytes, 0, 2, 1, 0, placement)
        self.pipeline.submit(PullRequest(pull_id, peer, b"", ring, 10**9, path=path))

    def polls(self, count=4):
        return {c.plan_id: c for _ in range(count) for c in self.pipeline.poll()}

    def carry_out(self, ns_by_region):
        """Ends all reads, in the time that their region says; what has ended, and the regions in order."""
        ended, begun = {}, 0
        while self.pipeline.outstanding():
            ended |= self.polls(1)
            for read_id, region, _ in self.reader.started[begun:]:
                self.reader.end(read_id, busy_ns=ns_by_region[region])
            begun = len(self.reader.started)
        return ended


@pytest.fixture
def bench():
    return Bench()


def test_a_chunk_in_two_regions_is_in_place_when_both_reads_have_ended(bench):
    bench.submit(1, 2)
    bench.polls()
    assert bench.reader.started == [(1, FIRST, PAGE), (2, SECOND, PAGE)]
    bench.reader.end(2)
    assert bench.polls() == {}
    assert len(bench.reader.started) == 2
    bench.reader.end(1)
    bench.polls()
    assert bench.reader.started[2:] == [(3, FIRST, 0), (4, SECOND, 0)]
    bench.reader.end(3)
    bench.reader.end(4)
    assert bench.polls()[1].moved_bytes == 4 * PAGE


def test_half_a_chunk_that_failed_is_read_again_whole_when_the_other_half_is_quiet(bench):
    bench.submit(1, 1)
    bench.polls()
    bench.reader.end(1, Outcome.FAILED, TransferFailed("torn"))
    bench.now += RETRY_PAUSE_NS
    assert bench.polls() == {}
    assert len(bench.reader.started) == 2, "the other half may still write"
    bench.reader.end(2)
    bench.polls()
    bench.now += RETRY_PAUSE_NS
    bench.polls()
    assert [region for _, region, _ in bench.reader.started[2:]] == [FIRST, SECOND]
    bench.reader.end(3)
    bench.reader.end(4)
    assert bench.polls()[1].outcome is Outcome.DONE


@pytest.mark.parametrize("cancelled", [False, True])
def test_late_bytes_on_their_way_into_pages_are_said_to_be_and_end_the_process(bench, cancelled):
    bench.submit(1, 2)
    bench.polls()
    if cancelled:
        bench.pipeline.cancel(1)
    bench.reader.end(1, Outcome.UNKNOWN_FATE, TransferTimeout("late"))
    assert bench.polls() == {}, "the other half has not ended"
    assert not bench.pipeline.exhausted
    bench.reader.end(2)
    assert bench.polls()[1].outcome is Outcome.UNKNOWN_FATE
    assert bench.pipeline.exhausted
    assert len(bench.reader.started) == 2


@pytest.mark.parametrize(
    ("straight_ns", "chosen"), [(800, PullPath.DIRECT), (2_000, PullPath.RING)], ids=["faster", "slower"]
)
def test_the_first_chunks_take_both_ways_and_the_rest_the_faster_one(bench, straight_ns, chosen):
    ns = {STAGING: 4_000, FIRST: straight_ns, SECOND: straight_ns}
    if chosen is PullPath.RING:
        ns[STAGING] = 1_000  # two halves straight take four times as long; the placement is fast here or not
        bench.pipeline._paths.note("peer", PullPath.RING, 2 * PAGE, 1_000)
    bench.submit(1, 4 * SAMPLES, PullPath.MEASURED)
    ended = bench.carry_out(ns)[1]
    ways = [STAGING if region == STAGING else FIRST for _, region, _ in bench.reader.started if region != SECOND]
    assert ended.outcome is Outcome.DONE
    assert ended.path is not None
    assert ended.path.chosen is chosen
    assert ended.path.ring_bytes_per_s > 0
    assert ended.path.direct_bytes_per_s == pytest.approx(1e9 * PAGE / straight_ns)
    wanted = FIRST if chosen is PullPath.DIRECT else STAGING
    assert ways.count(wanted) >= 3 * SAMPLES
    assert set(ways[2 * SAMPLES :]) == {wanted}
    bench.submit(2, 2, PullPath.MEASURED, peer="another")
    before = len(bench.reader.started)
    bench.polls(1)
    assert bench.reader.started[before][1] == STAGING, "another peer is measured for itself"


def test_what_is_forced_what_is_short_and_what_is_compared_is_not_measured(bench):
    bench.submit(1, 1, PullPath.RING)
    bench.submit(2, 1, PullPath.MEASURED, run_bytes=paths.LEAST_RUN_BYTES - 1)
    ended = bench.carry_out({STAGING: 1, FIRST: 1, SECOND: 1})
    assert len(ended) == 2
    assert {region for _, region, _ in bench.reader.started} == {STAGING}


def test_joined_reads_settle_when_the_last_of_them_has():
    reader = HandReader()
    joined = JoinedReads(reader)
    one = np.zeros(1, np.int64)
    places = [Runs(STAGING, region, one, one, one + 8) for region in (FIRST, SECOND)]
    read_id = joined.read_places("peer", places, 1)
    for inner in (1, 2):
        reader.end(inner, Outcome.UNKNOWN_FATE, TransferTimeout("late"))
    (result,) = joined.poll()
    assert (result.read_id, result.outcome) == (read_id, Outcome.UNKNOWN_FATE)
    reader.settle(1)
    assert joined.settled() == []
    reader.settle(2)
    assert joined.settled() == [read_id]


def test_of_many_peers_the_longest_known_is_forgotten():
    known = PullPaths()
    for number in range(paths.PEERS + 1):
        known.note(f"peer {number}", PullPath.RING, 1, 1)
    assert known.rates("peer 0") is None
    assert known.rates(f"peer {paths.PEERS}") is not None
