"""A request's turns: complete answers, waking, refusal after the fact, and the end."""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import update_promises
from kvmanager.core.events import Opened
from kvmanager.core.homes import whole_lacks
from kvmanager.core.request import Phase, Request
from kvmanager.core.sessions import leave_session
from kvmanager.core.spans import DEVICE, NO_SPAN
from kvmanager.core.state import State
from kvmanager.core.tickets import request_ends
from kvmanager.core.zeros import hot_zeros
from kvmanager.errors import KVError


def opened(state: State, request: Request, name: str) -> Opened:
    """The complete answer for a request in its present state."""
    hot = request.hot if len(request.hot) else None
    group = state.groups[request.group]
    lacks = whole_lacks(group, request.most_tokens)
    tables, plans = request.tables(), (*request.worker_plans, *hot_zeros(state, group, request))
    return Opened(request.request_id, name, request.cached_tokens, tables, plans, hot, whole_lacks_slabs=lacks)


def begun(state: State, request: Request) -> Opened:
    """The answer for an admitted request: it runs, or waits for its bytes."""
    if request.waiting_on:
        request.phase = Phase.WAITING
        lacks = whole_lacks(state.groups[request.group], request.most_tokens)
        return Opened(request.request_id, "waiting", request.cached_tokens, whole_lacks_slabs=lacks)
    request.phase = Phase.RUNNING
    request.dirty.clear()
    return opened(state, request, "runnable")


def wake(state: State, request: Request) -> None:
    """A waiting request that has all its bytes runs: its engine is told, with complete tables."""
    if request.waiting_on or request.phase is not Phase.WAITING:
        return
    request.phase = Phase.RUNNING
    request.dirty.clear()
    if not request.expires_ns:  # a lease is asked for again
        state.notify(state.engine_of(request), ready=opened(state, request, "runnable"))


def refuse_waiting(state: State, request: Request, error: KVError) -> None:
    """Ends a waiting request: its engine is told, everything it held is given back."""
    engine = state.engine_of(request)
    drop_request(state, request)
    if not request.expires_ns:
        state.notify(engine, ready=Opened(request.request_id, "refused", error=error))
    state.counters["refusal"] += 1


def give_hot_back(state: State, request: Request) -> None:
    """Frees a request's hot buffer, if it has one."""
    group = state.groups[request.group]
    if len(request.hot):
        assert group.spec.sparse is not None
        device_pool = group.chains[0].pool(0, DEVICE)
        device_pool.give(group.spec.sparse.hot_class, request.hot)
        group.hot_slabs[state.tenants.of_namespace[request.namespace]] -= len(request.hot)
        request.hot = np.empty(0, np.int64)


def drop_request(state: State, request: Request) -> None:
    """Gives back all that a request holds, at once: no work of its engine may touch its pages any more."""
    request_ends(state, request)
    group = state.groups[request.group]
    if request.phase is Phase.CLOSING:
        state.pace.note("request_ns", state.now - request.since)
    leave_session(state, request)
    for pool, slabs in request.promised.items():
        group.pools[pool].promise(state.tenants.of_namespace[request.namespace], -slabs)
    request.promised = {}
    give_hot_back(state, request)
    del state.engine_of(request).requests[request.request_id]
    if request.phase is Phase.CLOSING:
        group.claims.pop((request.engine, request.epoch, request.request_id), None)
    for part in request.chains:
        held = part.rows[:]
        if request.phase is Phase.RETRACTED:
            part.chain.table.unanchor(held)
        if request.anchored:
            part.chain.table.unanchor(part.rows.array[: part.shared])
        if len(part.anchors):
            held = np.concatenate((held, part.anchors.array))
            part.chain.table.unanchor(part.anchors.array)
        part.chain.index.touch(held, state.now)
        part.chain.unpin(held)
        part.rows.shorten(0)
        part.anchors.shorten(0)
        part.end_token = 0
        part.anchor = NO_SPAN
    for number, row in request.donors:
        group.chains[number].unpin([row])
    request.donors = []
    if group.spec.swaps:
        update_promises(state, group)  # mirrors that it shared may be one other request's alone now
    group.unblock()
