"""What it costs the core to be looked at: a scrape's view, the meter of an event, KV events of a long prompt."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time

from prometheus_client import CollectorRegistry

from kvmanager.core.events import TimelinesRead
from kvmanager.core.state import COUNTERS
from kvmanager.observing.meter import Meter
from kvmanager.observing.metrics import view
from tests.bench.figure import Figure
from tests.sim.driver import Client, Driver, sharded_group

TOKENS = 1 << 20
SPAN = 512
EVENTS = 20_000


def _request(*, announced: bool) -> tuple[Driver, float]:
    """A request of a million tokens, opened, committed and published; CPU seconds."""
    pages = TOKENS // SPAN + 8
    driver = Driver([sharded_group(pages, pages)], audited=False)
    if announced:
        driver.node.announce(frozenset({"p"}))
    client = Client(driver, "p")
    began = process_time()
    client.open(1, TOKENS, "bench")
    client.commit(1, TOKENS)
    client.run()
    return driver, process_time() - began


def figures() -> Iterator[Figure]:
    """Ratios are to the request itself, or to one idle event of the core."""
    plain_s = min(_request(announced=False)[1] for _ in range(3))
    pairs = [_request(announced=True) for _ in range(3)]
    told_s = min(seconds for _, seconds in pairs)
    driver = pairs[0][0]
    yield Figure("KV events of a request of 1M tokens", (told_s - plain_s) * 1e3, "ms", "the request", told_s / plain_s)
    began = process_time()
    for _ in range(100):
        view(driver.node)
    yield Figure(
        "a scrape's look at 2,048 spans", (process_time() - began) * 10, "ms", "the request",
        (process_time() - began) / 100 / plain_s,
    )  # fmt: skip
    meter = Meter(CollectorRegistry(), dict.fromkeys(COUNTERS, 0), str)
    event = TimelinesRead({})
    began = process_time()
    for _ in range(EVENTS):
        meter.applied(event, (), 1e-5)
    metered_s = (process_time() - began) / EVENTS
    began = process_time()
    for _ in range(EVENTS):
        driver.apply(event)
    idle_s = (process_time() - began) / EVENTS
    yield Figure("the meter of one event", metered_s * 1e6, "us", "an idle event", metered_s / idle_s)
