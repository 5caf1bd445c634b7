"""Tickets: the right to read one request's KV, pinned until released or expired."""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    Exported,
    ExportRequestKV,
    ReleaseTicket,
    RenewTickets,
    TicketPages,
    TicketsRenewed,
)
from kvmanager.core.request import Phase, Request, RequestChain
from kvmanager.core.rows import RowList
from kvmanager.core.spans import ABSENT, DEVICE
from kvmanager.core.spec import Placement
from kvmanager.core.state import Engine, State, Ticket
from kvmanager.errors import InvalidArgument, LeaseExpired, NotReady, StalePage, UnknownLease


def export(state: State, event: ExportRequestKV) -> Exported:
    """A ticket on everything a request has committed; refused until the commit's fence has passed."""
    engine = state.engine(event.engine, event.epoch)
    request = state.request(engine, event.request_id)
    _check_exportable(state, engine, request)
    if event.ticket_id in state.tickets:
        raise InvalidArgument(f"ticket {event.ticket_id} was given already")
    if request.committed_tokens < 1:
        raise InvalidArgument(f"request {event.request_id} has committed nothing")
    if request.fenced_tokens < request.committed_tokens:
        raise NotReady(
            f"request {event.request_id}: {request.fenced_tokens} of {request.committed_tokens} committed tokens are "
            "known to be written; ask again when the workers' timelines have passed the commit's fence"
        )
    rows = []
    for number, part in enumerate(request.chains):
        held = _covering(part, request.fenced_tokens)
        part.chain.table.pin(held)
        rows.append((number, held))
    ttl = state.limits.ticket_ttl_ns
    state.tickets[event.ticket_id] = Ticket(
        event.ticket_id,
        engine.name,
        engine.epoch,
        engine.group,
        event.request_id,
        request.fenced_tokens,
        rows,
        state.now + ttl,
    )
    state.counters["export"] += 1
    return Exported(event.ticket_id, request.fenced_tokens, ttl)


def _check_exportable(state: State, engine: Engine, request: Request) -> None:
    spec = state.groups[engine.group].spec
    if len(spec.chains) > 1:
        raise InvalidArgument(f"group {spec.name} has {len(spec.chains)} chains; a hand-off serves groups of one")
    if spec.ranks > 1 and spec.chains[0].placement is Placement.REPLICATED:
        raise InvalidArgument(f"group {spec.name} holds its KV once a rank; a hand-off serves sharded groups")
    if spec.sparse is not None:
        raise InvalidArgument(f"group {spec.name} keeps pages on the host alone; only whole pages in HBM are exported")
    if request.phase is Phase.WAITING:
        raise NotReady(f"request {request.request_id} waits for bytes; export it when it runs")
    if request.ranks_lost != engine.ranks_lost:
        raise InvalidArgument(
            f"a rank of engine {engine.name!r} left while request {request.request_id} was open; compute it again"
        )


def _covering(part: RequestChain, tokens: int) -> list[int]:
    table, rows = part.chain.table, part.rows.array
    held = rows[table.first_token[rows] < tokens]
    # An exporting request holds pins on its spans, so their device pages can't have left.
    assert (table.copies[:, DEVICE, held] != ABSENT).all()
    rows_held: list[int] = held.tolist()
    return rows_held


def live_ticket(state: State, ticket_id: str) -> Ticket:
    """The ticket, or UnknownLease, or LeaseExpired."""
    ticket = state.tickets.get(ticket_id)
    if ticket is None:
        raise UnknownLease(f"no ticket {ticket_id}: never given, released or expired; prefill again for a new one")
    if state.now > ticket.expires_ns:
        raise LeaseExpired(f"ticket {ticket_id} expired {(state.now - ticket.expires_ns) // 1_000_000} ms ago")
    return ticket


def renew(state: State, event: RenewTickets) -> TicketsRenewed:
    """Extends the leases of tickets still alive."""
    unknown = []
    for ticket_id in event.ticket_ids:
        ticket = state.tickets.get(ticket_id)
        if ticket is None or state.now > ticket.expires_ns:
            unknown.append(ticket_id)
        else:
            ticket.expires_ns = state.now + state.limits.ticket_ttl_ns
    return TicketsRenewed(tuple(unknown))


def accept(state: State, event: AcceptTicket) -> TicketPages:
    """Where the pages are. The first to accept becomes the holder; nobody else can use the ticket."""
    ticket = live_ticket(state, event.ticket_id)
    if ticket.holder not in ("", event.holder):
        raise InvalidArgument(f"ticket {event.ticket_id} was accepted by {ticket.holder!r}")
    ticket.holder = event.holder
    ticket.expires_ns = state.now + state.limits.ticket_ttl_ns
    group = state.groups[ticket.group]
    number, rows = ticket.rows[0]
    part = RequestChain(group.chains[number], RowList(rows))
    return TicketPages(
        ticket.ticket_id, ticket.committed_tokens, (part.table_from(0),), group.generations(group.chains[number], rows)
    )


def check(state: State, event: CheckTicket) -> None:
    """Raises unless the pages are still those that were accepted."""
    ticket = live_ticket(state, event.ticket_id)
    group = state.groups[ticket.group]
    number, rows = ticket.rows[0]
    now = group.generations(group.chains[number], rows)
    if len(now) != len(event.generations) or not np.array_equal(now, event.generations):
        raise StalePage(f"pages of ticket {event.ticket_id} were reused since it was accepted")


def release(state: State, event: ReleaseTicket) -> None:
    """Gives the pins back, once, by the one it was given to."""
    ticket = state.tickets.get(event.ticket_id)
    if ticket is None:
        raise UnknownLease(f"no ticket {event.ticket_id}: never given, released or expired")
    if ticket.holder not in ("", event.holder):
        raise InvalidArgument(f"ticket {event.ticket_id} belongs to {ticket.holder!r}")
    _drop(state, ticket)


def overdue(state: State, now: int) -> bool:
    """Whether `expire` would drop a ticket at `now`."""
    return any(now > ticket.expires_ns + state.limits.ticket_grace_ns for ticket in state.tickets.values())


def expire(state: State) -> None:
    """Drops tickets whose lease and grace are over; needs no new work to happen."""
    for ticket in list(state.tickets.values()):
        if state.now > ticket.expires_ns + state.limits.ticket_grace_ns:
            state.counters["expired_ticket"] += 1
            _drop(state, ticket)


def _drop(state: State, ticket: Ticket) -> None:
    del state.tickets[ticket.ticket_id]
    group = state.groups[ticket.group]
    for number, rows in ticket.rows:
        group.chains[number].unpin(rows)
    group.unblock()
