"""Who is dead: attached processes that are killed, fork, or close what they hold."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attach_door import WAIT_S, Door, spawn

from kvmanager.daemon.attach import CONNECTIONS_MAX, ClientIdentity
from kvmanager.errors import Unauthorized


@pytest.fixture
def door() -> Iterator[Door]:
    with tempfile.TemporaryDirectory(prefix="kvm") as name:
        made = Door(Path(name) / "node", [os.getuid()])
        yield made
        made.server.close()


def test_kill_is_disconnect_then_exit(door: Door) -> None:
    with spawn(door, "time.sleep(600)") as client:
        identity = door.attached()
        assert identity.pid == client.pid
        client.send_signal(signal.SIGKILL)
    assert door.next() == ("disconnect", identity.token)
    assert door.next() == ("exit", identity.token)
    with pytest.raises(Unauthorized):
        door.server.identity_of(identity.token)


@contextlib.contextmanager
def orphan(door: Door, in_child: str = "") -> Iterator[tuple[ClientIdentity, int]]:
    """A client that forked and is dead, and a pidfd of the child, which runs `in_child` first."""
    fork = f"""
import os, socket
pid = os.fork()
if pid == 0:
    {in_child or 'pass'}
    time.sleep(600)
print(pid, flush=True)
os._exit(0)
"""
    with spawn(door, fork) as client:
        identity = door.attached()
        assert client.stdout is not None
        assert client.stdout.readline().strip() == identity.token
        child = os.pidfd_open(int(client.stdout.readline()))
        try:
            client.wait(WAIT_S)
            yield identity, child
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def test_a_child_that_inherited_the_lifeline_counts(door: Door) -> None:
    """The attached process is dead, its pidfd readable; a child of it may still write to what it mapped."""
    with orphan(door) as (identity, child):
        assert door.next() == ("disconnect", identity.token)
        with pytest.raises(queue.Empty):
            door.reports.get(timeout=0.3)
        life = door.server.life_of(identity.token)
        assert life is not None
        assert (life.pid, life.inherited) == (identity.pid, True)
        assert not door.server.kill(identity.token), "there is no pidfd of the child"
        signal.pidfd_send_signal(child, signal.SIGKILL)
        assert door.next() == ("exit", identity.token)
        assert door.server.life_of(identity.token) is None


@pytest.mark.parametrize("where", ["attachment._channel.shutdown(socket.SHUT_RDWR)", "os.close(attachment.lifeline)"])
def test_what_a_child_says_on_the_socket_counts_for_nothing(door: Door, where: str) -> None:
    """Only a closed lifeline is an end; a socket that any holder shut down is none."""
    with orphan(door, where) as (identity, _):
        assert door.next() == ("disconnect", identity.token)
        if "lifeline" in where:
            assert door.next() == ("exit", identity.token)
        else:
            with pytest.raises(queue.Empty):
                door.reports.get(timeout=0.3)


def test_a_process_that_closed_or_wrote_to_its_lifeline_counts_by_its_pidfd(door: Door) -> None:
    then = "import os\nos.write(attachment.lifeline, b'x' * 9000)\nos.close(attachment.lifeline)\ntime.sleep(600)"
    with spawn(door, then) as client:
        identity = door.attached()
        with pytest.raises(queue.Empty):
            door.reports.get(timeout=0.3)
        client.kill()
        assert door.next() == ("disconnect", identity.token)
        assert door.next() == ("exit", identity.token)


def test_a_child_that_executed_a_program_inherited_nothing(door: Door) -> None:
    """Close-on-exec: its new memory maps nothing, and the lifeline is closed in it."""
    then = "import os, subprocess\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)\nos._exit(0)"
    with spawn(door, then) as client:
        identity = door.attached()
        assert client.stdout is not None
        assert client.stdout.readline().strip() == identity.token
        child = os.pidfd_open(int(client.stdout.readline()))
        try:
            assert door.next() == ("disconnect", identity.token)
            assert door.next() == ("exit", identity.token)
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


def test_kill_ends_the_attached_process_and_no_other(door: Door) -> None:
    with spawn(door, "time.sleep(600)") as client:
        identity = door.attached()
        life = door.server.life_of(identity.token)
        assert life is not None
        assert (life.pid, life.inherited) == (client.pid, False)
        assert door.server.kill(identity.token)
        assert client.wait(WAIT_S) == -signal.SIGKILL
    assert door.next() == ("disconnect", identity.token)
    assert door.next() == ("exit", identity.token)
    assert not door.server.kill(identity.token)
    assert not door.server.kill("0" * 64)


@pytest.mark.parametrize("role", ["operator", "peer"])
def test_who_holds_nothing_and_left_costs_nothing(door: Door, role: str) -> None:
    """A process that looks at the node again and again must not fill the table of connections."""
    open_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(CONNECTIONS_MAX + 10):
        attachment = door.attach(role, "again")
        attachment.close()
        identity = door.attached()
        for what in ("leave", "disconnect", "exit"):
            assert door.next() == (what, identity.token)
    assert len(os.listdir("/proc/self/fd")) <= open_fds + 3
    door.attach("engine").close()
    assert door.attached().role == "engine"
