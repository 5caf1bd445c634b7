"""The Peer service: exports for our engines, and everything a pulling daemon asks of us."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Final

import grpc

from kvmanager.core.checksums import SumArray
from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    Exported,
    ExportRequestKV,
    ReleaseTicket,
    RenewTickets,
    SpanRunTable,
    TicketPages,
)
from kvmanager.core.node import Node
from kvmanager.core.spec import ChainSpec, GroupSpec, PageClass, Placement
from kvmanager.core.tickets import tenant_of
from kvmanager.core.verification import ticket_sums
from kvmanager.daemon.attach import ClientIdentity
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.membership import Membership
from kvmanager.daemon.movers import Mover
from kvmanager.errors import NotReady, StaleBoot, StalePage, UnknownLease
from kvmanager.geometry import Int64Array
from kvmanager.killpoints import reach
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.callers import Whose, typed
from kvmanager.services.messages import span_run
from kvmanager.wire import layout_to_proto, pack_u32, pack_u64, unpack_u32

BY_CERTIFICATE: Final = -1
"""Instead of a uid: the caller is on another machine."""


class PeerService(pb_grpc.PeerServicer):
    """Tickets."""

    def __init__(
        self,
        boot_id: int,
        address: str,
        loop: OwnerLoop,
        groups: dict[str, GroupSpec],
        callers: Whose,
        membership: Membership,
        mover: Mover,
    ) -> None:
        """`address`: where other daemons find this one."""
        self._boot_id = boot_id
        self._address = address
        self._loop = loop
        self._groups = groups
        self._callers = callers
        self._membership = membership
        self._mover = mover

    def seen_by(self, callers: Whose) -> PeerService:
        """The same service where other callers come in."""
        return PeerService(
            self._boot_id, self._address, self._loop, self._groups, callers, self._membership, self._mover
        )

    @typed
    def Export(self, request: pb.ExportRequest, context: grpc.ServicerContext) -> pb.ExportReply:
        """A ticket for a request of the calling engine."""
        token = self._callers.who(context, "engine").token
        if request.boot_id != self._boot_id:
            raise StaleBoot(f"boot id {request.boot_id} is not this daemon's ({self._boot_id}); register again")
        engine = self._membership.engine_of(token, request.epoch)
        registration = self._membership.registration(engine, request.epoch)
        ticket_id = secrets.token_hex(16)
        answer: Exported = self._loop.call(
            ExportRequestKV(engine, request.epoch, request.request_id, ticket_id, request.expected_tokens)
        )
        reach("daemon.ticket.exported")
        self._mover.warm_agent()  # whoever accepts the ticket needs it
        return pb.ExportReply(
            ticket=pb.Ticket(
                ticket_id=answer.ticket_id,
                node_address=self._address,
                boot_id=self._boot_id,
                namespace=registration.namespace,
                kv_fingerprint=self._groups[registration.group].kv_format.fingerprint,
                committed_tokens=answer.committed_tokens,
                expected_tokens=answer.expected_tokens,
                final=answer.committed_tokens >= answer.expected_tokens,
                lease_ttl_ns=answer.lease_ttl_ns,
            )
        )

    @typed
    def Accept(self, request: pb.AcceptRequest, context: grpc.ServicerContext) -> pb.AcceptReply:
        """Where the ticket's pages are, and through which agent they are read."""
        holder = _holder(self._callers.who(context, "peer"))
        ticket_id = request.ticket.ticket_id
        group, pages = self._loop.inspect(lambda node: _group_of(node, ticket_id))
        answer: TicketPages = self._loop.call(AcceptTicket(ticket_id, holder, request.tenant))
        sums = self._loop.inspect(lambda node: ticket_sums(node.state, ticket_id))
        agent = self._mover.agent()
        info = self._mover.info
        if info.incarnation != agent.incarnation:
            raise NotReady("the mover is restarting; ask again")
        return pb.AcceptReply(
            agent_metadata=agent.metadata,
            agent_name=agent.name,
            mover_incarnation=agent.incarnation,
            chains=[
                _source_chain(chain, page_class, table, summed, pages[page_class.device_pool], info.addresses)
                for chain, table, summed in zip(self._groups[group].chains, answer.spans, sums, strict=True)
                for page_class in chain.classes
            ],
            generations=pack_u32(answer.generations),
            packed=self._mover.device != "cpu",
            committed_tokens=answer.committed_tokens,
            final=answer.final,
        )

    @typed
    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        """Keeps tickets alive."""
        identity = self._callers.who(context, "peer", "engine")
        named = list(request.ticket_ids)
        if identity.role == "engine":  # its own tenant's; of others it must not learn that they are there
            tenant = self._callers.tenant_of(identity.uid)
            named = self._loop.inspect(lambda node: _of_tenant(node, named, tenant))
        answer = self._loop.call(RenewTickets(tuple(named)))
        alive = {*named} - {*answer.unknown_ids}
        return pb.HeartbeatReply(unknown_ids=[each for each in request.ticket_ids if each not in alive])

    @typed
    def Check(self, request: pb.CheckRequest, context: grpc.ServicerContext) -> pb.CheckReply:
        """Whether what was read is still what was exported."""
        self._callers.who(context, "peer")
        incarnation = self._mover.info.incarnation
        if incarnation == 0:
            raise NotReady("the mover is restarting; ask again")
        if request.mover_incarnation != incarnation:
            raise StalePage(f"the mover was restarted: incarnation {request.mover_incarnation} is over")
        self._loop.call(CheckTicket(request.ticket_id, unpack_u32(request.generations, "generations")))
        return pb.CheckReply()

    @typed
    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        """The target is done with a ticket."""
        holder = _holder(self._callers.who(context, "peer"))
        self._loop.call(ReleaseTicket(request.ticket_id, holder))
        return pb.ReleaseReply()


def _holder(identity: ClientIdentity) -> str:
    """Who holds a ticket: its process, which stays the same when our daemon restarts and it attaches anew."""
    if identity.uid == BY_CERTIFICATE:
        return f"{identity.name} (by its certificate)"
    return f"{identity.name} (uid {identity.uid}, pid {identity.pid}, started {identity.started})"


def _source_chain(
    chain: ChainSpec,
    page_class: PageClass,
    table: SpanRunTable,
    summed: tuple[Int64Array, Int64Array, SumArray],
    pages: int,
    addresses: dict[int, int],
) -> pb.SourceChain:
    """One class of a chain's pages. `pages`: of a rank's device pool."""
    # Every rank of a replicated chain holds all of it: one of them is read.
    regions = page_class.device_regions if chain.placement is Placement.SHARDED else page_class.device_regions[:1]
    # Of several classes nobody knows sums: they are of host copies, and most of what is read here has none.
    on_device, on_host, sums = summed if len(chain.classes) == 1 else (part[:0] for part in summed)
    host = page_class.host_regions or (0,) * len(regions)
    shares = [addresses.get(region, 0) for region in page_class.host_regions]
    spread = chain.placement is Placement.REPLICATED
    return pb.SourceChain(
        layout=layout_to_proto(page_class.layout),
        spans=span_run(replace(table, pages={page_class.name: table.pages[page_class.name]})),
        summed_pages=pack_u32(on_device),
        summed_host_pages=pack_u32(on_host),
        host_shares=pack_u64(shares) if spread and shares else b"",
        sums=pack_u64(sums[:, : len(regions)].reshape(-1)),
        ranks=[
            pb.SourceRank(
                rank=rank,
                base_address=addresses[region],
                size_bytes=pages * page_class.layout.page_bytes,
                host_base_address=addresses.get(share, 0),
            )
            for rank, (region, share) in enumerate(zip(regions, host, strict=False))
        ],
    )


def _of_tenant(node: Node, ticket_ids: list[str], tenant: str) -> list[str]:
    """Those that are a tenant's."""
    tickets = node.state.tickets
    return [each for each in ticket_ids if each in tickets and tenant_of(node.state, tickets[each]) == tenant]


def _group_of(node: Node, ticket_id: str) -> tuple[str, dict[str, int]]:
    """(group, pages a rank of its pools) of a ticket. Raises UnknownLease."""
    ticket = node.state.tickets.get(ticket_id)
    if ticket is None:
        raise UnknownLease(f"no ticket {ticket_id!r}: never given, released or expired; prefill again for a new one")
    group = node.state.groups[ticket.group]
    return ticket.group, {name: pool.slabs for name, pool in group.pools.items()}
