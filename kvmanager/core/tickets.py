"""Tickets: the right to read one request's KV, pinned until released or expired."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
from kvmanager.core.spans import ABSENT, DEVICE, HOST, READY
from kvmanager.core.spec import GroupSpec
from kvmanager.core.state import Engine, State, Ticket
from kvmanager.errors import (
    InvalidArgument,
    LeaseExpired,
    NotReady,
    StalePage,
    TransferFailed,
    Unauthorized,
    UnknownLease,
)


def export(state: State, event: ExportRequestKV) -> Exported:
    """A ticket on everything a request has committed; refused until the commit's fence has passed.

    One that expects more is given at once, on what is known to be written, and grows with the request.
    """
    engine = state.engine(event.engine, event.epoch)
    request = state.request(engine, event.request_id)
    _check_exportable(state, engine, request)
    if event.ticket_id in state.tickets:
        raise InvalidArgument(f"ticket {event.ticket_id} was given already")
    expected = max(event.expected_tokens, request.committed_tokens)
    _check_expected(request, expected)
    if state.groups[engine.group].spec.sparse is not None and expected > request.committed_tokens:
        raise InvalidArgument(f"request {event.request_id} is of a decode rank: tickets of those do not grow")
    ttl = state.limits.ticket_ttl_ns
    ticket = state.tickets[event.ticket_id] = Ticket(
        event.ticket_id,
        engine.name,
        engine.epoch,
        engine.group,
        event.request_id,
        0,
        [(number, []) for number in range(len(request.chains))],
        state.now + ttl,
        expected,
    )
    _extend(request, ticket)
    state.counters["export"] += 1
    return Exported(event.ticket_id, ticket.committed_tokens, ttl, expected)


def _check_expected(request: Request, expected: int) -> None:
    if expected > request.committed_tokens:
        if request.phase is not Phase.RUNNING or expected > request.most_tokens:
            raise InvalidArgument(
                f"request {request.request_id} is {request.phase.value} with {request.committed_tokens} of at most "
                f"{request.most_tokens} tokens committed; {expected} will not come"
            )
        return
    if expected < 1:
        raise InvalidArgument(f"request {request.request_id} has committed nothing")
    if request.fenced_tokens < expected:
        raise NotReady(
            f"request {request.request_id}: {request.fenced_tokens} of {request.committed_tokens} committed tokens are "
            "known to be written; ask again when the workers' timelines have passed the commit's fence"
        )


def _extend(request: Request, ticket: Ticket) -> None:
    """Takes in, up to what is expected, what is known to be written; spans that are new get a pin."""
    tokens = min(request.fenced_tokens, ticket.expected_tokens)
    for part, (_, rows) in zip(request.chains, ticket.rows, strict=True):
        held = _covering(part, tokens)
        assert held[: len(rows)] == rows
        part.chain.table.pin(held[len(rows) :])
        rows += held[len(rows) :]
    ticket.committed_tokens = tokens


def request_ends(state: State, request: Request) -> None:
    """Before a request gives its pages back: tickets that still grow with it take what they can get."""
    for ticket in state.tickets.values():
        if ticket.final or ticket.cut or not _of(ticket, request):
            continue
        _extend(request, ticket)
        ticket.cut = not ticket.final


def _of(ticket: Ticket, request: Request) -> bool:
    return (ticket.engine, ticket.epoch, ticket.request_id) == (request.engine, request.epoch, request.request_id)


def _check_exportable(state: State, engine: Engine, request: Request) -> None:
    spec = state.groups[engine.group].spec
    if spec.sparse is not None and not state.limits.return_path:
        raise InvalidArgument(
            f"group {spec.name} is of a decode rank: its KV goes back only where [mover] return_path = true"
        )
    check_one_part(spec)
    if request.phase is Phase.WAITING:
        raise NotReady(f"request {request.request_id} waits for bytes; export it when it runs")
    if request.ranks_lost != engine.ranks_lost:
        raise InvalidArgument(
            f"a rank of engine {engine.name!r} left while request {request.request_id} was open; compute it again"
        )


def check_one_part(spec: GroupSpec) -> None:
    """Raises InvalidArgument for a cache group of several ranks: each holds a part of every page."""
    if spec.cache_only and spec.ranks > 1:
        raise InvalidArgument(
            f"group {spec.name} is a cache of {spec.ranks} ranks, each with a part of every page; a hand-off reads one"
        )


def _covering(part: RequestChain, tokens: int) -> list[int]:
    table, rows = part.chain.table, part.rows.array
    held = rows[table.first_token[rows] < tokens]
    # An exporting request holds pins on its spans, so their device pages can't have left, except to the host.
    there = table.copies[:, DEVICE, held] != ABSENT
    if part.chain.swaps:
        there |= table.copies[:, HOST, held] == READY
    assert there.all()
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


def tenant_of(state: State, ticket: Ticket) -> str | None:
    """Whose KV it is; None where nothing of that is left."""
    engine = state.any_engine(ticket.engine, ticket.epoch)
    if engine is not None:
        return state.tenants.name_of(engine.namespace)
    for number, rows in ticket.rows:
        if rows:
            return state.tenants.name_of(int(state.groups[ticket.group].chains[number].table.namespace[rows[0]]))
    return None


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
    """Where the pages are, so far. The first to accept becomes the holder; nobody else can use the ticket.

    The holder asks again until the answer is final. Raises TransferFailed when it never will be.
    """
    ticket = live_ticket(state, event.ticket_id)
    if event.tenant is not None and tenant_of(state, ticket) != event.tenant:
        raise Unauthorized(
            f"ticket {event.ticket_id} is not of tenant {event.tenant!r}; tenants have the same names in [[tenant]] of "
            "both nodes"
        )
    if ticket.holder not in ("", event.holder):
        raise InvalidArgument(f"ticket {event.ticket_id} was accepted by {ticket.holder!r}")
    ticket.holder = event.holder
    ticket.expires_ns = state.now + state.limits.ticket_ttl_ns
    if not (ticket.final or ticket.cut):
        _extend(state.engine(ticket.engine, ticket.epoch).requests[ticket.request_id], ticket)
    if ticket.cut:
        raise TransferFailed(
            f"ticket {event.ticket_id}: its request ended with {ticket.committed_tokens} of {ticket.expected_tokens} "
            "tokens written; release it, and prefill again"
        )
    chains = state.groups[ticket.group].chains
    spans = tuple(RequestChain(chains[number], RowList(rows)).table_from(0) for number, rows in ticket.rows)
    return TicketPages(ticket.ticket_id, ticket.committed_tokens, spans, _generations(state, ticket), ticket.final)


def _generations(state: State, ticket: Ticket) -> npt.NDArray[np.uint32]:
    group = state.groups[ticket.group]
    return np.concatenate([group.generations(group.chains[number], rows) for number, rows in ticket.rows])


def check(state: State, event: CheckTicket) -> None:
    """Raises unless the pages are still those that were accepted."""
    ticket = live_ticket(state, event.ticket_id)
    now = _generations(state, ticket)
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
