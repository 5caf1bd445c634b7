"""Hybrid HiSparse: which latent pages of running requests stay in HBM, and what their workers are told.

A release is an effect in the reply to a step message: the worker writes the new table row before that
step's first kernel, and the fence of the next message acknowledges it. Until then the slab drains.
"""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import update_promise, update_promises
from kvmanager.core.events import HotGrant, ResidencyRows
from kvmanager.core.group import Group
from kvmanager.core.homes import counted, latent_class, spare_slabs
from kvmanager.core.pool import PageState
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.request import Phase, Request, RequestChain
from kvmanager.core.spans import ABSENT, DEVICE, HOST, NO_PAGE, READY
from kvmanager.core.spec import Residency
from kvmanager.core.state import Engine, State, concat, mark_dirty
from kvmanager.core.zeros import hot_zeros
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
    """Releases clean sealed latent pages, tail first, until one hot buffer's worth of HBM is free again.

    In a group whose pages are always on the host, all that may be released is.
    """
    sparse = group.spec.sparse
    assert sparse is not None
    release = _Release(state, engine, group)
    missing = _missing_slabs(engine, group)
    if sparse.residency is Residency.ALWAYS_HOST:
        missing = release.pool.slabs
    for request in sorted(engine.requests.values(), key=lambda r: -r.request_id):
        if missing <= 0 or request.phase is not Phase.RUNNING:
            continue
        missing -= release.tail_of(request, missing)
    if release.grants or release.released:
        update_promises(state, group)
    if missing > 0:
        _mirror_more(state, group)
    group.deficit_slabs = 0
    return release.grants


def _mirror_more(state: State, group: Group) -> None:
    """Too few clean pages: mirrors that found no room, or were taken away, are tried again now."""
    group.unblock()
    declined, unwritten = group.declined[0], group.unwritten[0]
    again = [declined.popleft() for _ in range(min(len(declined), state.limits.reconsidered_spans))]
    group.writeback[0].extend([*again, *unwritten[: state.limits.reconsidered_spans]])
    del unwritten[: state.limits.reconsidered_spans]


def _missing_slabs(engine: Engine, group: Group) -> int:
    """Slabs of HBM that should come free by releases."""
    sparse, chain = group.spec.sparse, group.chains[0]
    assert sparse is not None
    pool = chain.pool(latent_class(group), DEVICE)
    short = max(sparse.hot_slabs, pool.owed_slabs) - pool.free_slabs
    if short > 0:
        short -= reclaimable_slabs(group, pool)
    # A refused request's deficit is what it lacked beyond free and reclaimable slabs, so those don't cover it.
    unbacked = sum(r.unbacked_slabs for r in engine.requests.values() if r.phase is Phase.RUNNING)
    draining = pool.spaces[sparse.latent_class].counts[PageState.DRAINING]
    return max(short, 0) + group.deficit_slabs + unbacked - draining


class _Release:
    """Releases of one step's reply. `grants`: hot buffers given for them. `released`: pages so far."""

    def __init__(self, state: State, engine: Engine, group: Group) -> None:
        self._state, self._engine, self._group = state, engine, group
        self._latent = latent_class(group)
        self._chain = group.chains[0]
        self.pool = self._chain.pool(self._latent, DEVICE)
        self.grants: list[HotGrant] = []
        self.released = 0
        self._spare: int | None = None

    def tail_of(self, request: Request, missing: int) -> int:
        """Slabs released from one request, up to `missing`."""
        part, chain = request.chains[0], self._chain
        rows = part.rows.array[: first_resident_of(self._group, request, part)]
        copies, before = chain.table.copies[self._latent], self.released
        clean = (copies[DEVICE, rows] == READY) & (copies[HOST, rows] == READY) & (chain.table.busy[rows] == 0)
        for row in rows[clean][::-1].tolist():
            if self.released - before >= missing:
                break
            if not _hot_for_all(self._state, self._engine, self._group, row, self.grants):
                continue
            if self._home_on_host(request, row):
                self._release(row)
        return self.released - before

    def _home_on_host(self, request: Request, row: int) -> bool:
        """Whether the span's mirror may become its home: promised to the request, shared, or there is room to spare."""
        table, width = self._chain.table, int(self._chain.widths([row])[0])
        if table.pins[row] > 1:
            return True
        host = self._chain.pool(self._latent, HOST)
        resident = counted(self._chain, self._latent, request.chains[0].rows.array)[1] if request.homed_pages else width
        promised = request.promised.get(host.name, 0)
        if promised >= width and resident - width >= request.homed_pages:
            request.promised[host.name] = promised - width
            host.promise(self._state.tenants.of_namespace[request.namespace], -width)
            return True
        if self._spare is None:
            self._spare = spare_slabs(self._group, host)
        if self._spare < width:
            return False
        self._spare -= width
        request.homed_pages = max(0, request.homed_pages - width)
        return True

    def _release(self, row: int) -> None:
        """Takes a span's latent pages out of HBM; every request that holds it tells its worker."""
        name = self._chain.spec.classes[self._latent].name
        pages = self._chain.table.drop(self._latent, DEVICE, row)
        self.pool.settle(name, pages, PageState.DRAINING)
        self._engine.covered.frees.append((self.pool.name, name, pages))
        mark_dirty(self._state, self._group, 0, row)
        self._state.counters["spill"] += 1
        self.released += len(pages)


def _hot_for_all(state: State, engine: Engine, group: Group, row: int, grants: list[HotGrant]) -> bool:
    """Every holder of the span has a hot buffer, or got one: without it nothing may be read from the host."""
    holders = [r for r in state.holders(group.spec.name) if r.chains[0].ordinal(row) is not None]
    if any((holder.engine, holder.epoch) != (engine.name, engine.epoch) for holder in holders):
        return False  # another epoch's kernels may still read it, and its fences are not ours
    for holder in holders:
        if len(holder.hot) or holder.phase is Phase.CLOSING or holder.retracted:
            continue
        try:
            take_hot(state, group, holder)
        except PoolExhausted:
            return False
        # A waiting request is told with its complete tables.
        if holder.phase is Phase.RUNNING:
            grants.append(HotGrant(holder.request_id, holder.hot, hot_zeros(state, group, holder)))
        else:
            update_promise(state, holder)
    return True


def first_resident_of(group: Group, request: Request, part: RequestChain) -> int:
    """Ordinal of the first span of a request that must stay in HBM."""
    spec, table = part.chain.spec, part.chain.table
    assert group.spec.sparse is not None
    widths = part.chain.widths(part.rows.array).tolist()
    ends = [int(table.first_token[row]) + spec.span_tokens(table.order(row)) for row in part.rows]
    return first_resident(ends, widths, request.fenced_tokens, group.spec.sparse.tail_pages)


def residency_rows(engine: Engine, group: Group) -> list[ResidencyRows]:
    """What changed for running requests since their workers were last told."""
    latent, rows = latent_class(group), []
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
        landed = table.copies[latent, DEVICE, row] == ABSENT and table.copies[latent, HOST, row] == READY
        host.append(table.pages[latent, HOST, row, :width] if landed else np.full(width, NO_PAGE, np.int64))
    return ResidencyRows(
        request.request_id, spec.classes[latent].name, concat(ordinals), concat(device), concat(host)
    )
