"""The Engine and Worker services."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import grpc

from kvmanager import __version__
from kvmanager.callers import Callers, typed
from kvmanager.core.events import AttachRank, DetachRank, EngineResumed
from kvmanager.core.node import Node
from kvmanager.errors import Draining, KVError, LayoutMismatch, RequestError, StaleBoot, Unauthorized
from kvmanager.groups import TIMELINE_REGION
from kvmanager.loop import OwnerLoop
from kvmanager.membership import Membership
from kvmanager.memory import NodeRegions
from kvmanager.messages import register_event, step_event
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.sessions import SessionHub, SessionStream
from kvmanager.units import MIB
from kvmanager.wire import abort_with, layout_to_proto, region_to_proto

MESSAGE_BYTES = 64 * MIB
PAGES_PER_CALL = 1 << 20
_log = logging.getLogger("kvmanager.engine")


class NotServed(RequestError):
    """In the contract, not in this version."""

    reason = "NOT_IMPLEMENTED"


class Gate:
    """Whether new work is let in; closed while the node drains."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def close(self) -> None:
        """Lets nothing new in."""
        self._closed.set()

    def check(self) -> None:
        """Raises Draining when closed."""
        if self._closed.is_set():
            raise Draining("the node drains; open new work elsewhere")


class EngineService(pb_grpc.EngineServicer):
    """Registration, sessions and lookups."""

    def __init__(
        self,
        boot_id: int,
        loop: OwnerLoop,
        node: Node,
        callers: Callers,
        membership: Membership,
        hub: SessionHub,
        gate: Gate,
    ) -> None:
        self._boot_id = boot_id
        self._loop = loop
        self._node = node
        self._callers = callers
        self._membership = membership
        self._hub = hub
        self._gate = gate

    @typed
    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        """A new epoch of an engine."""
        identity = self._callers.who(context, "engine")
        self._gate.check()
        group = self._node.state.groups.get(request.group)
        if group is not None and request.namespace.kv_format != group.spec.kv_format.name:
            raise LayoutMismatch(
                f"namespace.kv_format is {request.namespace.kv_format!r}, group {request.group!r} holds "
                f"{group.spec.kv_format.name!r}"
            )
        answer = self._loop.call(register_event(request, tenant=str(identity.uid)))
        self._membership.registered(request.engine, answer.epoch, identity.token)
        _log.info("engine %s epoch %d registered for group %s", request.engine, answer.epoch, request.group)
        limits = self._node.state.limits
        return pb.RegisterReply(
            boot_id=self._boot_id,
            epoch=answer.epoch,
            limits=pb.Limits(
                message_bytes=MESSAGE_BYTES,
                requests_per_step=limits.requests_per_step,
                pages_per_call=PAGES_PER_CALL,
                stored_replies=limits.stored_replies,
                unseen_notices=limits.unseen_notices,
            ),
            daemon_version=__version__,
        )

    def Session(
        self, request_iterator: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepReply]:
        """Steps in, replies and notices out."""
        try:
            token = self._callers.who(context, "engine").token
            first = next(request_iterator, None)
            if first is None:
                return
            engine = self._membership.engine_of(token, first.epoch)
            self._check_boot(first)
            self._loop.call(EngineResumed(engine, first.epoch))
        except KVError as error:
            abort_with(context, error)
        stream = self._hub.open((engine, first.epoch))
        self._membership.stream_opened(engine, first.epoch)
        reader = threading.Thread(
            target=self._read, args=(stream, first, request_iterator), name=f"session-{engine}", daemon=True
        )
        reader.start()
        try:
            while True:
                message = stream.outgoing.get()
                if isinstance(message, KVError):
                    abort_with(context, message)
                if message is None:
                    return
                yield message
        finally:
            self._hub.closed(stream)
            self._membership.stream_ended(engine, first.epoch)

    def _read(self, stream: SessionStream, first: pb.StepRequest, rest: Iterator[pb.StepRequest]) -> None:
        """Reader thread of one stream; ends it when the client does, or at the first message that can't be read."""
        try:
            self._step(stream, first)
            for message in rest:
                self._step(stream, message)
        except KVError as error:
            stream.end(error)
        except grpc.RpcError:
            _log.warning("the session of %s broke", stream.key[0])
        finally:
            self._loop.inspect(lambda _node: None)  # what the client sent is answered first
            stream.end()

    def _step(self, stream: SessionStream, message: pb.StepRequest) -> None:
        self._check_boot(message)
        if message.open:
            self._gate.check()
        event = step_event(stream.key[0], message)
        self._loop.send(event, self._hub.answer(stream, self._node))

    def _check_boot(self, message: pb.StepRequest | pb.LookupRequest) -> None:
        if message.boot_id != self._boot_id:
            raise StaleBoot(
                f"boot id {message.boot_id} is not this daemon's ({self._boot_id}); attach and register again"
            )

    @typed
    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        """How long a prefix is known; pins nothing, renews nothing."""
        token = self._callers.who(context, "engine").token
        self._check_boot(request)
        name = self._membership.engine_of(token, request.epoch)
        return self._loop.inspect(lambda node: _lookup(node, name, request))

    @typed
    def Acquire(self, request: pb.AcquireRequest, context: grpc.ServicerContext) -> pb.AcquireReply:  # noqa: ARG002
        """Not served yet."""
        raise NotServed("Acquire is not served by this version: engines with memory of their own come later")

    @typed
    def Done(self, request: pb.DoneRequest, context: grpc.ServicerContext) -> pb.DoneReply:  # noqa: ARG002
        """Not served yet."""
        raise NotServed("Done is not served by this version: engines with memory of their own come later")

    @typed
    def Store(self, request: pb.StoreRequest, context: grpc.ServicerContext) -> pb.StoreReply:  # noqa: ARG002
        """Not served yet."""
        raise NotServed("Store is not served by this version: engines with memory of their own come later")


def _lookup(node: Node, engine_name: str, request: pb.LookupRequest) -> pb.LookupReply:
    engine = node.state.engine(engine_name, request.epoch)
    group = node.state.groups[engine.group]
    rows = group.spec.page_rows
    segments = min(len(request.keys) // group.key_bytes, request.prompt_tokens // rows)
    cached, device = segments, segments
    for chain in group.chains:
        match = chain.index.match(request.keys, segments, engine.namespace)
        cached = min(cached, match.segments + match.donor_segments)
        resident = 0
        for row in match.spans:
            if not chain.device_ready(row):
                break
            resident += int(chain.table.segments[row])
        device = min(device, resident)
    return pb.LookupReply(device_tokens=min(device, cached) * rows, cached_tokens=cached * rows)


class WorkerService(pb_grpc.WorkerServicer):
    """Ranks attach and leave."""

    def __init__(
        self, boot_id: int, loop: OwnerLoop, node: Node, callers: Callers, membership: Membership, regions: NodeRegions
    ) -> None:
        self._boot_id = boot_id
        self._loop = loop
        self._node = node
        self._callers = callers
        self._membership = membership
        self._regions = regions
        self._granted: dict[int, tuple[int, ...]] = {}

    @typed
    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        """Gives a rank its timeline word and the regions it may map."""
        token = self._callers.who(context, "worker").token
        word = self._regions.new_word()
        answer = self._loop.call(AttachRank(request.engine, request.epoch, request.rank, word))
        self._regions.bind(answer.attach_id, word)
        self._membership.attached(request.engine, request.epoch, answer.attach_id, token)
        spec = self._node.state.groups[self._node.state.engines[request.engine].group].spec
        chain = spec.chains[0]
        reply = pb.AttachReply(attach_id=answer.attach_id, timeline_word=word, boot_id=self._boot_id)
        region_ids = [TIMELINE_REGION]
        for page_class in (c for chain in spec.chains for c in chain.classes):
            device = page_class.device_regions[request.rank]
            # Only a sparse group's worker reads the host tier itself.
            host = page_class.host_regions[request.rank] if spec.sparse and page_class.host_regions else 0
            region_ids += [device] + ([host] if host else [])
            reply.layouts.add(
                page_class=page_class.name,
                layout=layout_to_proto(page_class.layout),
                device_region=device,
                host_region=host,
            )
        region_ids = list(dict.fromkeys(region_ids))
        reply.regions.extend(region_to_proto(self._regions.region(i)) for i in region_ids)
        self._granted[answer.attach_id] = tuple(region_ids)
        _log.info("rank %d of %s attached as %d (%s)", request.rank, request.engine, answer.attach_id, chain.name)
        return reply

    def fds_for(self, token: str, attach_id: int) -> list[int]:
        """The descriptors of an attach, for the process that made it. Raises UnknownLease."""
        self._check_owner(attach_id, token)
        return [self._regions.fd(region_id) for region_id in self._granted[attach_id]]

    def _check_owner(self, attach_id: int, token: str) -> None:
        if self._membership.token_of(attach_id) != token:
            raise Unauthorized(f"attach {attach_id} belongs to another process")

    @typed
    def Detach(self, request: pb.DetachRequest, context: grpc.ServicerContext) -> pb.DetachReply:
        """A clean leave of one rank."""
        token = self._callers.who(context, "worker").token
        self._check_owner(request.attach_id, token)
        self._loop.call(DetachRank(request.attach_id))
        self._membership.rank_ended(request.attach_id)
        return pb.DetachReply()
