"""Hand-offs into the spans of a request: what is asked for, and where it goes."""

from __future__ import annotations

from kvmanager.core.events import AbandonTicket, ChainPull, PullTarget, StartPull, TicketInfo
from kvmanager.core.movement import span_runs
from kvmanager.core.request import Request, RequestChain
from kvmanager.core.rows import RowArray
from kvmanager.core.spans import DEVICE, FILLING, HOST
from kvmanager.core.spec import Placement
from kvmanager.core.state import PullJob, State


def start_pull(state: State, request: Request, ticket: TicketInfo) -> None:
    """Fetches what a ticket covers and is not here already, skipped by position, in every chain."""
    group = state.groups[request.group]
    end = ticket.committed_tokens
    request.cached_tokens = max(request.cached_tokens, end)
    chains, held = [], []
    for number, part in enumerate(request.chains):
        rows = part.rows[part.shared :]
        if len(rows) == 0 or int(part.chain.table.first_token[rows[0]]) >= end:
            continue
        first = int(part.chain.table.first_token[rows[0]])
        chains.append(ChainPull(part.chain.spec.name, first, _pull_targets(part, rows, end)))
        part.chain.table.busy[rows] += 1
        held.append((number, rows.tolist()))
    if not chains:
        state.effects.append(AbandonTicket(ticket))
        return
    plan_id = state.new_pull_id()
    who = (request.engine, request.epoch, request.request_id)
    state.jobs[plan_id] = PullJob(group.spec.name, held, who, ticket, since=state.now)
    request.waiting_on.add(plan_id)
    tenant = state.tenants.name_of(request.namespace)
    state.effects.append(
        StartPull(plan_id, group.spec.name, ticket, tuple(chains), state.limits.pull_deadline_ns, tenant)
    )


def _pull_targets(part: RequestChain, rows: RowArray, end: int) -> tuple[PullTarget, ...]:
    """Where positions below `end` go, by class and tier. `rows`: spans in token order."""
    chain, table, spec = part.chain, part.chain.table, part.chain.spec
    reached = rows[table.first_token[rows] < end]
    targets = []
    for c, page_class in enumerate(chain.spec.classes):
        for tier in (DEVICE, HOST):
            there = reached[table.copies[c, tier, reached] == FILLING]
            regions = page_class.device_regions if tier == DEVICE else page_class.host_regions
            # Every rank of a replicated group gets all of it.
            copies = [regions] if spec.placement is Placement.SHARDED else [(region,) for region in regions]
            for some in copies if len(there) else ():
                targets.append(PullTarget(page_class.name, span_runs(chain, c, tier, there, some), end))
    return tuple(targets)
