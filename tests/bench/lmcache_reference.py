"""LMCache's own server and bench client, in an environment of their own: what a SIGKILL of the server leaves.

The environment is made once in `build/lmcache` (1.9 GB; a quarter of an hour on two cores). Nothing of it is used by
the product. The server runs on the CPU with its memory in POSIX shared memory, under the same name after the kill.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

VENV = Path(__file__).resolve().parents[2] / "build" / "lmcache"
WHEEL = "lmcache==0.5.6"
OBJECTS = 80
PORT, HTTP_PORT = 25555, 28080
SHM = f"kvm-bench-{os.getpid()}"
URL = f"http://127.0.0.1:{HTTP_PORT}"
FETCH_S = 3600
START_S = 120.0


class Unavailable(Exception):
    """It can't be fetched or run here; the text says why."""


class Restart(NamedTuple):
    """Objects before the kill and after the restart, and the time from the kill to a server that says it is healthy."""

    before: int
    after: int
    healthy_s: float


def restart() -> Restart:
    """Ten requests of eight chunks are stored; then the server is killed and started again. Raises Unavailable."""
    program = VENV / "bin" / "lmcache"
    if not program.exists():
        _run([sys.executable, "-m", "venv", str(VENV)], 300)
        _run([str(VENV / "bin" / "python"), "-m", "pip", "install", "-q", WHEEL], FETCH_S)
    shape = "(2,1024,16,1,64):float16:4"
    client = [
        str(program), "bench", "server", "--rpc-url", f"tcp://127.0.0.1:{PORT}", "--mode", "cpu", "--transfer-mode",
        "lmcache_driven", "--num-tokens", "2048", "--start", "0", "--end", "10", "--interval", "0", "--url", URL,
        "--kvcache-shape-spec", shape, "--format", "json",
    ]  # fmt: skip
    try:
        with _server(program):
            _run(client, 300)
            before = _objects()
            if before != OBJECTS:
                raise Unavailable(f"its bench left {before} objects, not {OBJECTS}")
            start = time.perf_counter()
        with _server(program):
            healthy_s = time.perf_counter() - start
            return Restart(before, _objects(), healthy_s)
    finally:
        for left in Path("/dev/shm").glob(f"*{SHM}*"):
            left.unlink(missing_ok=True)


@contextmanager
def _server(program: Path) -> Iterator[None]:
    """One that is healthy; SIGKILL at the end."""
    command = [
        str(program), "server", "--host", "127.0.0.1", "--port", str(PORT), "--http-host", "127.0.0.1", "--http-port",
        str(HTTP_PORT), "--l1-size-gb", "1", "--no-l1-use-lazy", "--shm-name", SHM, "--eviction-policy", "LRU",
        "--disable-metrics", "--supported-transfer-mode", "lmcache_driven",
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + START_S
            while not _healthy():
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise Unavailable(f"its server does not start: {log.read()[-300:]!r}")
                time.sleep(0.02)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _healthy() -> bool:
    try:
        with urllib.request.urlopen(f"{URL}/healthcheck", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _objects() -> int:
    with urllib.request.urlopen(f"{URL}/status", timeout=30) as reply:
        status: dict[str, Any] = json.load(reply)
    return int(status["storage_manager"]["l1_manager"]["total_object_count"])


def _run(command: list[str], limit_s: int) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command[:4])}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:4])}: {done.stderr.strip()[-300:]}")
