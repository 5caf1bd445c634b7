"""Timelines and fences: what an engine said is believed, and what it gave up is reused, only when its work is done."""

from __future__ import annotations

from kvmanager.core.admission import update_promise, update_promises
from kvmanager.core.group import Group
from kvmanager.core.lifecycle import drop_request
from kvmanager.core.request import Phase
from kvmanager.core.retract import take_off
from kvmanager.core.settle import publish, settle_tail
from kvmanager.core.state import Engine, FenceEntry, State
from kvmanager.errors import InvalidArgument


def resolve_fences(state: State, engine: Engine) -> None:
    """Applies every leading entry whose fence has passed. Values rise, so the head decides."""
    while engine.fences and state.fence_passed(engine.fences[0].fence):
        entry = engine.fences.popleft()
        moved(state, engine)
        apply_entry(state, engine, entry, keep_commits=reached(state, entry))
    if engine.ended:
        state.forget_attaches(engine)


def moved(state: State, engine: Engine) -> None:
    """A rank that was waited for goes on, or none is waited for any more."""
    engine.moved_ns = state.now
    if engine.stalled:  # where its stream broke as well, the time for that begins now
        engine.stalled, engine.suspect_ns, engine.fenced = False, state.now, False


def check_fence(engine: Engine, fence: dict[int, int]) -> None:
    """Raises InvalidArgument for a fence that names strangers, or goes back."""
    if not fence.keys() <= engine.attaches.keys():
        strange = sorted(set(fence) - set(engine.attaches))
        raise InvalidArgument(f"the fence names attach ids {strange} that are not of engine {engine.name!r}")
    for attach_id, value in fence.items():
        before = engine.fence_values.get(attach_id, 0)
        if value < before:
            raise InvalidArgument(
                f"the fence of attach {attach_id} goes back from {before} to {value}: values of a timeline only rise"
            )


def check_names_all(engine: Engine, fence: dict[int, int]) -> None:
    """Raises InvalidArgument unless the fence names every attached rank."""
    if fence.keys() != engine.attaches.keys():
        raise InvalidArgument(
            f"the fence names {len(fence)} of {len(engine.attaches)} attached ranks; progress needs all of them"
        )


def reached(state: State, entry: FenceEntry) -> bool:
    """Every word reached its value; a dead rank's entry may pass without that."""
    return all(state.timelines.get(attach, 0) >= value for attach, value in entry.fence.items())


def _free_truncated(group: Group, engine: Engine, entry: FenceEntry) -> None:
    """Spans that were given up and not taken back."""
    for request_id, chain_number, row in entry.truncated:
        request = engine.requests.get(request_id)
        if request is not None and (chain_number, row) in request.truncated:
            request.truncated.remove((chain_number, row))
        group.chains[chain_number].unpin([row])


def _end_requests(state: State, engine: Engine, entry: FenceEntry) -> None:
    """Those that were retracted or closed by the message."""
    for request_id in entry.retracts:
        request = engine.requests.get(request_id)
        if request is not None and request.phase is Phase.RETRACTING:
            take_off(state, request)
    for request_id in entry.closes:
        request = engine.requests.get(request_id)
        if request is not None:
            settle_tail(state, request)
            drop_request(state, request)


def apply_entry(state: State, engine: Engine, entry: FenceEntry, *, keep_commits: bool) -> None:
    """Publishes commits (if they are known to be written), then closes, unpins and frees."""
    group = state.groups[engine.group]
    for request_id, tokens in entry.commits:
        request = engine.requests.get(request_id)
        if request is not None and keep_commits:
            request.fenced_tokens = max(request.fenced_tokens, tokens)
            publish(state, request)
            if group.spec.sparse is not None:  # else what is promised depends on pages alone
                update_promise(state, request)
    _end_requests(state, engine, entry)
    _free_truncated(group, engine, entry)
    for chain_number, rows in entry.unpins:
        group.chains[chain_number].unpin(rows)
    for pool, page_class, pages in entry.frees:
        group.pools[pool].give(page_class, pages)
    if entry.frees:
        update_promises(state, group)  # what was released backs the windows of those who release
    if keep_commits:
        state.pace.note("fence_ns", state.now - entry.since)
    group.unblock()
