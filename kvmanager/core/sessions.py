"""Sessions in the core: who owns which span, which branches are dead, and when a turn ends."""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import TurnEnded
from kvmanager.core.eviction import joint_owner
from kvmanager.core.group import Group
from kvmanager.core.request import Phase, Request
from kvmanager.core.return_rate import SessionRecord
from kvmanager.core.rows import as_range
from kvmanager.core.spans import NO_OWNER
from kvmanager.core.state import State
from kvmanager.geometry import Int64Array


def session_key(namespace: int, session_id: str) -> str:
    """Sessions of two namespaces (tenants among them) are never the same."""
    return f"{namespace}/{session_id}"


def begin_turn(state: State, group: Group, request: Request) -> None:
    """A request of a session was admitted: what it found is its session's, what the session left behind is dead."""
    if not request.session_id:
        return
    key = session_key(request.namespace, request.session_id)
    record = group.sessions.opened(key, request.prompt_tokens, state.now)
    request.owner = record.number
    for number, part in enumerate(request.chains):
        table = part.chain.table
        found = part.rows.array[: part.shared]
        _abandon(group, record, number, found)
        at = as_range(found)
        table.owner[at] = joint_owner(table.owner[at], record.number)
        table.dead[at] = False
        table.owner[as_range(part.rows.array[part.shared :])] = record.number


def _abandon(group: Group, record: SessionRecord, number: int, found: Int64Array) -> None:
    """The session's newest path that the new prompt does not go along: hardly ever asked for again."""
    rows, uids = record.paths.get(number, (found[:0], np.empty(0, np.uint64)))
    table = group.chains[number].table
    still = table.live[rows] & (table.uids[rows, 0] == uids) & (table.owner[rows] == record.number)
    left = rows[still & ~np.isin(rows, found)]
    table.dead[left] = True


def leave_session(state: State, request: Request) -> None:
    """A request of a session gives its spans back: they are the session's newest path.

    Its turn ends with it when its close said why it stopped, or when it was never closed; else the turn goes on
    (a prefill node's part of it is over) until TurnEnded.
    """
    if request.owner == NO_OWNER:
        return
    group = state.groups[request.group]
    record = group.sessions.record(session_key(request.namespace, request.session_id))
    assert record is not None, "a session with an open request is not forgotten"
    for number, part in enumerate(request.chains):
        rows = part.rows[:]
        record.paths[number] = (rows, part.chain.table.uids[as_range(rows), 0].copy())
    group.sessions.left(record, state.now)
    if request.stop_reason or request.phase is not Phase.CLOSING:
        group.sessions.turn_ended(record, request.stop_reason, state.now)
    if request.session_ends:
        _end_session(group, record)


def end_turn(state: State, group: Group, namespace: int, event: TurnEnded) -> None:
    """The session's turn is over: it is idle from now on. A session that is not known is no error: it is a hint."""
    record = group.sessions.record(session_key(namespace, event.session_id))
    if record is None:
        return
    group.sessions.turn_ended(record, event.stop_reason, state.now)
    if event.session_ends:
        _end_session(group, record)


def _end_session(group: Group, record: SessionRecord) -> None:
    """Nothing of the session will be asked for again."""
    record.ended = True
    for chain in group.chains:
        chain.table.dead |= chain.table.live & (chain.table.owner == record.number)


def sweep(state: State) -> None:
    """Forgets sessions that hold nothing and stayed away; bounded work, on every tick."""
    for group in state.groups.values():
        if len(group.sessions) == 0:
            continue
        holding: set[int] = set()
        for chain in group.chains:
            holding.update(np.unique(chain.table.owner[chain.table.live]).tolist())
        group.sessions.forget_idle(holding, state.now)


def overdue(state: State, now: int) -> bool:
    """Whether `sweep` might forget a session at `now`."""
    return any(group.sessions.overdue(now) for group in state.groups.values())
