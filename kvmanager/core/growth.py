"""Growing and shrinking a running request.

What the promise covers is given first and can't fail while no more than the pool is promised (overcommit 1.0);
what goes beyond it is given as a whole or not at all, so that asking for too much costs nobody a cached page.
"""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import Demands, check, check_now, own_order, update_promise
from kvmanager.core.group import Group
from kvmanager.core.plans import CopyPlan
from kvmanager.core.pool import PageState
from kvmanager.core.request import Request, RequestChain
from kvmanager.core.scrubbing import by_worker
from kvmanager.core.spans import ABSENT, DEVICE, CopyState
from kvmanager.core.state import Engine, FenceEntry, State
from kvmanager.errors import CapacityError, KVError


def resize(
    state: State, engine: Engine, entry: FenceEntry, request: Request, capacity: int
) -> tuple[int | None, list[int] | None, KVError | None, list[CopyPlan]]:
    """(spans kept after a truncate, first new ordinal a chain after a grow, error), None for what did not happen.

    Last: what the worker does to new pages before it writes there.
    """
    plans: list[CopyPlan] = []
    kept: int | None = None
    firsts: list[int] | None = None
    for number, part in enumerate(request.chains):
        if _surplus(part, capacity):
            _truncate(entry, request, number, part, capacity)
            kept = len(request.chains[0].rows)
    if lacks_pages(request, capacity):
        firsts = [len(part.rows) for part in request.chains]
        try:
            _grow(state, engine, entry, request, capacity, plans)
        except CapacityError as error:
            return kept, firsts, error, plans
    request.capacity_tokens = capacity
    return kept, firsts, None, plans


def lacks_pages(request: Request, capacity: int) -> bool:
    """Whether some of the positions [0, capacity) have no page yet."""
    return request.end_token < capacity


# ------------------------------------------------------------------------------------ shrinking


def _surplus(part: RequestChain, capacity: int) -> bool:
    if capacity > part.end_token - part.chain.spec.page_rows:
        return False  # in its last segment, if not behind it
    return len(part.rows) > part.shared and part.chain.table.first_token.item(part.rows.last) >= capacity


def _truncate(entry: FenceEntry, request: Request, number: int, part: RequestChain, capacity: int) -> None:
    """Gives back whole spans at the end that hold nothing committed; their pages drain until the fence."""
    chain = part.chain
    while _surplus(part, capacity):
        row = part.pop()
        assert not chain.table.published[row]
        for c in range(len(chain.spec.classes)):
            if chain.table.copies[c, DEVICE, row] != ABSENT:
                chain.set_state(c, DEVICE, row, CopyState.FILLING, PageState.DRAINING)
        entry.truncated.append((request.request_id, number, row))
        request.truncated.append((number, row))


def _take_back(engine: Engine, entry: FenceEntry, request: Request, capacity: int) -> None:
    """Spans that this request gave up and that still drain: its own later work comes after all that touches them.

    So a truncated request never waits for its own fence, and nobody else gets these pages meanwhile.
    """
    for number, part in enumerate(request.chains):
        while part.end_token < capacity and (row := _draining(request, number, part)) is not None:
            for waiting in (entry, *engine.fences):
                if (request.request_id, number, row) in waiting.truncated:
                    waiting.truncated.remove((request.request_id, number, row))
            request.truncated.remove((number, row))
            for c in range(len(part.chain.spec.classes)):
                if part.chain.table.copies[c, DEVICE, row] != ABSENT:
                    part.chain.set_state(c, DEVICE, row, CopyState.FILLING, PageState.FILLING)
            part.append(row)


def _draining(request: Request, number: int, part: RequestChain) -> int | None:
    """A span that the request gave up just where the chain ends now."""
    table, end = part.chain.table, part.end_token
    return next((row for chain, row in request.truncated if chain == number and table.first_token[row] == end), None)


# -------------------------------------------------------------------------------------- growing


def _grow(
    state: State, engine: Engine, entry: FenceEntry, request: Request, capacity: int, plans: list[CopyPlan]
) -> None:
    """Adds spans until positions [0, capacity) have pages. Raises PoolExhausted; what the promise covers stays.

    `plans`: gets those that the worker carries out first.
    """
    if request.truncated:
        _take_back(engine, entry, request, capacity)
    group = state.groups[request.group]
    if not lacks_pages(request, capacity):
        return
    demands, covered = _demands(group, request, capacity), capacity
    if not _covered(group, request, demands):
        update_promise(state, request)
        covered = _covered_until(group, request, capacity)
        demands = _demands(group, request, covered)
    if covered > request.end_token:
        check_now(state, group, demands, request, lambda: _next(group, request))
        _add(state, group, request, covered, plans)
        if covered == capacity:
            return
        update_promise(state, request)
    if lacks_pages(request, capacity):
        check(state, group, _demands(group, request, capacity), request, request.promised, _next(group, request))
        _add(state, group, request, capacity, plans)


def _demands(group: Group, request: Request, capacity: int) -> Demands:
    """Device pages that positions up to `capacity` lack."""
    demands = Demands()
    for part in request.chains:
        order = own_order(group, part.chain.spec)
        spans = max(0, -(-(capacity - part.end_token) // part.chain.spec.span_tokens(order)))
        for page_class in part.chain.spec.classes:
            demands.add_now(page_class.device_pool, page_class.name, spans * part.chain.spec.span_pages(order))
    return demands


def _next(group: Group, request: Request) -> Demands:
    """What the request needs to go on at all: a span more where it ends now."""
    return _demands(group, request, request.end_token + 1)


def _covered(group: Group, request: Request, demands: Demands) -> bool:
    """Whether these pages are promised."""
    for name, demand in demands.by_pool.items():
        if group.pools[name].slabs_needed(demand.now) > request.promised.get(name, 0):
            return False
    return True


def _covered_until(group: Group, request: Request, capacity: int) -> int:
    """The most tokens, up to `capacity`, whose pages are promised."""
    if _covered(group, request, _demands(group, request, capacity)):
        return capacity
    low, high = request.end_token, capacity
    while high - low > 1:
        middle = (low + high) // 2
        if _covered(group, request, _demands(group, request, middle)):
            low = middle
        else:
            high = middle
    return low


def _add(state: State, group: Group, request: Request, capacity: int, plans: list[CopyPlan]) -> None:
    """Takes the pages of all chains; they are known to fit."""
    reclaimer = state.reclaimers[group.spec.name]
    for part in request.chains:
        chain, table = part.chain, part.chain.table
        order = own_order(group, chain.spec)
        firsts = np.arange(part.end_token, capacity, chain.spec.span_tokens(order), dtype=np.int64)
        if len(firsts) == 0:
            continue
        rows = table.add_many(firsts, order, state.now, request.namespace, request.owner)
        table.pin(rows)
        part.extend(rows)
        for c, page_class in enumerate(chain.spec.classes):
            wanted = len(firsts) * chain.spec.span_pages(order)
            pages = reclaimer.take(chain.pool(c, DEVICE), page_class.name, wanted)
            assert pages is not None, "room was made for these pages"
            chain.put_many(c, DEVICE, rows, pages)
        if group.spec.scrub:
            plans += by_worker(state, chain, rows)
