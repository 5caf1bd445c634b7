"""Who may do what: the roles of every call.

The role that a user may attach in is `AccessSection`'s to say.
A call that is not in `ROLES` is refused; a test holds the table against the contract. Which tenant a caller belongs to
follows from the uid behind its token, never from what it says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc

from kvmanager.errors import KVError, Unauthorized
from kvmanager.services.callers import Callers
from kvmanager.services.refusedlog import LineBudget
from kvmanager.wire import abort_with

ENGINE, WORKER, PEER = "engine", "worker", "peer"
OPERATOR, READER = "operator", "reader"

ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "Engine/Register": (ENGINE,),
    "Engine/Session": (ENGINE,),
    "Engine/Lookup": (ENGINE,),
    "Engine/Acquire": (ENGINE,),
    "Engine/Done": (ENGINE,),
    "Engine/Store": (ENGINE,),
    "Engine/CacheCalls": (ENGINE,),
    "Worker/Attach": (WORKER,),
    "Worker/Detach": (WORKER,),
    "Peer/Export": (ENGINE,),
    "Peer/Accept": (PEER,),
    "Peer/Heartbeat": (PEER, ENGINE),
    "Peer/Check": (PEER,),
    "Peer/Release": (PEER,),
    "Admin/Status": (OPERATOR, READER),
    "Admin/Pools": (OPERATOR, READER),
    "Admin/Map": (OPERATOR, READER),
    "Admin/Requests": (OPERATOR, READER),
    "Admin/Prefixes": (OPERATOR, READER),
    "Admin/Leases": (OPERATOR, READER),
    "Admin/Upgrade": (OPERATOR,),
    "Admin/Reset": (OPERATOR,),
    "Operator/Transfers": (OPERATOR, READER),
    "Operator/Explain": (OPERATOR, READER),
    "Operator/Fsck": (OPERATOR,),
    "Operator/Cordon": (OPERATOR,),
    "Operator/Evict": (OPERATOR,),
    "Operator/Pin": (OPERATOR,),
    "Operator/Unpin": (OPERATOR,),
    "Operator/Pins": (OPERATOR, READER),
    "Operator/SetLogLevel": (OPERATOR,),
    "Operator/Config": (OPERATOR, READER),
}
"""Service/Method -> roles."""
OPEN_SERVICES: Final = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
"""For everybody who reaches the socket: whether the node is ready, and the contract. Nothing of anybody's content."""
_PACKAGE: Final = "/kvmanager.v1."
_log = logging.getLogger("kvmanager.audit")


class Gatekeeper(grpc.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Ends every call that its caller's role may not make, before a byte of its message is read."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers
        self._lines = LineBudget()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's handler, or one that refuses."""
        service, _, _ = details.method.removeprefix("/").partition("/")
        if service in OPEN_SERVICES:
            return continuation(details)
        try:
            self._check(details)
        except KVError as error:
            return _refusing(error)
        return continuation(details)

    def _check(self, details: grpc.HandlerCallDetails) -> None:
        method = details.method.removeprefix(_PACKAGE)
        roles = ROLES.get(method)
        if roles is None:
            raise Unauthorized(f"nobody may call {details.method[:200]!r} here")
        identity = self._callers.holder(dict(details.invocation_metadata))
        if identity.role not in roles:
            if OPERATOR in roles and (more := self._lines.take(identity.pid)) is not None:
                who = f"uid {identity.uid} pid {identity.pid} ({identity.name})"
                _log.warning("%s as %s: %s refused%s", who, identity.role, method, more)
            raise Unauthorized(f"role {identity.role!r} may not make this call; it is for {', '.join(roles)}")


def _refusing(error: KVError) -> grpc.RpcMethodHandler[Any, Any]:
    """Takes any kind of call and reads nothing of it."""

    def refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: ARG001
        abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
