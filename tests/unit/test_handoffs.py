"""The target's side of a hand-off against a source and a mover that a test controls."""

from __future__ import annotations

import queue
import threading
from collections import Counter

import numpy as np
import pytest

from kvmanager.configuration.moverconfig import MoverSection
from kvmanager.core.checksums import SUM_WORDS, sections_of
from kvmanager.core.events import (
    ChainPull,
    CopyOutcome,
    PlanEnded,
    PullTarget,
    SpanRunTable,
    StartPull,
    TicketInfo,
)
from kvmanager.core.spanplans import SpanRun
from kvmanager.core.spans import NO_PAGE
from kvmanager.daemon.handoff import Handoffs, check_same, source_spans
from kvmanager.daemon.pulls import Staging, TargetClass, build_pull, expected_sums
from kvmanager.errors import KVError, NotReady, PeerUnreachable, StalePage, TransferFailed, UnknownLease
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.peer_service import _source_chain
from kvmanager.wire import layout_to_proto, pack_u32, pack_u64, unpack_u64
from tests.sim.worlds import RANKS, Regions, hisparse, replicated, sharded

WAIT_S = 60.0
PLAN = 1 << 16
PAGES = 3


class Source:
    """Answers by method: an error is raised, a function called. `calls` counts them."""

    def __init__(self, chain):
        self.chain = chain
        self.calls: Counter[str] = Counter()
        self.seen: queue.Queue = queue.Queue()
        self.answers = {"Check": pb.CheckReply(), "Release": pb.ReleaseReply(), "Heartbeat": pb.HeartbeatReply()}

    def call(self, _address, method, _request, _deadline_s=0.0):
        self.calls[method] += 1
        self.seen.put(method)
        answer = self.accepted() if method == "Accept" else self.answers[method]
        if isinstance(answer, KVError):
            raise answer
        return answer() if callable(answer) else answer

    def accepted(self, pages=tuple(range(PAGES)), generations=(1,) * PAGES, incarnation=7, final=True):
        spans = pb.SpanRun(
            chain="main",
            first_tokens=pack_u64(np.arange(len(pages)) * RANKS * 4),
            segments=pack_u32([RANKS] * len(pages)),
            interleave=pack_u32([1] * len(pages)),
            pages=[pb.ClassPages(page_class="kv", device_pages=pack_u32(pages))],
        )
        return pb.AcceptReply(
            agent_name="a", mover_incarnation=incarnation, generations=pack_u32(generations), final=final,
            committed_tokens=len(pages) * RANKS * 4,
            chains=[pb.SourceChain(
                layout=layout_to_proto(self.chain.classes[0].layout), spans=spans,
                ranks=[pb.SourceRank(rank=r, base_address=r << 30, size_bytes=1) for r in range(RANKS)],
            )],
        )  # fmt: skip

    def close(self):
        pass


class HandMover:
    """A mover whose pulls end when the test says so."""

    def __init__(self):
        self.pulls: queue.Queue = queue.Queue()
        self.cancelled: queue.Queue = queue.Queue()

    def pull(self, command, wanted):
        if wanted():
            self.pulls.put(command.pull_id)

    def cancel(self, work_id):
        self.cancelled.put(work_id)


class Bench:
    def __init__(self):
        regions = Regions({})
        (chain,) = sharded(regions, "p", 8, 0).chains
        group = hisparse(regions, "d", 60, 60)
        self.posted: queue.Queue = queue.Queue()
        self.source, self.mover = Source(chain), HandMover()
        settings = MoverSection(staging_bytes=1 << 16, chunk_bytes=1 << 13)
        self.handoffs = Handoffs("us", {"d": group}, settings, self.posted.put)
        self.handoffs._peers.close()
        self.handoffs._peers = self.source
        self.handoffs.use(self.mover)
        tokens = PAGES * RANKS * 4
        c = group.chains[0].classes[0]
        spans = (SpanRun(0, TokenOrder(RANKS, 1), c.device_regions, np.arange(PAGES * RANKS)),)
        wanted = ChainPull("main", 0, (PullTarget(c.name, spans, tokens),))
        ticket = TicketInfo("t", "there", tokens, 10**12)
        self.handoffs.start(StartPull(PLAN, "d", ticket, (wanted,), 10**12))

    def end(self, outcome, error=None, part=None):
        part = self.mover.pulls.get(timeout=WAIT_S) if part is None else part
        assert self.handoffs.pull_ended(part, outcome, error)

    def result(self) -> PlanEnded:
        return self.posted.get(timeout=WAIT_S)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.handoffs.close()


def _wait(bench, method, count):
    while bench.source.calls[method] < count:
        bench.source.seen.get(timeout=WAIT_S)


def test_a_source_that_says_no_while_it_is_read_ends_the_pull_once_nothing_is_in_flight(bench):
    part = bench.mover.pulls.get(timeout=WAIT_S)
    _wait(bench, "Check", 2)
    bench.source.answers["Check"] = UnknownLease("expired")
    assert bench.mover.cancelled.get(timeout=WAIT_S) == part
    assert bench.posted.empty(), "its read is still in flight"
    bench.end(CopyOutcome.CANCELLED, part=part)
    ended = bench.result()
    assert (ended.outcome, type(ended.error)) == (CopyOutcome.FAILED, StalePage)
    _wait(bench, "Release", 1)


@pytest.mark.parametrize("fate", [CopyOutcome.UNKNOWN_FATE, CopyOutcome.FAILED])
def test_how_it_ended_counts_more_than_why_it_was_given_up(bench, fate):
    part = bench.mover.pulls.get(timeout=WAIT_S)
    bench.source.answers["Check"] = StalePage("reused")
    bench.mover.cancelled.get(timeout=WAIT_S)
    bench.end(fate, TransferFailed("late"), part)
    assert bench.result().outcome is fate


@pytest.mark.parametrize("fate", [CopyOutcome.CANCELLED, CopyOutcome.UNKNOWN_FATE])
def test_after_an_error_of_our_own_the_mover_says_whether_bytes_may_come_late(bench, fate):
    """Without its word the pages would be in quarantine until the mover ends, which nobody asks it to."""
    part = bench.mover.pulls.get(timeout=WAIT_S)

    def break_off():
        raise ValueError("not a KVError")

    bench.source.answers["Check"] = break_off
    assert bench.mover.cancelled.get(timeout=WAIT_S) == part
    assert bench.posted.empty(), "its read is still in flight"
    bench.end(fate, part=part)
    expected = fate if fate is CopyOutcome.UNKNOWN_FATE else CopyOutcome.FAILED
    assert bench.result().outcome is expected


@pytest.mark.parametrize("silence", [PeerUnreachable("cut"), NotReady("restarting")])
def test_a_source_that_does_not_know_is_asked_again(bench, silence):
    part = bench.mover.pulls.get(timeout=WAIT_S)
    bench.source.answers["Check"] = silence
    _wait(bench, "Check", 3)
    bench.source.answers["Check"] = pb.CheckReply()
    bench.end(CopyOutcome.DONE, part=part)
    assert bench.result() == PlanEnded(PLAN, CopyOutcome.DONE, None)
    assert bench.mover.cancelled.empty()


@pytest.mark.parametrize(
    ("doubt", "expected"),
    [(PeerUnreachable("cut"), PeerUnreachable), (NotReady("restarting"), StalePage), (StalePage("other"), StalePage)],
)
def test_the_last_word_must_be_yes(bench, doubt, expected):
    part = bench.mover.pulls.get(timeout=WAIT_S)
    bench.source.answers["Check"] = doubt
    bench.end(CopyOutcome.DONE, part=part)
    ended = bench.result()
    assert (ended.outcome, type(ended.error)) == (CopyOutcome.FAILED, expected)


def test_a_ticket_is_released_once_however_the_pull_ends(bench):
    part = bench.mover.pulls.get(timeout=WAIT_S)
    assert bench.handoffs.cancel(PLAN)
    ended = bench.handoffs.pull_ended
    threads = [threading.Thread(target=ended, args=(part, outcome, None)) for outcome in CopyOutcome]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.result()
    _wait(bench, "Release", 1)
    bench.handoffs._threads.shutdown(wait=True)
    assert bench.source.calls["Release"] == 1
    assert bench.posted.empty()
    assert not bench.handoffs.cancel(PLAN)


def test_a_grown_ticket_must_begin_with_the_pages_that_were_read(bench):
    accepted = bench.source.accepted
    before = accepted()
    check_same(before, accepted((0, 1, 2, 9), (1, 1, 1, 5)))
    check_same(accepted((), ()), before)
    for other in (
        accepted((0, 1, 2, 9), (1, 2, 1, 5)), accepted((0, 3, 2), (1, 1, 1)), accepted((0, 1), (1, 1)),
        accepted(incarnation=8),
    ):  # fmt: skip
        with pytest.raises(StalePage):
            check_same(before, other)


def test_a_replicated_source_says_where_its_host_shares_are():
    """What the source answers, as the target reads it: rank 0's device pages, host pages in shares in turn."""
    (chain,) = replicated(Regions({}), "p", 6, 12, 3).chains
    (c,) = chain.classes
    device, host = np.array([2, NO_PAGE, NO_PAGE]), np.array([NO_PAGE, 4, 11])
    ones = np.ones(3, np.int64)
    table = SpanRunTable("main", 0, np.arange(3) * 4, ones, ones, np.arange(3, dtype=np.uint64), {"kv": (device, host)})
    addresses = {region: region << 30 for region in (*c.device_regions, *c.host_regions)}
    words = len(sections_of(c.layout)) * SUM_WORDS
    summed = np.empty(0, np.int64), np.array([11]), np.arange(words, dtype=np.uint64).reshape(1, 1, words)
    said = _source_chain(chain, c, table, summed, 6, addresses)
    assert [rank.base_address for rank in said.ranks] == [c.device_regions[0] << 30]
    spans = source_spans(said)
    wanted = TargetClass(c.layout, PullTarget("kv", (SpanRun(0, SEQUENTIAL, (99,), np.arange(3)),), 12))
    shares = unpack_u64(said.host_shares, "host_shares").tolist()
    bases = [said.ranks[0].base_address]
    ring = build_pull(1, c.layout, spans, bases, [wanted], Staging(1, 3), 0, host_addresses=shares)
    page = c.page_bytes
    assert ring.addresses.tolist() == [
        (c.device_regions[0] << 30) + 2 * page,
        (c.host_regions[1] << 30) + page,
        (c.host_regions[2] << 30) + 3 * page,
    ]
    known = expected_sums(said, c.layout, bases, shares, ring.addresses)
    assert known.pages.tolist() == [2]
    assert known.sums.tolist() == [list(range(words))]
