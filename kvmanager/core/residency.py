"""Hybrid HiSparse: which latent pages of running requests stay in HBM, and what their workers are told.

A release is an effect in the reply to a step message: the worker writes the new table row before that
step's first kernel, and the fence of the next message acknowledges it. Until then the slab drains.
"""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import update_promise
from kvmanager.core.events import HotGrant, ResidencyRows
from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.request import Phase, Request, RequestChain
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, READY
from kvmanager.core.state import Engine, State, concat
from kvmanager.errors import PoolExhausted


def first_resident(ends: list[int], widths: list[int], sealed_tokens: int, tail_pages: int) -> int:
    """Ordinal of the first span that must stay in HBM: unsealed ones and at least the last `tail_pages` sealed pages.

    `ends[i]`: position after span i. A span is sealed when it ends at or before `sealed_tokens`.
    """
    kept = 0
    for ordinal in range(len(ends) - 1, -1, -1):
        if ends[ordinal] <= sealed_tokens:
            if kept >= tail_pages:
                return ordinal + 1
            kept += widths[ordinal]
    return 0


def take_hot(state: State, group: Group, request: Request) -> None:
    """Gives a request its hot buffer, before anything of it is read from the host."""
    sparse = group.spec.sparse
    assert sparse is not None
    if len(request.hot):
        return
    pool = group.chains[0].pool(0, DEVICE)
    pages = state.reclaimers[group.spec.name].take(pool, sparse.hot_class, sparse.hot_slabs)
    if pages is None:
        raise PoolExhausted(
            f"pool {pool.name}: no room for a hot buffer of {sparse.hot_slabs} slabs",
            pool=pool.name,
            needed=sparse.hot_slabs,
            free=pool.free_slabs,
            retry_after_ns=state.limits.retry_after_ns,
        )
    pool.settle(sparse.hot_class, pages, PageState.FILLING)
    request.hot = pages
    tenant = state.tenants.of_namespace[request.namespace]
    group.hot_slabs[tenant] = group.hot_slabs.get(tenant, 0) + len(pages)


def release_under_pressure(state: State, engine: Engine, group: Group) -> list[HotGrant]:
    """Releases clean sealed latent pages, tail first, until one hot buffer's worth of HBM is free again."""
    sparse = group.spec.sparse
    assert sparse is not None
    grants: list[HotGrant] = []
    chain = group.chains[0]
    latent = group.class_index(chain, sparse.latent_class)
    pool = chain.pool(latent, DEVICE)
    short = max(sparse.hot_slabs, pool.owed_slabs) - pool.free_slabs
    if short > 0:
        short -= reclaimable_slabs(group, pool)
    # A refused request's deficit is what it lacked beyond free and reclaimable slabs, so those don't cover it.
    unbacked = sum(r.unbacked_slabs for r in engine.requests.values() if r.phase is Phase.RUNNING)
    missing = max(short, 0) + group.deficit_slabs + unbacked - _draining(pool, sparse.latent_class)
    for request in sorted(engine.requests.values(), key=lambda r: -r.request_id):
        if missing <= 0 or request.phase is not Phase.RUNNING:
            continue
        missing -= _release_tail(state, engine, group, request, latent, missing, grants)
    for grant in grants:
        update_promise(state, engine.requests[grant.request_id])
    group.deficit_slabs = 0
    return grants


def _draining(pool: Pool, latent_class: str) -> int:
    return pool.spaces[latent_class].counts[PageState.DRAINING]


def _release_tail(
    state: State, engine: Engine, group: Group, request: Request, latent: int, missing: int, grants: list[HotGrant]
) -> int:
    """Slabs released from one request."""
    part = request.chains[0]
    released = 0
    for ordinal in reversed(range(_resident_from(group, request, part))):
        if released >= missing:
            break
        row = part.rows[ordinal]
        if not _may_release(part.chain, latent, row) or not _hot_for_all(state, engine, group, row, grants):
            continue
        released += _release(state, engine, group, latent, row)
    return released


def _hot_for_all(state: State, engine: Engine, group: Group, row: int, grants: list[HotGrant]) -> bool:
    """Every holder of the span has a hot buffer, or got one: without it nothing may be read from the host."""
    holders = [r for r in state.holders(group.spec.name) if r.chains[0].ordinal(row) is not None]
    if any((holder.engine, holder.epoch) != (engine.name, engine.epoch) for holder in holders):
        return False  # another epoch's kernels may still read it, and its fences are not ours
    for holder in holders:
        if len(holder.hot) or holder.phase is Phase.CLOSING:
            continue
        try:
            take_hot(state, group, holder)
        except PoolExhausted:
            return False
        # A waiting request is told with its complete tables.
        if holder.phase is Phase.RUNNING:
            grants.append(HotGrant(holder.request_id, holder.hot))
        else:
            update_promise(state, holder)
    return True


def _resident_from(group: Group, request: Request, part: RequestChain) -> int:
    spec, table = part.chain.spec, part.chain.table
    assert group.spec.sparse is not None
    widths = part.chain.widths(part.rows.array).tolist()
    ends = [int(table.first_token[row]) + spec.span_tokens(table.order(row)) for row in part.rows]
    return first_resident(ends, widths, request.fenced_tokens, group.spec.sparse.tail_pages)


def _may_release(chain: Chain, latent: int, row: int) -> bool:
    copies = chain.table.copies[latent, :, row]
    return bool(
        copies[DEVICE] == READY and copies[HOST] == READY and chain.table.busy[row] == 0
    )


def _release(state: State, engine: Engine, group: Group, latent: int, row: int) -> int:
    """Takes a span's latent pages out of HBM; every request that holds it tells its worker."""
    chain = group.chains[0]
    pool, name = chain.pool(latent, DEVICE), chain.spec.classes[latent].name
    pages = chain.table.drop(latent, DEVICE, row)
    pool.settle(name, pages, PageState.DRAINING)
    engine.covered.frees.append((pool.name, name, pages))
    for request in engine.requests.values():
        ordinal = request.chains[0].ordinal(row)
        if ordinal is not None:
            request.dirty.add((0, ordinal))
    state.counters["spill"] += 1
    return len(pages)


def residency_rows(engine: Engine, group: Group) -> list[ResidencyRows]:
    """What changed for running requests since their workers were last told."""
    assert group.spec.sparse is not None
    latent = group.class_index(group.chains[0], group.spec.sparse.latent_class)
    rows = []
    for request in engine.requests.values():
        if request.phase is not Phase.RUNNING or not request.dirty:
            continue
        changed = sorted(ordinal for chain, ordinal in request.dirty if chain == 0)
        request.dirty.clear()
        rows.append(_rows_of(request, latent, changed))
    return rows


def _rows_of(request: Request, latent: int, changed: list[int]) -> ResidencyRows:
    part = request.chains[0]
    spec, table = part.chain.spec, part.chain.table
    ordinals, device, host = [], [], []
    for ordinal in changed:
        row = part.rows[ordinal]
        width = spec.span_pages(table.order(row))
        first = part.first_page(ordinal)
        ordinals.append(np.arange(first, first + width, dtype=np.int64))
        device.append(table.pages[latent, DEVICE, row, :width])
        landed = table.copies[latent, HOST, row] == READY
        host.append(table.pages[latent, HOST, row, :width] if landed else np.full(width, NO_PAGE, np.int64))
    return ResidencyRows(
        request.request_id, spec.classes[latent].name, concat(ordinals), concat(device), concat(host)
    )
