"""Hand-offs into the spans of a request: what is asked for, and where it goes."""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import AbandonTicket, Open, PullTarget, StartPull
from kvmanager.core.movement import span_rows
from kvmanager.core.plans import Rows
from kvmanager.core.request import RequestChain
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.state import Engine, PullJob, State, concat


def start_pull(state: State, engine: Engine, event: Open) -> None:
    """Fetches what a ticket covers and is not here already, skipped by position."""
    assert event.ticket is not None
    group = state.groups[engine.group]
    request = engine.requests[event.request_id]
    request.cached_tokens = max(request.cached_tokens, event.ticket.committed_tokens)
    part = request.chains[0]
    rows = part.rows[part.shared :].tolist()
    start = int(part.chain.table.first_token[rows[0]]) if rows else event.prompt_tokens
    if start >= event.ticket.committed_tokens:
        state.effects.append(AbandonTicket(event.ticket))
        return
    targets = _pull_targets(part, rows, event.ticket.committed_tokens)
    plan_id = state.new_plan_id()
    part.chain.table.busy[np.asarray(rows, np.int64)] += 1
    who = (engine.name, engine.epoch, request.request_id)
    state.jobs[plan_id] = PullJob(group.spec.name, 0, rows, who, event.ticket)
    request.waiting_on.add(plan_id)
    state.effects.append(
        StartPull(
            plan_id,
            group.spec.name,
            part.chain.spec.name,
            event.ticket,
            start,
            targets,
            state.limits.pull_deadline_ns,
        )
    )


def _pull_targets(part: RequestChain, rows: list[int], end: int) -> tuple[PullTarget, ...]:
    chain, table = part.chain, part.chain.table
    targets = []
    for c, page_class in enumerate(chain.spec.classes):
        for tier in (DEVICE, HOST):
            there = [row for row in rows if table.copies[c, tier, row] == CopyState.FILLING]
            if not there:
                continue
            counts = [min(chain.spec.span_tokens(table.order(row)), end - int(table.first_token[row])) for row in there]
            pieces = [(row, count) for row, count in zip(there, counts, strict=True) if count > 0]
            places = [span_rows(chain, c, tier, row, count) for row, count in pieces]
            positions = [np.arange(count, dtype=np.int64) + table.first_token[row] for row, count in pieces]
            if places:
                merged = Rows(
                    np.concatenate([p.region for p in places]),
                    np.concatenate([p.page for p in places]),
                    np.concatenate([p.slot for p in places]),
                )
                targets.append(PullTarget(page_class.name, concat(positions), merged))
    return tuple(targets)
