"""One pool, one policy, one stream: drives the real core and counts prefix hits.

The pool keeps `pool_tokens` tokens. A request takes its pages from working room beside it, so that admission never
refuses; when it is over, the policy trims the pool back to its size, the newcomer being a candidate like any other.
Requests take no time in the core: nothing is pinned between events, as in the published hit-rate tables.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Protocol

from kvmanager.core.events import Close, Closing, Open, Progress, Trim
from kvmanager.core.eviction import POLICIES
from kvmanager.core.spec import ChainSpec, GroupSpec, Limits, PageClass, Placement, PoolSpec
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import SEQUENTIAL, ShardGeometry, TokenOrder
from kvmanager.layout import GLM53, native_layout
from kvmanager.replay.engine import ReplayEngine
from kvmanager.replay.stream import BLOCK_TOKENS, Request

GROUP, POOL = "replay", "replay/hbm"
WORKING_TOKENS = 1 << 20
"""Room for the request in hand: the longest prompt of GLM-5.3."""
WARM_UP = 0.25
"""Share of the requests, from the beginning, that is not counted."""
TICK_S = 60.0
Progressed = Callable[[int], None] | None


@dataclass(frozen=True)
class ReplayReport:
    """What a replay found. Rates are shares of prompt tokens, counted after the warm-up.

    `partial_span_tokens`: of the cached ones, those found in spans that the prompt shares in part only.
    """

    policy: str
    pool_tokens: int
    span_tokens: int
    requests: int
    prompt_tokens: int
    prefix_hit_rate: float
    prefilled_tokens: int
    ceiling: float
    evictions: int
    partial_span_reuse: int
    partial_span_tokens: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def group_spec(pool_tokens: int, ranks: int) -> GroupSpec:
    """One sharded chain of `ranks` ranks with pages of one block, accounting only."""
    geometry = ShardGeometry(ranks, BLOCK_TOKENS, 1)
    order = geometry.order if ranks > 1 else SEQUENTIAL
    if pool_tokens < geometry.span_tokens:
        raise InvalidArgument(f"a pool of {pool_tokens} tokens holds no span of {geometry.span_tokens}")
    slabs = _spans(pool_tokens, order) + _spans(WORKING_TOKENS, order) + 1
    layout = native_layout(GLM53, BLOCK_TOKENS)
    page_class = PageClass("kv", layout, POOL, tuple(range(1, ranks + 1)))
    chain = ChainSpec("main", Placement.SHARDED, ranks, BLOCK_TOKENS, order, order, (page_class,))
    pool = PoolSpec(POOL, "device", ranks, slabs, layout.page_bytes, (("kv", 1),))
    return GroupSpec(GROUP, ranks, BLOCK_TOKENS, GLM53, (chain,), (pool,))


def _spans(tokens: int, order: TokenOrder) -> int:
    return tokens // (order.segments * BLOCK_TOKENS)


class _Engine(ReplayEngine):
    """The one engine of a replay: opens, commits and closes a request at one moment."""

    def __init__(self, pool_tokens: int, ranks: int, policy: str) -> None:
        spec = group_spec(pool_tokens, ranks)
        super().__init__(spec, Limits(growth_cap_tokens=1), policy)
        self._working = spec.pools[0].slabs - _spans(pool_tokens, spec.chains[0].order)

    def request(self, number: int, request: Request) -> int:
        """Runs a request; returns the tokens of its prompt that were cached."""
        # One token more than the recorded blocks: a prompt's last token is always computed.
        tokens = request.tokens + 1
        opened = self.step(opens=(Open(number, tokens, 0, request.keys(), request.session_id),)).opened[0]
        if opened.error is not None:
            raise opened.error
        commit = Progress(number, tokens, tokens)
        self.step(progress=(commit,), closes=(Close(number, Closing.FINISHED),))
        self.apply(Trim(GROUP, POOL, self._working))
        return opened.cached_tokens


class Clock(Protocol):
    """What goes through the time of a stream."""

    def at(self, moment_s: float) -> None:
        """Time goes on."""

    def tick(self) -> None:
        """What happens with time alone."""

    def turn_ends(self, request: Request) -> None:
        """A request's answer is complete."""


class Timeline:
    """Between the starts of requests: their answers end, and the clock ticks every `tick_s` at most."""

    def __init__(self, engine: Clock, tick_s: float) -> None:
        self._engine, self._tick_s, self._next_tick = engine, tick_s, tick_s
        self._endings: list[tuple[float, int, Request]] = []

    def until(self, request: Request) -> None:
        """All that happens before the request starts."""
        while self._endings and self._endings[0][0] <= request.start_s:
            end, _, ended = heapq.heappop(self._endings)
            self._engine.at(end)
            self._engine.turn_ends(ended)
        self._engine.at(request.start_s)
        if request.start_s >= self._next_tick:
            self._engine.tick()
            self._next_tick = request.start_s + self._tick_s

    def began(self, number: int, request: Request) -> None:
        """The request runs until its recorded end."""
        heapq.heappush(self._endings, (request.end_s, number, request))


def replay(
    requests: Iterable[Request], total: int, pool_tokens: int, ranks: int, policy: str, progress: Progressed = None
) -> ReplayReport:
    """Replays `total` requests in the order of their start. Raises InvalidArgument for an unknown policy.

    `ranks` 8 stores spans of 512 tokens (DCP8), 1 spans of one block. `progress(done)` is called now and then.
    """
    if policy not in POLICIES:
        raise InvalidArgument(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    engine = _Engine(pool_tokens, ranks, policy)
    tally = _Tally(warm_up=int(total * WARM_UP))
    timeline = Timeline(engine, TICK_S)
    for number, request in enumerate(requests):
        timeline.until(request)
        if number == tally.warm_up:
            tally.partial_before = engine.node.state.counters["partial_span_tokens"]
        tally.count(number, request, engine.request(number + 1, request))
        timeline.began(number, request)
        if progress is not None and number % 100 == 99:
            progress(number + 1)
    counters = engine.node.state.counters
    return ReplayReport(
        policy,
        pool_tokens,
        ranks * BLOCK_TOKENS,
        total,
        tally.prompt_tokens,
        tally.cached_tokens / max(tally.prompt_tokens, 1),
        tally.prompt_tokens - tally.cached_tokens,
        tally.ceiling_tokens / max(tally.prompt_tokens, 1),
        counters["eviction"],
        counters["partial_span_reuse"],
        counters["partial_span_tokens"] - tally.partial_before,
    )


@dataclass
class _Tally:
    """Sums over the counted part of a replay. `seen`: by play, the prefixes asked for so far.

    `partial_before`: tokens found in partly shared spans before that.
    """

    warm_up: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ceiling_tokens: int = 0
    partial_before: int = 0
    seen: dict[int, set[int]] = field(default_factory=dict)

    def count(self, number: int, request: Request, cached_tokens: int) -> None:
        """Adds a request; before the warm-up is over only what an infinite cache would remember."""
        known = self.seen.setdefault(request.play, set())
        nodes = request.nodes.tolist()
        if number >= self.warm_up:
            self.prompt_tokens += request.tokens
            self.cached_tokens += cached_tokens
            self.ceiling_tokens += sum(node in known for node in nodes) * BLOCK_TOKENS
        known.update(nodes)
        if request.last:
            del self.seen[request.play]
