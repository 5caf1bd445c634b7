"""One numbered message of an engine: progress, closes, opens, in this order, with one stored reply."""

from __future__ import annotations

from kvmanager.core.admission import update_promise
from kvmanager.core.events import (
    CancelPlan,
    Close,
    Closing,
    Grown,
    HotGrant,
    Open,
    Opened,
    Progress,
    RequestFailed,
    ResidencyRows,
    Step,
    StepDone,
)
from kvmanager.core.fences import check_fence, check_names_all, resolve_fences
from kvmanager.core.group import Group
from kvmanager.core.growth import lacks_pages, resize
from kvmanager.core.lifecycle import drop_request
from kvmanager.core.opening import open_request
from kvmanager.core.request import Phase, Request
from kvmanager.core.residency import release_under_pressure, residency_rows
from kvmanager.core.retract import resume, retract
from kvmanager.core.sessions import end_turn
from kvmanager.core.state import Engine, FenceEntry, PullJob, State
from kvmanager.core.tenants import NOBODY
from kvmanager.errors import InvalidArgument, KVError, LimitExceeded


def step(state: State, event: Step) -> StepDone:
    """Applies a message once; a resend of a number still stored gets the same reply."""
    engine = state.engine(event.engine, event.epoch)
    if event.number <= engine.last_number:
        return _stored(engine, event.number)
    if event.number != engine.last_number + 1:
        raise InvalidArgument(f"step {event.number} after {engine.last_number}: numbers rise by one")
    named = max(len(event.progress), len(event.opens), len(event.closes))
    if named > state.limits.requests_per_step:
        raise LimitExceeded(f"{named} requests in a step; the limit is {state.limits.requests_per_step}")
    _check_fence(engine, event)
    while engine.notices and engine.notices[0].sequence <= event.notices_seen:
        engine.notices.popleft()
    engine.heard_ns = state.now
    group = state.groups[engine.group]
    group.asker = state.tenants.of_namespace[engine.namespace]
    reply = _apply(state, engine, event)
    group.asker = NOBODY
    engine.last_number = event.number
    engine.replies[event.number] = reply
    while len(engine.replies) > state.limits.stored_replies:
        engine.replies.popitem(last=False)
    state.counters["step"] += 1
    return reply


def _stored(engine: Engine, number: int) -> StepDone:
    reply = engine.replies.get(number)
    if reply is None:
        raise InvalidArgument(f"the reply to step {number} is no longer stored; the newest is {engine.last_number}")
    return reply


def _check_fence(engine: Engine, event: Step) -> None:
    check_fence(engine, event.fence)
    if event.progress or event.closes or not engine.covered.empty:
        check_names_all(engine, event.fence)
    if event.opens and len(engine.attaches) != engine.ranks:
        raise InvalidArgument(f"{len(engine.attaches)} of {engine.ranks} ranks are attached; attach all before opening")


def _apply(state: State, engine: Engine, event: Step) -> StepDone:
    group = state.groups[engine.group]
    group.unblock()
    entry, engine.covered = engine.covered, FenceEntry({})
    entry.fence, entry.since = dict(event.fence), state.now
    engine.fence_values.update(event.fence)
    opened: list[Opened] = []
    errors: list[RequestFailed] = []
    grown = _progress_and_close(state, engine, entry, event, errors)
    for turn in event.turn_ends:
        end_turn(state, group, engine.namespace, turn)
    if not entry.empty:
        engine.fences.append(entry)
    if engine.fences or engine.ended:
        resolve_fences(state, engine)
    for open_event in event.opens:
        opened.append(_open(state, engine, open_event))
    residency: list[ResidencyRows] = []
    hot: list[HotGrant] = []
    if group.spec.swaps:
        hot = release_under_pressure(state, engine, group)
        residency = residency_rows(engine, group)
    return StepDone(event.number, tuple(opened), tuple(grown), tuple(residency), tuple(hot), tuple(errors))


def _progress_and_close(
    state: State, engine: Engine, entry: FenceEntry, event: Step, errors: list[RequestFailed]
) -> list[Grown]:
    """What requests gained or gave up; appends to `errors`.

    One that is to be closed gains nothing: its pages may go with this message's fence, which doesn't cover what the
    worker does to pages of the reply.
    """
    grown: list[Grown] = []
    closes = {close.request_id for close in event.closes}
    postponed: list[tuple[Request, int]] = []
    for progress in event.progress:
        try:
            request, capacity = _progress(state, engine, entry, progress)
            if request.request_id in closes and lacks_pages(request, capacity):
                postponed.append((request, capacity))
            else:
                grown += _resize(state, engine, entry, request, capacity)
        except KVError as error:
            errors.append(RequestFailed(progress.request_id, error))
    for close in event.closes:
        try:
            _close(state, engine, entry, close)
        except KVError as error:
            errors.append(RequestFailed(close.request_id, error))
    for request, capacity in postponed:
        if request.phase is Phase.RUNNING:  # it could not be retracted
            grown += _resize(state, engine, entry, request, capacity)
    return grown


def _open(state: State, engine: Engine, event: Open) -> Opened:
    retracted = event.request_id in engine.requests and engine.requests[event.request_id].retracted
    try:
        return resume(state, engine, event) if retracted else open_request(state, engine, event)
    except KVError as error:
        return Opened(event.request_id, "refused", error=error)


def _progress(state: State, engine: Engine, entry: FenceEntry, progress: Progress) -> tuple[Request, int]:
    """Notes a row's commits; the request, and how many tokens it is to have pages for."""
    request = state.request(engine, progress.request_id)
    if request.phase is not Phase.RUNNING:
        raise InvalidArgument(f"request {progress.request_id} is {request.phase.value}; only a running one progresses")
    _commit(engine, state.groups[engine.group], entry, request, progress)
    if progress.rejected_tokens:
        state.counters["draft_truncation"] += 1
    return request, max(progress.capacity_tokens, request.committed_tokens)


def _resize(state: State, engine: Engine, entry: FenceEntry, request: Request, capacity: int) -> list[Grown]:
    kept, first_new, error, plans = resize(state, engine, entry, request, capacity)
    if first_new is None and kept is None:
        if state.groups[request.group].spec.sparse is not None:
            update_promise(state, request)
        return []
    update_promise(state, request)
    starts = first_new if first_new is not None else [len(part.rows) for part in request.chains]
    runs = tuple(
        part.table_from(first) for part, first in zip(request.chains, starts, strict=True) if first < len(part.rows)
    )
    spans_kept = kept if kept is not None else len(request.chains[0].rows)
    return [Grown(request.request_id, runs, spans_kept, error, tuple(plans))]


def _commit(engine: Engine, group: Group, entry: FenceEntry, request: Request, progress: Progress) -> None:
    """Notes what the engine says is final; it is believed once the message's fence has passed."""
    tokens, before, end = progress.committed_tokens, request.committed_tokens, request.end_token
    if not before <= tokens <= end:
        raise InvalidArgument(
            f"request {request.request_id}: committed_tokens {tokens} outside {before} (committed before) .. {end} "
            "(pages held)"
        )
    if progress.new_keys or progress.token_ids:
        _take_keys(group, request, progress)
    if tokens > before:
        request.committed_tokens = tokens
        if request.ranks_lost == engine.ranks_lost:
            entry.commits.append((request.request_id, tokens))
        # Else some rank left since it was opened and may not have written its rows: nothing more is believed.
        if request.donors:
            _let_donors_go(entry, request)


def _take_keys(group: Group, request: Request, progress: Progress) -> None:
    """Notes the keys of further segments, and their token ids. Raises InvalidArgument, and notes none."""
    width, more, ids = group.key_bytes, progress.new_keys, progress.token_ids
    if len(more) % width:
        raise InvalidArgument(f"request {request.request_id}: {len(more)} key bytes, keys are {width} bytes each")
    if ids or request.token_ids:
        group.check_token_ids(len(request.keys) + len(more), len(request.token_ids) + len(ids))
    segments = (len(request.keys) + len(more)) // width
    if more and segments * group.spec.page_rows > progress.committed_tokens:
        raise InvalidArgument(
            f"request {request.request_id}: {segments} keys cover more than the {progress.committed_tokens} "
            "committed tokens"
        )
    request.keys += more
    request.token_ids += ids


def _let_donors_go(entry: FenceEntry, request: Request) -> None:
    """The worker's copies ran before its first write, so the fence of the first commit covers them."""
    for number, row in request.donors:
        entry.unpins.append((number, [row]))
    request.donors = []


def _close(state: State, engine: Engine, entry: FenceEntry, close: Close) -> None:
    request = state.request(engine, close.request_id)
    if request.phase is Phase.CLOSING:
        raise InvalidArgument(f"request {close.request_id} is closing already")
    assert isinstance(close.closing, Closing)
    if close.closing is Closing.RETRACTED:
        retract(state, entry, request)
        return
    request.stop_reason, request.session_ends = close.stop_reason, close.session_ends
    if request.phase in (Phase.WAITING, Phase.RETRACTED):
        # Its engine knows of no page of it, so nothing of it can be in use; copies in flight keep theirs.
        pulls = [plan_id for plan_id in sorted(request.waiting_on) if isinstance(state.jobs[plan_id], PullJob)]
        state.effects += [CancelPlan(plan_id) for plan_id in pulls]
        drop_request(state, request)
        return
    request.phase = Phase.CLOSING
    entry.closes.append(close.request_id)
