"""Dead clients and starting nodes: how soon pages return, what others notice of it, how fast memory is faulted in."""

from __future__ import annotations

import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmanager.allocators.backing import open_memfd
from kvmanager.clients.admin import AdminClient
from kvmanager.daemon.faultin import FaultIn
from kvmanager.demo.nodes import PAGE_ROWS, SOURCE_RANKS, NodeProcess, PoolSizes, prefill_toml
from kvmanager.layout import GLM53_TINY
from kvmanager.units import GIB
from tests.bench.figure import Figure, median_s

ROUNDS = 9
SPANS = 64
FAULT_BYTES = GIB
CLIENT = """
import sys
from pathlib import Path
import numpy as np
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.keys import KeyChain
from kvmanager.demo.nodes import NAMESPACE, PAGE_ROWS, SOURCE_RANKS
from kvmanager.layout import GLM53_TINY, native_layout
from kvmanager.protos import kvmanager_pb2 as pb
engine = AttachedEngine(
    Path(sys.argv[1]), "victim", group="prefill", namespace=NAMESPACE,
    layouts=[native_layout(GLM53_TINY, PAGE_ROWS)], ranks=SOURCE_RANKS,
)
tokens = np.random.default_rng(int(sys.argv[3])).integers(0, 500, int(sys.argv[2]) * PAGE_ROWS * SOURCE_RANKS)
engine.open(pb.OpenRequest(request_id=1, prompt_tokens=len(tokens), prompt_keys=KeyChain(NAMESPACE).extend(tokens)))
for rank in engine.workers.ranks:
    rank.classes["kv"].device[:] = 1
print("holds", flush=True)
sys.stdin.read()
"""
"""An engine that holds SPANS spans, with all device memory of eight ranks mapped and touched."""


@dataclass(frozen=True)
class Death:
    """One killed client, in seconds: SIGKILL to the kernel's report, that to the pages' return, the slowest look on."""

    exit_s: float
    free_s: float
    slowest_status_s: float


def figures() -> Iterator[Figure]:
    """Needs about 40 s and 3 GiB."""
    yield from _fault_in()
    page_bytes = GLM53_TINY.page_bytes(PAGE_ROWS)
    sizes = PoolSizes(prefill_device_pages=GIB // (SOURCE_RANKS * page_bytes))
    with tempfile.TemporaryDirectory(prefix="kvm-bench-") as directory:
        runtime_dir = Path(directory) / "prefill-0"
        process = NodeProcess("prefill-0", Path(directory), prefill_toml(runtime_dir, GLM53_TINY, sizes))
        with process, process.wait_serving() as admin:
            yield from _deaths(runtime_dir, admin)


def _deaths(runtime_dir: Path, admin: AdminClient) -> Iterator[Figure]:
    status_s = median_s(admin.status, 100)
    deaths = [_kill_one(runtime_dir, admin, seed) for seed in range(ROUNDS)]
    free_s = statistics.median(death.free_s for death in deaths)
    worst_s = max(death.free_s for death in deaths)
    exit_s = statistics.median(death.exit_s for death in deaths)
    whole_s = statistics.median(death.exit_s + death.free_s for death in deaths)
    slow_s = statistics.median(death.slowest_status_s for death in deaths)
    look = "one Status call, by which it is seen"
    yield Figure("dead client, exit reported to pages free", free_s * 1e3, "ms", look, free_s / status_s)
    yield Figure("the same, slowest of 9", worst_s * 1e3, "ms", "the 50 ms that it may take", worst_s / 0.05)
    yield Figure("dead client of 1 GiB, SIGKILL to pages free", whole_s * 1e3, "ms", "its exit alone", whole_s / exit_s)
    yield Figure("slowest Status while it dies", slow_s * 1e3, "ms", "median Status", slow_s / status_s)


def _kill_one(runtime_dir: Path, admin: AdminClient, seed: int) -> Death:
    command = [sys.executable, "-c", CLIENT, str(runtime_dir), str(SPANS), str(seed)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "holds\n"
        assert len(admin.status().engines) == 1
        pidfd = os.pidfd_open(client.pid)
        reported: list[float] = []
        watcher = threading.Thread(target=_note_exit, args=(pidfd, reported))
        watcher.start()
        slowest = 0.0
        killed = time.perf_counter()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        engines = 1
        while engines:
            asked = time.perf_counter()
            engines = len(admin.status().engines)
            free = time.perf_counter()
            slowest = max(slowest, free - asked)
        watcher.join()
        os.close(pidfd)
    held = {pool.pool: pool.pinned_bytes + pool.promised_bytes + pool.draining_bytes for pool in admin.pools().pools}
    assert not any(held.values()), held
    return Death(reported[0] - killed, free - reported[0], slowest)


def _note_exit(pidfd: int, reported: list[float]) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    reported.append(time.perf_counter())


def _fault_in() -> Iterator[Figure]:
    threads = len(os.sched_getaffinity(0))
    many_s = statistics.median(_fault_once() for _ in range(3))
    everywhere = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(everywhere)})
        one_s = statistics.median(_fault_once() for _ in range(3))
    finally:
        os.sched_setaffinity(0, everywhere)
    rate = FAULT_BYTES / GIB / many_s
    yield Figure(f"fault-in, {threads} threads", rate, "GiB/s", "one thread", one_s / many_s)


def _fault_once() -> float:
    fd = open_memfd("bench", FAULT_BYTES)
    try:
        start = time.perf_counter()
        assert FaultIn([(fd, FAULT_BYTES)]).run(lambda: False)
        return time.perf_counter() - start
    finally:
        os.close(fd)
