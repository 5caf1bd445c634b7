"""Watches the node: whether its parts make progress, and what Prometheus and probes are told of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from grpc_health.v1 import health, health_pb2
from prometheus_client import CollectorRegistry, Gauge, process_collector

from kvmanager.configuration.operationsconfig import HealthSection, MetricsSection
from kvmanager.core.node import Node
from kvmanager.core.state import State
from kvmanager.errors import NotReady
from kvmanager.keeper.deposits import SERVING
from kvmanager.observing.health import Health, JobVitals, Sight, Tellers, vitals
from kvmanager.observing.httpprobes import HttpProbes, Tls
from kvmanager.observing.meter import CallTimer, Meter
from kvmanager.observing.metrics import NodeCollector, NodeView, tenants_of

T = TypeVar("T")
_log = logging.getLogger("kvmanager.watch")
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PARTS = ("core", "mover")
"""Services of gRPC health besides the node's own (""), each `kvmanager.PART`."""


class Loop(Protocol):
    """The owner loop, as far as it is watched."""

    def inspect(self, look: Callable[[Node], T], timeout_s: float | None = None) -> T:
        """Runs a read-only function on the core; NotReady when it ended, or does not answer in time."""
        ...

    @property
    def tick_age_s(self) -> float:
        """Time since the last tick."""
        ...


class Pinged(Protocol):
    """The mover, likewise."""

    def ping(self) -> None:
        """Asks it for a sign, if there is a link."""
        ...

    @property
    def pong_age_s(self) -> float:
        """Time since the last sign."""
        ...

    def peers_by_path(self) -> dict[str, int]:
        """Peers that it pulled from, counted by the way their chunks take."""
        ...


class Teller(Protocol):
    """The history."""

    @property
    def dropped(self) -> int:
        """Events that it lacks."""
        ...

    def vitals(self) -> JobVitals:
        """Whether its thread has something to do, and how much it did."""
        ...


class Streams(Protocol):
    """The streams of KV events."""

    def vitals(self) -> Mapping[str, JobVitals]:
        """The same of each one's thread, by the stream's name."""
        ...


class Watch:
    """Looks at the node every `probe_ms`. `servicer` is told of what is ready; so are HTTP probes where they listen."""

    def __init__(
        self,
        node: str,
        limits: HealthSection,
        metrics: MetricsSection,
        lease_grace_ns: int,
        core: State,
        state: Callable[[], str],
        tls: Tls = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        """`core`: counters and tenants are read in it. `state()`: starting, serving or draining. `tls`: for HTTP.

        Raises ConfigError when it can't listen.

        `on_progress(every_ms)` is called while the core makes progress, at least so often.
        """
        self._on_progress = on_progress
        self._limits = limits
        self._name = node
        self._state = state
        self._health = Health(limits, lease_grace_ns)
        self._loop: Loop | None = None
        self._mover: Pinged | None = None
        self._history: Teller | None = None
        self._streams: Streams | None = None
        self.servicer = health.HealthServicer()
        self.registry = CollectorRegistry()
        process_collector.ProcessCollector(registry=self.registry)
        self.meter = Meter(self.registry, core.counters, tenants_of(core))
        self.calls = CallTimer(self.registry)
        self._ready = Gauge("kvmanager_ready", "Whether the node is ready.", registry=self.registry)
        self._parts = Gauge(
            "kvmanager_part_stalled", "1 while a part makes no progress.", ["part"], registry=self.registry
        )
        self._late_parts = Gauge(
            "kvmanager_part_late",
            "1 while a part that the node serves without makes no progress.",
            ["part"],
            registry=self.registry,
        )
        self._lock = threading.Lock()  # guards what follows, and the order in which the servicer is told
        self._problems: dict[str, str] = {}
        self._tellers: dict[str, str] = {}  # "": it is well
        self._told: dict[str, str] = {}
        self._told_late: dict[str, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        probed = (self.registry, self.alive, self.problems, self.late)
        self._http = HttpProbes(metrics.listen, *probed, tls) if metrics.listen else None
        self.tell()

    def start(self, loop: Loop, mover: Pinged, history: Teller | None, streams: Streams) -> None:
        """Begins to look, and to answer probes. history: None where none is kept."""
        self._loop, self._mover, self._history, self._streams = loop, mover, history, streams

        def unrecorded() -> int:
            return 0 if history is None else history.dropped

        self.registry.register(NodeCollector(self._look, self._name, self._state, mover.peers_by_path, unrecorded))
        if self._http is not None:
            self._http.start()
        self._thread.start()

    def use(self, limits: HealthSection) -> None:
        """Judges by these from the next look on; what stands still goes on counting."""
        self._limits = self._health.limits = limits

    def close(self) -> None:
        """Ends."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._http is not None:
            self._http.close()

    def tell(self) -> None:
        """The node's state changed, or what was seen of it: gRPC health and the gauges follow."""
        with self._lock:
            problems = self._all_problems()
            self.servicer.set("", _NOT_SERVING if problems else _SERVING)
            for part in PARTS:
                self.servicer.set(f"kvmanager.{part}", _NOT_SERVING if part in problems else _SERVING)
            self._ready.set(not problems)
            for part in {*PARTS, *self._told, *problems} - {"node"}:
                self._parts.labels(part).set(part in problems)
            _log_changes("not ready", self._told, problems)
            self._told = problems
            for part, why in self._tellers.items():
                self._late_parts.labels(part).set(bool(why))
            late = self._all_late()
            _log_changes("late", self._told_late, late)
            self._told_late = late

    def problems(self) -> dict[str, str]:
        """Why the node is not ready; empty when it is."""
        with self._lock:
            return self._all_problems()

    def late(self) -> dict[str, str]:
        """What is wrong with parts that the node serves without: it is ready all the same."""
        with self._lock:
            return self._all_late()

    def _all_late(self) -> dict[str, str]:
        return {part: why for part, why in self._tellers.items() if why}

    def _all_problems(self) -> dict[str, str]:
        state = self._state()
        return dict(self._problems) if state == SERVING else {"node": state, **self._problems}

    def alive(self) -> bool:
        """Whether the core answers."""
        assert self._loop is not None
        try:
            self._loop.inspect(lambda _node: None, self._limits.core_ms / 1000)
        except NotReady:
            return False
        return True

    def _look(self, look: Callable[[Node], NodeView]) -> NodeView:
        assert self._loop is not None
        return self._loop.inspect(look, self._limits.core_ms / 1000)

    def _run(self) -> None:
        while not self._over.wait(self._limits.probe_ms / 1000):
            if self._state() == SERVING:
                self._probe()
                self.tell()
            elif self.alive():  # it drains
                self._progresses()

    def _progresses(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._limits.probe_ms + self._limits.core_ms)

    def _probe(self) -> None:
        assert self._loop is not None
        assert self._mover is not None
        assert self._streams is not None
        self._mover.ping()
        try:
            seen = self._loop.inspect(lambda node: vitals(node, time.monotonic_ns()), self._limits.core_ms / 1000)
        except NotReady:
            seen = None
        sight = Sight(time.monotonic_ns(), seen, _ns(self._loop.tick_age_s), _ns(self._mover.pong_age_s))
        problems = self._health.judge(sight)
        told = Tellers(None if self._history is None else self._history.vitals(), self._streams.vitals())
        tellers = self._health.late(sight.now, told)
        if seen is not None and "core" not in problems:
            self._progresses()
        with self._lock:
            self._problems, self._tellers = problems, tellers


def _log_changes(what: str, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for part, why in now.items():
        if part != "node" and part not in before:
            _log.warning("%s: %s %s", what, part, why)
    for part in before.keys() - now.keys() - {"node"}:
        _log.warning("%s goes on", part)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
