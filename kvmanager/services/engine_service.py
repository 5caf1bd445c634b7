"""The Engine service: registration, sessions, lookups, leases."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc

from kvmanager import __version__
from kvmanager.core.events import Registered
from kvmanager.core.node import Node
from kvmanager.daemon.attach import ClientIdentity
from kvmanager.daemon.clientnotes import ClientNote, EngineNote
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.membership import Membership, Registration
from kvmanager.daemon.sessions import SessionHub
from kvmanager.errors import KVError, LayoutMismatch, Unauthorized, VersionMismatch
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.cacheanswers import Asker, CacheAnswers
from kvmanager.services.callers import Callers, typed
from kvmanager.services.gate import Gate
from kvmanager.services.messages import register_event
from kvmanager.services.refusedlog import RefusedLog
from kvmanager.services.sessionsteps import SessionSteps
from kvmanager.wire import MESSAGE_MAX_BYTES, WIRE_VERSION, abort_with, error_to_proto

PAGES_PER_CALL = 1 << 20
_log = logging.getLogger("kvmanager.engine")


class EngineService(pb_grpc.EngineServicer):
    """Registration, sessions, lookups and leases."""

    def __init__(
        self,
        boot_id: int,
        loop: OwnerLoop,
        node: Node,
        callers: Callers,
        membership: Membership,
        hub: SessionHub,
        gate: Gate,
        steps: SessionSteps,
        cache: CacheAnswers,
    ) -> None:
        self._steps = steps
        self._cache = cache
        self._boot_id = boot_id
        self._loop = loop
        self._node = node
        self._callers = callers
        self._membership = membership
        self._hub = hub
        self._gate = gate
        self._refused = RefusedLog()

    @typed
    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:
        """A new epoch of an engine."""
        identity = self._callers.who(context, "engine")
        with self._refused.refusals_of(identity, request.engine):
            return self._register(request, identity)

    def _register(self, request: pb.RegisterRequest, identity: ClientIdentity) -> pb.RegisterReply:
        _check_version(request)
        self._gate.check()
        group = self._node.state.groups.get(request.group)  # the groups of a node never change
        if group is not None and request.namespace.kv_format != group.spec.kv_format.name:
            raise LayoutMismatch(
                f"namespace.kv_format is {request.namespace.kv_format!r}, group {request.group!r} holds "
                f"{group.spec.kv_format.name!r}; register for a group of your format, or change the node's"
            )
        if group is not None and group.spec.trust != self._callers.trust_of(identity.uid):
            raise Unauthorized(
                f"group {request.group!r} is of trust domain {group.spec.trust!r}, and your tenant is not: its engines "
                "map memory that yours must not see"
            )
        note = EngineNote(ClientNote.of(identity), request.namespace).stored()
        event = replace(register_event(request, tenant=self._callers.tenant_of(identity.uid)), note=note)
        answer: Registered = self._loop.call(event)
        registration = Registration(identity.token, request.group, request.namespace, event.tenant)
        self._membership.registered(request.engine, answer.epoch, registration)
        self._callers.confirm(identity.token, self._membership.disconnected, self._membership.exited)
        _log.info("engine %s epoch %d registered for group %s", request.engine, answer.epoch, request.group)
        limits = self._node.state.limits
        return pb.RegisterReply(
            boot_id=self._boot_id,
            epoch=answer.epoch,
            limits=pb.Limits(
                message_bytes=MESSAGE_MAX_BYTES,
                requests_per_step=limits.requests_per_step,
                pages_per_call=PAGES_PER_CALL,
                stored_replies=limits.stored_replies,
                unseen_notices=limits.unseen_notices,
            ),
            daemon_version=__version__,
            checksum_one_in=limits.checksums,
        )

    def Session(
        self, request_iterator: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepReply]:
        """Steps in, replies and notices out."""
        messages = _until_broken(request_iterator)
        try:
            token = self._callers.who(context, "engine").token
            first = next(messages, None)
            if first is None:
                return
            with self._steps.session(token, first) as stream:
                threading.Thread(
                    target=self._steps.read,
                    args=(stream, itertools.chain((first,), messages)),
                    name=f"session-{stream.key[0]}",
                    daemon=True,
                ).start()
                while (message := stream.get()) is not None:
                    if isinstance(message, KVError):
                        raise message
                    yield message
        except KVError as error:
            abort_with(context, error)

    @typed
    def Lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        """How long a prefix is known; pins nothing, renews nothing."""
        return self._cache.lookup(request, self._asker(context))

    @typed
    def Acquire(self, request: pb.AcquireRequest, context: grpc.ServicerContext) -> pb.AcquireReply:
        """Pins a cached prefix."""
        return self._cache.acquire(request, self._asker(context))

    @typed
    def Done(self, request: pb.DoneRequest, context: grpc.ServicerContext) -> pb.DoneReply:
        """Gives the pins of an Acquire back."""
        return self._cache.done(request, self._asker(context))

    @typed
    def Store(self, request: pb.StoreRequest, context: grpc.ServicerContext) -> pb.StoreReply:
        """One step of a write into the cache."""
        return self._cache.store(request, self._asker(context))

    def _asker(self, context: grpc.ServicerContext) -> Asker:
        token, left_s = self._callers.who(context, "engine").token, context.time_remaining()
        return Asker(token, context.is_active, math.inf if left_s is None else time.monotonic() + left_s)

    def CacheCalls(
        self, request_iterator: Iterator[pb.CacheCall], context: grpc.ServicerContext
    ) -> Iterator[pb.CacheAnswer]:
        """The four calls above, one after the other, each answered."""
        with self._hub.ended_by(context.cancel):
            try:
                for call in request_iterator:
                    yield self._answer(call, context)
            except KVError as error:  # no message of this call
                abort_with(context, error)
            except grpc.RpcError:
                _log.debug("a stream of cache calls broke")

    def _answer(self, call: pb.CacheCall, context: grpc.ServicerContext) -> pb.CacheAnswer:
        try:
            token = self._callers.who(context, "engine").token
        except KVError as error:
            return pb.CacheAnswer(error=error_to_proto(error))
        return self._cache.answer(call, token, context.is_active)


def _check_version(request: pb.RegisterRequest) -> None:
    """Raises VersionMismatch for a client that is older or newer than this daemon: one would misread the other."""
    if request.wire_version != WIRE_VERSION:
        told = request.client_version or "of a version that it does not tell"
        age = "older" if request.wire_version < WIRE_VERSION else "newer"
        raise VersionMismatch(
            f"the client is kvmanager {told} (wire version {request.wire_version}), {age} than this daemon, "
            f"{__version__} (wire version {WIRE_VERSION}): install the same version on both sides; until then it gets "
            "nothing from here"
        )


def _until_broken(messages: Iterator[pb.StepRequest]) -> Iterator[pb.StepRequest]:
    """The messages of a stream; they also end where it breaks."""
    try:
        yield from messages
    except grpc.RpcError:
        _log.warning("a session broke")
