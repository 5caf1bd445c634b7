"""Who calls: the session token of a gRPC call, and what its role may do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import grpc

from kvmanager.attach import ClientIdentity
from kvmanager.errors import KVError, Suspect, Unauthorized
from kvmanager.wire import TOKEN_METADATA_KEY, abort_with

Reply = TypeVar("Reply")


class Identities(Protocol):
    """Knows the tokens given out."""

    def identity_of(self, token: str) -> ClientIdentity:
        """Raises Unauthorized or Suspect."""
        ...


class Whose(Protocol):
    """Knows who calls: by token (`Callers`), or by certificate (`CertifiedCallers`)."""

    def who(self, context: grpc.ServicerContext, *roles: str) -> ClientIdentity:
        """The caller. Raises Unauthorized."""
        ...


class Callers:
    """Checks tokens and roles."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities

    def who(self, context: grpc.ServicerContext, *roles: str) -> ClientIdentity:
        """The caller. Raises Unauthorized without a valid token, or with a role not among `roles`."""
        token = dict(context.invocation_metadata()).get(TOKEN_METADATA_KEY)
        if not isinstance(token, str):
            raise Unauthorized(
                f"no {TOKEN_METADATA_KEY!r} in the call's metadata; attach on the node's attach socket first"
            )
        identity = self._identities.identity_of(token)
        if identity.role not in roles:
            raise Unauthorized(f"role {identity.role!r} may not make this call; it is for {', '.join(roles)}")
        return identity

    def confirm(self, token: str, disconnected: Callable[[str], None], exited: Callable[[str], None]) -> None:
        """Says again what happened to a token while it was being recorded: then nobody had known it yet."""
        try:
            self._identities.identity_of(token)
        except Suspect:
            disconnected(token)
        except Unauthorized:
            disconnected(token)
            exited(token)


def typed(
    method: Callable[[Any, Any, grpc.ServicerContext], Reply],
) -> Callable[[Any, Any, grpc.ServicerContext], Reply]:
    """A unary method whose KVErrors become gRPC statuses with details."""

    @functools.wraps(method)
    def wrapped(self: Any, request: Any, context: grpc.ServicerContext) -> Reply:
        try:
            return method(self, request, context)
        except KVError as error:
            abort_with(context, error)

    return wrapped
