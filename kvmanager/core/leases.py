"""Leases of engines with memory of their own: pages that their workers read from, or fill and then publish.

A lease is a request of the core like any other: found spans are pinned, new ones are filling, and it ends behind a
fence. So a worker that dies while it copies leaves nothing readable, and its pages wait until it can write no more.
"""

from __future__ import annotations

from kvmanager.core.admission import promises_hold
from kvmanager.core.bounce import bring, read_lease
from kvmanager.core.events import Open, Opened
from kvmanager.core.fences import check_fence, check_names_all, resolve_fences
from kvmanager.core.forgetting import condemn
from kvmanager.core.group import Chain, Group
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans
from kvmanager.core.leasesums import Acquired, keep_sums, sums_of
from kvmanager.core.lifecycle import drop_request
from kvmanager.core.opening import reserve_spans
from kvmanager.core.operatorevents import Loss
from kvmanager.core.request import Phase, Request, RequestChain
from kvmanager.core.rows import RowArray
from kvmanager.core.scrubbing import scrub
from kvmanager.core.spans import DEVICE, TOKEN_ID_BYTES
from kvmanager.core.state import Engine, FenceEntry, State
from kvmanager.core.tenants import NOBODY
from kvmanager.errors import InvalidArgument, PoolExhausted, UnknownLease

LONGEST_LEASE_NS = 3_600_000_000_000
"""Most that a lease may be asked for at once: an hour."""


def acquire(state: State, event: AcquirePrefix) -> Opened:
    """Pins the longest known prefix, as far as no promise to others is broken by it.

    `cached_tokens` of the answer may be 0, and then nothing is held. One that says "waiting" is to be asked for again.
    """
    engine, group = _asked(state, event)
    known = _known(engine, event)
    if known is not None:
        if known.chains[0].shared < len(known.chains[0].rows):
            raise InvalidArgument(f"lease {event.request_id} fills pages; choose another id to read some")
        return _acquired(known)
    chain = group.chains[0]
    found = chain.index.match_whole(event.keys, len(event.keys) // group.key_bytes, engine.namespace).rows
    engine.heard_ns = state.now
    request: Request | None = None
    if chain.offloads:
        request = bring(state, engine, group, event, found)
    elif len(rows := _pinned(group, chain, found)):
        request = read_lease(state, engine, group, event, rows)
    if request is None:
        return Opened(event.request_id, "runnable")
    state.counters["acquire"] += 1
    state.counters["acquired_tokens"] += request.prompt_tokens
    return _acquired(request)


def _pinned(group: Group, chain: Chain, rows: RowArray) -> RowArray:
    """Pins the leading spans that can be held back while every promise to others is kept; which they are."""
    chain.table.pin(rows)
    if promises_hold(group):
        return rows
    chain.table.unpin(rows)
    fits, breaks = 0, len(rows)  # what more pins break, fewer may keep: looked for by halving
    while breaks - fits > 1:
        middle = (fits + breaks) // 2
        chain.table.pin(rows[:middle])
        fits, breaks = (middle, breaks) if promises_hold(group) else (fits, middle)
        chain.table.unpin(rows[:middle])
    chain.table.pin(rows[:fits])
    return rows[:fits]


def reserve(state: State, event: ReserveSpans) -> Opened:
    """Pages for what is not known of the keys, as many leading ones as there is room for.

    `cached_tokens` of the answer: known already. Its spans are those to be filled. Raises PoolExhausted for none.
    One that says "waiting" has no spans yet: the same is to be asked again.
    """
    engine, group = _asked(state, event)
    group.check_token_ids(len(event.keys), len(event.token_ids))
    known = _known(engine, event)
    if known is not None:
        return _answer(known, known.chains[0].shared)
    if len(engine.attaches) != engine.ranks:
        raise InvalidArgument(f"{len(engine.attaches)} of {engine.ranks} ranks are attached; attach all before storing")
    engine.heard_ns = state.now
    group.unblock()
    group.asker = state.tenants.of_namespace[engine.namespace]
    try:
        request = _admit(state, engine, group, event)
    finally:
        group.asker = NOBODY
    request.expires_ns = state.now + event.lease_ttl_ns
    state.counters["store"] += 1
    if scrub(state, group, request):
        request.phase = Phase.WAITING
    return _answer(request, request.chains[0].shared)


def _admit(state: State, engine: Engine, group: Group, event: ReserveSpans) -> Request:
    """All of it, or what is left of it without the segments at the end that have no room."""
    segments = len(event.keys) // group.key_bytes
    try:
        return reserve_spans(state, engine, _open(group, event, segments))
    except PoolExhausted as error:
        fewer = segments - (error.needed - error.free)
        group.claims.pop((engine.name, engine.epoch, event.request_id), None)  # nobody waits for it
        if error.free < 1 or fewer < 1:
            raise
    return reserve_spans(state, engine, _open(group, event, fewer))


def _open(group: Group, event: ReserveSpans, segments: int) -> Open:
    keys = event.keys[: segments * group.key_bytes]
    tokens = segments * group.spec.page_rows
    token_ids = event.token_ids[: tokens * TOKEN_ID_BYTES]
    return Open(event.request_id, tokens, 0, keys, event.session_id, token_ids=token_ids)


def end(state: State, event: EndLease) -> None:
    """Ends a lease behind its fence. Raises UnknownLease when there is none, or it has ended."""
    engine = state.engine(event.engine, event.epoch)
    request = engine.requests.get(event.request_id)
    if request is None or request.expires_ns == 0:
        raise UnknownLease(f"engine {engine.name!r} has no lease {event.request_id}: it never began, ended or expired")
    if request.phase is Phase.CLOSING:
        return  # said before
    if request.phase is Phase.WAITING:
        _give_up(state, request, event)
        return
    check_fence(engine, event.fence)
    if event.committed or event.fence:
        check_names_all(engine, event.fence)
    tokens = event.committed_tokens or request.prompt_tokens
    if event.committed and not request.committed_tokens <= tokens <= request.prompt_tokens:
        raise InvalidArgument(
            f"lease {request.request_id}: {tokens} tokens written, outside {request.committed_tokens} (known before) "
            f".. {request.prompt_tokens} (covered)"
        )
    group = state.groups[engine.group]
    if event.committed:
        keep_sums(state, request, event.summed_pages, event.sums)
    _condemn(state, request, event.failed_pages)
    entry = FenceEntry(dict(event.fence), state.now, closes=[request.request_id])
    engine.heard_ns = state.now
    engine.fence_values.update(event.fence)
    if event.committed:
        state.counters["stored_tokens"] += tokens - request.committed_tokens
        request.committed_tokens = tokens
        if request.ranks_lost == engine.ranks_lost:
            entry.commits.append((request.request_id, tokens))
        # Else some rank left since it began and may not have written its part: nothing of it is believed.
    request.phase = Phase.CLOSING
    engine.fences.append(entry)
    resolve_fences(state, engine)
    group.unblock()


def _give_up(state: State, request: Request, event: EndLease) -> None:
    """Its engine knows of no page of it, so nothing of it can be in use; copies in flight keep theirs."""
    if event.committed:
        raise InvalidArgument(f"lease {request.request_id} waits for its pages: ask for them again, then fill them")
    drop_request(state, request)
    state.groups[request.group].unblock()


def expire(state: State) -> None:
    """Ends overdue leases of engines of which no rank ever attached: nobody can be touching their pages."""
    for engine, request in _overdue(state, state.now):
        drop_request(state, request)
        state.counters["expired_lease"] += 1
        state.groups[engine.group].unblock()


def overdue(state: State, now: int) -> bool:
    """Whether `expire` would end something at `now`."""
    return bool(_overdue(state, now))


def ends_ns(state: State) -> list[int]:
    """When the leases end that `expire` looks at; the grace comes on top."""
    return [request.expires_ns for _, request in _expiring(state)]


def _overdue(state: State, now: int) -> list[tuple[Engine, Request]]:
    grace_ns = state.limits.ticket_grace_ns
    return [each for each in _expiring(state) if now > each[1].expires_ns + grace_ns]


def _expiring(state: State) -> list[tuple[Engine, Request]]:
    return [
        (engine, request)
        for engine in state.all_engines()
        if not engine.attached
        for request in engine.requests.values()
        if request.expires_ns
    ]


def _asked(state: State, event: AcquirePrefix | ReserveSpans) -> tuple[Engine, Group]:
    """Who asks, of which group. Raises InvalidArgument for what can't be served."""
    engine = state.engine(event.engine, event.epoch)
    group = state.groups[engine.group]
    if not group.spec.cache_only:
        raise InvalidArgument(f"group {group.spec.name!r} has device memory: open requests there; caches have leases")
    segments, rest = divmod(len(event.keys), group.key_bytes)
    if rest or segments == 0:
        raise InvalidArgument(f"{len(event.keys)} key bytes; one {group.key_bytes}-byte key a segment, at least one")
    if not 1 <= event.lease_ttl_ns <= LONGEST_LEASE_NS:
        raise InvalidArgument(f"lease_ttl_ns {event.lease_ttl_ns} outside 1..{LONGEST_LEASE_NS}")
    return engine, group


def _known(engine: Engine, event: AcquirePrefix | ReserveSpans) -> Request | None:
    """The lease that a resend asks for again."""
    request = engine.requests.get(event.request_id)
    if request is None:
        return None
    open_lease = request.expires_ns and request.phase in (Phase.RUNNING, Phase.WAITING)
    if not (open_lease and event.keys.startswith(bytes(request.keys))):
        raise InvalidArgument(f"request {event.request_id} is open already; choose another id")
    return request


def _answer(request: Request, first: int) -> Opened:
    """The lease's spans from ordinal `first` on."""
    part = request.chains[0]
    if request.phase is Phase.WAITING:
        return Opened(request.request_id, "waiting")
    spans = (part.table_from(first),) if first < len(part.rows) else ()
    return Opened(request.request_id, "runnable", part.shared * _span_tokens(part), spans)


def _acquired(request: Request) -> Acquired:
    """All of the lease's spans, and what is known of their sums."""
    answer, (pages, sums) = _answer(request, 0), sums_of(request)
    return Acquired(
        answer.request_id, answer.state, answer.cached_tokens, answer.spans, summed_pages=pages, sums=sums
    )


def _span_tokens(part: RequestChain) -> int:
    return part.chain.spec.span_tokens(part.chain.spec.order)


def _condemn(state: State, request: Request, failed_pages: tuple[int, ...]) -> None:
    """Spans that could not be read are not offered again."""
    part = request.chains[0]
    for page in failed_pages:
        held = part.rows.array
        rows = held[(part.chain.table.pages[0, DEVICE, held] == page).any(axis=1)]
        if len(rows) == 0:
            raise InvalidArgument(f"lease {request.request_id} does not hold page {page}")
    for page in failed_pages:
        held = part.rows.array
        for row in held[(part.chain.table.pages[0, DEVICE, held] == page).any(axis=1)].tolist():
            state.counters["failed_load"] += 1
            condemn(state, part.chain, row, Loss.FAILED_LOAD)

