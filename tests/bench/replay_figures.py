"""How many events a second the core handles in a replay of recorded sessions, and what ranking sessions costs of it."""

from __future__ import annotations

from collections.abc import Iterator
from time import thread_time

from kvmanager.core.events import Event
from kvmanager.core.node import Node
from kvmanager.replay.cli import recorded_sessions
from kvmanager.replay.lanes import stream
from kvmanager.replay.run import replay
from kvmanager.replay.stream import Request
from tests.bench.figure import Figure

LANES, POOL_TOKENS, REQUESTS, SEED = 64, 2_000_000, 1_500, 42
RANKS = {1: "spans of 64 tokens", 8: "of 512"}


def figures() -> Iterator[Figure]:
    """64 lanes over 2 million tokens, both policies; a request is four or five events, and evicts most times."""
    requests = list(stream(recorded_sessions(None, 0), LANES, REQUESTS, SEED))
    for ranks, spans in RANKS.items():
        lru = _events_a_second(requests, ranks, "lru")
        for policy in ("lru", "return-rate"):
            rate = lru if policy == "lru" else _events_a_second(requests, ranks, policy)
            yield Figure(f"core: events at c64, {spans}, {policy} (CPU)", rate, "1/s", "lru", rate / lru)


class _Clock:
    """A node's `apply` with the CPU time that it takes."""

    def __init__(self) -> None:
        self.events, self.seconds = 0, 0.0
        self._apply = Node.apply

    def __enter__(self) -> _Clock:
        clock, apply = self, self._apply

        def timed(node: Node, event: Event, now: int) -> list:
            begun = thread_time()
            effects = apply(node, event, now)
            clock.seconds += thread_time() - begun
            clock.events += 1
            return effects

        Node.apply = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Node.apply = self._apply  # type: ignore[method-assign]


def _events_a_second(requests: list[Request], ranks: int, policy: str) -> float:
    with _Clock() as clock:
        replay(requests, len(requests), POOL_TOKENS, ranks, policy)
    return clock.events / clock.seconds
