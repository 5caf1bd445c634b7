"""Where other machines' daemons come in: a TCP port with mutual TLS that serves the Peer service and nothing else.

Who calls is in the certificate: its common name, or where it has none its first DNS name. Such a caller has the role
"peer" and no token. A certificate of another CA, or none, ends in the handshake; one of ours with a name that
`[peer] nodes` does not list gets UNAUTHORIZED. Each node needs a certificate of its own: a ticket's holder is its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from kvmanager.configuration.securityconfig import PeerSection
from kvmanager.daemon.attach import ClientIdentity
from kvmanager.errors import ConfigError, Unauthorized
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services.certificates import Certificates
from kvmanager.services.parsing import Parser
from kvmanager.services.peer_service import BY_CERTIFICATE, PeerService
from kvmanager.wire import MESSAGE_MAX_BYTES

CALLS: Final = 32
"""At one time, of all nodes."""
HANDSHAKE_MS: Final = 10_000
_log = logging.getLogger("kvmanager.peerdoor")


class CertifiedCallers:
    """Knows callers by their certificates."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        """`nodes`: names that are let in; empty: all."""
        self._nodes = nodes
        self.tenant_of: Callable[[int], str] = lambda _uid: ""
        """Nodes are no tenant's; they say for whose engine they ask, and are believed."""

    def who(self, context: grpc.ServicerContext, *roles: str) -> ClientIdentity:
        """The caller, whose role is "peer". Raises Unauthorized where that is not among `roles`."""
        name = _name(context.auth_context())
        if self._nodes and name not in self._nodes:
            raise Unauthorized(f"the certificate's name {name!r} is not among nodes in [peer] of this node")
        if "peer" not in roles:
            raise Unauthorized(f"another node may not make this call; it is for {', '.join(roles)}")
        return ClientIdentity("", BY_CERTIFICATE, 0, -1, "peer", name)


def _name(auth: Any) -> str:
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in auth.get(key, ()):
            if value:
                return str(value.decode("utf-8", "replace"))
    raise Unauthorized("the certificate names nobody: it needs a common name, or a DNS name")


class PeerDoor:
    """The port, if there is one. `serve`, `start`, `close`."""

    def __init__(self, section: PeerSection, certificates: Certificates | None) -> None:
        """Binds. Raises ConfigError where it can't."""
        self._nodes = section.nodes
        self._server: grpc.Server | None = None
        self.address = ""
        """What tickets say of this node; empty: there is no port."""
        if not section.listen:
            return
        if certificates is None:
            raise ConfigError(f"[peer] listen: {section.listen} without certificates; see [tls]")
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=CALLS, thread_name_prefix="peers"),
            interceptors=[Parser()],
            maximum_concurrent_rpcs=CALLS,
            options=[
                ("grpc.max_receive_message_length", MESSAGE_MAX_BYTES),
                ("grpc.max_send_message_length", MESSAGE_MAX_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ],
        )
        try:
            port = self._server.add_secure_port(section.listen, certificates.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"[peer] listen: can't listen on {section.listen}: {error}") from error
        host = section.listen.rpartition(":")[0]
        self.address = section.address or f"{host}:{port}"

    def serve(self, service: PeerService) -> None:
        """The one service here, asked by other callers than in the runtime directory; before `start`."""
        if self._server is not None:
            pb_grpc.add_PeerServicer_to_server(service.seen_by(CertifiedCallers(self._nodes)), self._server)

    def start(self) -> None:
        """Lets others in."""
        if self._server is not None:
            self._server.start()
            _log.info("other nodes come in at %s, with mTLS", self.address)

    def close(self) -> None:
        """Ends calls that take longer than a second."""
        if self._server is not None:
            self._server.stop(grace=1.0).wait()
