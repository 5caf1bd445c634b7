"""Opening a request: match, admit over all pools, take pages, start what must arrive first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvmanager.core.admission import (
    Demands,
    NewSpans,
    check,
    check_workspace,
    device_slabs_free,
    growth_pages,
    growth_promise,
    span_orders,
    unpromised,
    update_promise,
    update_promises,
)
from kvmanager.core.events import Open, Opened
from kvmanager.core.group import Chain, Group
from kvmanager.core.homes import Latents, counted
from kvmanager.core.lifecycle import begun, drop_request
from kvmanager.core.movement import copy_on_write, onboard, onboard_in_flight, wait_for_onboards
from kvmanager.core.prefix import Match
from kvmanager.core.pulling import start_pull
from kvmanager.core.refusal import exhausted
from kvmanager.core.request import Request, RequestChain
from kvmanager.core.residency import first_resident, take_hot
from kvmanager.core.rows import RowArray, RowList
from kvmanager.core.scrubbing import scrub
from kvmanager.core.sessions import begin_turn
from kvmanager.core.spans import ABSENT, DEVICE, HOST, NO_SPAN
from kvmanager.core.spec import Residency
from kvmanager.core.state import Engine, State
from kvmanager.core.tickets import check_one_part
from kvmanager.core.wholegroups import check_takes_all
from kvmanager.errors import CapacityError, InvalidArgument


@dataclass(frozen=True)
class _Shape:
    """What a request will consist of in one chain: what was found, and the spans to be added.

    imported: positions below arrive by hand-off, those from there on are written by the engine.
    """

    match: Match
    new: NewSpans
    imported: int


Way = Callable[[bytes, int, int], Match]
"""A chain's way to look for (keys, segments, namespace)."""


def open_request(state: State, engine: Engine, event: Open) -> Opened:
    """Admits a request or refuses it; a refusal leaves nothing behind."""
    group = state.groups[engine.group]
    _validate(state, engine, group, event)
    state.counters["request"] += 1
    request, shapes = _admit(state, engine, group, event)
    _reuse(state, group, request, shapes)
    begin_turn(state, group, request)
    _count_hit(state, event, request, shapes)
    waits = scrub(state, group, request, event.ticket)
    if event.ticket is not None and not waits:
        start_pull(state, request, event.ticket)
    update_promise(state, request)
    return begun(state, request)


def _admit(state: State, engine: Engine, group: Group, event: Open) -> tuple[Request, list[_Shape]]:
    """The request with its pages; PoolExhausted, and nothing kept, when they don't fit."""
    imported = event.ticket.committed_tokens if event.ticket else 0
    try:
        check_workspace(group, event.prompt_tokens)
    except CapacityError:
        state.counters["refusal"] += 1
        raise
    # At least the last token is computed, unless it arrives by hand-off.
    limit = max(imported, event.prompt_tokens - 1) // group.spec.page_rows
    shapes = _shapes(group, event, engine.namespace, _ways(group, event), limit)
    try:
        return _try(state, engine, group, event, shapes)
    except CapacityError:
        if any(shape.match.donor != NO_SPAN for shape in shapes):
            # A donor is held beside the pages of the request itself, and may be just what is missing.
            whole: list[Way] = [chain.index.match_whole for chain in group.chains]
            with suppress(CapacityError):
                return _try(state, engine, group, event, _shapes(group, event, engine.namespace, whole, limit))
        state.counters["refusal"] += 1
        raise


def _try(
    state: State, engine: Engine, group: Group, event: Open, shapes: list[_Shape], *, brings: bool = True
) -> tuple[Request, list[_Shape]]:
    request = _register(state, engine, group, event, shapes)
    if not brings and group.chains[0].offloads:
        request.anchored = True
        for part in request.chains:
            part.chain.table.anchor(part.rows.array)
    try:
        check(state, group, _demands(state, group, request, shapes, brings=brings), request)
        _take_pages(state, group, request, shapes)
        if brings:
            _make_room_for_missing(state, group, request)
    except CapacityError:
        drop_request(state, request)
        raise
    return request, shapes


def _validate(state: State, engine: Engine, group: Group, event: Open) -> None:
    if event.request_id in engine.requests:
        raise InvalidArgument(f"request {event.request_id} is open already; choose another id")
    if event.prompt_tokens < 1:
        raise InvalidArgument("prompt_tokens must be at least 1")
    if not 0 <= event.growth_tokens <= state.limits.growth_cap_tokens:
        cap = state.limits.growth_cap_tokens
        raise InvalidArgument(f"growth_tokens {event.growth_tokens} outside 0..{cap} (admission.growth_cap_tokens)")
    wanted = event.prompt_tokens // group.spec.page_rows * group.key_bytes
    if len(event.keys) != wanted:
        raise InvalidArgument(
            f"{len(event.keys)} key bytes for {event.prompt_tokens} tokens; one {group.key_bytes}-byte key for each "
            f"whole segment of {group.spec.page_rows} tokens makes {wanted}"
        )
    group.check_token_ids(len(event.keys), len(event.token_ids))
    if group.spec.one_holder:
        check_takes_all(group, event)
    if event.ticket is not None:
        check_one_part(group.spec)
    if event.ticket is not None and not 1 <= event.ticket.committed_tokens <= event.prompt_tokens:
        raise InvalidArgument(
            f"the ticket covers {event.ticket.committed_tokens} tokens of a prompt of {event.prompt_tokens}"
        )


def _ways(group: Group, event: Open) -> list[Way]:
    """How each chain looks for the prompt. Where bytes arrive by hand-off, a span is found or pulled, as a whole."""
    whole = group.spec.sparse is not None or event.ticket is not None
    return [chain.index.match_whole if whole else chain.index.match for chain in group.chains]


def reserve_spans(state: State, engine: Engine, event: Open) -> Request:
    """A request over whole segments, all of which may be known, with pages for those that are not.

    For a lease: what is known is pinned, what is new is filled by the engine. Raises PoolExhausted, and keeps nothing.
    """
    group = state.groups[engine.group]
    _validate(state, engine, group, event)
    whole: list[Way] = [chain.index.match_whole for chain in group.chains]
    limit = event.prompt_tokens // group.spec.page_rows
    shapes = _shapes(group, event, engine.namespace, whole, limit)
    request, _ = _try(state, engine, group, event, shapes, brings=False)
    begin_turn(state, group, request)
    return request


def _shapes(group: Group, event: Open, namespace: int, ways: list[Way], limit: int) -> list[_Shape]:
    """The longest prefix of `limit` segments at most that every chain has, and the spans to add after it."""
    imported = event.ticket.committed_tokens if event.ticket else 0
    rows = group.spec.page_rows
    while True:
        found = [way(event.keys, limit, namespace) for way in ways]
        reached = [match.segments + match.donor_segments for match in found]
        limit = min(reached)
        if limit == max(reached):
            break
    sparse = group.spec.sparse is not None
    shapes = []
    for chain, match in zip(group.chains, found, strict=True):
        new = span_orders(chain.spec, match.segments * rows, imported, event.prompt_tokens, sparse=sparse)
        shapes.append(_Shape(match, new, imported))
    return shapes


def _register(state: State, engine: Engine, group: Group, event: Open, shapes: list[_Shape]) -> Request:
    """The request with its found spans pinned, so that nothing done for it can evict them."""
    parts = []
    donors = []
    for number, (chain, shape) in enumerate(zip(group.chains, shapes, strict=True)):
        rows = shape.match.rows
        if len(rows):
            chain.table.pin(rows)
            chain.index.touch(rows, state.now)
        if shape.match.donor != NO_SPAN:
            chain.table.pin([shape.match.donor])
            chain.index.touch([shape.match.donor], state.now)
            donors.append((number, shape.match.donor))
        anchor = int(rows[-1]) if len(rows) else NO_SPAN
        parts.append(RequestChain(chain, RowList(rows), len(rows), anchor=anchor, settled=len(rows)))
    first = shapes[0].match
    request = Request(
        engine.name,
        engine.epoch,
        engine.group,
        engine.namespace,
        event.request_id,
        event.prompt_tokens,
        event.growth_tokens,
        event.session_id,
        bytearray(event.keys),
        parts,
        capacity_tokens=event.prompt_tokens,
        cached_tokens=(first.segments + first.donor_segments) * group.spec.page_rows,
        donors=donors,
        ranks_lost=engine.ranks_lost,
        since=state.now,
        token_ids=bytearray(event.token_ids),
    )
    request.committed_tokens = request.cached_tokens
    # A donor's rows are copied by the worker before its first write: they are there once that is fenced.
    request.fenced_tokens = first.segments * group.spec.page_rows
    engine.requests[event.request_id] = request
    if group.spec.swaps and first.segments:
        update_promises(state, group, but=request)  # mirrors that others alone relied on are shared now
    return request


def _demands(
    state: State, group: Group, request: Request, shapes: list[_Shape], *, brings: bool = True
) -> Demands:
    """`brings`: what was found is needed on the device, too."""
    demands = Demands()
    for chain, shape in zip(group.chains, shapes, strict=True):
        pages = shape.new.pages(chain.spec)
        end = _end_token(chain, shape)
        for c, page_class in enumerate(chain.spec.classes):
            if group.spec.floats(page_class.name):
                _demand_latents(state, group, request, c, shape, demands)
                continue
            missing = chain.absent(c, DEVICE, shape.match.rows)
            onboarded = int(chain.widths(missing).sum()) if brings and len(missing) else 0
            demands.add_now(page_class.device_pool, page_class.name, pages + onboarded)
        growth = request.most_tokens - end
        for pool, slabs in growth_promise(group, chain.spec, growth).items() if growth > 0 else ():
            demands.of(pool).later_slabs += slabs
    return demands


def _end_token(chain: Chain, shape: _Shape) -> int:
    if len(shape.new) == 0:
        return shape.match.segments * chain.spec.page_rows
    return shape.new.end(chain.spec)


def _demand_latents(
    state: State, group: Group, request: Request, page_class: int, shape: _Shape, demands: Demands
) -> None:
    """On a decode rank: the tail and a hot buffer in HBM, and a home for every latent page, on the host or in HBM."""
    sparse, chain = group.spec.sparse, group.chains[0]
    assert sparse is not None
    c = chain.spec.classes[page_class]
    tail = sum(shape.new.widths(chain.spec)[_tail_start(group, chain, shape) :])
    need, resident = counted(chain, page_class, shape.match.rows)
    growth = growth_pages(group, chain.spec, request.most_tokens - _end_token(chain, shape))
    latents = Latents(need + shape.new.pages(chain.spec), resident + tail, growth)
    wanted = latents.host_slabs(0)
    lacking = wanted - unpromised(state, group, group.pools[c.host_pool], request, wanted)
    # Spans are placed and released as a whole, so homed pages are whole spans, and one may be split by the room.
    widest = chain.spec.widest
    request.homed_pages = -(-lacking // widest) * widest
    demands.add_now(c.device_pool, c.name, tail)
    demands.of(c.host_pool).later_slabs += latents.host_slabs(request.homed_pages)
    homes = request.homed_pages - latents.resident
    homes = homes + widest - 1 if homes > 0 else 0
    demands.of(c.device_pool).later_slabs += sparse.hot_slabs + min(growth, sparse.tail_pages + 1) + homes


def _tail_start(group: Group, chain: Chain, shape: _Shape) -> int:
    """First of the new spans that must be resident: what the engine writes itself never starts on the host."""
    ends, widths = shape.new.ends(chain.spec), shape.new.widths(chain.spec)
    assert group.spec.sparse is not None
    return first_resident(ends, widths, shape.imported, group.spec.sparse.tail_pages)


def _take_pages(state: State, group: Group, request: Request, shapes: list[_Shape]) -> None:
    for part, shape in zip(request.chains, shapes, strict=True):
        for first_tokens, order in shape.new.parts:
            rows = part.chain.table.add_many(first_tokens, order, state.now, request.namespace)
            part.chain.table.pin(rows)
            part.extend(rows)
        for c in range(len(part.chain.spec.classes)):
            _take_class(state, group, request, part, c, shape)


def _take_class(
    state: State, group: Group, request: Request, part: RequestChain, page_class: int, shape: _Shape
) -> None:
    """Device pages for the new spans of one class; latent pages of a sparse group partly on the host."""
    chain, name = part.chain, part.chain.spec.classes[page_class].name
    new = part.rows.array[part.shared :]
    if not group.spec.floats(name):
        _take_tier(state, group, chain, (page_class, DEVICE), new, shape.new.pages(chain.spec))
        return
    host_rows = np.asarray(_host_placed(group, request, part, page_class, shape), np.int64)
    for tier, rows in ((DEVICE, new[~np.isin(new, host_rows)]), (HOST, host_rows)):
        _take_tier(state, group, chain, (page_class, tier), rows, int(chain.widths(rows).sum()))
    if len(host_rows) or len(chain.absent(page_class, DEVICE, part.rows.array[: part.shared])):
        take_hot(state, group, request)


def _take_tier(
    state: State, group: Group, chain: Chain, place: tuple[int, int], rows: RowArray, pages: int
) -> None:
    """Pages for spans, so many in all. `place`: class and tier. Raises PoolExhausted."""
    if len(rows) == 0:
        return
    pool, name = chain.pool(*place), chain.spec.classes[place[0]].name
    taken = state.reclaimers[group.spec.name].take(pool, name, pages)
    if taken is None:
        raise exhausted(state, group, pool, pool.slabs_needed({name: pages}), pool.free_slabs)
    chain.put_many(*place, rows, taken)


def _host_placed(
    group: Group, request: Request, part: RequestChain, page_class: int, shape: _Shape
) -> list[int]:
    """New spans whose latent pages arrive on the host: what HBM can't hold, tail and hot buffer set aside.

    Heads stay resident: they survive longest, since release goes from the tail.
    """
    sparse = group.spec.sparse
    assert sparse is not None
    chain = part.chain
    new = part.rows[part.shared :]
    widths = chain.widths(new).tolist()
    tail = _tail_start(group, chain, shape)
    pool = chain.pool(page_class, DEVICE)
    indexers = {}
    for other, c in enumerate(chain.spec.classes):
        if other != page_class:
            missing = chain.absent(other, DEVICE, part.rows.array[: part.shared])
            indexers[c.name] = sum(widths) + int(chain.widths(missing).sum())
    growth = request.most_tokens - part.end_token
    later = growth_promise(group, chain.spec, growth).get(pool.name, 0)
    later += min(growth_pages(group, chain.spec, growth), sparse.tail_pages + 1)
    set_aside = max(pool.owed_slabs, 0) + pool.slabs_needed(indexers) + sparse.hot_slabs + later + sum(widths[tail:])
    room = device_slabs_free(group, pool) - set_aside
    if sparse.residency is Residency.ALWAYS_HOST:
        room = 0
    # What the host was not promised for stays in HBM.
    on_host = counted(chain, page_class, part.rows.array[: part.shared])[0] + sum(widths)
    on_host += growth_pages(group, chain.spec, growth) - request.homed_pages
    room = max(room, sum(widths[:tail]) - on_host)
    placed = []
    for row, width in zip(new[:tail].tolist(), widths[:tail], strict=True):
        if width <= room or width > on_host:
            room -= width
        else:
            placed.append(row)
            room, on_host = 0, on_host - width
    return placed


def _reuse(state: State, group: Group, request: Request, shapes: list[_Shape]) -> None:
    """Brings what was found onto the device, copies donors, and starts a hand-off."""
    for number, (part, shape) in enumerate(zip(request.chains, shapes, strict=True)):
        if part.shared:
            onboard_missing(state, group, request, number)
        if shape.match.donor != NO_SPAN:
            tokens = shape.match.donor_segments * group.spec.page_rows
            _use_donor(state, group, request, number, shape.match.donor, part.rows[part.shared], tokens)


def _make_room_for_missing(state: State, group: Group, request: Request) -> None:
    """What was found is brought to the device next: room for it, or PoolExhausted.

    It was asked for with the rest, but where more is promised than there is (overcommit above 1.0), the request's own
    hot buffer, until then a promise, may have taken just that.
    """
    wants: dict[str, dict[str, int]] = {}
    for part in request.chains:
        shared = part.rows.array[: part.shared]
        for c, page_class in enumerate(part.chain.spec.classes):
            missing = part.chain.absent(c, DEVICE, shared)
            if len(missing) and not group.spec.floats(page_class.name):
                of_pool = wants.setdefault(page_class.device_pool, {})
                of_pool[page_class.name] = of_pool.get(page_class.name, 0) + int(part.chain.widths(missing).sum())
    for name, pages in wants.items():
        pool = group.pools[name]
        if not state.reclaimers[group.spec.name].make_room(pool, pages):
            raise exhausted(state, group, pool, pool.slabs_needed(pages), pool.free_slabs)


def onboard_missing(state: State, group: Group, request: Request, number: int) -> None:
    """Brings what was found and is not on the device there, into pages that room was made for; the request waits."""
    part = request.chains[number]
    chain = part.chain
    who = (request.engine, request.epoch, request.request_id)
    for c, page_class in enumerate(chain.spec.classes):
        shared = part.rows.array[: part.shared]
        # Of a class that floats, too: a request that is resumed has some of its pages brought back.
        unattended = wait_for_onboards(state, group, request, number, c, shared)
        assert not unattended, "a published span is being filled by nobody"
        if group.spec.floats(page_class.name):
            continue  # read where it lies
        absent = chain.absent(c, DEVICE, part.rows.array[: part.shared]).tolist()
        if not absent:
            continue
        wanted = int(chain.widths(absent).sum())
        pages = state.reclaimers[group.spec.name].take(chain.pool(c, DEVICE), page_class.name, wanted)
        assert pages is not None, "room was made for these pages"
        chain.put_many(c, DEVICE, absent, pages)
        job = onboard(state, group, number, c, [(row, row) for row in absent])
        job.waiters.append(who)
        request.waiting_on.add(state.next_plan - 1)


def _use_donor(
    state: State, group: Group, request: Request, number: int, donor: int, row: int, tokens: int
) -> None:
    """Copy-on-write from a device donor by the worker; from a host donor the page is onboarded into the new span."""
    chain = group.chains[number]
    on_device = all(
        chain.table.copies[c, DEVICE, donor] != ABSENT
        and onboard_in_flight(state, group, number, c, donor) is None
        for c in range(len(chain.spec.classes))
    )
    if on_device:
        request.worker_plans = (*request.worker_plans, copy_on_write(state, chain, donor, row, tokens))
        return
    for c in range(len(chain.spec.classes)):
        job = onboard(state, group, number, c, [(donor, row)])
        job.waiters.append((request.engine, request.epoch, request.request_id))
        request.waiting_on.add(state.next_plan - 1)


def _count_hit(state: State, event: Open, request: Request, shapes: list[_Shape]) -> None:
    state.counters["prompt_tokens"] += event.prompt_tokens
    if request.cached_tokens:
        state.counters["prefix_hit"] += 1
        state.counters["prefix_hit_tokens"] += request.cached_tokens
    if any(shape.match.donor != NO_SPAN for shape in shapes):
        state.counters["partial_span_reuse"] += 1
        donated = min(shape.match.donor_segments for shape in shapes)
        state.counters["partial_span_tokens"] += donated * request.chains[0].chain.spec.page_rows
