"""The Worker service: ranks attach and leave."""

from __future__ import annotations

import logging

import grpc

from kvmanager.core.events import Attached, AttachRank, DetachRank
from kvmanager.core.node import Node
from kvmanager.core.spec import GroupSpec
from kvmanager.daemon.clientnotes import ClientNote, RankNote
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.membership import Membership
from kvmanager.daemon.memory import NodeRegions
from kvmanager.errors import KVError, StaleEpoch, Unauthorized
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.callers import Callers, typed
from kvmanager.wire import layout_to_proto, region_to_proto

_log = logging.getLogger("kvmanager.worker")


class WorkerService(pb_grpc.WorkerServicer):
    """Gives ranks their timeline words and the memory they may map."""

    def __init__(
        self,
        boot_id: int,
        loop: OwnerLoop,
        groups: dict[str, GroupSpec],
        callers: Callers,
        membership: Membership,
        regions: NodeRegions,
    ) -> None:
        self._boot_id = boot_id
        self._loop = loop
        self._groups = groups
        self._callers = callers
        self._membership = membership
        self._regions = regions

    @typed
    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        """Gives a rank its timeline word and the regions it may map. Raises Unauthorized for another tenant's rank."""
        identity = self._callers.who(context, "worker")
        registration = self._membership.registration(request.engine, request.epoch)
        if self._callers.tenant_of(identity.uid) != registration.tenant:
            raise Unauthorized(f"engine {request.engine!r} is another tenant's than uid {identity.uid}")
        spec = self._groups[registration.group]
        layouts = _layouts(spec, request.rank) if 0 <= request.rank < spec.ranks else []
        before = self._loop.inspect(lambda node: _attached_before(node, request, identity.token))
        if before is not None:  # its answer was lost
            return self._reply(*before, layouts)
        note = RankNote(ClientNote.of(identity), self._regions.new_word(spec.trust), self._granted(spec, layouts))
        event = AttachRank(request.engine, request.epoch, request.rank, note.word, note.stored())
        try:
            answer: Attached = self._loop.call(event)
        except KVError:
            self._regions.return_word(note.word)
            raise
        self._regions.bind(answer.attach_id, note.word, note.regions)
        try:
            self._membership.attached(request.engine, request.epoch, answer.attach_id, identity.token)
        except StaleEpoch:
            self._regions.unbind(answer.attach_id)
            raise
        self._callers.confirm(identity.token, self._membership.disconnected, self._membership.exited)
        _log.info("rank %d of %s attached as %d", request.rank, request.engine, answer.attach_id)
        return self._reply(answer.attach_id, note, layouts)

    def _reply(self, attach_id: int, note: RankNote, layouts: list[pb.ClassLayout]) -> pb.AttachReply:
        return pb.AttachReply(
            attach_id=attach_id,
            timeline_word=self._regions.place_of(note.word),
            boot_id=self._boot_id,
            layouts=layouts,
            regions=[region_to_proto(self._regions.region(region_id)) for region_id in note.regions],
        )

    def _granted(self, spec: GroupSpec, layouts: list[pb.ClassLayout]) -> tuple[int, ...]:
        """Region ids in a fixed order, each once: the timelines of its trust domain, then what the layouts name."""
        named = [region for entry in layouts for region in (entry.device_region, entry.host_region) if region]
        return tuple(dict.fromkeys([self._regions.plan.timelines[spec.trust], *named]))

    def fds_for(self, token: str, attach_id: int) -> list[int]:
        """The descriptors of an attach, for the process that made it. Raises UnknownLease, Unauthorized."""
        self._check_owner(attach_id, token)
        return self._regions.granted_fds(attach_id)

    @typed
    def Detach(self, request: pb.DetachRequest, context: grpc.ServicerContext) -> pb.DetachReply:
        """A clean leave of one rank."""
        token = self._callers.who(context, "worker").token
        self._check_owner(request.attach_id, token)
        self._loop.call(DetachRank(request.attach_id))
        self._membership.rank_ended(request.attach_id)
        return pb.DetachReply()

    def _check_owner(self, attach_id: int, token: str) -> None:
        if self._membership.token_of(attach_id) != token:
            raise Unauthorized(f"attach {attach_id} belongs to another process; attach a rank of your own")


def _attached_before(node: Node, request: pb.AttachRequest, token: str) -> tuple[int, RankNote] | None:
    """The attach that the same client has for the rank already."""
    engine = node.state.any_engine(request.engine, request.epoch)
    if engine is None:
        return None
    for attach_id, rank in engine.attaches.items():
        note = RankNote.read(engine.attach_notes[attach_id])
        if rank == request.rank and note.client.token == token:
            return attach_id, note
    return None


def _layouts(spec: GroupSpec, rank: int) -> list[pb.ClassLayout]:
    """The page classes of a group, with the regions that hold them on one rank."""
    layouts = []
    for page_class in (c for chain in spec.chains for c in chain.classes):
        # Only a sparse group's worker reads the host tier itself.
        reads_host = spec.sparse is not None and bool(page_class.host_regions)
        layouts.append(
            pb.ClassLayout(
                page_class=page_class.name,
                layout=layout_to_proto(page_class.layout),
                device_region=page_class.device_regions[rank],
                host_region=page_class.host_regions[rank] if reads_host else 0,
            )
        )
    return layouts
