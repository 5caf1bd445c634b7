"""What survival costs and how long it takes: the journal beside the core, snapshots, and a warm restart.

Three costs of the journal: of one committing message, of a replay of recorded sessions on 64 lanes, and of a
snapshot. Recovery is of 10M cached tokens, in this process; the restart is of a real node that holds little, so what
the start of a process costs is seen apart.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from kvmanager import journal
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.core.digest import state_digest
from kvmanager.core.events import Event, Open, Progress, Step
from kvmanager.core.node import Node
from kvmanager.demo.nodes import NAMESPACE, PAGE_ROWS, SOURCE_RANKS, NodeProcess, PoolSizes, prefill_toml
from kvmanager.journal import Fingerprints, Journal
from kvmanager.journalcodec import Codec
from kvmanager.layout import GLM53_TINY, native_layout
from kvmanager.replay.cli import replay_file
from tests.bench.core_figures import STATE_TOKENS, TOKENS, Driver, session_keys
from tests.bench.figure import Figure, median_s

PRINTS = Fingerprints("0" * 64)
REPLAYED = 1_000


def figures() -> Iterator[Figure]:
    """The journal's costs, then recovery and a restart."""
    yield from _append_figures()
    yield from _replay_figures()
    yield from _state_figures()
    yield from _restart_figures()


class _Kept:
    """A journal for a core."""

    def __init__(self, node: Node) -> None:
        self.fd = journal.create()
        specs = [group.spec for group in node.state.groups.values()]
        self.codec = Codec(specs, node.state.limits)
        self.journal = Journal(self.fd, self.codec, PRINTS)
        self.journal.snapshot(node)

    def recovered(self) -> Node:
        return Journal(self.fd, self.codec, PRINTS).recover()

    def close(self) -> None:
        self.journal.close()
        os.close(self.fd)


def _append_figures() -> Iterator[Figure]:
    """One message that commits a page's worth of tokens of each of 1 or 64 requests, and the core's own work for it."""
    for requests in (1, 64):
        driver = Driver(hbm_gib=70, host_gib=0)
        kept = _Kept(driver.node)
        held = 8 * 64 * 512
        for number in range(requests):
            driver._request += 1
            keys = session_keys(number, 512)
            driver._step(opens=(Open(driver._request, 512, held // 64, keys),))
        committed = 512
        core_s: list[float] = []
        journal_s: list[float] = []
        for _ in range(60):
            committed += 64
            progress = tuple(
                Progress(r + 1, committed + 64, committed, 0, session_keys(r + committed, 64)) for r in range(requests)
            )
            driver._number += 1
            driver._now += 1
            event = Step("engine", 1, driver._number, fence=driver._fence(), progress=progress)
            start = perf_counter()
            driver.node.apply(event, driver._now)
            middle = perf_counter()
            kept.journal.append(event, driver._now, 0.0)
            core_s.append(middle - start)
            journal_s.append(perf_counter() - middle)
        journal_s.sort()
        core_s.sort()
        cost, work = journal_s[30], core_s[30]
        yield Figure(
            f"survival: journal a commit, {requests} a message", cost / requests * 1e6, "us",
            "the core's work for the message", cost / work,
        )  # fmt: skip
        kept.close()


def _replay_figures() -> Iterator[Figure]:
    """Recorded sessions on 64 lanes, the core's events kept as the daemon keeps them."""
    spent = {"journal": 0.0, "snapshots": 0.0, "core": 0.0, "recorded": 0.0}
    made: list[_Kept] = []
    apply = Node.apply

    def kept(self: Node, event: Event, now: int) -> list:
        if not made:
            made.append(_Kept(self))
        if self.idle(event, now):
            return []
        start = perf_counter()
        effects = apply(self, event, now)
        middle = perf_counter()
        made[0].journal.append(event, now, middle - start)
        spent["journal"] += perf_counter() - middle
        spent["core"] += middle - start
        spent["recorded"] = now / 1e9
        if made[0].journal.due(idle=False):
            start = perf_counter()
            made[0].journal.snapshot(self)
            spent["snapshots"] += perf_counter() - start
        return effects

    Node.apply = kept  # type: ignore[method-assign]
    try:
        start = perf_counter()
        replay_file(
            None, lanes=64, pool_tokens=2_000_000, requests=REPLAYED, seed=42, policy="return-rate", ranks=8, min_peak=0
        )
        whole_s = perf_counter() - start
    finally:
        Node.apply = apply  # type: ignore[method-assign]
    made[0].close()
    for name in ("journal", "snapshots"):
        label = f"survival: {name}, c64 replay of {REPLAYED:,}"
        yield Figure(label, spent[name] * 1e3, "ms", "the time that was recorded", spent[name] / spent["recorded"])
        yield Figure(label, spent[name] * 1e3, "ms", "the replay, all computing", spent[name] / whole_s)


def _state_figures() -> Iterator[Figure]:
    """Snapshot and recovery of 10M cached tokens."""
    driver = Driver(hbm_gib=70, host_gib=70)
    for session in range(-(-STATE_TOKENS // TOKENS)):
        driver.request(session_keys(10_000 + session, TOKENS), TOKENS)
    kept = _Kept(driver.node)
    gc.collect()
    cold_s = median_s(lambda: driver.request(session_keys(time.perf_counter_ns(), TOKENS), TOKENS), 3)
    snapshot_s = median_s(lambda: kept.journal.snapshot(driver.node), 5)
    size = kept.journal.snapshot_bytes
    tokens = "10M tokens"
    against = "a cold request of 1,048,576 tokens"
    yield Figure(f"survival: snapshot of {tokens}", snapshot_s * 1e3, "ms", against, snapshot_s / cold_s)
    keys_bytes = STATE_TOKENS // 64 * 16
    yield Figure(f"survival: its size, {tokens}", size / (1 << 20), "MiB", "their keys alone", size / keys_bytes)
    recover_s = median_s(kept.recovered, 5)
    assert state_digest(kept.recovered().state) == state_digest(driver.node.state)
    yield Figure(f"survival: recovery from it, {tokens}", recover_s * 1e3, "ms", against, recover_s / cold_s)
    # A log as long as it may get: half a second of the core's work.
    apply = driver.node.apply
    spent = 0.0

    def logged(event: Event, now: int) -> list:
        nonlocal spent
        start = perf_counter()
        effects = apply(event, now)
        took = perf_counter() - start
        kept.journal.append(event, now, took)
        spent += took
        return effects

    driver.node.apply = logged  # type: ignore[method-assign]
    number = 50_000
    while spent < journal.REPLAY_S:
        driver.request(session_keys(number, TOKENS >> 4), TOKENS >> 4)
        number += 1
    del driver.node.apply
    gc.collect()
    start = perf_counter()
    node = kept.recovered()
    whole_s = perf_counter() - start
    assert state_digest(node.state) == state_digest(driver.node.state)
    name = f"survival: recovery with a full log, {tokens}"
    yield Figure(name, whole_s * 1e3, "ms", "the core's work in the log", whole_s / spent)
    kept.close()


def _restart_figures() -> Iterator[Figure]:
    """SIGKILL of a real daemon to the next answered message of its engine, and what importing the daemon takes."""
    start_s = median_s(lambda: subprocess.run([sys.executable, "-c", "import kvmanager.daemon"], check=True), 3)
    times = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        toml = prefill_toml(directory / "bench", GLM53_TINY, PoolSizes())
        with NodeProcess("bench", directory, toml) as process:
            process.wait_serving().close()
            engine = AttachedEngine(
                process.runtime_dir, "bench", group="prefill", namespace=NAMESPACE,
                layouts=[native_layout(GLM53_TINY, PAGE_ROWS)], ranks=SOURCE_RANKS,
            )  # fmt: skip
            engine.step()
            for _ in range(3):
                log = process.log_path.read_text(encoding="utf-8")
                pid = int(log.rpartition("started the daemon, pid ")[2].split()[0])
                start = perf_counter()
                os.kill(pid, signal.SIGKILL)
                engine.step()
                times.append(perf_counter() - start)
            engine.close()
    restart_s = statistics.median(times)
    yield Figure(
        "survival: SIGKILL to the next reply, small node", restart_s * 1e3, "ms",
        "importing the daemon in a new process", restart_s / start_s,
    )  # fmt: skip
