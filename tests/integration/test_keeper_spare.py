"""The keeper's spare daemon, with stand-in children: it takes a dead daemon's place, no more."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from keeper_support import LINKED_DAEMON, SAY, WAIT_S, gone, keeper, kill_and_wait, lives, said

from kvmanager.keeper import lockfile
from kvmanager.killpoints import VARIABLE as KILL_AT
from kvmanager.killpoints import KillOrder

HELD = "[('hbm', 4096, 'bytes of hbm'), ('host', 4096, 'bytes of host')]"
MODULE = """
{say}
WORD = "old"
def main(arguments):
    import sys
    sys.argv[1:] = arguments
    print("version", WORD, "loaded by", sys.orig_argv[2])
    exec(DAEMON, globals())
if __name__ == "__main__":
    main(__import__("sys").argv[1:])
"""


@pytest.fixture
def node(tmp_path):
    """What `keeper` takes: a daemon's program, as code and as a module that a spare can load; not just written."""
    program = tmp_path / "program"
    program.mkdir()
    daemon = LINKED_DAEMON.format(runtime_dir=str(tmp_path / "node"))
    path = program / "stand_in_daemon.py"
    path.write_text(f"DAEMON = {daemon!r}\n" + MODULE.format(say=SAY))
    time.sleep(0.05)
    environment = {"PYTHONPATH": os.pathsep.join([str(program), os.environ.get("PYTHONPATH", "")])}
    return {"daemon": daemon, "spare": "stand_in_daemon", "environment": environment}, tmp_path / "node", path


def ready(process) -> int:
    return int(said(process, "a spare daemon is ready").rpartition("pid ")[2])


def stop(process) -> str:
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return errors


def first_daemon(lines) -> int:
    assert lines.next("held") == "[]"
    return int(lines.next("daemon"))


def children_of(pid) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_it_becomes_the_daemon_and_the_next_one_is_started(node):
    options, runtime_dir, _ = node
    with keeper(runtime_dir, **options) as (process, lines):
        daemon = first_daemon(lines)
        for _ in range(3):
            spare = ready(process)
            links = [os.readlink(entry) for entry in Path(f"/proc/{spare}/fd").iterdir()]
            assert not [name for name in links if "memfd" in name or str(runtime_dir) in name], "it holds nothing yet"
            os.kill(daemon, signal.SIGKILL)
            assert lines.next("version") == "old loaded by kvmanager.keeper.spare"
            assert lines.next("held") == HELD
            daemon = int(lines.next("daemon"))
            assert daemon == spare == lockfile.holder(runtime_dir / "daemon.lock")
        spare = ready(process)
        pidfd = os.pidfd_open(spare)
        stop(process)
        assert gone(pidfd)
        assert list(runtime_dir.iterdir()) == []


def test_a_changed_file_is_loaded_anew_in_the_same_process(node):
    options, runtime_dir, path = node
    # Python takes cached bytecode for that of a file with the same time and size.
    options["environment"]["PYTHONDONTWRITEBYTECODE"] = "1"
    with keeper(runtime_dir, **options) as (process, lines):
        daemon, spare = first_daemon(lines), ready(process)
        stamp = path.stat()
        path.write_text(path.read_text().replace('"old"', '"new"'))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as a tool that keeps times and sizes
        os.kill(daemon, signal.SIGKILL)
        assert lines.next("version") == "new loaded by stand_in_daemon"
        assert lines.next("held") == HELD
        assert int(lines.next("daemon")) == spare
        stop(process)


def test_its_death_costs_nothing_until_it_dies_too_often(node):
    options, runtime_dir, _ = node
    with keeper(runtime_dir, **options) as (process, lines):
        daemon = first_daemon(lines)
        for _ in range(3):
            os.kill(ready(process), signal.SIGKILL)
        os.kill(ready(process), signal.SIGKILL)
        said(process, "the last of many: no other is started")
        assert lives(daemon)
        os.kill(daemon, signal.SIGKILL)
        assert lines.next("held") == HELD, "a daemon is started as ever"
        lines.next("daemon")
        stop(process)


def test_one_that_can_not_be_used_costs_nothing_either(node):
    """Stopped, it does not answer; the keeper ends it and starts a daemon as after any death."""
    options, runtime_dir, _ = node
    with keeper(runtime_dir, **options) as (process, lines):
        daemon, spare = first_daemon(lines), ready(process)
        os.kill(spare, signal.SIGSTOP)
        os.kill(daemon, signal.SIGKILL)
        said(process, "the spare does not take the daemon's place")
        assert lines.next("held") == HELD
        assert int(lines.next("daemon")) != spare
        assert not lives(spare)
        stop(process)


def test_it_ends_with_its_keeper(node):
    options, runtime_dir, _ = node
    with keeper(runtime_dir, **options) as (process, lines):
        lines.next("daemon")
        pidfd = os.pidfd_open(ready(process))
        kill_and_wait(process)
        assert gone(pidfd)


def test_it_ends_with_its_keeper_while_it_loads(node):
    options, runtime_dir, path = node
    path.write_text("import os, time\nos.write(1, b'loading %d\\n' % os.getpid())\ntime.sleep(600)\n")
    with keeper(runtime_dir, **options) as (process, lines):
        lines.next("daemon")
        pidfd = os.pidfd_open(int(lines.next("loading")))
        kill_and_wait(process)
        assert gone(pidfd)


def test_as_the_daemon_it_outlives_its_keeper(node):
    options, runtime_dir, _ = node
    with keeper(runtime_dir, **options) as (first, lines):
        daemon, spare = first_daemon(lines), ready(first)
        os.kill(daemon, signal.SIGKILL)
        assert lines.next("held") == HELD
        assert int(lines.next("daemon")) == spare
        kill_and_wait(first)
        with keeper(runtime_dir, **options) as (second, _):
            said(second, f"found the daemon, pid {spare}")
            assert lives(spare)
            stop(second)


def test_an_upgrade_of_the_keeper_begins_with_its_end(node):
    options, runtime_dir, _ = node
    with keeper(runtime_dir, **options) as (process, lines):
        daemon, spare = first_daemon(lines), ready(process)
        process.send_signal(signal.SIGUSR2)
        said(process, "upgraded in place")
        assert spare not in children_of(process.pid), "not even as a zombie"
        os.kill(daemon, signal.SIGKILL)
        assert lines.next("held") == HELD
        lines.next("daemon")
        ready(process)
        stop(process)


@pytest.mark.parametrize("point", ["spare.ready", "spare.begins"])
def test_a_spare_killed_at_its_points(node, tmp_path, point):
    options, runtime_dir, _ = node
    order = KillOrder(tmp_path / "order")
    options["environment"][KILL_AT] = order.value
    if point == "spare.ready":
        order.give(point, 1)
    with keeper(runtime_dir, **options) as (process, lines):
        daemon = first_daemon(lines)
        spare = ready(process)
        if point == "spare.begins":
            order.give(point, 1)
        os.kill(daemon, signal.SIGKILL)
        assert lines.next("held") == HELD
        assert (int(lines.next("daemon")) == spare) == (point == "spare.ready")
        assert order.over
        stop(process)
    order.close()


def test_a_keeper_killed_while_the_spare_begins(node):
    """Keeper and daemon are dead: a cold start, and exactly one daemon afterwards."""
    options, runtime_dir, _ = node
    options["environment"][KILL_AT] = "keeper.spare_begins:1"
    with keeper(runtime_dir, **options) as (first, lines):
        daemon, spare = first_daemon(lines), ready(first)
        pidfd = os.pidfd_open(spare)
        os.kill(daemon, signal.SIGKILL)
        assert first.wait(WAIT_S) == -signal.SIGKILL
        assert gone(pidfd), "nobody has the memory for it"
        del options["environment"][KILL_AT]
        with keeper(runtime_dir, **options) as (second, later):
            assert later.next("held") == "[]"
            assert int(later.next("daemon")) == lockfile.holder(runtime_dir / "daemon.lock")
            assert "cold start" in stop(second)


def test_a_program_that_can_not_be_loaded_is_no_spare(node):
    options, runtime_dir, path = node
    path.write_text("raise SystemExit(3)\n")
    with keeper(runtime_dir, **options) as (process, lines):
        daemon = first_daemon(lines)
        said(process, "the last of many: no other is started")
        assert lives(daemon)
        stop(process)


def test_what_it_loads_is_what_is_started():
    """The real program: a spare loads all that a daemon needs, and no thread is left."""
    code = """
import sys, threading
from kvmanager.keeper.spare import LoadedProgram
program = LoadedProgram("kvmanager.daemon.__main__")
assert program.current
assert {"grpc", "numpy", "kvmanager.core.node"} <= sys.modules.keys()
print(threading.active_count())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
