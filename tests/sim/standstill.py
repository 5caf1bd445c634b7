"""Nobody stands still: while pages that fit a waiting request are free or reclaimable, one gets on.

When all copies have landed and all launched work is done, each engine asks again for what it was refused. What the
pools could give is counted here on sets, by the rules and not by the core's functions. Where more was promised than
there is, engines step back one by one, newest first; the last one left must always get on.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmanager.core.events import Close, Closing, CopyOutcome, Open, Progress, Tick
from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.spans import DEVICE, HOST, NO_SPAN, CopyState
from tests.sim.content import PAGE_ROWS
from tests.sim.engine import SimEngine
from tests.sim.harness import World
from tests.sim.tenancy import room_for
from tests.sim.worker import ChainTable, SimRequest

MOST_COPIES = 1000
"""Far more than there are spans in a world: whoever needs more copies each other's pages out for ever."""


def quiet(worlds: Iterable[World], engines: Iterable[SimEngine]) -> None:
    """All copies that can land do, and all work that was launched is done."""
    for world in worlds:
        _land_all(world)
    for engine in engines:
        engine.catch_up()
    for world in worlds:
        _land_all(world)


def _land_all(world: World) -> None:
    for _ in range(MOST_COPIES):
        if not world.flights:
            return
        world.end_plan(min(world.flights), CopyOutcome.DONE)
    raise AssertionError(f"copies without end: {[flight.plan for flight in world.flights.values()]}")


def nobody_stands_still(engine: SimEngine, alone: bool) -> None:
    """The engine asks again; `alone`: no other epoch holds anything of its node."""
    engine.world.happened["asked again"] += 1
    _ask_again(engine)
    for _ in range(len(engine.requests) + 1):
        starved = _starved(engine)
        if not starved:
            break
        for request in starved:
            assert not _growth_fits(engine, request), f"request {request.request_id} could grow and may not"
        assert engine.world.limits.overcommit > 1.0 or engine.spec.sparse is not None, "a promise is not kept"
        others = [request for request in engine.requests.values() if request is not starved[0]]
        if not others:
            _alone_it_must(engine, starved[0], alone)
            break
        engine.world.happened["stepped back"] += 1
        engine.send([], [Close(others[-1].request_id, Closing.ABORTED)])
        quiet([engine.world], [engine])
        _ask_again(engine)
    _open_again(engine)


def _ask_again(engine: SimEngine) -> None:
    """Those that may not grow ask again, after what they gave up is free. A sparse page leaves in one message more."""
    for _ in range(2 if engine.spec.sparse is None else 4):
        engine.send([Progress(r.request_id, r.capacity, r.committed) for r in _starved(engine)])
        quiet([engine.world], [engine])


def _starved(engine: SimEngine) -> list[SimRequest]:
    """Requests that were refused pages inside their promise, oldest first."""
    return [r for r in engine.requests.values() if r.starved and not r.waiting and r.capacity <= r.prompt + r.growth]


def _alone_it_must(engine: SimEngine, request: SimRequest, alone: bool) -> None:
    group = engine.world.node.state.groups[engine.spec.name]
    strange = any(pool.units(PageState.QUARANTINED) for pool in group.pools.values())
    tickets = any(t.group == engine.spec.name for t in engine.world.node.state.tickets.values())
    busy = any(chain.table.busy.any() for chain in group.chains)
    assert not alone or strange or tickets or busy, f"request {request.request_id} stands still, alone"


def _open_again(engine: SimEngine) -> None:
    """The newest refused request asks again: where all its pages are there and promised to nobody, it must get in."""
    refused, engine.refused = engine.refused, None
    engine.world.apply(Tick(), passes=2 * engine.world.limits.claim_hold_ns)  # nobody in front holds it back any more
    if refused is None or refused.request_id in engine.requests or engine.spec.sparse is not None:
        return
    group = engine.world.node.state.groups[engine.spec.name]
    fits = all(
        _pages(chain, refused.prompt) <= _reachable(group, pool, engine)
        and _pages(chain, refused.prompt + refused.growth) <= _reachable(group, pool, engine) - _owed(pool)
        and _may_have(engine, group, pool, _pages(chain, refused.prompt + refused.growth))
        for chain in group.chains
        for pool in [chain.pool(0, DEVICE)]
    )
    tables = [ChainTable(chain, group) for chain in engine.spec.chains]
    again = SimRequest(refused.request_id, refused.text, engine.namespace, refused.prompt, refused.growth, tables)
    keys = refused.text.keys(0, refused.prompt // PAGE_ROWS)
    engine.send([], [], [(Open(again.request_id, again.prompt, again.growth, keys), again)])
    engine.world.happened["opened again"] += fits
    assert not fits or again.request_id in engine.requests, f"request {again.request_id} fits and is refused"


def _growth_fits(engine: SimEngine, request: SimRequest) -> bool:
    if engine.spec.sparse is not None:
        return False  # what of its own pages may leave HBM is not counted here; `_alone_it_must` is
    group = engine.world.node.state.groups[engine.spec.name]
    return all(
        _pages(chain, request.capacity) - _pages(chain, table.end) <= _reachable(group, chain.pool(0, DEVICE), engine)
        for chain, table in zip(group.chains, request.tables, strict=True)
    )


def _pages(chain: Chain, tokens: int) -> int:
    """Page indexes that positions [0, tokens) take, in spans that the engine fills itself."""
    order = chain.spec.order
    return -(-tokens // chain.spec.span_tokens(order)) * chain.spec.span_pages(order)


def _owed(pool: Pool) -> int:
    return pool.promised_slabs - pool.overbooked_slabs


def _may_have(engine: SimEngine, group: Group, pool: Pool, pages: int) -> bool:
    return not engine.tenant or pages <= room_for(group, pool, engine.tenant, engine.world.node)


def _reachable(group: Group, pool: Pool, engine: SimEngine) -> int:
    """Free pages, and those of spans that nobody holds; in pools of one page class. Of tenants only its own."""
    pages = pool.slabs - sum(space.pages - space.counts[PageState.FREE] for space in pool.spaces.values())
    for chain in group.chains:
        table = chain.table
        rows = [row for row in table if table.published[row]]
        if engine.tenant:
            mine = engine.world.node.state.engines[engine.name].namespace
            rows = [row for row in rows if table.namespace[row] == mine]
        held = {row for row in rows if table.pins[row] or table.busy[row]}
        above: set[int] = set()
        for row in held:
            at = int(table.parent[row])
            while at != NO_SPAN:
                above.add(at)
                at = int(table.parent[at])
        for row in set(rows) - held:
            device, host = (table.copies[0, tier, row] == CopyState.READY for tier in (DEVICE, HOST))
            clean = device and host
            for tier, there in ((DEVICE, device), (HOST, host)):
                if there and chain.pool(0, tier) is pool and (row not in above or (tier == DEVICE and clean)):
                    pages += len(table.page_list(0, tier, row))
    return pages
