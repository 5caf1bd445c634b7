"""The Peer service: exports for our engines, and everything a pulling daemon asks of us."""

from __future__ import annotations

import secrets

import grpc

from kvmanager.callers import Callers, typed
from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    Exported,
    ExportRequestKV,
    ReleaseTicket,
    RenewTickets,
    TicketPages,
)
from kvmanager.core.node import Node
from kvmanager.errors import LayoutMismatch, StaleBoot, StalePage
from kvmanager.groups import STAGING_REGION
from kvmanager.loop import OwnerLoop
from kvmanager.membership import Membership
from kvmanager.messages import span_run
from kvmanager.movers import Mover
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import layout_to_proto, pack_u32, unpack_u32


class PeerService(pb_grpc.PeerServicer):
    """Tickets."""

    def __init__(
        self,
        boot_id: int,
        address: str,
        loop: OwnerLoop,
        node: Node,
        callers: Callers,
        membership: Membership,
        mover: Mover,
    ) -> None:
        self._boot_id = boot_id
        self._address = address
        self._loop = loop
        self._node = node
        self._callers = callers
        self._membership = membership
        self._mover = mover

    @typed
    def Export(self, request: pb.ExportRequest, context: grpc.ServicerContext) -> pb.ExportReply:
        """A ticket for a request of the calling engine."""
        token = self._callers.who(context, "engine").token
        if request.boot_id != self._boot_id:
            raise StaleBoot(f"boot id {request.boot_id} is not this daemon's ({self._boot_id}); register again")
        engine = self._membership.engine_of(token, request.epoch)
        ticket_id = secrets.token_hex(16)
        answer: Exported = self._loop.call(ExportRequestKV(engine, request.epoch, request.request_id, ticket_id))
        # The agent starts with the first ticket; its metadata is asked for when somebody accepts it.
        group = self._node.state.groups[self._node.state.engines[engine].group].spec
        return pb.ExportReply(
            ticket=pb.Ticket(
                ticket_id=answer.ticket_id,
                node_address=self._address,
                boot_id=self._boot_id,
                kv_fingerprint=group.kv_format.name,
                committed_tokens=answer.committed_tokens,
                final=True,
                lease_ttl_ns=answer.lease_ttl_ns,
            )
        )

    @typed
    def Accept(self, request: pb.AcceptRequest, context: grpc.ServicerContext) -> pb.AcceptReply:
        """Where the ticket's pages are, and through which agent they are read."""
        token = self._callers.who(context, "peer").token
        agent = self._mover.agent()
        answer: TicketPages = self._loop.call(AcceptTicket(request.ticket.ticket_id, token))
        group = self._loop.inspect(lambda node: node.state.tickets[request.ticket.ticket_id].group)
        spec = self._node.state.groups[group].spec
        chain = spec.chains[0]
        if len(chain.classes) != 1:
            raise LayoutMismatch(
                f"group {group} keeps its KV in {len(chain.classes)} page classes; export from a sharded group"
            )
        page_class = chain.classes[0]
        addresses = self._mover.info.addresses
        reply = pb.AcceptReply(
            agent_metadata=agent.metadata,
            agent_name=agent.name,
            mover_incarnation=agent.incarnation,
            layout=layout_to_proto(page_class.layout),
            spans=[span_run(table) for table in answer.spans],
            generations=pack_u32(answer.generations),
        )
        pool = self._node.state.groups[group].pools[page_class.device_pool]
        for rank, region in enumerate(page_class.device_regions):
            assert region != STAGING_REGION
            size = pool.slabs * page_class.page_bytes
            reply.ranks.add(rank=rank, base_address=addresses[region], size_bytes=size)
        return reply

    @typed
    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        """Keeps tickets alive."""
        self._callers.who(context, "peer", "engine")
        answer = self._loop.call(RenewTickets(tuple(request.ticket_ids)))
        return pb.HeartbeatReply(unknown_ids=answer.unknown_ids)

    @typed
    def Check(self, request: pb.CheckRequest, context: grpc.ServicerContext) -> pb.CheckReply:
        """Whether what was read is still what was exported."""
        self._callers.who(context, "peer")
        incarnation = self._mover.info.incarnation
        if request.mover_incarnation != incarnation:
            raise StalePage(f"the mover was restarted: incarnation {request.mover_incarnation} is over")
        self._loop.call(CheckTicket(request.ticket_id, unpack_u32(request.generations, "generations")))
        return pb.CheckReply()

    @typed
    def Release(self, request: pb.ReleaseRequest, context: grpc.ServicerContext) -> pb.ReleaseReply:
        """The target is done with a ticket."""
        token = self._callers.who(context, "peer").token
        self._loop.call(ReleaseTicket(request.ticket_id, token))
        return pb.ReleaseReply()
