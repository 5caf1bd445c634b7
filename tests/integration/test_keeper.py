"""The keeper with stand-in children: restarts, deposits, orderly ends, and nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from keeper_support import MOVER, WAIT_S, gone, keeper, lives

from kvmanager.daemon.keeperlink import KeeperLink
from kvmanager.errors import DaemonError
from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.keeper.deposits import Deposit, DepositBox
from kvmanager.keeper.keeper import main


def test_sigterm_drains_the_daemon_then_stops_the_mover(tmp_path: Path) -> None:
    polite = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (print('mover stops'), sys.exit(0)))\n"
    with keeper(tmp_path, mover=polite + MOVER) as (process, lines):
        lines.next("mover")
        lines.next("daemon")
        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, errors
        assert rest.split("\n")[:2] == ["daemon drained", "mover stops"]


def test_sigint_is_the_same(tmp_path: Path) -> None:
    # Whoever runs the tests in the background may have it ignored, and a keeper leaves it so.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    with keeper(tmp_path, before=heard) as (process, lines):
        lines.next("daemon")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "daemon drained" in rest


def test_a_deaf_daemon_is_killed_after_its_deadline(tmp_path: Path) -> None:
    daemon = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + MOVER.replace("mover", "daemon")
    with keeper(tmp_path, daemon, drain_s=0.2) as (process, lines):
        pidfd = os.pidfd_open(int(lines.next("daemon")))
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "did not stop within 0.2 s" in errors
        assert gone(pidfd)


def test_a_second_signal_ends_the_wait(tmp_path: Path) -> None:
    daemon = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('deaf'))\nprint('daemon')\n" + (
        "while True: signal.pause()\n"
    )
    with keeper(tmp_path, daemon, drain_s=600.0) as (process, lines):
        lines.next("daemon")
        process.send_signal(signal.SIGTERM)
        lines.next("deaf")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0


@pytest.mark.parametrize("victim", ["daemon", "mover"])
def test_a_dead_child_is_restarted_alone(victim: str, tmp_path: Path) -> None:
    other = {"daemon": "mover", "mover": "daemon"}[victim]
    with keeper(tmp_path) as (process, lines):
        first = int(lines.next(victim))
        survivor = int(lines.next(other))
        os.kill(first, signal.SIGKILL)
        assert int(lines.next(victim)) != first
        os.kill(survivor, 0)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
        assert f"the {victim} ended with -9" in errors
        assert process.returncode == 0


def test_a_daemon_that_keeps_dying_ends_the_node(tmp_path: Path) -> None:
    with keeper(tmp_path, "import sys\nprint('daemon')\nsys.exit(77)\n") as (process, lines):
        mover = int(lines.next("mover"))
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 1
        assert "the daemon ended with 77: death 4 in 60 s; giving up" in errors
        assert errors.count("started the daemon") == 4
        assert not lives(mover)


@pytest.mark.parametrize("code", [EXIT_CONFIG, 0])
def test_a_daemon_that_ends_on_purpose_is_not_restarted(code: int, tmp_path: Path) -> None:
    with keeper(tmp_path, f"import sys\nsys.exit({code})\n") as (process, _):
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == code
        assert errors.count("started the daemon") == 1


def test_memory_survives_the_daemon(tmp_path: Path) -> None:
    """The first daemon deposits and dies; the second gets the same bytes back and forgets one piece."""
    daemon = """
import os, signal, sys, time
from kvmanager.daemon.keeperlink import KeeperLink
link = KeeperLink(int(sys.argv[2]))
assert sys.argv[1] == "--keeper-fd"
held = link.reclaim()
print("held", [(d.name, d.size_bytes, os.pread(d.fd, 99, 0).decode()) for d in held])
if not held:
    for name in ("hbm", "host"):
        fd = os.memfd_create(name)
        os.write(fd, f"bytes of {name}".encode())
        link.deposit(name, 4096, fd)
    os.kill(os.getpid(), signal.SIGKILL)
if len(held) == 2:
    link.forget("hbm")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    with keeper(tmp_path, daemon) as (process, lines):
        assert lines.next("held") == "[]"
        assert lines.next("held") == "[('hbm', 4096, 'bytes of hbm'), ('host', 4096, 'bytes of host')]"
        assert lines.next("held") == "[('host', 4096, 'bytes of host')]"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)


def test_a_daemon_that_talks_nonsense_loses_its_channel_only(tmp_path: Path) -> None:
    daemon = """
import os, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[2]))
channel.sendall(b"\\xff" * 64)
print("closed", channel.recv(10))
time.sleep(600)
"""
    with keeper(tmp_path, daemon) as (process, lines):
        assert lines.next("closed") == "b''"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0


class NoStore:
    """Nobody keeps descriptors beyond the keeper."""

    def keep(self, deposit: Deposit) -> None:
        pass

    def let_go(self, deposit: Deposit) -> None:
        pass


@pytest.fixture
def link() -> Iterator[KeeperLink]:
    """A link to a box served by a thread."""
    ours, theirs = socket.socketpair()
    box = DepositBox(NoStore(), lambda _state: None)

    def serve() -> None:
        while box.serve(ours):
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    made = KeeperLink(theirs.detach())
    yield made
    made.close()
    thread.join(WAIT_S)
    box.close()
    ours.close()


def test_deposits_are_refused_clearly(link: KeeperLink) -> None:
    fd = os.memfd_create("x")
    link.deposit("x", 1, fd)
    with pytest.raises(DaemonError, match="'x' is deposited already; forget it first"):
        link.deposit("x", 1, fd)
    os.close(fd)
    with pytest.raises(DaemonError, match=r"nothing called 'y'.*\['x'\]"):
        link.forget("y")
    with pytest.raises(DaemonError, match="0 descriptors"):
        link._ask({"op": "deposit", "name": "z", "size": 1}, [])
    with pytest.raises(DaemonError, match="unknown request"):
        link._ask({"op": "sing"}, [])
    held = link.reclaim()
    assert [(deposit.name, deposit.size_bytes) for deposit in held] == [("x", 1)]
    os.close(held[0].fd)


def test_an_open_runtime_directory_is_a_config_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o755)
    arguments = ["--config", "none.toml", "--runtime-dir", str(tmp_path), "--device", "cpu"]
    assert main(arguments) == EXIT_CONFIG
    assert "chmod 0700" in capsys.readouterr().err


def test_the_keeper_loads_nothing_heavy() -> None:
    script = (
        "import sys, kvmanager.keeper\n"
        "print(sorted({'grpc', 'google', 'torch', 'numpy', 'cupy', 'nixl_cu13'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_daemon_loads_no_torch_and_no_screens() -> None:
    """A restart takes as long as its imports."""
    code = "import sys, kvmanager.daemon; print(*{'torch', 'rich', 'typer', 'cupy', 'nixl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_sighup_waits_for_a_daemon_that_serves_and_is_passed_on(tmp_path: Path) -> None:
    """Before that the daemon would die of it; an upgrade of the keeper loses neither the request nor the state."""
    daemon = f"""
import os, signal, sys
from pathlib import Path
from kvmanager.daemon.keeperlink import KeeperLink
link = KeeperLink(int(sys.argv[2]))
link.listen(Path({str(tmp_path)!r}))
print("begins", os.getpid())
sys.stdout.flush()
while not Path({str(tmp_path / "go")!r}).exists():
    signal.sigtimedwait([], 0.01)
signal.signal(signal.SIGHUP, lambda *_: print("reads its file"))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
link.say("serving")
print("serves")
while True: signal.pause()
"""
    heard = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    with keeper(tmp_path, daemon, before=heard) as (process, lines):
        lines.next("begins")
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        lines.next("serves")
        lines.next("reads its file")
        process.send_signal(signal.SIGUSR2)
        assert process.stderr is not None
        while "upgraded in place" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGHUP)
        lines.next("reads its file")
