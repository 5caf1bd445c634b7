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
from kvmanager.core.state import Engine, HostRead, State, Ticket
from kvmanager.core.ticketplaces import generations, let_copies_go, lost, name_copies, readable_tokens, table_of
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

    One that expects more is given at once, on what is known to be written, and grows with the request. So, where
    `limits.export_from_host`, is one of a request that waits for its prefix: on what the host has of it.
    """
    engine = state.engine(event.engine, event.epoch)
    request = state.request(engine, event.request_id)
    _check_exportable(state, engine, request, event.expected_tokens)
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
        [HostRead() for _ in request.chains],
    )
    _extend(state, request, ticket)
    state.counters["export"] += 1
    return Exported(event.ticket_id, ticket.committed_tokens, ttl, expected)


def _check_expected(request: Request, expected: int) -> None:
    if expected > request.committed_tokens:
        if request.phase not in (Phase.RUNNING, Phase.WAITING) or expected > request.most_tokens:
            raise InvalidArgument(
                f"request {request.request_id} is {request.phase.value} with {request.committed_tokens} of at most "
                f"{request.most_tokens} tokens committed; {expected} will not come"
            )
        return
    if expected < 1:
        raise InvalidArgument(f"request {request.request_id} has committed nothing")
    if request.fenced_tokens < expected and request.phase is not Phase.WAITING:
        raise NotReady(
            f"request {request.request_id}: {request.fenced_tokens} of {request.committed_tokens} committed tokens are "
            "known to be written; ask again when the workers' timelines have passed the commit's fence"
        )


def _extend(state: State, request: Request, ticket: Ticket) -> None:
    """Takes in, up to what is expected, what is known to be written; spans that are new get a pin."""
    tokens = _readable(state, request, min(request.fenced_tokens, ticket.expected_tokens))
    if tokens < ticket.committed_tokens:
        return  # it waits still, and an onboard of what the ticket has already has failed
    for part, (_, rows), read in zip(request.chains, ticket.rows, ticket.on_host, strict=True):
        held = _covering(part, tokens)
        assert held[: len(rows)] == rows
        part.chain.table.pin(held[len(rows) :])
        name_copies(state.limits, part.chain, read, held[len(rows) :])
        rows += held[len(rows) :]
    ticket.committed_tokens = tokens


def _readable(state: State, request: Request, tokens: int) -> int:
    """As many of these as every chain has where a ticket can name them; all of them once the request runs."""
    if request.phase is not Phase.WAITING:
        return tokens
    for part in request.chains:
        tokens = min(tokens, readable_tokens(state.limits, part, tokens))
    return tokens


def request_ends(state: State, request: Request) -> None:
    """Before a request gives its pages back: tickets that still grow with it take what they can get."""
    for ticket in state.tickets.values():
        if ticket.final or ticket.cut or not _of(ticket, request):
            continue
        _extend(state, request, ticket)
        ticket.cut = not ticket.final


def _of(ticket: Ticket, request: Request) -> bool:
    return (ticket.engine, ticket.epoch, ticket.request_id) == (request.engine, request.epoch, request.request_id)


def _check_exportable(state: State, engine: Engine, request: Request, expected_tokens: int) -> None:
    spec = state.groups[engine.group].spec
    if spec.sparse is not None and not state.limits.return_path:
        raise InvalidArgument(
            f"group {spec.name} is of a decode rank: its KV goes back only where [mover] return_path = true"
        )
    check_one_part(spec)
    if request.phase is Phase.WAITING and not (
        expected_tokens and spec.sparse is None and _readable(state, request, request.fenced_tokens)
        and state.limits.export_from_host
    ):  # fmt: skip
        raise NotReady(
            f"request {request.request_id} waits for bytes; export it when it runs. Before that a ticket can be on "
            "what the host has: with [mover] export_path = \"host\", and told how many tokens to expect"
        )
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
    there = (table.copies[:, DEVICE, held] != ABSENT) | (table.copies[:, HOST, held] == READY)
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
        _extend(state, state.engine(ticket.engine, ticket.epoch).requests[ticket.request_id], ticket)
    if ticket.cut:
        raise TransferFailed(
            f"ticket {event.ticket_id}: its request ended with {ticket.committed_tokens} of {ticket.expected_tokens} "
            "tokens written; release it, and prefill again"
        )
    chains = state.groups[ticket.group].chains
    spans = tuple(
        table_of(RequestChain(chains[number], RowList(rows)), read)
        for (number, rows), read in zip(ticket.rows, ticket.on_host, strict=True)
    )
    return TicketPages(ticket.ticket_id, ticket.committed_tokens, spans, _generations(state, ticket), ticket.final)


def _generations(state: State, ticket: Ticket) -> npt.NDArray[np.uint32]:
    """Of its pages, chain by chain. Raises StalePage where a host copy that it names is gone."""
    group, found = state.groups[ticket.group], []
    for (number, rows), read in zip(ticket.rows, ticket.on_host, strict=True):
        chain = group.chains[number]
        if lost(chain, read):
            raise StalePage(f"host copies of ticket {ticket.ticket_id} were found to be wrong since it was given")
        on_host = len(read.rows) > 0
        index = np.asarray(rows, np.int64)
        found.append(generations(chain, index, read) if on_host else group.generations(chain, rows))
    return np.concatenate(found)


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
    for (number, rows), read in zip(ticket.rows, ticket.on_host, strict=True):
        let_copies_go(group.chains[number], read)
        group.chains[number].unpin(rows)
    group.unblock()
