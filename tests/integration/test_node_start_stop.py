"""Starting and stopping a node: what is checked first, what is shown meanwhile, and how long a stop waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nodes_support import (
    RANKS,
    SPAN,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    tokens_of,
    wait_for,
)

from kvmanager.clients.admin import AdminClient
from kvmanager.demo.nodes import NodeProcess
from kvmanager.errors import Draining, KVError, NotReady
from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.protos import kvmanager_pb2 as pb

SLOW_START = """
import os, sys
if "kvmanager.daemon" in " ".join(sys.orig_argv):
    import time
    from kvmanager.daemon import faultin
    faultin.PIECE_BYTES = 1 << 20
    populate = faultin.populate
    def slow(fd, offset, size):
        while not os.path.exists({gate!r}) and offset:
            time.sleep(0.01)
        populate(fd, offset, size)
    faultin.populate = slow
"""
"""Faults one piece of each region in, and the others once a file is there."""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nodes started from now on wait for this file in the midst of faulting in."""
    path = tmp_path / "gate"
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(SLOW_START.format(gate=str(path)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hooks), os.environ.get("PYTHONPATH", "")]))
    return path


def health_of(runtime_dir: Path) -> int:
    with grpc.insecure_channel(f"unix:{runtime_dir / 'grpc.sock'}") as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status


def operator(process: NodeProcess) -> AdminClient:
    """An operator's client as soon as the door is open, whatever the node's state."""
    clients: list[AdminClient] = []

    def connected() -> bool:
        try:
            clients.append(AdminClient(process.runtime_dir))
        except KVError:
            return False
        return True

    wait_for(connected, process.log_tail)
    return clients[0]


def test_a_starting_node_shows_its_progress_and_lets_no_engine_in(tmp_path: Path, gate: Path) -> None:
    process = NodeProcess("slow", tmp_path, prefill_toml(tmp_path / "slow", pages=64))
    with process, operator(process) as admin:
        wait_for(lambda: admin.status().faulted_in_bytes > 0)
        status = admin.status()
        assert status.state == "starting"
        assert 0 < status.faulted_in_bytes < status.memory_bytes
        assert health_of(process.runtime_dir) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(NotReady, match=r"the node starts: .* of .* are faulted in"):
            prefill_engine(process.runtime_dir)
        command = [sys.executable, "-m", "kvmanager.command.cli", "status", "--runtime-dir", str(process.runtime_dir)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        assert "starting" in shown
        assert "faulted in" in shown
        gate.touch()
        process.wait_serving().close()
        status = admin.status()
        assert status.faulted_in_bytes == status.memory_bytes
        assert health_of(process.runtime_dir) == health_pb2.HealthCheckResponse.SERVING
        prefill_engine(process.runtime_dir).close()


def test_a_node_that_starts_can_be_stopped(tmp_path: Path, gate: Path) -> None:
    assert not gate.exists()
    process = NodeProcess("slow", tmp_path, prefill_toml(tmp_path / "slow", pages=64))
    with process:
        operator(process).close()
        assert process._process is not None
        process._process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        gate.touch()  # a piece under way is finished
        assert process._process.wait(20) == 0
        assert "serves" not in process.log_tail()


def test_memory_in_use_is_all_there_when_the_node_serves(tmp_path: Path) -> None:
    """Nothing is faulted in late: every block of every region's file is taken. The journal's file is sparse."""
    with node(tmp_path, "full", prefill_toml, pages=64) as running:
        taken: dict[str, int] = {}
        for fd in Path(f"/proc/{running.pid_of('daemon')}/fd").iterdir():
            name = os.readlink(fd)
            if name.startswith("/memfd:kvmanager:") and "journal" not in name:
                taken[name] = 512 * fd.stat().st_blocks
                assert taken[name] >= fd.stat().st_size
        assert len(taken) == 2 + 2 * RANKS
        assert sum(taken.values()) >= running.admin.status().memory_bytes


def test_a_node_larger_than_the_host_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    pages = 1 << 32
    process = NodeProcess("huge", tmp_path, prefill_toml(tmp_path / "huge", pages=pages))
    with process:
        assert process._process is not None
        assert process._process.wait(30) == EXIT_CONFIG
        log = process.log_tail()
        for part in ("pool larger than memory", "needed", "available by", "lower [[group]]"):
            assert part in log


def test_a_drain_that_takes_too_long_says_what_was_held(tmp_path: Path) -> None:
    drain = lambda directory, **options: prefill_toml(directory, **options).replace(  # noqa: E731
        "[mover]", "drain_ms = 700\n[mover]", 1
    )
    with node(tmp_path, "stuck", drain) as running:
        engine = prefill_engine(running.runtime_dir)
        engine.open(open_of(7, tokens_of(1, SPAN)))
        keeper = running.process._process
        keeper.send_signal(signal.SIGTERM)
        wait_for(lambda: bool(engine.client.draining))
        late = engine.client.step(fence=engine.workers.fence(), opens=[open_of(8, tokens_of(2, SPAN))])
        assert late.opened[8].error.reason == pb.DRAINING
        with pytest.raises(Draining):
            prefill_engine(running.runtime_dir, "late")
        assert health_of(running.runtime_dir) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert running.admin.status().state == "draining"
        assert keeper.wait(20) == 0
        log = running.log()
        assert "stops with work undone (drain_ms = 700 are over)" in log
        assert "engine engine epoch 1: request 7, 0 tokens committed" in log
        assert "of memory, " in log
        with pytest.raises(KVError):
            engine.close()


def test_a_second_sigterm_to_the_daemon_ends_its_drain(tmp_path: Path) -> None:
    with node(tmp_path, "twice", prefill_toml) as running:
        engine = prefill_engine(running.runtime_dir)
        engine.open(open_of(7, tokens_of(1, SPAN)))
        assert len(engine.workers.ranks) == RANKS
        daemon = running.pid_of("daemon")
        keeper = running.process._process
        os.kill(daemon, signal.SIGTERM)
        wait_for(lambda: bool(engine.client.draining))
        os.kill(daemon, signal.SIGTERM)
        assert keeper.wait(20) == 0, "the daemon has ended in order, and the node with it"
        assert "stops with work undone (told again)" in running.log()
        with pytest.raises(KVError):
            engine.close()
