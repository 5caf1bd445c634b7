"""The Admin service: what the node holds, read from the core between two events."""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc
import numpy as np

from kvmanager import __version__
from kvmanager.core.audit import ledger_holds
from kvmanager.core.extents import SharedRegion
from kvmanager.core.group import Chain, Group
from kvmanager.core.node import Node
from kvmanager.core.operatorevents import Reset, ResetDone
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, NO_SPAN, CopyState
from kvmanager.core.state import Engine, State
from kvmanager.core.tickets import tenant_of
from kvmanager.daemon.faultin import FaultIn
from kvmanager.daemon.fencing import Fence
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.movers import Mover
from kvmanager.errors import InvalidArgument
from kvmanager.observing.watch import Watch
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.auditlog import audited
from kvmanager.services.callers import Callers, typed
from kvmanager.wire import pack_u32

PREFIX_ROWS = 100
UNASSIGNED = 255


class AdminService(pb_grpc.AdminServicer):
    """Views, and what operators may do. `state()` names the node's life: starting, serving, draining."""

    def __init__(
        self,
        boot_id: int,
        name: str,
        loop: OwnerLoop,
        callers: Callers,
        mover: Mover,
        state: Callable[[], str],
        fence: Fence,
        fault_in: FaultIn,
        watch: Watch,
        check_successor: Callable[[], None],
        replace: Callable[[], None],
    ) -> None:
        self._boot_id = boot_id
        self._name = name
        self._loop = loop
        self._callers = callers
        self._mover = mover
        self._state = state
        self._fence = fence
        self._fault_in = fault_in
        self._watch = watch
        self._copied_bytes = watch.meter.copied_bytes
        self._started_ns = time.monotonic_ns()
        self._check_successor = check_successor
        self._replace = replace

    @typed
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: ARG002
        """Engines, movers, counters, and whether every pool's states sum to its capacity."""
        tenant = self._callers.viewer(context)
        reply = self._loop.inspect(lambda node: self._status(node, tenant))
        info = self._mover.info
        reply.boot_id = self._boot_id
        reply.version = __version__
        reply.node = self._name
        reply.state = self._state()
        reply.faulted_in_bytes = self._fault_in.done_bytes
        reply.memory_bytes = self._fault_in.total_bytes
        reply.uptime_ns = time.monotonic_ns() - self._started_ns
        reply.movers.add(
            device=self._mover.device,
            pid=info.pid,
            incarnation=info.incarnation,
            outstanding=info.outstanding,
            agent_started=info.agent is not None,
            pull_paths=info.paths,
        )
        for found, ready in ((self._watch.problems(), False), (self._watch.late(), True)):
            stalls = [pb.Stall(part=part, why=why, ready=ready) for part, why in found.items() if part != "node"]
            reply.stalls.extend(stalls)
        return reply

    def _status(self, node: Node, tenant: str | None) -> pb.StatusReply:
        reply = _status(node, tenant)
        if tenant is None:
            reply.copied_bytes.update(self._copied_bytes)
        for engine, entry in zip(_engines(node.state, tenant), reply.engines, strict=True):
            if not engine.trusted:
                entry.suspect_ns = max(node.state.now - engine.suspect_ns, 1)
                key = (engine.name, engine.epoch)
                stalled = engine.standing(node.state.timelines) if engine.stalled else ()
                entry.held_by = self._fence.holders(key, stalled)
                entry.fence = self._fence.done(key) if engine.fenced else ""
        return reply

    @typed
    def Pools(self, request: pb.PoolsRequest, context: grpc.ServicerContext) -> pb.PoolsReply:  # noqa: ARG002
        """The account of every pool."""
        self._callers.viewer(context)
        return self._loop.inspect(
            lambda node: pb.PoolsReply(
                pools=[_pool(g, p) for g in node.state.groups.values() for p in g.pools.values()],
                regions=[_shared_region(node, region) for region in node.state.regions.values()],
            )
        )

    @typed
    def Map(self, request: pb.MapRequest, context: grpc.ServicerContext) -> pb.MapReply:
        """One entry an accounting unit. Raises InvalidArgument for an unknown pool."""
        self._callers.sees_all(context)
        return self._loop.inspect(lambda node: _map(node, request.pool))

    @typed
    def Requests(self, request: pb.RequestsRequest, context: grpc.ServicerContext) -> pb.RequestsReply:  # noqa: ARG002
        """Every admitted request."""
        tenant = self._callers.viewer(context)
        return self._loop.inspect(lambda node: _requests(node, tenant))

    @typed
    def Prefixes(self, request: pb.PrefixesRequest, context: grpc.ServicerContext) -> pb.PrefixesReply:
        """Cached prefixes, one row a leaf, newest first."""
        tenant = self._callers.viewer(context)
        return self._loop.inspect(lambda node: _prefixes(node.state, request.limit or PREFIX_ROWS, tenant))

    @typed
    def Leases(self, request: pb.LeasesRequest, context: grpc.ServicerContext) -> pb.LeasesReply:  # noqa: ARG002
        """Every ticket that pins pages."""
        tenant = self._callers.viewer(context)
        return self._loop.inspect(lambda node: _leases(node.state, tenant))

    @typed
    def Reset(self, request: pb.ResetRequest, context: grpc.ServicerContext) -> pb.ResetReply:
        """Nothing that a group has cached is found any more. Raises InvalidArgument for an unknown group."""
        with audited(self._callers, context, f"reset {request.group}"):
            done: ResetDone = self._loop.call(Reset(request.group))
        return pb.ResetReply(forgotten_spans=done.forgotten_spans, held_spans=done.held_spans)

    @typed
    def Upgrade(self, request: pb.UpgradeRequest, context: grpc.ServicerContext) -> pb.UpgradeReply:  # noqa: ARG002
        """Has the daemon replaced once the answer is out. Raises JournalMismatch when a new one could not go on."""
        with audited(self._callers, context, "upgrade"):
            self._check_successor()
            context.add_callback(self._replace)
        return pb.UpgradeReply(boot_id=self._boot_id)


def _engines(state: State, tenant: str | None) -> list[Engine]:
    """A tenant's, or all."""
    return [e for e in state.all_engines() if tenant in (None, state.tenants.name_of(e.namespace))]


def _status(node: Node, tenant: str | None) -> pb.StatusReply:
    """Counters are of all tenants together, and not for the eyes of one."""
    state = node.state
    pools = {name: pool for group in state.groups.values() for name, pool in group.pools.items()}
    reply = pb.StatusReply(
        counters=state.counters if tenant is None else {},
        ledger_ok=all(map(ledger_holds, pools.values()))
        and all(region.account(pools).total_bytes == region.capacity_bytes for region in state.regions.values()),
    )
    for engine in _engines(state, tenant):
        reply.engines.add(
            engine=engine.name,
            group=engine.group,
            epoch=engine.epoch,
            state=_engine_state(engine),
            ranks_attached=len(engine.attaches),
            requests=len(engine.requests),
        )
    return reply


def _engine_state(engine: Engine) -> str:
    if not engine.trusted:
        return "suspect"
    return "attached" if len(engine.attaches) == engine.ranks else "registered"


def _pool(group: Group, pool: Pool) -> pb.PoolStatus:
    account = pool.account()
    unit = pool.unit_bytes * pool.ranks
    slab = unit * pool.units_per_slab
    return pb.PoolStatus(
        pool=pool.name,
        tier=pool.tier,
        ranks=pool.ranks,
        capacity_bytes=pool.capacity_bytes,
        free_bytes=account[PageState.FREE],
        reserved_bytes=account[PageState.RESERVED],
        filling_bytes=account[PageState.FILLING],
        ready_bytes=account[PageState.READY],
        draining_bytes=account[PageState.DRAINING],
        quarantined_bytes=account[PageState.QUARANTINED],
        pinned_bytes=_pinned_units(group, pool) * unit,
        reclaimable_bytes=reclaimable_slabs(group, pool) * slab,
        promised_bytes=pool.promised_slabs * slab,
        pages_by_class={
            name: space.pages - space.counts[PageState.FREE] for name, space in pool.spaces.items()
        },
    )


def _shared_region(node: Node, region: SharedRegion) -> pb.SharedRegionStatus:
    account = region.account({name: p for group in node.state.groups.values() for name, p in group.pools.items()})
    return pb.SharedRegionStatus(
        name=region.name,
        ranks=region.ranks,
        capacity_bytes=region.capacity_bytes,
        extent_bytes=region.extent_bytes,
        unowned_bytes=account.unowned_bytes,
        unusable_bytes=account.unusable_bytes,
        moves=region.moves,
        pools=region.pools,
        owners=pack_u32(region.owner.astype(np.uint32)),
        floor_extents=pack_u32(region.floors),
        most_extents=pack_u32([region.most_extents(pool) for pool in region.pools]),
    )


def _pages_in(chain: Chain, pool: Pool, page_class: int, tier: int) -> bool:
    return (tier == DEVICE or chain.has_host(page_class)) and chain.pool(page_class, tier) is pool


def _pinned_units(group: Group, pool: Pool) -> int:
    """Units of pages whose span somebody holds."""
    units = 0
    for chain in group.chains:
        held = chain.table.live & (chain.table.pins > 0)
        for c, page_class in enumerate(chain.spec.classes):
            for tier in (DEVICE, HOST):
                if _pages_in(chain, pool, c, tier):
                    pages = chain.table.pages[c, tier, held]
                    units += int((pages != NO_PAGE).sum()) * pool.spaces[page_class.name].units
    return units


def _map(node: Node, name: str) -> pb.MapReply:
    for group in node.state.groups.values():
        if name in group.pools:
            return _map_pool(group, group.pools[name])
    known = sorted(pool for group in node.state.groups.values() for pool in group.pools)
    raise InvalidArgument(f"no pool {name!r}; this node has {', '.join(known)}")


def _map_pool(group: Group, pool: Pool) -> pb.MapReply:
    numbered = pool.numbered_slabs * pool.units_per_slab
    states = np.zeros(numbered, np.uint8)
    classes = np.full(numbered, UNASSIGNED, np.uint8)
    pins = np.zeros(numbered, np.uint32)
    names = list(pool.spaces)
    for number, space in enumerate(pool.spaces.values()):
        taken = np.flatnonzero(space.state != PageState.FREE)
        units = (taken[:, None] * space.units + np.arange(space.units)).ravel()
        states[units] = np.repeat(space.state[taken], space.units)
        classes[units] = number
    for chain in group.chains:
        for c, page_class in enumerate(chain.spec.classes):
            for tier in (DEVICE, HOST):
                if not _pages_in(chain, pool, c, tier):
                    continue
                width = pool.spaces[page_class.name].units
                for row in np.flatnonzero(chain.table.live & (chain.table.pins > 0)).tolist():
                    pages = chain.table.page_list(c, tier, row)
                    pins[(pages[:, None] * width + np.arange(width)).ravel()] = chain.table.pins[row]
    return pb.MapReply(
        pool=pool.name, states=states.tobytes(), classes=classes.tobytes(), class_names=names, pins=pack_u32(pins)
    )


def _requests(node: Node, tenant: str | None) -> pb.RequestsReply:
    reply = pb.RequestsReply()
    for engine in _engines(node.state, tenant):
        for request in engine.requests.values():
            part = request.chains[0]
            absent = [
                row for row in part.rows if (part.chain.table.copies[:, DEVICE, row] == CopyState.ABSENT).any()
            ]
            reply.requests.add(
                engine=engine.name,
                request_id=request.request_id,
                state=request.phase.value,
                session_id=request.session_id,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens,
                committed_tokens=request.committed_tokens,
                fenced_tokens=request.fenced_tokens,
                spans=len(part.rows),
                host_only_spans=len(absent),
            )
    return reply


def _prefixes(state: State, limit: int, tenant: str | None) -> pb.PrefixesReply:
    rows: list[pb.PrefixStatus] = []
    spans = tokens = 0
    for group in state.groups.values():
        for chain in group.chains:
            table = chain.table
            published = np.flatnonzero(table.live & table.published)
            if tenant is not None:
                owner = state.tenants.of(table.namespace[published])
                published = published[owner == state.tenants.numbers.get(tenant, -1)]
            spans += len(published)
            tokens += int(table.valid[published].sum()) * group.spec.page_rows
            leaves = published[table.children[published] == 0]
            newest = leaves[np.argsort(-table.last_used[leaves], kind="stable")][:limit]
            rows.extend(_prefix(group, chain, row) for row in newest.tolist())
    rows.sort(key=lambda row: row.idle_ns)
    return pb.PrefixesReply(prefixes=rows[:limit], spans=spans, tokens=tokens)


def _prefix(group: Group, chain: Chain, leaf: int) -> pb.PrefixStatus:
    table = chain.table
    path = [leaf]
    while (parent := int(table.parent[path[-1]])) != NO_SPAN:
        path.append(parent)
    tokens = table.valid[path] * group.spec.page_rows
    on_device = (table.copies[:, DEVICE, path] != CopyState.ABSENT).all(axis=0)
    on_host = (table.copies[:, HOST, path] == CopyState.READY).any(axis=0)
    return pb.PrefixStatus(
        group=group.spec.name,
        chain=chain.spec.name,
        key=table.keys[leaf][-group.key_bytes :].hex(),
        tokens=int(tokens.sum()),
        device_tokens=int(tokens[on_device].sum()),
        host_tokens=int(tokens[on_host].sum()),
        pins=int(table.pins[leaf]),
        idle_ns=max(time.monotonic_ns() - int(table.last_used[leaf]), 0),
    )


def _leases(state: State, tenant: str | None) -> pb.LeasesReply:
    now = time.monotonic_ns()
    reply = pb.LeasesReply(
        leases=[
            pb.LeaseStatus(
                lease_id=ticket.ticket_id,
                kind="ticket",
                holder=ticket.holder,
                request_id=ticket.request_id,
                tokens=ticket.committed_tokens,
                expires_in_ns=max(ticket.expires_ns - now, 0),
            )
            for ticket in state.tickets.values()
            if tenant in (None, tenant_of(state, ticket))
        ]
    )
    for engine in _engines(state, tenant):
        for request in engine.requests.values():
            if request.expires_ns:
                reads = request.chains[0].shared == len(request.chains[0].rows)
                reply.leases.add(
                    lease_id=f"{request.request_id:x}",
                    kind="read" if reads else "fill",
                    holder=engine.name,
                    request_id=request.request_id,
                    tokens=request.prompt_tokens,
                    expires_in_ns=max(request.expires_ns - now, 0),
                )
    return reply
