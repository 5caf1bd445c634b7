"""The keeper's own death, upgrade and rivals, with stand-in children; the pieces of memory are told by their bytes."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from keeper_support import (
    DAEMON,
    LINKED_DAEMON,
    WAIT_S,
    gone,
    keeper,
    kill_and_wait,
    lives,
    said,
)

from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.keeper import lockfile
from kvmanager.keeper.children import kill_orphans
from kvmanager.keeper.handover import VARIABLE as STATE
from kvmanager.killpoints import VARIABLE as KILL_AT

RSS_MAX_KIB = 30 * 1024
HELD = "[('hbm', 4096, 'bytes of hbm'), ('host', 4096, 'bytes of host')]"
CHANGED = "[('host', 4096, 'bytes of host'), ('journal', 99, 'records')]"


@pytest.fixture
def linked(tmp_path):
    return LINKED_DAEMON.format(runtime_dir=str(tmp_path))


def wait_until(done):
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def stop(process):
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return out, errors


def rss_kib(pid):
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


def test_children_outlive_the_keeper_and_the_next_one_finds_them(tmp_path, linked):
    with keeper(tmp_path, linked) as (first, lines):
        mover, daemon = int(lines.next("mover")), int(lines.next("daemon"))
        kill_and_wait(first)
        assert lives(mover)
        assert lives(daemon)
        os.kill(daemon, signal.SIGUSR1)  # deposits go on without a keeper
        lines.next("changed")
        with keeper(tmp_path, linked) as (second, later):
            said(second, f"found the daemon, pid {daemon}")
            wait_until(lambda: not (tmp_path / "keeper.lock").read_text().startswith(f"{first.pid}\n"))
            # Only from the daemon can it have what its successor gets now.
            wait_until(lambda: all(name in descriptors(second.pid) for name in ("memfd:host", "memfd:journal")))
            assert "memfd:hbm" not in descriptors(second.pid)
            os.kill(daemon, signal.SIGKILL)
            assert later.next("held") == CHANGED
            assert int(later.next("daemon")) != daemon
            assert lives(mover)
            pidfd = os.pidfd_open(mover)
            _, errors = stop(second)
            assert "deposits kept" in errors
            assert "restart" in errors
            assert gone(pidfd), "a mover that it did not start is stopped as well"
            assert list(tmp_path.iterdir()) == []


def descriptors(pid):
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            names.append(os.readlink(entry))
    return " ".join(names)


def test_a_found_mover_that_dies_is_restarted(tmp_path, linked):
    with keeper(tmp_path, linked) as (first, lines):
        mover, daemon = int(lines.next("mover")), int(lines.next("daemon"))
        kill_and_wait(first)
        with keeper(tmp_path, linked) as (second, later):
            said(second, "found the daemon")
            os.kill(mover, signal.SIGKILL)
            assert int(later.next("mover")) != mover
            assert lives(daemon)
            stop(second)


@pytest.mark.parametrize("alone", [False, True])
def test_a_found_daemon_that_ends_in_order_ends_the_node(tmp_path, linked, alone):
    """Nobody can wait for a process that is not its child: the daemon says its exit code itself."""
    with keeper(tmp_path, linked) as (first, lines):
        mover, daemon = int(lines.next("mover")), int(lines.next("daemon"))
        kill_and_wait(first)
        if alone:  # without a keeper at all
            pidfd = os.pidfd_open(daemon)
            os.kill(daemon, signal.SIGTERM)
            assert gone(pidfd)
            assert lives(mover)
            assert kill_orphans(tmp_path) == ["mover"]
            return
        with keeper(tmp_path, linked) as (second, _):
            said(second, "found the daemon")
            wait_until(lambda: "memfd:hbm" in descriptors(second.pid))
            os.kill(daemon, signal.SIGTERM)
            _, errors = second.communicate(timeout=WAIT_S)
            assert second.returncode == 0, errors
            assert not lives(mover)


def test_when_keeper_and_daemon_die_the_start_is_cold_and_the_old_mover_is_killed_first(tmp_path, linked):
    with keeper(tmp_path, linked) as (first, lines):
        mover, daemon = int(lines.next("mover")), int(lines.next("daemon"))
        kill_and_wait(first)
        pidfd = os.pidfd_open(daemon)
        os.kill(daemon, signal.SIGKILL)
        assert gone(pidfd)
        with keeper(tmp_path, linked) as (second, later):
            assert int(later.next("mover")) != mover
            assert not lives(mover)
            assert later.next("held") == "[]"
            _, errors = stop(second)
            assert "cold start, the cache is lost" in errors
            assert errors.index("killed what was left: mover") < errors.index("started the mover")


def test_a_found_daemon_that_dies_before_it_gave_anything_back_is_a_cold_start_too(tmp_path, linked):
    """It was dying when the keeper found it: memory is lost, and the mover that still maps it must not go on."""
    with keeper(tmp_path, linked) as (first, lines):
        mover, daemon = int(lines.next("mover")), int(lines.next("daemon"))
        wait_until(lambda: lockfile.holder(tmp_path / "daemon.lock") == daemon)
        wait_until(lambda: "memfd:hbm" in descriptors(first.pid))
        kill_and_wait(first)
        os.kill(daemon, signal.SIGSTOP)  # not before: what is stopped while its parent dies gets a SIGHUP
        with keeper(tmp_path, linked) as (second, later):
            said(second, f"found the daemon, pid {daemon}")
            pidfd = os.pidfd_open(daemon)
            os.kill(daemon, signal.SIGKILL)
            assert gone(pidfd)
            assert "cold start, the cache is lost; killed what was left: mover" in said(second, "cold start")
            assert not lives(mover)
            assert later.next("held") == "[]"
            assert int(later.next("mover")) != mover
            stop(second)


def test_a_first_start_says_nothing_of_a_life_before(tmp_path, linked):
    with keeper(tmp_path, linked) as (process, lines):
        lines.next("daemon")
        _, errors = stop(process)
        assert "cold" not in errors
        assert "found" not in errors


def test_a_second_keeper_is_refused(tmp_path, linked):
    with keeper(tmp_path, linked) as (first, lines):
        daemon = int(lines.next("daemon"))
        with keeper(tmp_path, linked) as (second, _):
            _, errors = second.communicate(timeout=WAIT_S)
            assert second.returncode == EXIT_CONFIG
            assert f"error: a keeper, pid {first.pid}, has {tmp_path} already; stop it or choose another" in errors
        assert lives(daemon)
        assert kill_orphans(tmp_path) == []
        assert lives(daemon)
        assert lockfile.holder(tmp_path / "keeper.lock") == first.pid


def test_an_upgrade_keeps_pid_children_and_memory(tmp_path, linked):
    with keeper(tmp_path, linked) as (process, lines):
        mover, daemon = int(lines.next("mover")), int(lines.next("daemon"))
        started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        for _ in range(2):
            process.send_signal(signal.SIGUSR2)
            said(process, f"upgraded in place: pid {process.pid}, 2 deposits")
        os.kill(daemon, signal.SIGUSR1)  # the channel is still there
        lines.next("changed")
        assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19] == started
        assert lives(mover)
        with keeper(tmp_path, linked) as (rival, _):
            assert rival.wait(WAIT_S) == EXIT_CONFIG, "the lock was not let go of"
        assert lines.next("held") == "[]"
        os.kill(daemon, signal.SIGKILL)
        assert lines.next("held") == CHANGED
        os.kill(mover, signal.SIGKILL)
        assert int(lines.next("mover")) != mover
        _, errors = stop(process)
        assert "the daemon ended with -9" in errors, "they are its children still, it knows their codes"
        assert "the mover ended with -9" in errors
        assert list(tmp_path.iterdir()) == []


def test_an_upgrade_to_what_can_not_start_is_refused(tmp_path, linked):
    module = tmp_path / "broken" / "kvmanager"
    trap = tmp_path / "trap"
    module.mkdir(parents=True)
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        f"import os, sys\nif os.path.exists({str(trap)!r}) and '-c' in sys.orig_argv: raise SystemExit(3)\n"
    )
    path = os.pathsep.join([str(tmp_path / "broken"), os.environ.get("PYTHONPATH", "")])
    runtime_dir = tmp_path / "node"
    daemon = linked.replace(str(tmp_path), str(runtime_dir))
    with keeper(runtime_dir, daemon, environment={"PYTHONPATH": path}) as (process, lines):
        pid = int(lines.next("daemon"))
        trap.touch()
        process.send_signal(signal.SIGUSR2)
        said(process, "no upgrade, the old keeper goes on: the installed kvmanager.keeper can't be imported")
        trap.unlink()
        assert lives(pid)
        process.send_signal(signal.SIGUSR2)
        said(process, "upgraded in place")
        stop(process)


def test_a_state_that_can_not_be_read_is_as_a_death_of_the_keeper(tmp_path, linked):
    with keeper(tmp_path, linked) as (first, lines):
        daemon = int(lines.next("daemon"))
        kill_and_wait(first)
        state = os.memfd_create("state")
        os.write(state, b'{"version": 0}')
        with keeper(tmp_path, linked, environment={STATE: str(state)}, pass_fds=[state]) as (second, _):
            os.close(state)
            assert "no state of version 1" in said(second, f"found the daemon, pid {daemon}")
            stop(second)


@pytest.mark.parametrize(
    "point", ["keeper.start_child:1", "keeper.start_child:2", "keeper.deposit:2", "keeper.reclaim:1"]
)
def test_a_keeper_killed_at_a_point_leaves_what_the_next_one_can_use(tmp_path, linked, point):
    """Whatever the daemon had got to, exactly one of each child runs afterwards, and memory goes on from there."""
    with keeper(tmp_path, linked, environment={KILL_AT: point}) as (first, _):
        assert first.wait(WAIT_S) == -signal.SIGKILL
        with keeper(tmp_path, linked) as (second, later):
            wait_until(lambda: "memfd:hbm" in descriptors(second.pid) and "memfd:host" in descriptors(second.pid))
            daemon = lockfile.holder(tmp_path / "daemon.lock")
            os.kill(daemon, signal.SIGKILL)
            while (held := later.next("held")) == "[]":
                pass
            assert held == HELD
            while int(later.next("daemon")) == daemon:
                pass
            out, _ = stop(second)
            assert "daemon drained" in out


def test_forget_at_a_kill_point(tmp_path, linked):
    with keeper(tmp_path, linked, environment={KILL_AT: "keeper.forget:1"}) as (first, lines):
        daemon = int(lines.next("daemon"))
        os.kill(daemon, signal.SIGUSR1)
        assert first.wait(WAIT_S) == -signal.SIGKILL
        lines.next("changed")
        with keeper(tmp_path, linked) as (second, _):
            wait_until(lambda: "memfd:journal" in descriptors(second.pid))
            wait_until(lambda: "memfd:hbm" not in descriptors(second.pid))
            stop(second)


def test_a_kill_point_is_armed_in_a_childs_first_process_only(tmp_path):
    daemon = "import os\nprint('armed', os.environ.get('KVMANAGER_KILL_AT'))\n" + DAEMON
    with keeper(tmp_path, daemon, environment={KILL_AT: "daemon.apply.after:1"}) as (process, lines):
        assert lines.next("armed") == "daemon.apply.after:1"
        os.kill(int(lines.next("daemon")), signal.SIGKILL)
        assert lines.next("armed") == "None"
        lines.next("daemon")
        stop(process)


def test_a_daemon_whose_leftover_holds_its_lock_is_not_doubled(tmp_path):
    """The daemon dies, a process that it forked without exec lives: the node gives up instead of starting two."""
    daemon = """
import os, signal, time
if os.fork() == 0:
    print("leftover", os.getpid())
    time.sleep(600)
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with keeper(tmp_path, daemon) as (process, lines):
        leftover = int(lines.next("leftover"))
        assert process.wait(WAIT_S) == 1
        os.kill(leftover, signal.SIGKILL)  # it holds our pipes
        _, errors = process.communicate(timeout=WAIT_S)
        assert errors.count("started the daemon") == 1
        assert "still runs" in errors


def test_the_keeper_is_small(tmp_path, linked):
    with keeper(tmp_path, linked) as (process, lines):
        lines.next("daemon")
        assert rss_kib(process.pid) < RSS_MAX_KIB
        process.send_signal(signal.SIGUSR2)
        said(process, "upgraded")
        assert rss_kib(process.pid) < RSS_MAX_KIB
        print("VmRSS", rss_kib(process.pid))
        stop(process)
