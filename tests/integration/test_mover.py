"""Real mover processes: shared memory, broken connections, parents, signals and silence."""

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.daemon.moverlink import mover_socket
from kvmanager.errors import PeerUnreachable
from kvmanager.framing import send_frame
from kvmanager.keeper import lockfile
from kvmanager.planwire import plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import KEEPER_LOCK
from kvmanager.transport.pacing import LinkRates
from kvmanager.units import MIB
from kvmanager.wire import RegionInfo, RegionKind
from tests.integration.mover_process import POISON, WAIT_S, Client, reversed_pieces, running, slow_plan
from tests.plans import strided


@pytest.fixture
def mover(tmp_path):
    with running(tmp_path / "node") as (process, path):
        client = Client(path)
        yield client, process
        client.close()


# ----------------------------------------------------------------------------------------- plans


def test_a_plan_moves_bytes_between_regions_given_as_fds(mover):
    client, process = mover
    assert client.welcome.welcome.pid == process.pid
    assert client.welcome.welcome.device == "cpu"
    assert (client.redelivered, client.outstanding) == ([], [])
    source = client.add(1, MIB, fill=0)
    target = client.add(2, MIB)
    source[:] = np.random.default_rng(1).integers(0, 256, MIB, dtype=np.uint8)
    client.link.submit(reversed_pieces(7, 1, 2, [0, 8192, 16384]))
    done = client.completions(1)[7]
    assert (done.outcome, done.moved_bytes) == (pb.Completion.DONE, 3 * 4096)
    assert done.busy_ns > 0
    assert np.array_equal(target[:4096], source[16384 : 16384 + 4096])
    assert np.array_equal(target[8192:12288], source[8192:12288])
    assert (target[4096:8192] == POISON).all()
    assert client.list() == []


def test_descriptors_behind_a_bad_frame_are_closed(tmp_path):
    """They came in one read with it, and nobody takes them any more."""
    def of_others(pid):
        return sum(os.readlink(fd).startswith("/memfd:stranger") for fd in Path(f"/proc/{pid}/fd").iterdir())

    with running(tmp_path / "node") as (process, path), socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(os.fspath(path))
        fd = os.memfd_create("stranger")
        bad, good = b"\xff" * 3, pb.MoverCommand(boot_id=1, ping=1).SerializeToString()
        frames = struct.pack("<II", len(bad), 0) + bad + struct.pack("<II", len(good), 1) + good
        socket.send_fds(stranger, [frames], [fd])
        os.close(fd)
        stranger.settimeout(WAIT_S)
        assert stranger.recv(1) == b"", "the connection is closed"
        assert of_others(process.pid) == 0


def test_a_link_at_its_rate_delays_write_back_and_no_onboard(tmp_path):
    """At 1 MB/s the write-back would take a minute; the onboard ends, and the write-back when given up."""
    with running(tmp_path / "node") as (_, path):
        client = Client(path, rates=LinkRates(to_host=1_000_000))
        size = 64 * MIB
        source = client.add(1, size, fill=7)
        target = client.add(2, size)
        whole = strided(1, 2, np.array([0]), np.array([0]), (), (), (), size)
        client.link.submit(CopyPlan(1, Purpose.OFFLOAD, (whole,)))
        client.link.submit(CopyPlan(2, Purpose.ONBOARD, (whole,)))
        assert client.completions(1)[2].outcome == pb.Completion.DONE
        assert np.array_equal(source, target)
        assert client.list() == [1]
        client.link.cancel(1)
        ended = client.completions(1)[1]
        assert ended.outcome == pb.Completion.CANCELLED
        assert 0 < ended.moved_bytes < size
        client.close()


def test_what_is_wrong_with_a_plan_comes_back_as_its_completion(mover):
    client, _ = mover
    client.add(1, MIB)
    target = client.add(2, MIB, fill=3)
    client.link.submit(reversed_pieces(1, 1, 2, [0, MIB - 4095]))
    client.link.submit(reversed_pieces(2, 1, 9, [0]))
    torn = plan_to_proto(reversed_pieces(3, 1, 2, [0, 8192]))
    torn.copies[0].source.slots = bytes(9)
    client.link.send(pb.MoverCommand(submit=torn))
    client.link.submit(reversed_pieces(4, 1, 2, [0]))
    ended = client.completions(4)
    assert [ended[i].outcome for i in (1, 2, 3, 4)] == [pb.Completion.FAILED] * 3 + [pb.Completion.DONE]
    assert {ended[i].error.reason for i in (1, 2, 3)} == {pb.INVALID_ARGUMENT}
    assert "leave region 1" in ended[1].error.message
    assert "PagedCopies.source.slots" in ended[3].error.message
    assert (target[4096:] == 3).all()


def test_plans_interleave_and_a_cancelled_one_ends_once(mover):
    client, _ = mover
    size = 64 * MIB
    client.add(1, size)
    client.add(2, size)
    rows = np.arange(size // 64, dtype=np.int64) * 64
    huge = strided(1, 2, rows, np.random.default_rng(0).permutation(rows), (), (), (), 64)
    client.link.submit(CopyPlan(1, Purpose.PLACE, (huge,)))
    for plan_id in range(2, 50):
        client.link.submit(reversed_pieces(plan_id, 1, 2, [0]))
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
    client.link.submit(slow_plan(5, size))
    client.link.submit(slow_plan(5, size))
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
        first.link.submit(reversed_pieces(1, 1, 2, [0]))
        first.completions(1)
        for plan_id in range(2, 12):
            first.link.submit(reversed_pieces(plan_id, 1, 2, [4096 * plan_id]))
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
        second.link.submit(reversed_pieces(12, 1, 2, [0, 65536]))
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


# ------------------------------------------------------------------------------------- the process


def test_sigterm_ends_what_is_outstanding_and_takes_the_socket_away(tmp_path):
    with running(tmp_path / "node") as (process, path):
        client = Client(path)
        client.add(1, 32 * MIB)
        client.add(2, 32 * MIB)
        client.link.submit(slow_plan(1, 32 * MIB))
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


@pytest.mark.parametrize("keeper_lives", [False, True])
def test_a_mover_without_daemon_and_keeper_ends(tmp_path, keeper_lives):
    """With a living keeper it waits on, for that one starts daemons."""
    (tmp_path / "node").mkdir(mode=0o700)
    lock = lockfile.hold(tmp_path / "node" / KEEPER_LOCK) if keeper_lives else None
    with running(tmp_path / "node", "--orphan-s", "0.3") as (process, path):
        client = Client(path)
        time.sleep(0.5)  # idle, with a daemon: that is no orphan
        assert client.list() == []
        client.close()
        if lock is None:
            assert process.wait(WAIT_S) == 0
            assert not path.exists()
        else:
            time.sleep(0.8)
            Client(path, boot_id=2).close()
            os.close(lock)
            assert process.wait(WAIT_S) == 0


def test_a_mover_that_was_linked_for_long_is_no_orphan_at_the_first_moment_alone(tmp_path):
    with running(tmp_path / "node", "--orphan-s", "2") as (process, path):
        client = Client(path)
        time.sleep(2.2)
        client.close()
        again = Client(path, boot_id=2)
        assert again.incarnation == client.incarnation
        assert process.poll() is None
        again.close()


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
