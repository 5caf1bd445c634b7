"""Who calls: the session token of a gRPC call, and what its role may do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

import grpc

from kvmanager.configuration.config import NodeConfig
from kvmanager.daemon.attach import ClientIdentity
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

    tenant_of: Callable[[int], str]

    def who(self, context: grpc.ServicerContext, *roles: str) -> ClientIdentity:
        """The caller. Raises Unauthorized."""
        ...


class Callers:
    """Checks tokens and roles, and knows whose tenant a caller is."""

    def __init__(
        self,
        identities: Identities,
        tenant_of: Callable[[int], str] = lambda uid: f"uid {uid}",
        sees_all: Callable[[int], bool] = lambda _uid: True,
        trust_of: Callable[[int], str] = lambda _uid: "",
    ) -> None:
        """`tenant_of(uid)`, `trust_of(uid)`; `sees_all(uid)`: whether a reader is shown what is other tenants'."""
        self.trust_of = trust_of
        self._identities = identities
        self.tenant_of = tenant_of
        self._sees_all = sees_all

    def holder(self, metadata: Mapping[str, object]) -> ClientIdentity:
        """Who holds the token of a call's metadata. Raises Unauthorized, Suspect."""
        token = metadata.get(TOKEN_METADATA_KEY)
        if not isinstance(token, str):
            raise Unauthorized(
                f"no {TOKEN_METADATA_KEY!r} in the call's metadata; attach on the node's attach socket first"
            )
        return self._identities.identity_of(token)

    def who(self, context: grpc.ServicerContext, *roles: str) -> ClientIdentity:
        """The caller. Raises Unauthorized without a valid token, or with a role not among `roles`."""
        return _as_one_of(self.holder(dict(context.invocation_metadata())), roles)

    def bearer(self, token: str, *roles: str) -> ClientIdentity:
        """Who holds a token that came by another way than gRPC. Raises Unauthorized, Suspect."""
        return _as_one_of(self._identities.identity_of(token), roles)

    def viewer(self, context: grpc.ServicerContext) -> str | None:
        """The one tenant whose content an operator or reader is shown; None: all. Raises Unauthorized."""
        identity = self.who(context, "operator", "reader")
        all_of_it = identity.role == "operator" or self._sees_all(identity.uid)
        return None if all_of_it else self.tenant_of(identity.uid)

    def sees_all(self, context: grpc.ServicerContext) -> None:
        """Raises Unauthorized for a reader of one tenant."""
        tenant = self.viewer(context)
        if tenant is not None:
            raise Unauthorized(f"this shows what is others', too; you read what is tenant {tenant!r}'s")

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


def _as_one_of(identity: ClientIdentity, roles: Collection[str]) -> ClientIdentity:
    if identity.role not in roles:
        raise Unauthorized(f"role {identity.role!r} may not make this call; it is for {', '.join(roles)}")
    return identity


def callers_of(config: NodeConfig, identities: Identities) -> Callers:
    """With the tenants, readers and trust domains of a configuration."""
    return Callers(identities, config.tenant_of, config.access.sees_all, config.trust_of)
