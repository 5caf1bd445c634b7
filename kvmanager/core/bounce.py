"""Reading leases, and bounce regions: memory of one trust domain's engines in place of a pool that they may not map.

In a group with one, what the core calls the device tier is the bounce region, and the pool is the host tier: a lease
that reads waits until the mover has brought its pages there, one that fills writes there and the mover copies them out,
like any onboard and any write-back. So movers alone map the pool, and groups of several trust domains may share its
region.
"""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import Demands, check
from kvmanager.core.group import Chain, Group
from kvmanager.core.leaseevents import AcquirePrefix
from kvmanager.core.lifecycle import drop_request
from kvmanager.core.opening import onboard_missing
from kvmanager.core.reclaim import reclaimable_slabs
from kvmanager.core.request import Phase, Request, RequestChain
from kvmanager.core.rows import RowArray, RowList
from kvmanager.core.spans import ABSENT, DEVICE
from kvmanager.core.state import Engine, State
from kvmanager.core.tenants import NOBODY
from kvmanager.errors import CapacityError


def read_lease(state: State, engine: Engine, group: Group, event: AcquirePrefix, rows: RowArray) -> Request:
    """The lease on spans that are pinned already, at least one."""
    chain = group.chains[0]
    segments = int(chain.table.segments[rows].sum())
    chain.index.touch(rows, state.now)
    tokens = segments * group.spec.page_rows
    part = RequestChain(chain, RowList(rows), len(rows), RowList(), int(rows[-1]), len(rows))
    request = Request(
        engine.name, engine.epoch, engine.group, engine.namespace, event.request_id, tokens, 0, "",
        bytearray(event.keys[: segments * group.key_bytes]), [part],
        capacity_tokens=tokens, committed_tokens=tokens, fenced_tokens=tokens, cached_tokens=tokens,
        ranks_lost=engine.ranks_lost, since=state.now, expires_ns=state.now + event.lease_ttl_ns,
    )  # fmt: skip
    engine.requests[request.request_id] = request
    return request


def bring(state: State, engine: Engine, group: Group, event: AcquirePrefix, rows: RowArray) -> Request | None:
    """A lease on as many leading spans as the bounce region has room for, which waits for what is not there yet.

    None where there is room for none: nobody waits for it, its engine computes.
    """
    chain = group.chains[0]
    group.asker = state.tenants.of_namespace[engine.namespace]
    try:
        while len(rows):
            chain.table.pin(rows)
            request = read_lease(state, engine, group, event, rows)
            try:
                check(state, group, _demands(chain, rows), request)
            except CapacityError:
                drop_request(state, request)
                group.claims.pop((engine.name, engine.epoch, event.request_id), None)
                rows = rows[: _fitting(group, chain, rows)]
                continue
            onboard_missing(state, group, request, 0)
            if request.waiting_on:
                request.phase = Phase.WAITING
            return request
    finally:
        group.asker = NOBODY
    return None


def _demands(chain: Chain, rows: RowArray) -> Demands:
    """Pages of the bounce region that these spans lack."""
    demands = Demands()
    for c, page_class in enumerate(chain.spec.classes):
        missing = chain.absent(c, DEVICE, rows)
        if len(missing):
            demands.add_now(page_class.device_pool, page_class.name, int(chain.widths(missing).sum()))
    return demands


def _fitting(group: Group, chain: Chain, rows: RowArray) -> int:
    """How many leading spans, fewer than all, the bounce region could hold beside what others use of it."""
    pool = chain.pool(0, DEVICE)
    room = pool.free_slabs + reclaimable_slabs(group, pool)
    held = (chain.table.copies[0, DEVICE, rows] != ABSENT) & (chain.table.pins[rows] > chain.table.anchored[rows])
    takes = np.where(held, 0, chain.widths(rows))
    return min(int(np.searchsorted(np.cumsum(takes), room, "right")), len(rows) - 1)
