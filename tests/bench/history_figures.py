"""What the history costs: CPU of the owner loop's part, of the writer's part, and of the core, in one run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvmanager.core.audit import audit
from kvmanager.core.events import Effect, Event
from kvmanager.observing.history import WAITING_MAX, History
from kvmanager.observing.historyrecords import Recorder
from tests.bench.figure import Figure
from tests.sim.driver import Client, Driver, sharded_group

ROUNDS = 600
SPAN = 512


def _noted() -> tuple[list[tuple[Event, int, list[Effect]]], Driver, float]:
    """Events of requests under pressure with their effects, and the core's CPU seconds for them."""
    driver = Driver([sharded_group(64, 128)], audited=False)
    events: list[tuple[Event, int, list[Effect]]] = []
    apply, spent = driver.node.apply, 0.0

    def applied(event: Event, now: int) -> list[Effect]:
        nonlocal spent
        began = time.thread_time()
        effects = apply(event, now)
        spent += time.thread_time() - began
        events.append((event, now, effects))
        return effects

    driver.node.apply = applied  # type: ignore[method-assign]
    client = Client(driver, "p")
    for number in range(ROUNDS):
        client.serve(number, 8 * SPAN, number % 40)
    audit(driver.node.state)
    return events, driver, spent


def figures() -> Iterator[Figure]:
    """CPU microseconds an event, against the core's own."""
    events, _, core_s = _noted()
    core_us = core_s / len(events) * 1e6
    with tempfile.TemporaryDirectory() as directory:
        history = History(Path(directory), 64 << 20, Recorder(Driver([sharded_group(64, 128)]).node.state, "lru"))
        loop_s = writer_s = 0.0
        for first in range(0, len(events), WAITING_MAX):
            some = events[first : first + WAITING_MAX]
            began = time.thread_time()
            for event, now, effects in some:
                history.note(event, now, effects)
            loop_s += time.thread_time() - began
            began = time.thread_time()
            history._write(0)
            writer_s += time.thread_time() - began
        size = sum(path.stat().st_size for path in Path(directory).iterdir())
    core = "the core's CPU for the event"
    loop_us, writer_us = (spent / len(events) * 1e6 for spent in (loop_s, writer_s))
    yield Figure("history: owner loop, CPU an event", loop_us, "us", core, loop_us / core_us)
    yield Figure("history: writer thread, CPU an event", writer_us, "us", core, writer_us / core_us)
    yield Figure("history: file bytes a request", size / ROUNDS, "B", "requests of 8 spans", size / ROUNDS)
