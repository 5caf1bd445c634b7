"""The peers' environments and servers. What can't be had here is said, and skipped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.lmcache_reference import Unavailable, _run

BUILD = Path(__file__).resolve().parents[3] / "build"
HERE = Path(__file__).resolve().parent
FETCH_S = 1800
START_S = 120.0
CASE_S = 600
LMCACHE = "lmcache==0.5.6"
MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "msgpack")


def environment(name: str, wheels: tuple[str, ...]) -> Path:
    """`build/NAME`, made once; the place may be given in KVM_PEER_NAME. Raises Unavailable."""
    given = os.environ.get(f"KVM_PEER_{name.upper()}")
    venv = Path(given) if given else BUILD / name
    if not (venv / "made").exists() and not given:
        _run([sys.executable, "-m", "venv", str(venv)], 300)
        _run([str(venv / "bin" / "python"), "-m", "pip", "install", "-q", *wheels], FETCH_S)
        (venv / "made").touch()
    return venv


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(command: list[str], ready: Callable[[], bool]) -> Iterator[int]:
    """A running server's pid; SIGKILL at the end. Raises Unavailable."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + START_S
            while not ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise Unavailable(f"{command[0]} does not start: {log.read()[-300:]!r}")
                time.sleep(0.05)
            yield process.pid
        finally:
            process.kill()
            process.wait()


def ask(venv: Path, script: str, *arguments: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The JSON object that a script prints in a peer's environment. Raises Unavailable."""
    return answer(start(venv, script, *arguments, environ=environ))


def start(
    venv: Path, script: str, *arguments: str, environ: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """The same, not waited for."""
    command = [str(venv / "bin" / "python"), str(HERE / script), *arguments]
    given = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**given, **(environ or {})}
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it prints last."""
    try:
        out, err = process.communicate(timeout=CASE_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise Unavailable(f"{process.args}: no end after {CASE_S} s") from error
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise Unavailable(f"exit {process.returncode}: {err.strip()[-400:]}")
    told: dict[str, Any] = json.loads(lines[-1])
    return told


@contextmanager
def lmcache(venv: Path, transport: str, l1_gib: float) -> Iterator[tuple[str, str]]:
    """LMCache's server: (request URL, HTTP URL)."""
    port, http = free_port(), free_port()
    shm = f"kvm-peers-{os.getpid()}-{port}"
    command = [
        str(venv / "bin" / "lmcache"), "server", "--transport", transport, "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http), "--l1-size-gb", str(l1_gib), "--no-l1-use-lazy",
        "--shm-name", shm, "--eviction-policy", "LRU", "--disable-metrics", "--supported-transfer-mode",
        "lmcache_driven", "--disable-logging",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{http}"

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/healthcheck", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    try:
        with server(command, healthy):
            yield f"{'grpc' if transport == 'grpc' else 'tcp'}://127.0.0.1:{port}", url
    finally:
        for left in Path("/dev/shm").glob(f"*{shm}*"):
            left.unlink(missing_ok=True)


@contextmanager
def mooncake(venv: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Mooncake's master: (address, what a script needs to kill and start it again)."""
    port, metrics = free_port(), free_port()
    program = next(venv.glob("lib/python3*/site-packages/mooncake/mooncake_master"), venv / "bin" / "mooncake_master")
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={metrics}", "--default_kv_lease_ttl=100"]

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with server(command, listens) as pid:
        yield f"127.0.0.1:{port}", {"MASTER_PID": str(pid), "MASTER_COMMAND": json.dumps(command)}


def end_group(pid: int) -> None:
    """SIGKILL to a server's group."""
    os.killpg(pid, signal.SIGKILL)
