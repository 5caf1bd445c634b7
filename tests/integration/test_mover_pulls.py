"""Pulls between real mover processes: NIXL over loopback, cancelled, killed and hung."""

import secrets
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.errors import PeerUnreachable
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53_TINY, indexer_layout, latent_layout, native_layout
from kvmanager.planwire import plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import SECOND_NS
from kvmanager.wire import RegionKind, error_from_proto, pack_u64
from tests.integration.mover_process import POISON, WAIT_S, Client, reversed_pieces, running


def _stop(process: subprocess.Popen) -> None:
    """Returns when none of its threads runs any more: on a busy machine that comes later than the signal."""
    process.send_signal(signal.SIGSTOP)
    give_up = time.monotonic() + WAIT_S
    tasks = Path(f"/proc/{process.pid}/task")
    while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
        assert time.monotonic() < give_up
        time.sleep(0.005)


class Source:
    """A prefill node: 8 ranks with native pages of 16 rows, dealt token by token, in a mover of its own."""

    LAYOUT = native_layout(GLM53_TINY, 16)
    PAGES = 6

    def __init__(self, path, seed):
        rng = np.random.default_rng(seed)
        self.tokens = 3 * 128 - 37
        self.pages = rng.permutation(self.PAGES)[:3]  # page index of each span, on every rank
        self.client = Client(path)
        page = self.LAYOUT.page_bytes
        for rank in range(8):
            self.client.add(1 + rank, self.PAGES * page, RegionKind.DEVICE)
        self.rows = {}
        for position in range(self.tokens):
            for key, c in self.LAYOUT.by_key.items():
                row = self.rows[position, key] = rng.integers(0, 256, c.row_bytes, dtype=np.uint8)
                span, offset = divmod(position, 128)
                start = c.offset + int(self.pages[span]) * page + (offset // 8) * c.slot_stride
                self.client.memory[1 + offset % 8][start : start + c.row_bytes] = row
        self.agent = self.client.agent()

    def pull(self, pull_id, targets, first_page=0, slots=1, spans_a_chunk=1, deadline_ns=20 * SECOND_NS):
        """A Pull of all tokens. `targets`: (layout, region, page list); the ring begins at page `first_page`."""
        page = self.LAYOUT.page_bytes
        remote = [
            self.client.addresses[1 + rank] + int(index) * page for index in self.pages for rank in range(8)
        ]
        staged = [SpanRun(0, TokenOrder(8, 1), (50,), np.arange(24))]
        copies = []
        for layout, region, pages in targets:
            target = SpanRun(0, SEQUENTIAL, (region,), pages[:24])
            copies += copy_spans(self.LAYOUT, layout, staged, [target], self.tokens)
        return pb.Pull(
            pull_id=pull_id,
            agent_name=self.agent.agent_name,
            agent_metadata=self.agent.agent_metadata,
            peer_incarnation=self.client.incarnation,
            deadline_ns=deadline_ns,
            remote_addresses=pack_u64(remote),
            page_bytes=page,
            ring_offset=first_page * page,
            ring_slots=slots,
            chunk_pages=8 * spans_a_chunk,
            placement=plan_to_proto(CopyPlan(0, Purpose.PLACE, tuple(copies))),
        )


LATENT, INDEXER = latent_layout(GLM53_TINY, 16), indexer_layout(GLM53_TINY, 16)
TARGET_PAGES = 30


class Target:
    """A decode rank: staging for 3 spans (region 50), latent and indexer regions for two requests."""

    def __init__(self, path):
        self.client = Client(path)
        self.client.add(50, 24 * Source.LAYOUT.page_bytes, RegionKind.STAGING)
        for request in (0, 1):
            self.client.add(60 + request, TARGET_PAGES * LATENT.page_bytes)
            self.client.add(70 + request, TARGET_PAGES * INDEXER.page_bytes)

    def places(self, request, seed):
        rng = np.random.default_rng(seed)
        return [
            (LATENT, 60 + request, rng.permutation(TARGET_PAGES)),
            (INDEXER, 70 + request, rng.permutation(TARGET_PAGES)),
        ]

    def check(self, source, targets):
        """Every byte of the regions: rows where tokens lie, poison everywhere else."""
        for layout, region, pages in targets:
            expected = np.full(TARGET_PAGES * layout.page_bytes, POISON, dtype=np.uint8)
            for position in range(source.tokens):
                for key, c in layout.by_key.items():
                    start = c.offset + int(pages[position // 16]) * layout.page_bytes + (position % 16) * c.slot_stride
                    expected[start : start + c.row_bytes] = source.rows[position, key]
            assert np.array_equal(self.client.memory[region], expected), layout.name


@contextmanager
def two_movers(tmp_path, *arguments):
    with (
        running(tmp_path / "prefill", *arguments) as (source_process, source_path),
        running(tmp_path / "decode", *arguments) as (_, target_path),
    ):
        source, target = Source(source_path, seed=5), Target(target_path)
        yield source, target, source_process
        source.client.close()
        target.client.close()


def _pulled_once(source, target):
    """The places of a pull that has worked."""
    places = target.places(0, seed=3)
    target.client.link.pull(source.pull(1, places))
    assert target.client.completions(1)[1].outcome == pb.Completion.DONE
    return places


def _stop_in_a_read(source, target, process):
    """Leaves pull 2 reading from a source that is stopped: over TCP the read stays in flight."""
    places = _pulled_once(source, target)
    target.client.memory[60][:] = POISON
    _stop(process)
    target.client.link.pull(source.pull(2, places))
    for _ in range(2):  # the answer to the second means that a turn of the mover began the read
        assert target.client.list() == [2]


@pytest.mark.parametrize("transports", ["tcp,cma,self", "tcp,self"])
def test_pulls_permute_dcp8_pages_into_sequential_ones(tmp_path, transports):
    """Two pulls at once; chunks of both use the same staging, so they must take turns in it."""
    with two_movers(tmp_path, "--ucx-transports", transports) as (source, target, _):
        places = [target.places(0, seed=11), target.places(1, seed=12)]
        target.client.link.pull(source.pull(1, places[0], slots=2))
        target.client.link.pull(source.pull(2, places[1], first_page=4, slots=2))
        ended = target.client.completions(2)
        for completion in ended.values():
            assert completion.outcome == pb.Completion.DONE, completion
            assert completion.moved_bytes == 24 * Source.LAYOUT.page_bytes
        for request in (0, 1):
            target.check(source, places[request])
        target.client.memory[60][:] = POISON
        target.client.memory[70][:] = POISON
        target.client.link.pull(source.pull(3, places[0], spans_a_chunk=3))
        assert target.client.completions(1)[3].outcome == pb.Completion.DONE
        target.check(source, places[0])
        assert target.client.list() == []


def test_pulls_that_make_no_sense_fail_before_a_byte_moves(tmp_path):
    with two_movers(tmp_path) as (source, target, _):
        model = source.pull(0, target.places(0, seed=1))

        def good(pull_id):
            pull = pb.Pull.FromString(model.SerializeToString())
            pull.pull_id = pull_id
            return pull

        pulls = {name: good(number) for number, name in enumerate(_BAD_PULLS, start=1)}
        for name, (change, _) in _BAD_PULLS.items():
            change(pulls[name])
            target.client.link.pull(pulls[name])
        empty = good(90)
        empty.ClearField("remote_addresses")
        empty.ClearField("placement")
        empty.placement.purpose = Purpose.PLACE.value
        target.client.link.pull(empty)
        ended = target.client.completions(len(pulls) + 1)
        assert (ended[90].outcome, ended[90].moved_bytes) == (pb.Completion.DONE, 0)
        for name, (_, text) in _BAD_PULLS.items():
            completion = ended[pulls[name].pull_id]
            assert completion.outcome == pb.Completion.FAILED, name
            assert completion.moved_bytes == 0, name
            assert text in completion.error.message, (name, completion.error)
        for region in (50, 60, 70):
            assert (target.client.memory[region] == POISON).all()


def _outside(pull):
    pull.ring_offset += 16 * Source.LAYOUT.page_bytes + 1


def _no_ring(pull):
    pull.chunk_pages = 0


def _no_slot(pull):
    pull.first_slot = 1


def _into_staging(pull):
    pull.placement.copies[0].target_region = 50


def _unread(pull):
    pull.remote_addresses = pull.remote_addresses[: 8 * 23]


def _between_pages(pull):
    pull.placement.copies[0].boxes[0].source_page_stride -= 1


def _over_the_end(pull):
    pull.placement.copies[0].boxes[0].row_bytes = Source.LAYOUT.page_bytes


def _elsewhere(pull):
    pull.placement.copies[0].boxes[0].target_offset = 2**40


def _no_deadline(pull):
    pull.deadline_ns = 0


def _other_process(pull):
    pull.peer_incarnation ^= 1


def _bad_metadata(pull):
    pull.agent_metadata = secrets.token_bytes(200)


def _torn(pull):
    pull.remote_addresses = bytes(9)


_BAD_PULLS = {
    "outside": (_outside, "leaves region 50"),
    "no ring": (_no_ring, "each is at least 1"),
    "no slot": (_no_slot, "slot 1 of a ring of 1"),
    "into staging": (_into_staging, "placement goes from staging"),
    "unread": (_unread, "which the pull does not read"),
    "between pages": (_between_pages, "of a page"),
    "over the end": (_over_the_end, "of a page"),
    "elsewhere": (_elsewhere, "leave region"),
    "no deadline": (_no_deadline, "deadline"),
    "other process": (_other_process, "incarnation"),
    "bad metadata": (_bad_metadata, "metadata"),
    "torn": (_torn, "Pull.remote_addresses"),
}


def test_a_killed_source_fails_the_pull_with_a_typed_error(tmp_path):
    with two_movers(tmp_path) as (source, target, process):
        places = _pulled_once(source, target)
        process.kill()
        process.wait()
        for pull_id in (2, 3):
            target.client.link.pull(source.pull(pull_id, places))
            completion = target.client.completions(1)[pull_id]
            assert completion.outcome == pb.Completion.FAILED
            assert isinstance(error_from_proto(completion.error), PeerUnreachable), completion.error
        target.client.link.submit(reversed_pieces(4, 60, 61, [0]))
        assert target.client.completions(1)[4].outcome == pb.Completion.DONE, "the mover serves on"


def test_a_source_killed_in_the_middle_of_a_read_fails_the_pull(tmp_path):
    """Over TCP a stopped peer keeps the read in flight until it is killed."""
    with two_movers(tmp_path, "--ucx-transports", "tcp,self") as (source, target, process):
        _stop_in_a_read(source, target, process)
        process.kill()
        process.wait()
        completion = target.client.completions(1)[2]
        assert completion.outcome == pb.Completion.FAILED
        assert isinstance(error_from_proto(completion.error), PeerUnreachable), completion.error
        assert (target.client.memory[60] == POISON).all(), "nothing was placed"


def test_a_pull_cancelled_during_a_read_waits_for_it_and_places_nothing(tmp_path):
    with two_movers(tmp_path, "--ucx-transports", "tcp,self") as (source, target, process):
        _stop_in_a_read(source, target, process)
        target.client.link.cancel(2)
        assert target.client.list() == [2]
        assert target.client.list() == [2], "its read is still in flight"
        process.send_signal(signal.SIGCONT)
        completion = target.client.completions(1)[2]
        assert completion.outcome == pb.Completion.CANCELLED
        assert (target.client.memory[60] == POISON).all(), "nothing was placed"
        assert target.client.list() == []


def test_a_hung_source_costs_a_piece_of_staging_and_nobody_else_notices(tmp_path):
    """TCP, where a stopped peer delivers nothing and never errs; its bytes come when it goes on."""
    arguments = ("--ucx-transports", "tcp,self")
    other_mover = running(tmp_path / "other", *arguments)
    with two_movers(tmp_path, *arguments) as (hung, target, process), other_mover as (_, at):
        other = Source(at, seed=6)
        places = _pulled_once(hung, target)
        for region in (50, 60, 70):
            target.client.memory[region][:] = POISON
        _stop(process)
        target.client.link.pull(hung.pull(2, places, slots=3, deadline_ns=SECOND_NS // 2))
        late = target.client.completions(1)[2]
        assert (late.outcome, late.error.reason) == (pb.Completion.FAILED, pb.TRANSFER_TIMEOUT)
        target.client.link.pull(hung.pull(6, places, slots=3))
        assert "hangs" in target.client.completions(1)[6].error.message, "at once"
        for pull_id in (3, 4):  # three chunks each, in the two places that are left
            target.client.link.pull(other.pull(pull_id, target.places(1, seed=pull_id), slots=3))
            assert target.client.completions(1)[pull_id].outcome == pb.Completion.DONE
        target.client.memory[61][:] = POISON
        target.client.memory[71][:] = POISON
        target.client.link.pull(other.pull(5, target.places(1, seed=5), slots=3))
        assert target.client.completions(1)[5].outcome == pb.Completion.DONE
        target.check(other, target.places(1, seed=5))
        first = target.client.memory[50][: 8 * Source.LAYOUT.page_bytes]
        assert (first == POISON).all(), "nobody uses the place where late bytes may land"
        process.send_signal(signal.SIGCONT)
        give_up = time.monotonic() + WAIT_S
        while (first == POISON).all():
            assert time.monotonic() < give_up, "the late bytes come"
            time.sleep(0.01)
        for region in (60, 70):
            assert (target.client.memory[region] == POISON).all(), "into staging, and no further"
        for pull_id in range(7, 10_000):
            target.client.link.pull(hung.pull(pull_id, places, slots=3))
            again = target.client.completions(1)[pull_id]
            if again.outcome == pb.Completion.DONE:
                break
            assert isinstance(error_from_proto(again.error), PeerUnreachable), again.error
            assert time.monotonic() < give_up
            time.sleep(0.01)
        target.check(hung, places)
        other.client.close()


def test_a_mover_whose_staging_is_all_in_doubt_ends_and_takes_the_late_reads_with_it(tmp_path):
    """The end of its process is the fence: what the peer sends afterwards goes nowhere."""
    arguments = ("--ucx-transports", "tcp,self")
    with (
        running(tmp_path / "prefill", *arguments) as (source_process, source_path),
        running(tmp_path / "other", *arguments) as (_, other_path),
        running(tmp_path / "decode", *arguments) as (target_process, target_path),
    ):
        other = Source(other_path, seed=6)
        source, target = Source(source_path, seed=5), Target(target_path)
        places = _pulled_once(source, target)
        for region in (50, 60, 70):
            target.client.memory[region][:] = POISON
        _stop(source_process)
        target.client.link.pull(source.pull(2, places, deadline_ns=SECOND_NS // 2))
        assert target.client.completions(1)[2].outcome == pb.Completion.FAILED
        target.client.link.submit(reversed_pieces(3, 60, 61, [0]))
        assert target.client.completions(1)[3].outcome == pb.Completion.DONE, "it still copies for its own node"
        target.client.link.pull(other.pull(4, places))
        refused = target.client.completions(1)[4]
        assert (refused.outcome, "must end" in refused.error.message) == (pb.Completion.FAILED, True)
        assert target_process.wait(WAIT_S) == 0
        source_process.send_signal(signal.SIGCONT)
        with running(tmp_path / "decode", *arguments) as (_, again):
            fresh = Target(again)
            fresh.client.link.pull(other.pull(5, fresh.places(0, seed=3)))
            assert fresh.client.completions(1)[5].outcome == pb.Completion.DONE
            fresh.check(other, fresh.places(0, seed=3))
            fresh.client.close()
        for region in (50, 60, 70):
            assert (target.client.memory[region] == POISON).all(), "no late byte has landed anywhere"
        source.client.close()
        other.client.close()


def test_pulls_without_staging_are_refused(tmp_path):
    with running(tmp_path / "prefill") as (_, source_path), running(tmp_path / "bare") as (_, bare_path):
        source, bare = Source(source_path, seed=1), Client(bare_path)
        bare.link.pull(source.pull(1, []))
        completion = bare.completions(1)[1]
        assert (completion.outcome, completion.error.reason) == (pb.Completion.FAILED, pb.NOT_READY)
        source.client.close()
        bare.close()


def _kept(source, pull, targets):
    """The same pull with pages that keep the source's order, so that whole sections are runs."""
    copies = []
    for layout, region, pages in targets:
        spans = [SpanRun(0, TokenOrder(8, 1), (50,), np.arange(24))]
        target = SpanRun(0, TokenOrder(8, 1), (region,), pages[:24])
        copies += copy_spans(source.LAYOUT, layout, spans, [target], 3 * 128)
    pull.placement.CopyFrom(plan_to_proto(CopyPlan(0, Purpose.PLACE, tuple(copies))))
    return pull


@pytest.mark.parametrize("transports", ["tcp,cma,self", "tcp,self"])
def test_chunks_go_straight_to_their_pages_and_the_faster_way_is_found(tmp_path, transports):
    with two_movers(tmp_path, "--ucx-transports", transports) as (source, target, _):
        places, found = target.places(0, seed=3), {}
        for pull_id, path in enumerate(("ring", "direct", *4 * ["measured"]), start=1):
            target.client.memory[60][:] = target.client.memory[70][:] = POISON
            pull = _kept(source, source.pull(pull_id, places, slots=3), places)
            pull.path = path
            target.client.link.pull(pull)
            done = target.client.completions(1)[pull_id]
            assert done.outcome == pb.Completion.DONE, done
            bytes_now = [target.client.memory[region].copy() for region in (60, 70)]
            for was, now in zip(found.setdefault("bytes", bytes_now), bytes_now, strict=True):
                assert np.array_equal(was, now)
            if path == "ring":
                target.client.memory[50][:] = POISON
            elif path == "direct":
                assert (target.client.memory[50] == POISON).all(), "staging is not touched"
        assert done.path.agent_name == source.agent.agent_name
        assert done.path.chosen in ("ring", "direct")
        assert min(done.path.ring_bytes_per_s, done.path.direct_bytes_per_s) > 0


def test_a_peer_that_hangs_while_it_is_read_straight_into_pages_ends_the_mover(tmp_path):
    """Its late bytes would land in pages, so the pages are in doubt until the mover's process is gone."""
    with (
        running(tmp_path / "prefill", "--ucx-transports", "tcp,self") as (source_process, source_path),
        running(tmp_path / "decode", "--ucx-transports", "tcp,self") as (mover, target_path),
    ):
        source, target = Source(source_path, seed=5), Target(target_path)
        places = _pulled_once(source, target)
        _stop(source_process)
        pull = _kept(source, source.pull(2, places, slots=3, deadline_ns=SECOND_NS), places)
        pull.path = "direct"
        target.client.link.pull(pull)
        late = target.client.completions(1)[2]
        assert (late.outcome, late.error.reason) == (pb.Completion.UNKNOWN_FATE, pb.TRANSFER_TIMEOUT)
        assert mover.wait(WAIT_S) == 0
        source_process.send_signal(signal.SIGCONT)
        source.client.close()
        target.client.close()
