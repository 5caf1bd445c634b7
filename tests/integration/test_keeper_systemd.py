"""A test that plays systemd: it hears what the keeper says, keeps its descriptors, and starts it anew with them."""

import array
import contextlib
import os
import select
import signal
import socket
import time

import pytest
from keeper_support import LINKED_DAEMON, WAIT_S, gone, keeper, kill_and_wait, lives, said

from kvmanager.keeper.children import kill_orphans
from kvmanager.keeper.deposits import Deposit, DepositBox
from kvmanager.keeper.systemd import Systemd, stored_deposits

HELD = "[('hbm', 4096, 'bytes of hbm'), ('host', 4096, 'bytes of host')]"


class PlayedSystemd:
    """A notify socket, and the descriptor store as systemd keeps it: by name, the same file once."""

    def __init__(self, address):
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(WAIT_S)
        self.heard = []
        self.store = {}

    def hear(self):
        """The next datagram's lines."""
        data, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_LEN(64))
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        lines = dict(line.split("=", 1) for line in data.decode().split("\n"))
        self.heard.append(lines)
        if lines.get("FDSTORE") == "1":
            assert lines["FDPOLL"] == "0"
            assert ":" not in lines["FDNAME"]
            assert len(fds) == 1
            self.store.setdefault(lines["FDNAME"], []).append(fds[0])
        else:
            assert not fds
        if lines.get("FDSTOREREMOVE") == "1":
            for fd in self.store.pop(lines["FDNAME"]):
                os.close(fd)
        return lines

    def hear_until(self, name, value):
        """Hears until a datagram has this line."""
        while self.hear().get(name) != value:
            pass

    def hear_the_rest(self):
        """Hears what was sent already."""
        while select.select([self.socket], [], [], 0.0)[0]:
            self.hear()

    @contextlib.contextmanager
    def start(self, runtime_dir, daemon, **environment):
        """Starts the service as systemd does: descriptors from 3 on, their names, and the pid in the environment."""
        names = [name for name, fds in self.store.items() for _ in fds]
        fds = [fd for fds in self.store.values() for fd in fds]
        script = START.format(fds=fds, environment=environment)
        given = {"NOTIFY_SOCKET": self.address, "NAMES": ":".join(names)}
        with keeper(runtime_dir, daemon, environment=given, pass_fds=fds, before=script) as running:
            yield running

    def close(self):
        self.socket.close()
        for fds in self.store.values():
            for fd in fds:
                os.close(fd)


START = """
import fcntl, os
names = os.environ.pop("NAMES", None)
if names:  # not once more after an upgrade
    for number, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in {fds}]):
        os.dup2(fd, 3 + number)
        os.close(fd)
    os.environ.update(LISTEN_FDS=str(len({fds})), LISTEN_FDNAMES=names, LISTEN_PID=str(os.getpid()))
os.environ.update({environment})
"""


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    address = str(tmp_path / "notify") if request.param == "path" else f"@kvmanager-test-{os.getpid()}-{time.time_ns()}"
    played = PlayedSystemd(address)
    yield played
    played.close()


@pytest.fixture
def runtime_dir(tmp_path):
    return tmp_path / "node"


@pytest.fixture
def linked(runtime_dir):
    return LINKED_DAEMON.format(runtime_dir=str(runtime_dir))


def test_the_story_of_a_service(systemd, runtime_dir, linked):
    with systemd.start(runtime_dir, linked) as (process, lines):
        systemd.hear_until("READY", "1")
        assert [lines for lines in systemd.heard if "READY" in lines] == [systemd.heard[-1]]
        assert systemd.heard[-1]["STATUS"] == "the daemon is serving"
        assert sorted(systemd.store) == ["hbm;4096", "host;4096"]
        assert os.pread(systemd.store["hbm;4096"][0], 99, 0) == b"bytes of hbm"
        daemon = int(lines.next("daemon"))
        os.kill(daemon, signal.SIGUSR1)
        systemd.hear_until("FDNAME", "journal;99")
        assert sorted(systemd.store) == ["host;4096", "journal;99"]
        os.kill(daemon, signal.SIGKILL)
        systemd.hear()
        assert systemd.heard[-1]["STATUS"].startswith("the daemon ended with -9; restart in ")
        systemd.hear_until("READY", "1")
        lines.next("daemon")  # it has its answer and can say more
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        systemd.hear_until("STOPPING", "1")
        systemd.hear_the_rest()
        assert {"STATUS": "the daemon is draining"} in systemd.heard
        assert systemd.store == {}, "an orderly end lets go of the memory"


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_memory_comes_back_from_the_store_when_systemd_killed_all_processes(systemd, runtime_dir, linked):
    """KillMode=control-group: keeper, daemon and mover die together, and the next life is not cold."""
    with systemd.start(runtime_dir, linked) as (first, lines):
        systemd.hear_until("READY", "1")
        lines.next("daemon")
        kill_and_wait(first)
        assert kill_orphans(runtime_dir) == ["daemon", "mover"]
        with systemd.start(runtime_dir, linked) as (second, later):
            assert later.next("held") == HELD
            systemd.hear_until("READY", "1")
            assert "2 descriptors came back from systemd" in said(second, "came back")
            second.send_signal(signal.SIGUSR2)
            said(second, "upgraded in place")
            systemd.hear_the_rest()
            assert [len(fds) for fds in systemd.store.values()] == [1, 1], "nothing was stored twice"
            # The third life has what the second had, in memory too.
            kill_and_wait(second)
            kill_orphans(runtime_dir)
            with systemd.start(runtime_dir, linked) as (third, last):
                assert last.next("held") == HELD
                _, errors = stop(third)
                assert "cold" not in errors


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_a_mover_that_lived_on_is_kept_with_its_memory(systemd, runtime_dir, linked):
    """KillMode=process, and the daemon died too: what the mover still does is the next daemon's to ask about."""
    with systemd.start(runtime_dir, linked) as (first, lines):
        systemd.hear_until("READY", "1")
        daemon, mover = int(lines.next("daemon")), int(lines.next("mover"))
        kill_and_wait(first)
        pidfd = os.pidfd_open(daemon)
        os.kill(daemon, signal.SIGKILL)
        assert gone(pidfd)
        with systemd.start(runtime_dir, linked) as (second, later):
            assert later.next("held") == HELD
            later.next("daemon")
            assert lives(mover)
            _, errors = stop(second)
            assert "started the mover" not in errors
            assert not lives(mover)


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_a_living_daemon_knows_better_than_the_store(systemd, runtime_dir, linked):
    """What it let go of while no keeper was there goes out of the store; what it made meanwhile goes in."""
    with systemd.start(runtime_dir, linked) as (first, lines):
        systemd.hear_until("READY", "1")
        daemon = int(lines.next("daemon"))
        kill_and_wait(first)
        os.kill(daemon, signal.SIGUSR1)
        lines.next("changed")
        assert sorted(systemd.store) == ["hbm;4096", "host;4096"]
        with systemd.start(runtime_dir, linked) as (second, _):
            systemd.hear_until("READY", "1")
            systemd.hear_the_rest()
            assert sorted(systemd.store) == ["host;4096", "journal;99"]
            assert [len(fds) for fds in systemd.store.values()] == [1, 1]
            stop(second)


def stop(process):
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, errors
    return out, errors


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_the_watchdog_is_fed_and_children_know_nothing_of_systemd(systemd, runtime_dir):
    daemon = """
import os, time
print("daemon", [name for name in os.environ if "NOTIFY" in name or "WATCHDOG" in name])
time.sleep(99)
"""
    with systemd.start(runtime_dir, daemon, WATCHDOG_USEC="100000") as (process, lines):
        assert lines.next("daemon") == "[]"
        for _ in range(3):
            systemd.hear_until("WATCHDOG", "1")
        process.kill()


STANDING = """
import signal, sys, time
from kvmanager.daemon.keeperlink import KeeperLink
link = KeeperLink(int(sys.argv[2]))
link.say("serving")
beats = {beats}
signal.signal(signal.SIGABRT, {on_abort})
print("daemon", os.getpid())
while True:
    if beats:
        link.alive({every_ms})
        beats -= 1
    time.sleep(0.05)
"""
"""Says `beats` times that it makes progress, then is there and says nothing."""


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_a_daemon_that_stands_still_is_ended_and_what_does_not_end_starves_the_watchdog(systemd, runtime_dir):
    """First one that is ended by the keeper, which then lives on; then one that can't be ended: systemd's business."""
    ends = STANDING.format(beats=3, every_ms=50, on_abort="signal.SIG_DFL")
    with systemd.start(runtime_dir, ends, WATCHDOG_USEC="2000000") as (process, lines):
        first = lines.next("daemon")
        said(process, f"the daemon, pid {first}, makes no progress for")
        assert lines.next("daemon") != first
        systemd.hear_until("WATCHDOG", "1")
        process.kill()
    kill_orphans(runtime_dir)
    systemd.hear_the_rest()
    systemd.heard.clear()
    stays = STANDING.format(beats=3, every_ms=50, on_abort="signal.SIG_IGN")
    with systemd.start(runtime_dir, stays, WATCHDOG_USEC="2000000") as (process, lines):
        said(process, "aborting it")
        systemd.hear_the_rest()
        fed = systemd.heard.count({"WATCHDOG": "1"})
        systemd.socket.settimeout(6.0)  # three times what systemd waits
        with pytest.raises(TimeoutError):
            systemd.hear_until("WATCHDOG", "1")
        assert systemd.heard.count({"WATCHDOG": "1"}) == fed
        systemd.socket.settimeout(WAIT_S)
        process.kill()


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_a_daemon_that_makes_progress_now_and_then_lives(systemd, runtime_dir):
    """As often as it said: the watchdog is fed all the while, and nobody is ended."""
    daemon = STANDING.format(beats=10**9, every_ms=60_000, on_abort="signal.SIG_DFL")
    with systemd.start(runtime_dir, daemon, WATCHDOG_USEC="200000") as (process, lines):
        pid = int(lines.next("daemon"))
        os.kill(pid, signal.SIGSTOP)  # silent for longer than the watchdog, not for longer than it said
        for _ in range(8):
            systemd.hear_until("WATCHDOG", "1")
        assert lives(pid)
        os.kill(pid, signal.SIGCONT)
        process.kill()


def test_a_service_manager_that_does_not_listen_costs_nothing(tmp_path, caplog):
    systemd = Systemd({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    systemd.say("READY=1")
    assert "did not hear 'READY=1'" in caplog.text
    Systemd({}).say("READY=1")


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_strangers_among_the_descriptors_are_closed(systemd, runtime_dir, linked):
    systemd.store["web.socket"] = [os.memfd_create("stranger")]
    with systemd.start(runtime_dir, linked) as (process, lines):
        assert lines.next("held") == "[]"
        said(process, "systemd passed a descriptor called 'web.socket': not one of ours, closed")
        stop(process)


def test_descriptors_for_another_process_are_left_alone():
    environment = {"LISTEN_FDS": "7", "LISTEN_PID": "1"}
    assert stored_deposits(environment) == []
    assert environment["LISTEN_FDS"] == "7"


def test_a_name_that_was_stored_twice_is_lost():
    """Which of the two holds the last bytes can't be told, and wrong KV costs answers."""
    store = {}

    class Store:
        def keep(self, deposit):
            store[deposit.name] = True

        def let_go(self, deposit):
            store[deposit.name] = False

    box = DepositBox(Store(), lambda _state: None)
    fds = [os.memfd_create(name) for name in "abc"]
    box.take_back([Deposit("a", 1, fds[0]), Deposit("b", 1, fds[1]), Deposit("a", 1, fds[2])])
    assert [deposit.name for deposit in box.deposits()] == ["b"]
    assert store == {"a": False}
    box.close()
    assert store == {"a": False, "b": False}
