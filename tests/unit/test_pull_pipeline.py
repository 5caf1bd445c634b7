"""Whose turn it is, and who may use which staging: the pull pipeline with a reader that a test controls."""

from dataclasses import replace

import numpy as np
import pytest

from kvmanager.core.checksums import ExpectedSums
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import copy_pages
from kvmanager.errors import (
    ChecksumMismatch,
    Draining,
    InvalidArgument,
    PeerUnreachable,
    TransferFailed,
    TransferTimeout,
)
from kvmanager.transport.checksums import section_sum
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.nixl import ReadResult
from kvmanager.transport.pull_pipeline import RETRY_PAUSE_NS, PullPipeline, PullRequest
from kvmanager.transport.ring import RingPull

STAGING, TARGET = 1, 2
SIZE = 4096


class HandReader:
    """Reads end when the test says so; `started` lists (read id, first staging byte) in order."""

    def __init__(self):
        self.started, self._ended, self._settled, self._open = [], [], [], {}

    def check(self, region_id, *_):
        assert region_id == STAGING

    def add_peer(self, _name, metadata):
        if metadata == b"dead":
            raise PeerUnreachable("dead")

    def read(self, _peer, _addresses, _region_id, offsets, lengths, _deadline_ns):
        read_id = len(self.started) + 1
        self.started.append((read_id, int(offsets[0])))
        self._open[read_id] = int(lengths.sum())
        return read_id

    def end(self, read_id, outcome=Outcome.DONE, error=None):
        moved = self._open.pop(read_id) if outcome is Outcome.DONE else 0
        self._ended.append(ReadResult(read_id, outcome, moved, 1, error))

    def settle(self, read_id):
        self._settled.append(read_id)

    def poll(self):
        ended, self._ended = self._ended, []
        return ended

    def settled(self):
        settled, self._settled = self._settled, []
        return settled


class Bench:
    def __init__(self, ahead=1):
        regions = RegionMap()
        self.staging = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
        regions.add(STAGING, self.staging)
        self.target = np.zeros(SIZE, dtype=np.uint8)
        regions.add(TARGET, self.target)
        self.reader, self.now = HandReader(), 0
        self.pipeline = PullPipeline(self.reader, regions, STAGING, lambda: self.now, ahead=ahead)

    def submit(self, pull_id, *spans, deadline_ns=10**9, metadata=b"", slots=1, peer=""):
        """`peer`: where it is read from; empty: each pull has a peer of its own."""
        ring = replace(_ring(*spans), slots=slots)
        self.pipeline.submit(PullRequest(pull_id, peer or f"peer {pull_id}", metadata, ring, deadline_ns))

    def polls(self, count=6):
        return {c.plan_id: c for _ in range(count) for c in self.pipeline.poll()}

    @property
    def started(self):
        return [offset for _, offset in self.reader.started]


def _ring(first, *others):
    """Chunks of one page, all in the same place."""
    start, end = first
    assert all(other == first for other in others)
    count = 1 + len(others)
    (copies,) = copy_pages(end - start, STAGING, np.arange(count), TARGET, np.zeros(count, np.int64))
    addresses = np.full(count, 10**6, np.uint64)
    return RingPull(addresses, end - start, start, 1, 1, 0, CopyPlan(0, Purpose.PLACE, (copies,)))


@pytest.fixture
def bench():
    return Bench()


def test_disjoint_staging_is_read_at_once_and_overlapping_staging_in_turn(bench):
    bench.submit(1, (0, 100))
    bench.submit(2, (100, 200))
    bench.submit(3, (199, 300))
    assert bench.polls() == {}
    assert bench.started == [0, 100], "3 waits for one byte of 2's staging"
    bench.reader.end(1)
    assert set(bench.polls()) == {1}
    assert bench.started == [0, 100]
    bench.reader.end(2)
    assert set(bench.polls()) == {2}
    assert bench.started == [0, 100, 199]


def test_nobody_overtakes_a_waiting_pull_into_staging_that_it_waits_for(bench):
    bench.submit(1, (0, 100), (0, 100), (0, 100))
    bench.submit(2, (0, 200))
    bench.submit(3, (150, 200))
    bench.submit(4, (300, 400))
    bench.polls()
    assert bench.started == [0, 300], "3 would fit, but keeps 2 waiting; 4 is in nobody's way"
    bench.reader.end(1)
    bench.polls()
    assert bench.reader.started[2] == (3, 0), "now 2, although 1 has chunks left"
    bench.reader.end(3)
    assert 2 in bench.polls()
    assert sorted(bench.started[3:]) == [0, 150]


def test_chunks_of_pulls_alternate(bench):
    bench.submit(1, *[(0, 10)] * 3)
    bench.submit(2, *[(5, 15)] * 3)
    for read_id in range(1, 7):
        bench.polls()
        bench.reader.end(read_id)
    ended = bench.polls()
    assert bench.started == [0, 5, 0, 5, 0, 5]
    assert {i: (c.outcome, c.moved_bytes) for i, c in ended.items()} == {2: (Outcome.DONE, 30)}


def test_the_deadline_counts_from_the_first_read_and_ends_a_pull_between_chunks(bench):
    bench.submit(1, (0, 10), (0, 10), deadline_ns=100)
    bench.submit(2, (0, 10), deadline_ns=100)
    bench.polls()
    bench.now = 99
    bench.reader.end(1)
    bench.polls()
    bench.now = 150
    bench.reader.end(2)
    ended = bench.polls()
    assert ended[2].outcome is Outcome.DONE, "its time began at 99"
    assert ended[1].outcome is Outcome.FAILED
    assert isinstance(ended[1].error, TransferTimeout)
    assert bench.started == [0, 0]


def test_where_late_bytes_may_land_nothing_is_put_until_they_have(bench):
    bench.submit(1, (0, 100), (0, 100))
    bench.polls()
    bench.submit(2, (50, 60))
    bench.submit(3, (100, 200))
    bench.reader.end(1, Outcome.UNKNOWN_FATE, TransferTimeout("late"))
    ended = bench.polls()
    assert {i: c.outcome for i, c in ended.items()} == {1: Outcome.FAILED, 2: Outcome.FAILED}
    assert isinstance(ended[1].error, TransferTimeout)
    assert "this mover must end" in str(ended[2].error)
    assert bench.pipeline.exhausted
    assert bench.started == [0, 100], "staging apart from it goes on"
    assert bench.pipeline.next_poll_s() is not None
    bench.reader.settle(1)
    bench.polls()
    bench.submit(4, (0, 100))
    bench.polls()
    assert bench.started == [0, 100, 0]


def test_chunks_go_elsewhere_in_the_ring_while_late_bytes_may_land_in_their_place():
    """Two reads hang; another pull's chunks go past both, in the places that are left, each placed from where it is."""
    bench = Bench(ahead=2)
    bench.submit(1, *[(0, 10)] * 2, slots=4)
    bench.polls()
    for read_id in (1, 2):
        bench.reader.end(read_id, Outcome.UNKNOWN_FATE, TransferTimeout("late"))
    assert bench.polls()[1].outcome is Outcome.FAILED
    bench.submit(2, *[(0, 10)] * 5, slots=4)
    ended = {}
    for read_id in range(3, 8):
        ended |= bench.polls()
        assert set(bench.started[2:]) <= {20, 30}
        at = bench.started[read_id - 1]
        bench.staging[at : at + 10] = read_id
        bench.reader.end(read_id)
    ended |= bench.polls()
    assert (ended[2].outcome, ended[2].moved_bytes) == (Outcome.DONE, 50)
    assert not bench.pipeline.exhausted
    assert set(bench.target[:10]) == {7}
    for read_id in (1, 2):
        bench.reader.settle(read_id)
    bench.polls()
    bench.submit(3, (0, 10), slots=4)
    bench.polls()
    assert bench.started[-1] == 0, "what has settled is used again"


def test_a_peer_that_hangs_is_asked_for_nothing_more_until_its_late_bytes_have_come(bench):
    bench.submit(1, (0, 10), peer="hangs")
    bench.polls()
    bench.reader.end(1, Outcome.UNKNOWN_FATE, TransferTimeout("late"))
    bench.polls()
    bench.submit(2, (100, 110), peer="hangs")
    bench.submit(3, (100, 110), peer="does not")
    ended = bench.polls()
    assert set(ended) == {2}
    assert isinstance(ended[2].error, PeerUnreachable)
    assert bench.started == [0, 100]
    bench.reader.settle(1)
    bench.reader.end(2)
    bench.polls()
    bench.submit(4, (100, 110), peer="hangs")
    bench.polls()
    assert bench.started == [0, 100, 100]


def test_a_peer_leaves_a_quarter_of_the_ring_to_others():
    bench = Bench(ahead=4)
    bench.submit(1, *[(0, 10)] * 4, slots=4, peer="one")
    bench.submit(2, *[(0, 10)] * 4, slots=4, peer="one")
    bench.polls()
    assert sorted(bench.started) == [0, 10, 20]
    bench.submit(3, (30, 40), peer="two")
    bench.polls()
    assert sorted(bench.started) == [0, 10, 20, 30]
    bench.reader.end(1)
    bench.polls()
    assert len(bench.started) == 5


def test_a_pull_ends_only_when_its_placements_have(bench):
    """Late bytes of one chunk say nothing of another that is being placed."""
    bench = Bench(ahead=2)
    bench.submit(1, *[(0, 10)] * 3, slots=3)
    bench.polls()
    bench.reader.end(1)
    bench.reader.end(2, Outcome.UNKNOWN_FATE, TransferTimeout("late"))
    held = bench.pipeline._placer.poll
    bench.pipeline._placer.poll = list
    assert bench.polls() == {}
    (last,) = bench.pipeline.abandon()
    assert last.outcome is Outcome.UNKNOWN_FATE, "the copy may be under way in another engine"
    bench.pipeline._placer.poll = held


def test_a_failed_read_fails_its_pull_only(bench):
    bench.submit(1, (0, 10), (0, 10))
    bench.submit(2, (20, 30))
    bench.submit(3, (40, 50), metadata=b"dead")
    ended = bench.polls()
    bench.reader.end(1, Outcome.FAILED, PeerUnreachable("gone"))
    bench.reader.end(2)
    ended |= bench.polls()
    for read_id in (3, 4):  # the same chunk, twice more
        bench.now += 2 * RETRY_PAUSE_NS
        ended |= bench.polls()
        bench.reader.end(read_id, Outcome.FAILED, PeerUnreachable("gone"))
        ended |= bench.polls()
    assert bench.started == [0, 20, 0, 0]
    assert {i: c.outcome for i, c in ended.items()} == {1: Outcome.FAILED, 2: Outcome.DONE, 3: Outcome.FAILED}
    assert isinstance(ended[1].error, PeerUnreachable)
    assert isinstance(ended[3].error, PeerUnreachable)


def test_a_chunk_that_failed_is_read_again_and_nothing_else_is(bench):
    bench.submit(1, *[(0, 10)] * 3)
    bench.polls()
    bench.reader.end(1)
    bench.polls()
    bench.reader.end(2, Outcome.FAILED, TransferFailed("torn"))
    bench.polls()
    assert bench.started == [0, 0], "after a pause"
    assert bench.pipeline.next_poll_s() is not None
    bench.submit(2, (0, 10))
    bench.polls()
    bench.reader.end(3)
    assert 2 in bench.polls(), "others use the staging meanwhile"
    bench.now = RETRY_PAUSE_NS
    bench.polls()
    bench.reader.end(4)
    bench.polls()
    bench.reader.end(5)
    ended = bench.polls()
    assert (ended[1].outcome, ended[1].moved_bytes) == (Outcome.DONE, 30)
    assert (bench.pipeline.retries, len(bench.started)) == (1, 5)


def test_a_chunk_is_not_read_again_after_a_cancel_or_the_deadline(bench):
    for pull_id, deadline_ns in ((1, 10**9), (2, 100)):
        bench.submit(pull_id, (20 * pull_id, 20 * pull_id + 10), deadline_ns=deadline_ns)
    bench.polls()
    bench.pipeline.cancel(1)
    for read_id in (1, 2):
        bench.reader.end(read_id, Outcome.FAILED, TransferFailed("torn"))
    bench.now = RETRY_PAUSE_NS
    ended = bench.polls()
    assert ended[1].outcome is Outcome.CANCELLED
    assert isinstance(ended[2].error, TransferTimeout)
    assert len(bench.started) == 2


def test_several_chunks_of_a_pull_are_under_way_where_reads_do_not_block():
    bench = Bench(ahead=3)
    bench.submit(1, *[(0, 10)] * 9, slots=4)
    bench.polls()
    assert bench.started == [0, 10, 20]
    bench.reader.end(2)
    bench.polls()
    assert bench.started == [0, 10, 20, 30], "its placement is over, so one more"
    bench.reader.end(3)
    bench.polls()
    assert len(bench.started) == 4, "the next one's place is that of the first, whose read goes on"
    bench.submit(2, (100, 110))
    bench.polls()
    assert bench.started[4:] == [100], "which is in nobody else's way"
    bench.reader.end(1)
    bench.reader.end(5)
    ended = bench.polls()
    bench.reader.end(4)
    for read_id in range(6, 12):
        ended |= bench.polls()
        if read_id in bench.reader._open:
            bench.reader.end(read_id)
    ended |= bench.polls()
    assert {i: c.moved_bytes for i, c in ended.items()} == {1: 90, 2: 10}


def test_a_cancelled_pull_whose_read_hangs_ends_by_its_deadline():
    bench = Bench(ahead=2)
    bench.submit(1, *[(0, 10)] * 2, slots=3)
    bench.polls()
    bench.pipeline.cancel(1)
    bench.reader.end(1, Outcome.FAILED, TransferFailed("torn"))
    assert bench.polls() == {}, "a read is in flight"
    bench.reader.end(2, Outcome.UNKNOWN_FATE, TransferTimeout("late"))
    assert bench.polls()[1].outcome is Outcome.CANCELLED


def test_a_cancelled_pull_ends_once_its_read_has(bench):
    bench.submit(1, (0, 10), (0, 10))
    bench.submit(2, (0, 10))
    bench.polls()
    bench.pipeline.cancel(1)
    bench.pipeline.cancel(2)
    assert set(bench.polls()) == {2}, "it had not begun"
    assert bench.pipeline.outstanding() == [1]
    bench.reader.end(1)
    assert bench.polls()[1].outcome is Outcome.CANCELLED
    assert bench.started == [0]


def test_abandoned_pulls_are_over_and_nothing_more_is_taken(bench):
    bench.submit(1, (0, 10))
    bench.polls()
    bench.submit(2, (0, 10))
    outcomes = {c.plan_id: c.outcome for c in bench.pipeline.abandon()}
    assert outcomes == {1: Outcome.CANCELLED, 2: Outcome.CANCELLED}
    with pytest.raises(Draining):
        bench.submit(3, (0, 10))


def test_an_outstanding_id_is_refused_and_an_idle_pipeline_sleeps(bench):
    assert bench.pipeline.next_poll_s() is None
    bench.submit(1, (0, 10))
    with pytest.raises(InvalidArgument):
        bench.submit(1, (0, 10))
    bench.polls()
    bench.reader.end(1)
    assert bench.polls()[1].outcome is Outcome.DONE
    bench.polls(1)
    assert bench.pipeline.next_poll_s() is None


def _with_sums(ring, bench, pages, wrong=None):
    """`pages` of the pull add up to what staging holds; all but `wrong`."""
    start, size = ring.offset, ring.page_bytes
    section = bench.staging[start + 2 : start + size]
    sums = np.tile(section_sum(section), (len(pages), 1))
    if wrong is not None:
        sums[list(pages).index(wrong)] ^= np.uint64(1)
    return replace(ring, expected=ExpectedSums(np.asarray(pages), sums, ((2, size - 2),)))


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_what_does_not_add_up_is_not_placed(bench, wrong):
    ring = _with_sums(_ring(*[(100, 164)] * 4), bench, (0, 2), wrong)
    bench.pipeline.submit(PullRequest(1, "peer", b"", ring, 100))
    bench.submit(2, (300, 364))
    ended = {}
    for read_id in range(1, 6):
        ended |= bench.polls()
        if read_id in bench.reader._open:
            bench.reader.end(read_id)
    ended |= bench.polls()
    assert ended[2].outcome is Outcome.DONE, "others go on"
    if wrong is None:
        assert ended[1].outcome is Outcome.DONE
        return
    assert ended[1].outcome is Outcome.FAILED
    assert isinstance(ended[1].error, ChecksumMismatch)
    assert f"page {wrong} of 4" in str(ended[1].error)
    assert not bench.pipeline.outstanding()


def test_sums_that_fit_no_page_are_refused(bench):
    ring = _with_sums(_ring((100, 164)), bench, (0,))
    for wrong in ({"pages": np.array([1])}, {"sections": ((60, 8),)}):
        expected = replace(ring.expected, **wrong)
        bench.pipeline.submit(PullRequest(1, "peer", b"", replace(ring, expected=expected), 100))
        (ended,) = bench.polls(1).values()
        assert isinstance(ended.error, InvalidArgument)
    assert not bench.started
