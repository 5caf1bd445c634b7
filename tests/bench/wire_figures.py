"""A live node: what a step message costs, beside a bare unix socket in the same run."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.demo.nodes import NodeProcess, PoolSizes, prefill_toml
from kvmanager.layout import GLM53_TINY, native_layout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.bench.figure import Figure, median_s

IDLE_S = 5.0
PAGE_ROWS = 16


def _echo_pair() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A process that sends back what it gets."""
    ours, theirs = socket.socketpair()
    code = "import socket,sys\ns=socket.socket(fileno=int(sys.argv[1]))\nwhile d:=s.recv(65536): s.sendall(d)"
    process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, process


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process, its children and all their threads; schedstat counts ns, not clock ticks."""
    pids = [p.pid for p in [process, *process.children(recursive=True)]]
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def figures() -> Iterator[Figure]:
    """Step round trip, Lookup, and the CPU time of an idle node."""
    with tempfile.TemporaryDirectory(prefix="kvm-bench-") as directory:
        runtime_dir = Path(directory) / "prefill-0"
        node = NodeProcess("prefill-0", Path(directory), prefill_toml(runtime_dir, GLM53_TINY, PoolSizes()))
        with node:
            node.wait_serving()
            yield from _measure(runtime_dir, node)


def _measure(runtime_dir: Path, node: NodeProcess) -> Iterator[Figure]:
    namespace = pb.Namespace(
        model="bench", weights_revision="0", kv_format=GLM53_TINY.name, key_hash="sha256", key_bytes=16,
        key_tokens=PAGE_ROWS,
    )
    engine = AttachedEngine(
        runtime_dir,
        "bench",
        group="prefill",
        namespace=namespace,
        layouts=[native_layout(GLM53_TINY, PAGE_ROWS)],
        ranks=8,
    )
    link, echo = _echo_pair()
    payload = b"x" * 256

    def bare() -> None:
        link.sendall(payload)
        link.recv(65536)

    step_s = median_s(lambda: engine.step(), 300)
    bare_s = median_s(bare, 300)
    yield Figure("step message, round trip", step_s * 1e6, "us", "256 B echoed over a unix socket", step_s / bare_s)
    link.close()
    echo.wait()
    engine.close()
    process = psutil.Process(node.pid)
    before = _cpu_s(process)
    time.sleep(IDLE_S)
    idle = (_cpu_s(process) - before) / IDLE_S
    yield Figure("idle node, CPU", idle * 100, "% core", "one busy core", idle)
