"""`[tls]`, `[peer]` and `[access]` of the configuration: certificates, where other nodes' daemons come in, and roles.

Whatever listens on TCP does so with mutual TLS. The one exception, plain TCP on a loopback address for what is not
secret (metrics, KV events), must be asked for.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvmanager.configuration import configvalues as parse
from kvmanager.configuration.configvalues import Parser
from kvmanager.configuration.operationsconfig import UNIX, listen_address
from kvmanager.errors import Unauthorized


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSection:
    """`[tls]`: PEM files of this node. All three, or none.

    certificate_file: its own certificate, for server and client use, with what leads to the CA; key_file: its key,
    which others may not read; ca_file: who signs the certificates that are let in. plain_loopback: metrics and KV
    events may be served without TLS on a loopback address.
    """

    certificate_file: Path = Path()
    key_file: Path = Path()
    ca_file: Path = Path()
    plain_loopback: bool = False

    @property
    def present(self) -> bool:
        """Whether there are certificates."""
        return self.certificate_file != Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSection:
    """`[peer]`: hand-offs between machines. listen: `ADDRESS:PORT`, or "": only nodes of this machine come in.

    address: `HOST:PORT` where other nodes find this one, if not there; its host is a name of the certificate.
    nodes: names of the certificates that are let in; empty: all that the CA has signed.
    """

    listen: str = ""
    address: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSection:
    """`[access]`: uids of more than engines. Of the others in `trust_uids` each is a tenant's.

    operators: may do everything. readers: see everything, all tenants'. peers: whose daemons on this machine may pull,
    and be pulled from. Who is in none of them may attach as engine, as worker, and as a reader of its own tenant.
    """

    operators: tuple[int, ...] = field(default_factory=lambda: (os.getuid(),))
    readers: tuple[int, ...] = ()
    peers: tuple[int, ...] = field(default_factory=lambda: (os.getuid(),))

    def check_role(self, uid: int, role: str) -> None:
        """Raises Unauthorized where a user may not attach in this role."""
        for needed, uids in (("operator", self.operators), ("peer", self.peers)):
            if role == needed and uid not in uids:
                raise Unauthorized(f"uid {uid} may not attach as {role!r}; name it in {needed}s in [access]")

    def sees_all(self, uid: int) -> bool:
        """Whether a reader is shown what is other tenants'."""
        return uid in self.operators or uid in self.readers


def certificate_path(value: object) -> Path:
    """An absolute path."""
    path = Path(parse.text(value))
    if not path.is_absolute():
        raise ValueError(f"{value!r} is not an absolute path")
    return path


def tcp_address(value: object) -> str:
    """`ADDRESS:PORT` with a numeric address; "" for "off"."""
    where = listen_address(value)
    if where.startswith(UNIX):
        raise ValueError(f"{value!r}: nodes of one machine use the runtime directory; write ADDRESS:PORT")
    return where


def host_and_port(value: object) -> str:
    """`HOST:PORT`."""
    where = parse.text(value)
    host, _, port = where.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535 or "/" in host:
        raise ValueError(f"{value!r} is not HOST:PORT")
    return where


def names(value: object) -> tuple[str, ...]:
    """A list of names."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of names")
    return tuple(parse.text(entry) for entry in value)


def any_uids(value: object) -> tuple[int, ...]:
    """User ids, perhaps none."""
    return () if value == [] else parse.uids(value)


SECURITY: Final[Mapping[type[Any], Mapping[str, Parser]]] = {
    TlsSection: {
        "certificate_file": certificate_path,
        "key_file": certificate_path,
        "ca_file": certificate_path,
        "plain_loopback": parse.switch,
    },
    PeerSection: {"listen": tcp_address, "address": host_and_port, "nodes": names},
    AccessSection: {"operators": parse.uids, "readers": any_uids, "peers": any_uids},
}
"""Parsers of the keys."""


def is_loopback(where: str) -> bool:
    """Whether `ADDRESS:PORT` can be reached from this machine alone. A name is not believed to be."""
    host = where.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_plain(tls: TlsSection, where: str) -> bool:
    """Whether `ADDRESS:PORT` is served without TLS."""
    return tls.plain_loopback and is_loopback(where)
