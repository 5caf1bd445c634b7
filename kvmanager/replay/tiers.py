"""Two tiers in virtual time: a device pool with a host pool behind it, or alone, driven on the real core.

Copies are done as soon as they are asked for. A request holds its pages for a share of its service time, none by
default: then it opens, commits and closes at one moment, as in the published hit-rate tables.
"""

from __future__ import annotations

from collections import Counter

from kvmanager.core.events import Close, Closing, CopyOutcome, Open, PlanEnded, Progress
from kvmanager.core.eviction import POLICIES
from kvmanager.core.plans import Purpose
from kvmanager.core.pool import PageState
from kvmanager.core.spec import ChainSpec, GroupSpec, Inclusion, Limits, PageClass, Placement, PoolSpec
from kvmanager.errors import CapacityError, InvalidArgument
from kvmanager.geometry import SEQUENTIAL, ShardGeometry
from kvmanager.layout import GLM53, native_layout
from kvmanager.replay.course import Course, Progressed, Served
from kvmanager.replay.engine import ReplayEngine
from kvmanager.replay.lanes import Source
from kvmanager.replay.stream import BLOCK_TOKENS, Request
from kvmanager.replay.tierreport import Cache, Rates, Tally, TierReport, figures, moved_bytes, published_rates

BATCH_SPANS = 4096
"""Copies are done at once here, so they are cut as seldom as can be."""
GROUP, DEVICE_POOL, HOST_POOL = "replay", "replay/hbm", "replay/host"


def two_tier_spec(device_tokens: int, host_tokens: int, ranks: int) -> GroupSpec:
    """One sharded chain of `ranks` ranks with a host pool beside it, accounting only; `host_tokens` 0: without one."""
    geometry = ShardGeometry(ranks, BLOCK_TOKENS, 1)
    order = geometry.order if ranks > 1 else SEQUENTIAL
    span = geometry.span_tokens
    if device_tokens < span or 0 < host_tokens < span:
        raise InvalidArgument(f"pools of {device_tokens} and {host_tokens} tokens: each must hold a span of {span}")
    layout = native_layout(GLM53, BLOCK_TOKENS)
    regions = tuple(range(1, ranks + 1))
    page_class = PageClass("kv", layout, DEVICE_POOL, regions)
    sizes = [(DEVICE_POOL, "device", device_tokens)]
    if host_tokens:
        page_class = PageClass("kv", layout, DEVICE_POOL, regions, HOST_POOL, tuple(r + ranks for r in regions))
        sizes.append((HOST_POOL, "host", host_tokens))
    chain = ChainSpec("main", Placement.SHARDED, ranks, BLOCK_TOKENS, order, order, (page_class,))
    pools = tuple(
        PoolSpec(name, tier, ranks, tokens // span, layout.page_bytes, (("kv", 1),)) for name, tier, tokens in sizes
    )
    return GroupSpec(GROUP, ranks, BLOCK_TOKENS, GLM53, (chain,), pools)


class TierEngine(ReplayEngine):
    """The one engine of a replay, and its mover: every copy is done as soon as it is asked for.

    moved: bytes of all ranks, by purpose. high_water: by pool, most bytes that were not free.
    """

    def __init__(self, spec: GroupSpec, limits: Limits, policy: str) -> None:
        super().__init__(spec, limits, policy)
        self.moved: Counter[Purpose] = Counter()
        self.high_water = {pool.name: 0 for pool in spec.pools}
        self._spec = spec

    def tick(self) -> None:
        """What happens with time alone."""
        super().tick()
        self._copy_all()

    def settle(self) -> None:
        """What was given back is free, and what follows from that is done."""
        self.step()
        self.tick()

    def _copy_all(self) -> None:
        """Ends every plan, and those that follow from that."""
        while self.plans:
            plan = self.plans.pop(0)
            self.moved[plan.purpose] += plan.total_bytes
            self.apply(PlanEnded(plan.plan_id, CopyOutcome.DONE))

    def _note_high_water(self) -> None:
        for group in self.node.state.groups.values():
            for name, pool in group.pools.items():
                used = (pool.capacity_units - pool.units(PageState.FREE)) * pool.unit_bytes * pool.ranks
                self.high_water[name] = max(self.high_water[name], used)

    def open(self, number: int, request: Request) -> Served:
        """Admits a request and computes its prompt; one that finds no room leaves nothing."""
        # One token more than the recorded blocks: a prompt's last token is always computed.
        tokens = request.tokens + 1
        loaded = self.moved[Purpose.ONBOARD]
        opened = self.step(opens=(Open(number, tokens, 0, request.keys(), request.session_id),)).opened[0]
        if opened.error is not None:
            if not isinstance(opened.error, CapacityError):
                raise opened.error
            return Served(refusal=opened.error)
        self._note_high_water()
        self._copy_all()
        self.step(progress=(Progress(number, tokens, tokens),))
        token_bytes = self._spec.chains[0].classes[0].page_bytes // BLOCK_TOKENS
        loaded_tokens = (self.moved[Purpose.ONBOARD] - loaded) // token_bytes
        return Served(opened.cached_tokens, loaded_tokens)

    def close(self, number: int) -> None:
        """The request gives its pages back; what it committed stays cached."""
        self.step(closes=(Close(number, Closing.FINISHED),))
        self._copy_all()

    def request(self, number: int, request: Request) -> Served:
        """Runs a request to its end."""
        served = self.open(number, request)
        if not served.refused:
            self.close(number)
        return served

    def turn_ends(self, request: Request) -> None:
        """The request's answer is complete: its session is idle, or over."""
        super().turn_ends(request)
        self._copy_all()

    def counts(self) -> Counter[str]:
        """The core's counters, and the bytes of all ranks under names of their own."""
        return Counter(self.node.state.counters) + Counter({moved_bytes(k): v for k, v in self.moved.items()})


def replay_tiers(
    source: Source,
    total: int,
    device_tokens: int,
    host_tokens: int,
    ranks: int,
    policy: str,
    inclusion: Inclusion = Inclusion.AS_NEEDED,
    rates: Rates | None = None,
    progress: Progressed = None,
    holds: float = 0.0,
) -> TierReport:
    """Replays `total` requests in the order of their start. Raises InvalidArgument for an unknown policy.

    `holds`: see `Course`; what finds no room then waits.
    """
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
    engine, tally = TierEngine(spec, limits, policy), Tally()

    def begin() -> None:
        tally.before = engine.counts()

    course = Course(engine, source, holds, tally.count, begin, progress)
    course.run(total)
    cache = Cache(policy, inclusion.value, (device_tokens, host_tokens), ranks, ranks * BLOCK_TOKENS)
    return TierReport(
        **figures(cache, total, tally, engine.counts(), course.queueing, engine.high_water, rates)
    )
