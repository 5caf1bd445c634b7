"""Two tiers, one policy, one stream: HBM, then host, then gone; on the real core, with copies that are done at once.

Here the device pool is what it says: requests are admitted into it, so a prompt displaces what lies there. Requests
take no time in the core, as in `run`. What is found on the device costs nothing, what is found on the host is loaded,
what is found nowhere is computed; the report adds up the seconds of all three.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.resources import files

from kvmanager.core.events import Close, Closing, CopyOutcome, Open, PlanEnded, Progress
from kvmanager.core.eviction import POLICIES
from kvmanager.core.plans import Purpose
from kvmanager.core.spec import ChainSpec, GroupSpec, Inclusion, Limits, MissCosts, PageClass, Placement, PoolSpec
from kvmanager.errors import CapacityError, InvalidArgument
from kvmanager.geometry import SEQUENTIAL, ShardGeometry
from kvmanager.layout import GLM53, native_layout
from kvmanager.replay.engine import ReplayEngine
from kvmanager.replay.run import TICK_S, WARM_UP, Progressed, Timeline
from kvmanager.replay.stream import BLOCK_TOKENS, Request

BATCH_SPANS = 4096
"""Copies are done at once here, so they are cut as seldom as can be."""
GROUP, DEVICE_POOL, HOST_POOL = "replay", "replay/hbm", "replay/host"


@dataclass(frozen=True)
class Rates:
    """What computing a token takes, and each rank's link to the host in both directions."""

    prefill_tokens_per_s: float
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float

    def miss_costs(self, token_bytes: float, ranks: int) -> MissCosts:
        """The same for the core: `token_bytes` of a token, spread over all ranks."""
        return MissCosts(token_bytes / ranks / self.host_to_device_bytes_per_s, 1 / self.prefill_tokens_per_s)


def published_rates() -> Rates:
    """The rates of the reference deployment, with their sources in the file."""
    told = tomllib.loads(files("kvmanager.replay").joinpath("data/rates.toml").read_text("utf-8"))
    link = told["link"]
    return Rates(
        told["prefill"]["tokens_per_s"], link["host_to_device_bytes_per_s"], link["device_to_host_bytes_per_s"]
    )


@dataclass(frozen=True)
class TierReport:
    """What a replay found, over the requests after the warm-up. Rates are shares of prompt tokens.

    A link is one rank's. Evictions are spans forgotten, by the tier that needed room; `reclaims` are copies that went
    while the other tier kept one. `partial_span_tokens`: found in spans that the prompt shares in part only.
    """

    policy: str
    inclusion: str
    device_tokens: int
    host_tokens: int
    span_tokens: int
    requests: int
    refused: int
    prompt_tokens: int
    device_hit_rate: float
    host_hit_rate: float
    prefix_hit_rate: float
    prefilled_tokens: int
    onboarded_tokens: int
    host_to_device_link_bytes: int
    device_to_host_link_bytes: int
    evictions_for_device: int
    evictions_for_host: int
    device_reclaims: int
    host_reclaims: int
    bypassed: int
    partial_span_reuse: int
    partial_span_tokens: int
    prefill_seconds_avoided: float
    reload_seconds: float
    seconds_saved: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def two_tier_spec(device_tokens: int, host_tokens: int, ranks: int) -> GroupSpec:
    """One sharded chain of `ranks` ranks with a host pool beside it, accounting only."""
    geometry = ShardGeometry(ranks, BLOCK_TOKENS, 1)
    order = geometry.order if ranks > 1 else SEQUENTIAL
    span = geometry.span_tokens
    if min(device_tokens, host_tokens) < span:
        raise InvalidArgument(f"pools of {device_tokens} and {host_tokens} tokens: each must hold a span of {span}")
    layout = native_layout(GLM53, BLOCK_TOKENS)
    shares = tuple(range(ranks + 1, 2 * ranks + 1))
    page_class = PageClass("kv", layout, DEVICE_POOL, tuple(range(1, ranks + 1)), HOST_POOL, shares)
    chain = ChainSpec("main", Placement.SHARDED, ranks, BLOCK_TOKENS, order, order, (page_class,))
    pools = tuple(
        PoolSpec(name, tier, ranks, tokens // span, layout.page_bytes, (("kv", 1),))
        for name, tier, tokens in ((DEVICE_POOL, "device", device_tokens), (HOST_POOL, "host", host_tokens))
    )
    return GroupSpec(GROUP, ranks, BLOCK_TOKENS, GLM53, (chain,), pools)


@dataclass
class Served:
    """One request: tokens of its prompt that were found, and how many of them had to be loaded."""

    cached_tokens: int = 0
    loaded_tokens: int = 0
    refused: bool = False


class TierEngine(ReplayEngine):
    """The one engine of a replay with two tiers, and its mover: every copy is done as soon as it is asked for.

    `moved`: bytes of all ranks, by purpose.
    """

    def __init__(self, spec: GroupSpec, limits: Limits, policy: str) -> None:
        super().__init__(spec, limits, policy)
        self.moved: Counter[Purpose] = Counter()
        self._spec = spec

    def tick(self) -> None:
        """What happens with time alone."""
        super().tick()
        self._copy_all()

    def _copy_all(self) -> None:
        """Ends every plan, and those that follow from that."""
        while self.plans:
            plan = self.plans.pop(0)
            self.moved[plan.purpose] += plan.total_bytes
            self.apply(PlanEnded(plan.plan_id, CopyOutcome.DONE))

    def request(self, number: int, request: Request) -> Served:
        """Runs a request to its end; a prompt that does not fit is computed without leaving anything."""
        # One token more than the recorded blocks: a prompt's last token is always computed.
        tokens = request.tokens + 1
        loaded = self.moved[Purpose.ONBOARD]
        opened = self.step(opens=(Open(number, tokens, 0, request.keys(), request.session_id),)).opened[0]
        if opened.error is not None:
            if not isinstance(opened.error, CapacityError):
                raise opened.error
            return Served(refused=True)
        self._copy_all()
        commit = Progress(number, tokens, tokens)
        self.step(progress=(commit,), closes=(Close(number, Closing.FINISHED),))
        self._copy_all()
        token_bytes = self._spec.chains[0].classes[0].page_bytes // BLOCK_TOKENS
        loaded_tokens = (self.moved[Purpose.ONBOARD] - loaded) // token_bytes
        return Served(opened.cached_tokens, loaded_tokens)

    def turn_ends(self, request: Request) -> None:
        """The request's answer is complete: its session is idle, or over."""
        super().turn_ends(request)
        self._copy_all()


@dataclass
class _Tally:
    """Sums over the counted part. `before`: counters and bytes when it began."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0
    loaded_tokens: int = 0
    refused: int = 0
    before: Counter[str] = field(default_factory=Counter)

    def count(self, request: Request, served: Served) -> None:
        """Adds a request. What was loaded and not used, at the end of a span, was not found on the host."""
        found_on_host = min(served.loaded_tokens, served.cached_tokens)
        self.prompt_tokens += request.tokens
        self.host_tokens += found_on_host
        self.device_tokens += served.cached_tokens - found_on_host
        self.loaded_tokens += served.loaded_tokens
        self.refused += served.refused


def _counts(engine: TierEngine) -> Counter[str]:
    """The core's counters, and the bytes of all ranks under names of their own."""
    return Counter(engine.node.state.counters) + Counter({_bytes(k): v for k, v in engine.moved.items()})


def _bytes(purpose: Purpose) -> str:
    return f"bytes/{purpose}"


def replay_tiers(
    requests: Iterable[Request],
    total: int,
    device_tokens: int,
    host_tokens: int,
    ranks: int,
    policy: str,
    inclusion: Inclusion = Inclusion.AS_NEEDED,
    rates: Rates | None = None,
    progress: Progressed = None,
) -> TierReport:
    """Replays `total` requests in the order of their start. Raises InvalidArgument for an unknown policy."""
    if policy not in POLICIES:
        raise InvalidArgument(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    rates = rates or published_rates()
    spec = two_tier_spec(device_tokens, host_tokens, ranks)
    token_bytes = spec.chains[0].classes[0].page_bytes / BLOCK_TOKENS
    limits = Limits(
        growth_cap_tokens=1,
        batch_spans=BATCH_SPANS,
        inclusion=inclusion,
        miss_costs=rates.miss_costs(token_bytes, ranks),
    )
    engine = TierEngine(spec, limits, policy)
    tally = _Tally()
    timeline = Timeline(engine, TICK_S)
    for number, request in enumerate(requests):
        timeline.until(request)
        if number == int(total * WARM_UP):
            tally.before = _counts(engine)
        served = engine.request(number + 1, request)
        if number >= int(total * WARM_UP):
            tally.count(request, served)
        timeline.began(number, request)
        if progress is not None and number % 100 == 99:
            progress(number + 1)
    happened = _counts(engine)
    happened.subtract(tally.before)
    sizes = (device_tokens, host_tokens)
    return _report(policy, inclusion, sizes, ranks, total, tally, happened, rates)


def _report(
    policy: str,
    inclusion: Inclusion,
    sizes: tuple[int, int],
    ranks: int,
    total: int,
    tally: _Tally,
    happened: Counter[str],
    rates: Rates,
) -> TierReport:
    prompt, found = max(tally.prompt_tokens, 1), tally.device_tokens + tally.host_tokens
    written = happened[_bytes(Purpose.OFFLOAD)] + happened[_bytes(Purpose.SPILL)]
    up, down = happened[_bytes(Purpose.ONBOARD)] // ranks, written // ranks
    avoided, reload = found / rates.prefill_tokens_per_s, up / rates.host_to_device_bytes_per_s
    return TierReport(
        policy=policy,
        inclusion=inclusion.value,
        device_tokens=sizes[0],
        host_tokens=sizes[1],
        span_tokens=ranks * BLOCK_TOKENS,
        requests=total,
        refused=tally.refused,
        prompt_tokens=tally.prompt_tokens,
        device_hit_rate=tally.device_tokens / prompt,
        host_hit_rate=tally.host_tokens / prompt,
        prefix_hit_rate=found / prompt,
        prefilled_tokens=tally.prompt_tokens - found,
        onboarded_tokens=tally.loaded_tokens,
        host_to_device_link_bytes=up,
        device_to_host_link_bytes=down,
        evictions_for_device=happened["eviction"] - happened["host_eviction"],
        evictions_for_host=happened["host_eviction"],
        device_reclaims=happened["reclaim"],
        host_reclaims=happened["host_reclaim"],
        bypassed=happened["writeback_bypass"],
        partial_span_reuse=happened["partial_span_reuse"],
        partial_span_tokens=happened["partial_span_tokens"],
        prefill_seconds_avoided=avoided,
        reload_seconds=reload,
        seconds_saved=avoided - reload,
    )
