"""Whether a configuration leaves anything open to strangers: TCP without certificates, regions across trust domains."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.operationsconfig import UNIX
from kvmanager.configuration.securityconfig import is_plain
from kvmanager.errors import ConfigError


def check_security(config: NodeConfig) -> None:
    """Refuses what would be open to strangers. Raises ConfigError naming the key."""
    check_tcp(config)
    _check_trust(config)


def _check_trust(config: NodeConfig) -> None:
    """One region is mapped by engines of one trust domain."""
    domains = {tenant.trust for tenant in config.tenants} | {""}
    for group in config.groups:
        where = f"[[group]] {group.name!r} trust"
        if group.trust not in domains:
            raise ConfigError(f"{where}: no [[tenant]] has trust = {group.trust!r}, so nobody could use the group")
        if not group.host_region:
            continue
        sharing = [other for other in config.groups if other.host_region == group.host_region]
        strangers = [other.name for other in sharing if other.trust != group.trust]
        if strangers and any(other.kind == "hisparse" for other in sharing):
            raise ConfigError(
                f"{where}: its host_region {group.host_region!r} is shared with {', '.join(strangers)} of another "
                "trust domain, and engines of a hisparse group map it; give each domain a region of its own"
            )
    served = {group.trust for group in config.groups}
    for tenant in config.tenants:
        if tenant.trust not in served:
            raise ConfigError(f"[[tenant]] {tenant.name!r} trust: no [[group]] has trust = {tenant.trust!r}")


def check_tcp(config: NodeConfig) -> None:
    """Refuses every TCP listener that would be open without a certificate. Raises ConfigError naming the key."""
    tls, peer = config.tls, config.peer
    paths = {key: getattr(tls, key) for key in ("certificate_file", "key_file", "ca_file")}
    missing = [key for key, path in paths.items() if path == Path()]
    if missing and len(missing) < len(paths):
        raise ConfigError(f"[tls] {', '.join(missing)}: missing; mutual TLS needs {', '.join(paths)}")
    if peer.listen and missing:
        raise ConfigError(
            f"[peer] listen: {peer.listen} without certificates; set certificate_file, key_file and ca_file in [tls]"
        )
    if not peer.listen and (peer.address or peer.nodes):
        raise ConfigError("[peer] address, nodes: nobody comes in over TCP; set listen, or remove them")
    if peer.listen and not peer.address and _is_wildcard(peer.listen):
        raise ConfigError(f"[peer] address: missing; nobody can connect to {peer.listen}, say where others find it")
    where = config.metrics.listen
    if where and not where.startswith(UNIX) and not is_plain(tls, where) and missing:
        raise ConfigError(
            f"[metrics] listen: {where} without certificates; set those in [tls], listen on unix:PATH, or on a "
            "loopback address with plain_loopback = true in [tls]"
        )
    for endpoint in _event_endpoints(config):
        if not is_plain(tls, endpoint):
            raise ConfigError(
                f"[[events]] endpoint: tcp://{endpoint} has no TLS (ZeroMQ knows none); write ipc:///PATH, or a "
                "loopback address with plain_loopback = true in [tls], and put a proxy that speaks mTLS before it"
            )


def _event_endpoints(config: NodeConfig) -> Iterator[str]:
    for section in config.events:
        for endpoint in (section.endpoint, section.replay_endpoint):
            if endpoint.startswith("tcp://"):
                yield endpoint.removeprefix("tcp://")


def _is_wildcard(where: str) -> bool:
    host = where.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return ipaddress.ip_address(host).is_unspecified
