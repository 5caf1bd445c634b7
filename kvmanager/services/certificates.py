"""Certificates of this node: read from files, proved to fit together, and made into credentials.

They are read again for new connections once a file has changed, so that a certificate is renewed without a restart;
files that do not fit together are refused, and those before them stay in use.
"""

from __future__ import annotations

import logging
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from kvmanager.configuration.operationsconfig import UNIX
from kvmanager.configuration.securityconfig import PeerSection, TlsSection, is_plain
from kvmanager.errors import ConfigError, KVError, PeerUnreachable, Unauthorized

DIAGNOSIS_S: Final = 3.0
_ROUNDS: Final = 8
"""Of a handshake with ourselves; TLS 1.3 takes three."""
_log = logging.getLogger("kvmanager.certificates")


class _Pem(NamedTuple):
    key: bytes
    certificate: bytes
    ca: bytes


class CertificateFacts(NamedTuple):
    """What a certificate says: the name that other nodes know its owner by, if any; hosts that it is for; its end."""

    caller: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    valid_until: str = ""


class Certificates:
    """The files of `[tls]`. Thread-safe."""

    def __init__(self, section: TlsSection) -> None:
        """Raises ConfigError for files that are missing, open to others, or no use together."""
        self._section = section
        self._lock = threading.Lock()
        self._seen = self._versions()
        self._pem = self._read()

    # ------------------------------------------------------------------------------- the files

    def _paths(self) -> tuple[Path, Path, Path]:
        return self._section.key_file, self._section.certificate_file, self._section.ca_file

    def _versions(self) -> tuple[tuple[int, int], ...]:
        try:
            found = [path.stat() for path in self._paths()]
        except OSError as error:
            raise ConfigError(f"[tls]: can't read {error.filename}: {error.strerror}") from error
        return tuple((each.st_mtime_ns, each.st_ino) for each in found)

    def _read(self) -> _Pem:
        key, certificate, ca = self._paths()
        try:
            pem = _Pem(key.read_bytes(), certificate.read_bytes(), ca.read_bytes())
            mode = stat.S_IMODE(key.stat().st_mode)
        except OSError as error:
            raise ConfigError(f"[tls]: can't read {error.filename}: {error.strerror}") from error
        if mode & 0o007:
            raise ConfigError(f"[tls] key_file: everybody may use {key} (mode {mode:04o}); run: chmod 0600 {key}")
        self._prove()
        return pem

    def _prove(self) -> None:
        """A handshake with ourselves: the key is the certificate's, and the CA signed it; it is valid, both ways."""
        try:
            self._meet_ourselves()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"[tls]: {self._section.certificate_file} can't be used with {self._section.key_file} and "
                f"{self._section.ca_file}: {_reason(error)}"
            ) from error

    def _meet_ourselves(self, host: str = "") -> dict[str, Any]:
        """What a server learns of our certificate; `host`: the name that a client has for us. Raises SSLError."""
        server, client = self.server_context(), self.client_context()
        client.check_hostname = bool(host)
        return _handshake(server, client, host)

    def facts(self) -> CertificateFacts:
        """What our certificate says."""
        seen = self._meet_ourselves()
        common = [value for part in seen.get("subject", ()) for key, value in part if key == "commonName"]
        others = seen.get("subjectAltName", ())
        hosts = tuple(value for _, value in others)
        callers = tuple(common or [value for kind, value in others if kind == "DNS"])
        return CertificateFacts(callers[:1], hosts, str(seen.get("notAfter", "")))

    def is_for(self, host: str) -> bool:
        """Whether others who call this host take our certificate for its."""
        try:
            self._meet_ourselves(host)
        except ssl.SSLCertVerificationError:
            return False
        return True

    def _fresh(self) -> _Pem:
        """What is in the files now, if it can be used."""
        with self._lock:
            try:
                versions = self._versions()
                if versions != self._seen:
                    self._pem = self._read()
                    self._seen = versions
                    _log.warning("new certificates from %s", self._section.certificate_file)
            except ConfigError as error:
                _log.error("%s; those before stay in use", error)
            return self._pem

    # ------------------------------------------------------------------------------- credentials

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC port that only clients with a certificate of our CA can use."""
        given = self._fresh()

        def fetch() -> Any:
            nonlocal given
            now = self._fresh()
            if now == given:
                return None
            given = now
            return _server_configuration(now)

        made: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _server_configuration(given), fetch, require_client_authentication=True
        )
        return made

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to a server with a certificate of our CA, and with the name that is called."""
        pem = self._fresh()
        return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)

    def plain_at(self, listen: str) -> bool:
        """Whether the configuration asks for plain TCP there."""
        return is_plain(self._section, listen)

    def server_context(self) -> ssl.SSLContext:
        """The same for a socket of ours."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        self._load(context)
        return context

    def client_context(self) -> ssl.SSLContext:
        """A client's, which checks the server's name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_verify_locations(self._section.ca_file)
        # A key with a passphrase would ask on the terminal.
        context.load_cert_chain(self._section.certificate_file, self._section.key_file, password=lambda: "")

    # ------------------------------------------------------------------------------- what went wrong

    def why_silent(self, address: str) -> KVError:
        """Why a node at `HOST:PORT` can't be called: gRPC does not tell a refused certificate from no answer.

        A server that takes our certificate speaks first (HTTP/2 settings); one that does not closes.
        """
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        try:
            context = self.client_context()
            context.set_alpn_protocols(["h2"])
            with (
                socket.create_connection((host, int(port)), DIAGNOSIS_S) as plain,
                context.wrap_socket(plain, server_hostname=host) as secure,
            ):
                if secure.recv(1):
                    return PeerUnreachable(f"the node at {address} takes our certificate, but does not answer")
        except ssl.SSLCertVerificationError as error:
            return Unauthorized(f"the node at {address} has a certificate that is no good here: {error.verify_message}")
        except ssl.SSLError as error:
            return Unauthorized(f"no TLS with the node at {address}: {_reason(error)}")
        except ConnectionResetError:
            pass
        except (OSError, ValueError) as error:
            return PeerUnreachable(f"the node at {address} can't be reached: {error}")
        return Unauthorized(
            f"the node at {address} closed the connection when it saw our certificate "
            f"{self._section.certificate_file}; is it of the CA that that node trusts, and still valid?"
        )


def _server_configuration(pem: _Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.ca)


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> dict[str, Any]:
    """In memory; the client's certificate as the server sees it. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False, server_hostname=host or None),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    for _ in range(_ROUNDS):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                continue
    if waiting:
        raise ssl.SSLError("the handshake does not end")
    return dict(ends[1].getpeercert() or {})


def _reason(error: BaseException) -> str:
    return getattr(error, "verify_message", "") or getattr(error, "strerror", "") or str(error)


def look_at(tls: TlsSection, peer: PeerSection) -> tuple[CertificateFacts, list[str]]:
    """What the configured files say, and why the node could not be used with them; nothing where there are none."""
    if not tls.present:
        return CertificateFacts(), []
    try:
        certificates = Certificates(tls)
    except ConfigError as error:
        return CertificateFacts(), [str(error)]
    facts, problems = certificates.facts(), []
    if peer.listen:
        key = "address" if peer.address else "listen"
        where = getattr(peer, key)
        host = where.rpartition(":")[0].removeprefix("[").removesuffix("]")
        if not certificates.is_for(host):
            known = ", ".join(facts.hosts) or "no host"
            problems.append(f"[peer] {key}: {tls.certificate_file} is for {known}, not for {host}: others refuse it")
        if not facts.caller:
            problems.append(f"[tls] certificate_file: {tls.certificate_file} has neither a common name nor a DNS name")
    return facts, problems


def http_tls(certificates: Certificates | None, listen: str) -> Callable[[], ssl.SSLContext] | None:
    """What clients of a listener must pass; None on a unix socket, or where plain TCP was asked for."""
    if certificates is None or listen.startswith(UNIX) or certificates.plain_at(listen):
        return None
    return certificates.server_context
