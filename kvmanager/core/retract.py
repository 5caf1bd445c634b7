"""Retraction: a running request gives up its device pages, not its bytes, and goes on later where it stopped.

Its rows reach the host before its slots return: once the engine's work on them is done, every span of it wants a host
copy, and a device copy may go when its host copy is complete. The host copies stay as long as the request does. It is
resumed by an open of the same id.
"""

from __future__ import annotations

from kvmanager.core.admission import (
    Demands,
    check,
    growth_pages,
    growth_promise,
    unpromised,
    update_promise,
    update_promises,
)
from kvmanager.core.events import Open, Opened
from kvmanager.core.group import Chain, Group
from kvmanager.core.homes import Latents, counted, spare_slabs
from kvmanager.core.lifecycle import begun, give_hot_back
from kvmanager.core.movement import onboard, wait_for_onboards
from kvmanager.core.pool import PageState
from kvmanager.core.refusal import exhausted
from kvmanager.core.request import Phase, Request, RequestChain
from kvmanager.core.residency import first_resident_of, take_hot
from kvmanager.core.rows import RowArray
from kvmanager.core.spans import ABSENT, DEVICE, FILLING, HOST, READY, CopyState
from kvmanager.core.state import Engine, FenceEntry, State
from kvmanager.errors import CapacityError, InvalidArgument, PoolExhausted


def retract(state: State, entry: FenceEntry, request: Request) -> None:
    """Takes a running request off the device behind the message's fence.

    Raises PoolExhausted, and the request goes on, where the host has no room for all of it; InvalidArgument where
    some of its pages can't leave the device.
    """
    group = state.groups[request.group]
    if request.phase is not Phase.RUNNING:
        raise InvalidArgument(f"request {request.request_id} is {request.phase.value}; only a running one is retracted")
    if group.spec.sparse is None:
        raise InvalidArgument(f"group {group.spec.name} is no decode rank; close the request, its prefix stays cached")
    if not all(chain.has_host(c) for chain in group.chains for c in range(chain.table.classes)):
        raise InvalidArgument(f"group {group.spec.name} has no host memory for all page classes; nothing is retracted")
    if request.donors or request.worker_plans:
        raise InvalidArgument(f"request {request.request_id} copies its first rows still; retract it when it committed")
    need = _host_need(request)
    for name, slabs in need.items():
        lacking = slabs - _host_room(group, request, name)
        if lacking > 0 and name in state.lenders:
            state.lenders[name].fetch(group.pools[name], lacking)
    for name, slabs in need.items():  # what one got may have been another's
        room = _host_room(group, request, name)
        if slabs > room:
            raise exhausted(state, group, group.pools[name], slabs, max(room, 0))
    request.phase = Phase.RETRACTING
    entry.retracts.append(request.request_id)
    update_promise(state, request)


def _host_room(group: Group, request: Request, pool: str) -> int:
    """Slabs of a host pool that it can have: nobody's, and those that it was promised."""
    return spare_slabs(group, group.pools[pool]) + request.promised.get(pool, 0)


def _host_need(request: Request) -> dict[str, int]:
    """Slabs by host pool that must be there for it: copies that it lacks, and its mirrors that may be taken away."""
    need: dict[str, int] = {}
    for part in request.chains:
        table, rows = part.chain.table, part.rows.array
        for c, page_class in enumerate(part.chain.spec.classes):
            host, pool = table.copies[c, HOST, rows], part.chain.pool(c, HOST)
            loose = (table.copies[c, DEVICE, rows] != ABSENT) & (host == READY) & (table.pins[rows] == 1)
            pages = int(part.chain.widths(rows[loose | (host == ABSENT)]).sum())
            need[pool.name] = need.get(pool.name, 0) - (-pages // pool.per_slab(page_class.name))
    return need


def take_off(state: State, request: Request) -> None:
    """Its work is done: what it wrote beyond its commits goes, the rest is final and on its way to the host."""
    group = state.groups[request.group]
    request.phase = Phase.RETRACTED
    give_hot_back(state, request)
    for number, part in enumerate(request.chains):
        _drop_unfenced(request, part)
        rows = part.rows.array
        for c in range(part.chain.table.classes):
            filling = rows[part.chain.table.copies[c, DEVICE, rows] == FILLING]
            part.chain.set_states(c, DEVICE, filling, CopyState.READY, PageState.READY)
        part.chain.table.anchor(rows)
        group.writeback[number].extend(rows)
    request.capacity_tokens = request.committed_tokens = request.fenced_tokens
    state.counters["retraction"] += 1
    update_promises(state, group)


def _drop_unfenced(request: Request, part: RequestChain) -> None:
    """Spans that hold no fenced token."""
    table = part.chain.table
    while len(part.rows) > part.shared and int(table.first_token[part.rows[-1]]) >= request.fenced_tokens:
        part.chain.unpin([part.pop()])


def resume(state: State, engine: Engine, event: Open) -> Opened:
    """A retracted request runs again: its indexer pages and its tail come back to the device first.

    Raises PoolExhausted while its rows are still on their way to the host, or there is no room now.
    """
    request, group = engine.requests[event.request_id], state.groups[engine.group]
    _check_same(state, group, request, event)
    before = request.prompt_tokens, request.growth_tokens, request.homed_pages
    request.prompt_tokens, request.growth_tokens = event.prompt_tokens, event.growth_tokens
    promised = dict(request.promised)
    for part in request.chains:
        part.chain.table.unanchor(part.rows.array)
    try:
        check(state, group, _demands(state, group, request), request, promised)
    except CapacityError:
        request.prompt_tokens, request.growth_tokens, request.homed_pages = before
        for part in request.chains:
            part.chain.table.anchor(part.rows.array)
        raise
    request.phase = Phase.WAITING
    state.counters["resumption"] += 1
    if group.spec.swaps:
        take_hot(state, group, request)
    for number, part in enumerate(request.chains):
        _bring_back(state, group, request, number, part)
    request.cached_tokens, request.capacity_tokens = request.fenced_tokens, request.prompt_tokens
    request.keys, request.token_ids = bytearray(event.keys), bytearray(event.token_ids)
    update_promises(state, group)
    return begun(state, request)


def _check_same(state: State, group: Group, request: Request, event: Open) -> None:
    """Raises InvalidArgument unless the open names just what was retracted, PoolExhausted when it comes too early."""
    moving = any(part.chain.table.busy[part.rows.array].any() for part in request.chains)
    if request.phase is not Phase.RETRACTED or moving:
        raise PoolExhausted(
            f"rows of request {request.request_id} are still on their way to the host; ask again when they are there",
            pool=request.chains[0].chain.pool(0, HOST).name,
            retry_after_ns=max(state.pace.copy_ns, state.limits.retry_after_ns),
        )
    if event.ticket is not None:
        raise InvalidArgument(f"request {request.request_id} is resumed from this node's own memory; send no ticket")
    if event.prompt_tokens != request.fenced_tokens:
        raise InvalidArgument(
            f"request {request.request_id} was retracted with {request.fenced_tokens} committed tokens; "
            f"the open says {event.prompt_tokens}"
        )
    whole = event.prompt_tokens // group.spec.page_rows * group.key_bytes
    if len(event.keys) != whole or not event.keys.startswith(bytes(request.keys[:whole])):
        raise InvalidArgument(f"request {request.request_id} was retracted with other keys")
    group.check_token_ids(len(event.keys), len(event.token_ids))


def _demands(state: State, group: Group, request: Request) -> Demands:
    """Device pages for what must be there, a hot buffer, and homes for the rest."""
    demands = Demands()
    growth = request.most_tokens - request.end_token
    for part in request.chains:
        chain = part.chain
        for c, page_class in enumerate(chain.spec.classes):
            missing = int(chain.widths(_missing(group, request, part, c)).sum())
            demands.add_now(page_class.device_pool, page_class.name, missing)
            if group.spec.floats(page_class.name):
                _demand_homes(state, group, request, part, c, missing, demands)
        for pool, slabs in growth_promise(group, chain.spec, growth).items():
            demands.of(pool).later_slabs += slabs
    return demands


def _demand_homes(
    state: State, group: Group, request: Request, part: RequestChain, page_class: int, missing: int, demands: Demands
) -> None:
    sparse, chain = group.spec.sparse, part.chain
    assert sparse is not None
    need, resident = counted(chain, page_class, part.rows.array)
    growth = growth_pages(group, chain.spec, request.most_tokens - part.end_token)
    latents = Latents(need + missing, resident + missing, growth)
    pool = chain.pool(page_class, HOST)
    wanted = latents.host_slabs(0)
    had = request.promised.get(pool.name, 0)
    request.homed_pages = wanted - min(wanted, unpromised(state, group, pool, request, wanted) + had)
    demands.of(pool.name).later_slabs += latents.host_slabs(request.homed_pages)
    homes = max(0, request.homed_pages - latents.resident)
    device = chain.pool(page_class, DEVICE).name
    demands.add_now(device, sparse.hot_class, sparse.hot_slabs)  # it is given at once
    demands.of(device).later_slabs += min(growth, sparse.tail_pages + 1) + homes


def _missing(group: Group, request: Request, part: RequestChain, page_class: int) -> RowArray:
    """Spans whose device copy of a class must be there before the request runs, and is not."""
    rows = part.rows.array
    if group.spec.floats(part.chain.page_class(page_class).name):
        rows = rows[first_resident_of(group, request, part) :]
        # Others read these on the host: their workers' tables say so.
        rows = rows[part.chain.table.pins[rows] == 1]
    return part.chain.absent(page_class, DEVICE, rows)


def _bring_back(state: State, group: Group, request: Request, number: int, part: RequestChain) -> None:
    chain, who = part.chain, (request.engine, request.epoch, request.request_id)
    for c, page_class in enumerate(chain.spec.classes):
        wait_for_onboards(state, group, request, number, c, part.rows.array)
        missing = _missing(group, request, part, c)
        if len(missing) == 0:
            continue
        wanted = int(chain.widths(missing).sum())
        pages = state.reclaimers[group.spec.name].take(chain.pool(c, DEVICE), page_class.name, wanted)
        assert pages is not None, "room was made for these pages"
        chain.put_many(c, DEVICE, missing, pages)
        job = onboard(state, group, number, c, [(row, row) for row in missing.tolist()])
        job.waiters.append(who)
        request.waiting_on.add(state.next_plan - 1)
    for row in part.rows.array.tolist():
        if unsealed(chain, request, row):
            reopen(chain, row)


def unsealed(chain: Chain, request: Request, row: int) -> bool:
    """Whether the request goes on writing rows of the span."""
    table = chain.table
    return int(table.first_token[row]) + chain.spec.span_tokens(table.order(row)) > request.fenced_tokens


def reopen(chain: Chain, row: int) -> None:
    """A span that is written again: its host copy, which is soon out of date, goes where no plan reads it."""
    table = chain.table
    for c in range(table.classes):
        if table.copies[c, DEVICE, row] == READY:
            chain.set_state(c, DEVICE, row, CopyState.FILLING, PageState.FILLING)
        if table.copies[c, HOST, row] != ABSENT and table.busy[row] == 0:
            chain.free_copy(c, HOST, row)


__all__ = ["reopen", "resume", "retract", "take_off", "unsealed"]
