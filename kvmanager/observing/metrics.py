"""What the core holds, as Prometheus sees it: read in one look between two events, when somebody asks.

`scrape` asks the owner loop for one `NodeView`; the text is made from it in the thread of the one who asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmanager import __version__
from kvmanager.core.group import Chain, Group
from kvmanager.core.node import Node
from kvmanager.core.pool import Pool
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.spans import READY
from kvmanager.core.state import State
from kvmanager.core.tenants import used_units
from kvmanager.errors import NotReady

TIERS: Final = ("device", "host")


@dataclass(frozen=True)
class PoolView:
    """One pool, bytes over all ranks. states: by name; they sum to `capacity`. tenants: by name, what each holds."""

    group: str
    name: str
    tier: str
    capacity: int
    states: dict[str, int]
    reclaimable: int
    promised: int
    tenants: dict[str, int]


@dataclass(frozen=True)
class GroupView:
    """One memory group. queues: job -> spans that wait for it."""

    name: str
    cached_spans: int
    cached_tokens: dict[str, int]
    queues: dict[str, int]
    claims: int


@dataclass(frozen=True)
class NodeView:
    """The core between two events. engines: by state. plans: by kind."""

    counters: dict[str, int]
    pools: list[PoolView]
    groups: list[GroupView]
    engines: dict[str, int]
    requests: int
    plans: dict[str, int]
    tickets: int
    quarantined: int
    took_s: float = field(default=0.0)


def tenants_of(state: State) -> Callable[[str], str]:
    """In the core: the tenant of an engine by its name, "" for one that is not registered."""

    def tenant(engine: str) -> str:
        found = state.engines.get(engine)
        return "" if found is None else state.tenants.name_of(found.namespace)

    return tenant


def view(node: Node) -> NodeView:
    """In the core: plain numbers, nothing that the core goes on to change."""
    began = time.perf_counter()
    state = node.state
    engines = {"registered": 0, "attached": 0, "suspect": 0}
    requests = 0
    for engine in state.all_engines():
        attached = "attached" if len(engine.attaches) == engine.ranks else "registered"
        engines[attached if engine.trusted else "suspect"] += 1
        requests += len(engine.requests)
    plans = {"copy": 0, "check": 0, "pull": 0, "scrub": 0}
    for job in state.jobs.values():
        plans[type(job).__name__.removesuffix("Job").lower()] += 1
    return NodeView(
        counters=dict(state.counters),
        pools=[_pool(state, group, pool) for group in state.groups.values() for pool in group.pools.values()],
        groups=[_group(group) for group in state.groups.values()],
        engines=engines,
        requests=requests,
        plans=plans,
        tickets=len(state.tickets),
        quarantined=sum(len(pages) for _, _, _, pages in state.quarantine),
        took_s=time.perf_counter() - began,
    )


def _pool(state: State, group: Group, pool: Pool) -> PoolView:
    unit = pool.unit_bytes * pool.ranks
    slab = unit * pool.units_per_slab
    tenants = state.tenants
    return PoolView(
        group=group.spec.name,
        name=pool.name,
        tier=pool.tier,
        capacity=pool.capacity_bytes,
        states={page_state.name.lower(): held for page_state, held in pool.account().items()},
        reclaimable=reclaimable_slabs(group, pool) * slab,
        promised=pool.promised_slabs * slab,
        tenants={
            spec.name: used_units(group, pool, number) * unit
            for number, spec in enumerate(tenants.specs)
            if number in tenants.of_namespace
        },
    )


def _group(group: Group) -> GroupView:
    spans = 0
    tokens = dict.fromkeys(TIERS, 0)
    for chain in group.chains:
        spans += int(chain.table.published.sum())
        for number, tier in enumerate(TIERS):
            tokens[tier] += _tokens(chain, number) * group.spec.page_rows
    return GroupView(
        name=group.spec.name,
        cached_spans=spans,
        cached_tokens=tokens,
        queues={
            "writeback": sum(len(queue) for queue in group.writeback),
            "declined": sum(len(queue) for queue in group.declined),
            "unwritten": sum(len(queue) for queue in group.unwritten),
        },
        claims=len(group.claims),
    )


def _tokens(chain: Chain, tier: int) -> int:
    """Segments of published spans with a copy of any class in the tier that is complete."""
    table = chain.table
    held = table.published & (table.copies[:, tier] == READY).any(axis=0)
    return int(table.valid[held].sum())


class NodeCollector(Collector):
    """Asks the core when it is asked itself. What does not answer in time is left out, and `kvmanager_up` is 0."""

    def __init__(
        self,
        look: Callable[[Callable[[Node], NodeView]], NodeView],
        node: str,
        state: Callable[[], str],
        peers: Callable[[], dict[str, int]] = dict,
        unrecorded: Callable[[], int] = lambda: 0,
    ) -> None:
        """`look(f)` runs f in the core; it raises NotReady when that takes too long.

        `peers()`: those that the mover pulled from, by the way of their chunks. `unrecorded()`: events that the history
        lacks.
        """
        self._unrecorded = unrecorded
        self._look = look
        self._node = node
        self._state = state
        self._peers = peers

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry must not ask the core when it is made."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        info = GaugeMetricFamily("kvmanager_build_info", "Who answers; always 1.", labels=["version", "node"])
        info.add_metric([__version__, self._node], 1)
        yield info
        life = GaugeMetricFamily("kvmanager_node_state", "1 for the state the node is in.", labels=["state"])
        for name in ("starting", "serving", "draining"):
            life.add_metric([name], int(name == self._state()))
        yield life
        text = "Peers that the mover pulled from, by the way their chunks take; measured: not decided yet."
        paths = [((path,), count) for path, count in self._peers().items()]
        yield _gauge("kvmanager_pull_peers", text, ("path",), paths)
        text = "Events that are missing in the history: it fell behind, or could not be written."
        yield CounterMetricFamily("kvmanager_history_dropped_events", text, value=self._unrecorded())
        try:
            seen: NodeView | None = self._look(view)
        except NotReady:
            seen = None
        yield GaugeMetricFamily("kvmanager_up", "Whether the core answered in time.", value=int(seen is not None))
        if seen is not None:
            yield from families(seen)


def families(seen: NodeView) -> Iterator[Metric]:
    """What was seen, as Prometheus wants it."""
    yield _gauge("kvmanager_look_duration_seconds", "Time the core took for this look.", (), [((), seen.took_s)])
    yield from _pools(seen.pools)
    yield from _groups(seen.groups)
    yield _gauge("kvmanager_engines", "Engine epochs.", ("state",), [((k,), v) for k, v in seen.engines.items()])
    yield _gauge("kvmanager_requests", "Requests that hold pages.", (), [((), seen.requests)])
    yield _gauge(
        "kvmanager_plans_in_flight", "Plans under way.", ("kind",), [((k,), v) for k, v in seen.plans.items()]
    )
    yield _gauge("kvmanager_tickets", "Tickets that are out.", (), [((), seen.tickets)])
    quarantined = [((), seen.quarantined)]
    yield _gauge("kvmanager_quarantined_pages", "Pages whose late bytes may still arrive.", (), quarantined)
    for name, count in seen.counters.items():
        yield CounterMetricFamily(f"kvmanager_{name}", f"Counter `{name}` of `kvmanager status`.", value=count)


def _pools(pools: list[PoolView]) -> Iterator[Metric]:
    where = ("group", "pool", "tier")

    def each(value: Callable[[PoolView], float]) -> list[tuple[tuple[str, ...], float]]:
        return [((pool.group, pool.name, pool.tier), value(pool)) for pool in pools]

    yield _gauge("kvmanager_pool_capacity_bytes", "Bytes of the pool.", where, each(lambda p: p.capacity))
    yield _gauge("kvmanager_pool_reclaimable_bytes", "Could be taken back now.", where, each(lambda p: p.reclaimable))
    yield _gauge("kvmanager_pool_promised_bytes", "Promised and not taken.", where, each(lambda p: p.promised))
    yield _gauge(
        "kvmanager_pool_bytes",
        "Bytes by state; the states sum to the capacity.",
        (*where, "state"),
        [((p.group, p.name, p.tier, state), held) for p in pools for state, held in p.states.items()],
    )
    yield _gauge(
        "kvmanager_tenant_bytes",
        "Bytes that a tenant's spans and hot buffers take.",
        (*where, "tenant"),
        [((p.group, p.name, p.tier, tenant), held) for p in pools for tenant, held in p.tenants.items()],
    )


def _groups(groups: list[GroupView]) -> Iterator[Metric]:
    spans = [((g.name,), g.cached_spans) for g in groups]
    yield _gauge("kvmanager_cached_spans", "Spans in the index.", ("group",), spans)
    yield _gauge(
        "kvmanager_cached_tokens",
        "Tokens in the index with a complete copy in a tier, summed over chains.",
        ("group", "tier"),
        [((g.name, tier), tokens) for g in groups for tier, tokens in g.cached_tokens.items()],
    )
    yield _gauge(
        "kvmanager_background_job_queue",
        "Spans that wait for a background job; entries may be out of date.",
        ("group", "job"),
        [((g.name, job), waiting) for g in groups for job, waiting in g.queues.items()],
    )
    claims = [((g.name,), g.claims) for g in groups]
    yield _gauge("kvmanager_refused_claims", "Refused requests that come first.", ("group",), claims)


def _gauge(
    name: str, text: str, labels: tuple[str, ...], values: Sequence[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


