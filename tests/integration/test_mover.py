"""Real mover processes: shared memory, NIXL over loopback, broken connections, death and silence."""

import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvmanager.allocators.backing import create_memfd, map_fd
from kvmanager.core.plans import CopyPlan, Purpose, Rows, StridedCopies, copy_rows
from kvmanager.errors import PeerUnreachable
from kvmanager.framing import send_frame
from kvmanager.layout import GLM53_TINY, indexer_layout, latent_layout, native_layout
from kvmanager.moverlink import MoverLink, mover_socket
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import MIB, SECOND_NS
from kvmanager.wire import RegionInfo, RegionKind, error_from_proto, pack_u64, plan_to_proto, unpack_u64

WAIT_S = 30
POISON = 0xA5


class Client:
    """A daemon's stand-in: a link, its events, and the regions that it gave."""

    def __init__(self, path, boot_id=1):
        self.events: queue.Queue = queue.Queue()
        self.link = MoverLink(path, boot_id, self.events.put, self.events.put)
        self.welcome = self.next("welcome")
        self.incarnation = self.welcome.incarnation
        self.redelivered = []
        while (event := self.event()).WhichOneof("what") == "completion":
            self.redelivered.append(event.completion)
        self.outstanding = unpack_u64(event.outstanding.plan_ids, "plan_ids").tolist()
        self.memory: dict[int, np.ndarray] = {}
        self.addresses: dict[int, int] = {}
        self.fds: dict[int, int] = {}

    def event(self):
        event = self.events.get(timeout=WAIT_S)
        if isinstance(event, Exception):
            raise event
        return event

    def next(self, what):
        event = self.event()
        assert event.WhichOneof("what") == what, event
        return event

    def add(self, region_id, size, kind=RegionKind.HOST, fill=POISON):
        fd = create_memfd(f"region-{region_id}", size)
        self.memory[region_id] = map_fd(fd, size)
        self.memory[region_id][:] = fill
        self.fds[region_id] = fd
        self.link.add_region(RegionInfo(region_id, kind, size), fd)
        added = self.next("region_added").region_added
        assert added.region_id == region_id
        self.addresses[region_id] = added.base_address
        return self.memory[region_id]

    def agent(self):
        self.link.start_agent()
        started = self.next("agent_started").agent_started
        assert not started.HasField("error"), started.error
        return started

    def completions(self, count):
        found = [self.next("completion").completion for _ in range(count)]
        assert len({c.plan_id for c in found}) == count
        return {c.plan_id: c for c in found}

    def list(self):
        """Outstanding ids; completions that come before the answer go to `between`."""
        self.link.list_outstanding()
        self.between = []
        while (event := self.event()).WhichOneof("what") == "completion":
            self.between.append(event.completion)
        return unpack_u64(event.outstanding.plan_ids, "plan_ids").tolist()

    def close(self):
        self.link.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


@contextmanager
def running(directory, *arguments, stderr=None):
    """A mover process that listens, stopped hard at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvmanager.mover", "--runtime-dir", str(directory), *arguments], stderr=stderr
    )
    try:
        path = mover_socket(directory, "cpu")
        give_up = time.monotonic() + WAIT_S
        while not path.exists():
            assert process.poll() is None, "the mover did not start"
            assert time.monotonic() < give_up
            time.sleep(0.01)
        yield process, path
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


@pytest.fixture
def mover(tmp_path):
    with running(tmp_path / "node") as (process, path):
        client = Client(path)
        yield client, process
        client.close()


def _run(plan_id, source, target, offsets, length=4096):
    array = np.array(offsets, dtype=np.int64)
    copies = StridedCopies(source, target, array, array[::-1].copy(), (), (), (), length)
    return CopyPlan(plan_id, Purpose.OFFLOAD, (copies,))


def _slow(plan_id, size):
    """Reverses `size` bytes by 64: half a million short runs in a message of some bytes."""
    last = np.array([size - 64])
    copies = StridedCopies(1, 2, np.array([0]), last, (size // 64,), (64,), (-64,), 64)
    return CopyPlan(plan_id, Purpose.PLACE, (copies,))


# ----------------------------------------------------------------------------------------- plans


def test_a_plan_moves_bytes_between_regions_given_as_fds(mover):
    client, process = mover
    assert client.welcome.welcome.pid == process.pid
    assert client.welcome.welcome.device == "cpu"
    assert (client.redelivered, client.outstanding) == ([], [])
    source = client.add(1, MIB, fill=0)
    target = client.add(2, MIB)
    source[:] = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    client.link.submit(_run(7, 1, 2, [0, 8192, 16384]))
    done = client.completions(1)[7]
    assert (done.outcome, done.moved_bytes) == (pb.Completion.DONE, 3 * 4096)
    assert done.busy_ns > 0
    assert np.array_equal(target[:4096], source[16384 : 16384 + 4096])
    assert np.array_equal(target[8192:12288], source[8192:12288])
    assert (target[4096:8192] == POISON).all()
    assert client.list() == []


def test_what_is_wrong_with_a_plan_comes_back_as_its_completion(mover):
    client, _ = mover
    client.add(1, MIB)
    target = client.add(2, MIB, fill=3)
    client.link.submit(_run(1, 1, 2, [0, MIB - 4095]))
    client.link.submit(_run(2, 1, 9, [0]))
    torn = plan_to_proto(_run(3, 1, 2, [0, 8192]))
    torn.copies[0].source_offsets = bytes(9)
    client.link.send(pb.MoverCommand(submit=torn))
    client.link.submit(_run(4, 1, 2, [0]))
    ended = client.completions(4)
    assert [ended[i].outcome for i in (1, 2, 3, 4)] == [pb.Completion.FAILED] * 3 + [pb.Completion.DONE]
    assert {ended[i].error.reason for i in (1, 2, 3)} == {pb.INVALID_ARGUMENT}
    assert "leave region 1" in ended[1].error.message
    assert "Strided.source_offsets" in ended[3].error.message
    assert (target[4096:] == 3).all()


def test_plans_interleave_and_a_cancelled_one_ends_once(mover):
    client, _ = mover
    size = 64 * MIB
    client.add(1, size)
    client.add(2, size)
    rows = np.arange(size // 64, dtype=np.int64) * 64
    huge = StridedCopies(1, 2, rows, np.random.default_rng(0).permutation(rows), (), (), (), 64)
    client.link.submit(CopyPlan(1, Purpose.PLACE, (huge,)))
    for plan_id in range(2, 50):
        client.link.submit(_run(plan_id, 1, 2, [0]))
    client.link.cancel(1)
    client.link.cancel(999)
    ended = client.completions(49)
    assert ended[1].outcome == pb.Completion.CANCELLED
    assert ended[1].moved_bytes < size
    assert {ended[i].outcome for i in range(2, 50)} == {pb.Completion.DONE}
    assert client.list() == []


def test_an_id_that_is_outstanding_closes_the_connection_and_the_first_plan_goes_on(mover, tmp_path):
    client, _ = mover
    size = 32 * MIB
    client.add(1, size)
    target = client.add(2, size, fill=0)
    client.link.submit(_slow(5, size))
    client.link.submit(_slow(5, size))
    with pytest.raises(PeerUnreachable):
        client.event()
    again = Client(mover_socket(tmp_path / "node", "cpu"))
    ended = {c.plan_id: c for c in again.redelivered} or again.completions(1)
    assert ended[5].outcome == pb.Completion.DONE
    assert (target == POISON).all()
    again.close()


# ------------------------------------------------------------------------------------ connections


def test_completions_of_a_broken_connection_go_to_the_next_daemon_that_lists(tmp_path):
    with running(tmp_path / "node") as (_, path):
        first = Client(path, boot_id=10)
        source, target = first.add(1, MIB, fill=9), first.add(2, MIB)
        first.link.submit(_run(1, 1, 2, [0]))
        first.completions(1)
        for plan_id in range(2, 12):
            first.link.submit(_run(plan_id, 1, 2, [4096 * plan_id]))
        first.list()  # all of them have arrived
        fd = os.dup(first.fds[1])
        first.close()

        second = Client(path, boot_id=11)
        known = {c.plan_id for c in second.redelivered} | set(second.outstanding)
        assert known == set(range(1, 12)), "1 too: the daemon may have died before it acted on it"
        ended = {c.plan_id: c for c in second.redelivered} | second.completions(len(second.outstanding))
        assert {c.outcome for c in ended.values()} == {pb.Completion.DONE}
        assert second.list() == []
        assert second.between == [], "what was delivered here is not delivered here again"
        second.link.add_region(RegionInfo(1, RegionKind.HOST, MIB), fd)
        assert second.next("region_added").region_added.base_address == first.addresses[1], "regions were kept"
        os.close(fd)
        second.link.submit(_run(12, 1, 2, [0, 65536]))
        assert second.completions(1)[12].outcome == pb.Completion.DONE
        assert np.array_equal(target[65536 : 65536 + 4096], source[:4096])
        second.close()


def test_the_newest_boot_is_served_and_older_ones_are_turned_away(tmp_path):
    with running(tmp_path / "node") as (_, path):
        old, new = Client(path, boot_id=3), Client(path, boot_id=4)
        with pytest.raises(PeerUnreachable):
            old.event()
        with pytest.raises(PeerUnreachable):
            Client(path, boot_id=3)
        same = Client(path, boot_id=4)
        with pytest.raises(PeerUnreachable):
            new.event()
        assert same.list() == []
        assert same.incarnation == new.incarnation == old.incarnation
        same.close()


def _garbage(path, case):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(WAIT_S)
        raw.connect(str(path))
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        region = pb.Region(region_id=1, kind=pb.HOST, size_bytes=4096)
        add = pb.MoverCommand(boot_id=9, add_region=pb.AddRegion(region=region))
        if case == "no frame":
            raw.sendall(struct.pack("<II", 2**31, 0))
        elif case == "no message":
            send_frame(raw, b"\xff" * 40)
        elif case == "no boot id":
            send_frame(raw, pb.MoverCommand(hello=pb.Hello()).SerializeToString())
        elif case == "no command":
            send_frame(raw, pb.MoverCommand(boot_id=9).SerializeToString())
        elif case == "no fd":
            send_frame(raw, add.SerializeToString())
        elif case == "unsealed fd":
            send_frame(raw, add.SerializeToString(), [fd])
        os.close(fd)
        assert raw.recv(100) == b"", "the mover closes the connection"


def test_garbage_closes_its_connection_and_nothing_else(tmp_path):
    with running(tmp_path / "node") as (process, path):
        cases = ("no frame", "no message", "no boot id", "no command", "no fd", "unsealed fd")
        before = None
        for case in (*cases, *cases):
            _garbage(path, case)
            if case == cases[-1]:
                fds = sorted(os.listdir(f"/proc/{process.pid}/fd"))
                assert before in (None, fds), "no fd leaks"
                before = fds
        client = Client(path, boot_id=9)
        assert client.list() == []
        client.close()


# ------------------------------------------------------------------------------------------ pulls


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

    def pull(self, pull_id, targets, staging_bases, spans_a_chunk=1, deadline_ns=20 * SECOND_NS):
        """A Pull of all tokens. `targets`: (layout, region, page list); chunk i goes to staging page `bases[i % n]`."""
        page = self.LAYOUT.page_bytes
        chunks = []
        for number, first in enumerate(range(0, 3, spans_a_chunk)):
            spans = list(range(first, min(first + spans_a_chunk, 3)))
            base = staging_bases[number % len(staging_bases)]
            remote, staging = [], []
            for rank in range(8):
                for place, span in enumerate(spans):
                    remote.append(self.client.addresses[1 + rank] + int(self.pages[span]) * page)
                    staging.append((base + place * 8 + rank) * page)
            positions = np.arange(first * 128, min((spans[-1] + 1) * 128, self.tokens))
            offset = positions % 128
            rows = Rows(
                np.full(len(positions), 50, np.int32), base + (positions // 128 - first) * 8 + offset % 8, offset // 8
            )
            copies = []
            for layout, region, pages in targets:
                target = Rows(np.full(len(positions), region, np.int32), pages[positions // 16], positions % 16)
                copies += copy_rows(self.LAYOUT, layout, rows, target)
            chunks.append(
                pb.PullChunk(
                    remote_addresses=pack_u64(remote),
                    staging_offsets=pack_u64(staging),
                    lengths=pack_u64([page] * len(remote)),
                    placement=plan_to_proto(CopyPlan(0, Purpose.PLACE, tuple(copies))),
                )
            )
        return pb.Pull(
            pull_id=pull_id,
            agent_name=self.agent.agent_name,
            agent_metadata=self.agent.agent_metadata,
            peer_incarnation=self.client.incarnation,
            chunks=chunks,
            deadline_ns=deadline_ns,
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


@pytest.mark.parametrize("transports", ["tcp,cma,self", "tcp,self"])
def test_pulls_permute_dcp8_pages_into_sequential_ones(tmp_path, transports):
    """Two pulls at once; chunks of both use the same staging, so they must take turns in it."""
    with two_movers(tmp_path, "--ucx-transports", transports) as (source, target, _):
        places = [target.places(0, seed=11), target.places(1, seed=12)]
        target.client.link.pull(source.pull(1, places[0], staging_bases=[0, 8]))
        target.client.link.pull(source.pull(2, places[1], staging_bases=[4, 12, 0]))
        ended = target.client.completions(2)
        for completion in ended.values():
            assert completion.outcome == pb.Completion.DONE, completion
            assert completion.moved_bytes == 24 * Source.LAYOUT.page_bytes
        for request in (0, 1):
            target.check(source, places[request])
        target.client.memory[60][:] = POISON
        target.client.memory[70][:] = POISON
        target.client.link.pull(source.pull(3, places[0], staging_bases=[0], spans_a_chunk=3))
        assert target.client.completions(1)[3].outcome == pb.Completion.DONE
        target.check(source, places[0])
        assert target.client.list() == []


def test_pulls_that_make_no_sense_fail_before_a_byte_moves(tmp_path):
    with two_movers(tmp_path) as (source, target, _):
        model = source.pull(0, target.places(0, seed=1), [0])

        def good(pull_id):
            pull = pb.Pull.FromString(model.SerializeToString())
            pull.pull_id = pull_id
            return pull

        pulls = {name: good(number) for number, name in enumerate(_BAD_PULLS, start=1)}
        for name, (change, _) in _BAD_PULLS.items():
            change(pulls[name])
            target.client.link.pull(pulls[name])
        empty = good(90)
        del empty.chunks[:]
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


def _last(pull):
    return pull.chunks[len(pull.chunks) - 1]


def _outside(pull):
    _last(pull).staging_offsets = pack_u64([24 * Source.LAYOUT.page_bytes - 1] * 8)


def _twice(pull):
    _last(pull).staging_offsets = pack_u64([0] * 8)


def _into_staging(pull):
    _last(pull).placement.copies[0].target_region = 50


def _unread(pull):
    _last(pull).staging_offsets = pack_u64((np.arange(8) + 16) * Source.LAYOUT.page_bytes)


def _no_deadline(pull):
    pull.deadline_ns = 0


def _other_process(pull):
    pull.peer_incarnation ^= 1


def _bad_metadata(pull):
    pull.agent_metadata = secrets.token_bytes(200)


def _uneven(pull):
    _last(pull).lengths = pack_u64([1] * 7)


_BAD_PULLS = {
    "outside": (_outside, "leaves region 50"),
    "twice": (_twice, "twice into the same staging"),
    "into staging": (_into_staging, "placement goes from staging"),
    "unread": (_unread, "which it does not read"),
    "no deadline": (_no_deadline, "deadline"),
    "other process": (_other_process, "incarnation"),
    "bad metadata": (_bad_metadata, "metadata"),
    "uneven": (_uneven, "7 lengths"),
}


def test_a_killed_source_fails_the_pull_with_a_typed_error(tmp_path):
    with two_movers(tmp_path) as (source, target, process):
        places = target.places(0, seed=3)
        target.client.link.pull(source.pull(1, places, [0]))
        assert target.client.completions(1)[1].outcome == pb.Completion.DONE
        process.kill()
        process.wait()
        for pull_id in (2, 3):
            target.client.link.pull(source.pull(pull_id, places, [0]))
            completion = target.client.completions(1)[pull_id]
            assert completion.outcome == pb.Completion.FAILED
            assert isinstance(error_from_proto(completion.error), PeerUnreachable), completion.error
        target.client.link.submit(_run(4, 60, 61, [0]))
        assert target.client.completions(1)[4].outcome == pb.Completion.DONE, "the mover serves on"


def test_a_source_killed_in_the_middle_of_a_read_fails_the_pull(tmp_path):
    """Over TCP a stopped peer keeps the read in flight until it is killed."""
    with two_movers(tmp_path, "--ucx-transports", "tcp,self") as (source, target, process):
        places = target.places(0, seed=3)
        target.client.link.pull(source.pull(1, places, [0]))
        assert target.client.completions(1)[1].outcome == pb.Completion.DONE
        target.client.memory[60][:] = POISON
        process.send_signal(signal.SIGSTOP)
        target.client.link.pull(source.pull(2, places, [0]))
        assert target.client.list() == [2]
        assert target.client.list() == [2]
        process.kill()
        process.wait()
        completion = target.client.completions(1)[2]
        assert completion.outcome == pb.Completion.FAILED
        assert isinstance(error_from_proto(completion.error), PeerUnreachable), completion.error
        assert (target.client.memory[60] == POISON).all(), "nothing was placed"


def test_a_pull_cancelled_during_a_read_waits_for_it_and_places_nothing(tmp_path):
    with two_movers(tmp_path, "--ucx-transports", "tcp,self") as (source, target, process):
        places = target.places(0, seed=3)
        target.client.link.pull(source.pull(1, places, [0]))
        assert target.client.completions(1)[1].outcome == pb.Completion.DONE
        target.client.memory[60][:] = POISON
        process.send_signal(signal.SIGSTOP)
        target.client.link.pull(source.pull(2, places, [0]))
        for _ in range(2):  # the answer to the second means that a turn of the mover began the read
            assert target.client.list() == [2]
        target.client.link.cancel(2)
        assert target.client.list() == [2]
        assert target.client.list() == [2], "its read is still in flight"
        process.send_signal(signal.SIGCONT)
        completion = target.client.completions(1)[2]
        assert completion.outcome == pb.Completion.CANCELLED
        assert (target.client.memory[60] == POISON).all(), "nothing was placed"
        assert target.client.list() == []


def test_a_hung_source_ends_in_unknown_fate_and_its_staging_is_quarantined_until_the_bytes_came(tmp_path):
    """TCP, where a stopped peer delivers nothing and never errs; its bytes come when it goes on."""
    with two_movers(tmp_path, "--ucx-transports", "tcp,self") as (source, target, process):
        places = target.places(0, seed=3)
        target.client.link.pull(source.pull(1, places, [0]))
        assert target.client.completions(1)[1].outcome == pb.Completion.DONE
        target.client.memory[50][:] = POISON
        target.client.memory[60][:] = POISON
        process.send_signal(signal.SIGSTOP)
        target.client.link.pull(source.pull(2, places, [0], deadline_ns=SECOND_NS // 2))
        late = target.client.completions(1)[2]
        assert late.outcome == pb.Completion.UNKNOWN_FATE
        assert late.error.reason == pb.TRANSFER_TIMEOUT
        target.client.link.pull(source.pull(3, places, [4]))
        refused = target.client.completions(1)[3]
        assert refused.outcome == pb.Completion.FAILED
        assert "unknown fate" in refused.error.message
        assert (target.client.memory[60] == POISON).all(), "nothing was placed"
        process.send_signal(signal.SIGCONT)
        give_up = time.monotonic() + WAIT_S
        for pull_id in range(4, 1000):
            target.client.link.pull(source.pull(pull_id, places, [0]))
            if target.client.completions(1)[pull_id].outcome == pb.Completion.DONE:
                break
            assert time.monotonic() < give_up
            time.sleep(0.05)
        target.client.memory[70][:] = POISON
        target.client.memory[60][:] = POISON
        target.client.link.pull(source.pull(5000, places, [0]))
        assert target.client.completions(1)[5000].outcome == pb.Completion.DONE
        target.check(source, places)


def test_pulls_without_staging_are_refused(tmp_path):
    with running(tmp_path / "prefill") as (_, source_path), running(tmp_path / "bare") as (_, bare_path):
        source, bare = Source(source_path, seed=1), Client(bare_path)
        bare.link.pull(source.pull(1, [], [0]))
        completion = bare.completions(1)[1]
        assert (completion.outcome, completion.error.reason) == (pb.Completion.FAILED, pb.NOT_READY)
        source.client.close()
        bare.close()


# ------------------------------------------------------------------------------------- the process


def test_sigterm_ends_what_is_outstanding_and_takes_the_socket_away(tmp_path):
    with running(tmp_path / "node") as (process, path):
        client = Client(path)
        client.add(1, 32 * MIB)
        client.add(2, 32 * MIB)
        client.link.submit(_slow(1, 32 * MIB))
        client.list()
        process.terminate()
        (done,) = client.between or client.completions(1).values()
        assert done.outcome == pb.Completion.DONE, "32 MiB take less than the time it has"
        assert process.wait(WAIT_S) == 0
        assert not path.exists()
        client.close()


def test_a_mover_whose_memory_was_made_anew_stops(tmp_path):
    with running(tmp_path / "node") as (process, path):
        old = Client(path, boot_id=1)
        old.add(1, MIB)
        new = Client(path, boot_id=2)
        with pytest.raises(PeerUnreachable):
            new.add(1, MIB)
        assert process.wait(WAIT_S) == 0
        assert not path.exists()
        old.close()
        new.close()


def test_a_second_mover_of_a_device_is_refused_and_a_dead_ones_socket_is_not(tmp_path):
    with running(tmp_path / "node") as (process, path):
        command = [sys.executable, "-m", "kvmanager.mover", "--runtime-dir", str(tmp_path / "node")]
        assert subprocess.run(command, capture_output=True, timeout=WAIT_S).returncode == 78
        Client(path).close()
        process.kill()
        process.wait()
        assert path.exists()
    with running(tmp_path / "node") as (process, path):
        while True:  # the old socket's file is there until the new one's
            try:
                Client(path, boot_id=2).close()
                break
            except PeerUnreachable:
                assert process.poll() is None
                time.sleep(0.02)


_PARENT = """
import os, subprocess, sys, time
process = subprocess.Popen([sys.executable, "-m", "kvmanager.mover", "--runtime-dir", sys.argv[1]])
print(process.pid, flush=True)
time.sleep(60)
"""


def test_the_mover_ends_when_its_parent_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "node")], stdout=subprocess.PIPE, text=True
    )
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    path = mover_socket(tmp_path / "node", "cpu")
    while not path.exists():
        time.sleep(0.01)
    Client(path).close()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    give_up = time.monotonic() + WAIT_S
    while path.exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    os.close(pidfd)


def _cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_mover_sleeps_with_and_without_its_agent_and_loads_no_gpu_stack(mover):
    client, process = mover
    client.add(1, MIB)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "nixl" not in maps, "NIXL is loaded with the first agent only"
    for start_agent in (False, True):
        if start_agent:
            agent = client.agent()
            assert agent.agent_name.endswith(f"{client.incarnation:016x}")
            assert client.agent().agent_name == agent.agent_name
        before = _cpu_seconds(process.pid)
        time.sleep(1)
        assert _cpu_seconds(process.pid) - before < 0.2
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "nixl" in maps
    for library in ("libtorch", "libcuda", "libcudart", "grpc/_cython"):
        assert library not in maps
