"""What survival costs: the journal beside the core, snapshots, and recovery.

Three costs of the journal: of one committing message, of a replay of recorded sessions on 64 lanes, and of a
snapshot. Recovery is of 10M cached tokens, in this process. Costs are CPU time of the thread, so that they mean the
same on a loaded machine; where a figure is wall time, its name says so. `restart_figures` restarts real nodes.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from time import thread_time

from kvmanager.core.digest import state_digest
from kvmanager.core.events import Event, Open, Progress, Step
from kvmanager.core.node import Node
from kvmanager.journal import journal
from kvmanager.journal.journal import Fingerprints, Journal
from kvmanager.journal.journalcodec import Codec
from kvmanager.replay.cli import Asked, replay_file
from tests.bench.core_figures import STATE_TOKENS, TOKENS, Driver, session_keys
from tests.bench.figure import Figure, median_s

PRINTS = Fingerprints("0" * 64)
REPLAYED = 1_000


def figures() -> Iterator[Figure]:
    """The journal's costs, then recovery."""
    yield from _append_figures()
    yield from _replay_figures()
    yield from _state_figures()


def _cpu_s(work: Callable[[], object], rounds: int) -> float:
    """Median CPU seconds of this thread for `work`, after one call that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        start = thread_time()
        work()
        times.append(thread_time() - start)
    return statistics.median(times)


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
        clock_s: list[float] = []  # reading the clock is a system call
        for _ in range(60):
            committed += 64
            progress = tuple(
                Progress(r + 1, committed + 64, committed, 0, session_keys(r + committed, 64)) for r in range(requests)
            )
            driver._number += 1
            driver._now += 1
            event = Step("engine", 1, driver._number, fence=driver._fence(), progress=progress)
            start = thread_time()
            driver.node.apply(event, driver._now)
            middle = thread_time()
            kept.journal.append(event, driver._now, 0.0)
            end = thread_time()
            core_s.append(middle - start)
            journal_s.append(end - middle)
            clock_s.append(thread_time() - end)
        clock, cost, work = (sorted(each)[30] for each in (clock_s, journal_s, core_s))
        cost, work = cost - clock, work - clock
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
        start = thread_time()
        effects = apply(self, event, now)
        middle = thread_time()
        made[0].journal.append(event, now, middle - start)
        spent["journal"] += thread_time() - middle
        spent["core"] += middle - start
        spent["recorded"] = now / 1e9
        if made[0].journal.due(idle=False):
            start = thread_time()
            made[0].journal.snapshot(self)
            spent["snapshots"] += thread_time() - start
        return effects

    Node.apply = kept  # type: ignore[method-assign]
    try:
        start = thread_time()
        replay_file(Asked(requests=REPLAYED), pool_tokens=2_000_000, policy="return-rate", ranks=8)
        whole_s = thread_time() - start
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
    cold_s = _cpu_s(lambda: driver.request(session_keys(time.perf_counter_ns(), TOKENS), TOKENS), 3)
    wall_s = median_s(lambda: kept.journal.snapshot(driver.node), 5)
    snapshot_s = _cpu_s(lambda: kept.journal.snapshot(driver.node), 5)
    size = kept.journal.snapshot_bytes
    tokens = "10M tokens"
    against = "a cold request of 1,048,576 tokens"
    yield Figure(f"survival: snapshot of {tokens}", snapshot_s * 1e3, "ms", against, snapshot_s / cold_s)
    yield Figure(f"survival: ... wall time, {tokens}", wall_s * 1e3, "ms", "its CPU time", wall_s / snapshot_s)
    keys_bytes = STATE_TOKENS // 64 * 16
    yield Figure(f"survival: its size, {tokens}", size / (1 << 20), "MiB", "their keys alone", size / keys_bytes)
    recover_s = _cpu_s(kept.recovered, 5)
    assert state_digest(kept.recovered().state) == state_digest(driver.node.state)
    yield Figure(f"survival: recovery from it, {tokens}", recover_s * 1e3, "ms", against, recover_s / cold_s)
    # A log as long as it may get: half a second of the core's work.
    apply = driver.node.apply
    spent = 0.0

    def logged(event: Event, now: int) -> list:
        nonlocal spent
        start = thread_time()
        effects = apply(event, now)
        took = thread_time() - start
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
    start = thread_time()
    node = kept.recovered()
    whole_s = thread_time() - start
    assert state_digest(node.state) == state_digest(driver.node.state)
    name = f"survival: recovery with a full log, {tokens}"
    yield Figure(name, whole_s * 1e3, "ms", "the core's work in the log", whole_s / spent)
    kept.close()
