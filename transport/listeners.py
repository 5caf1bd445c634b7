"""Which TCP ports this process listens on, and whether others than those of the data network can reach them.

UCX's TCP has no authentication: who reaches the port and has the metadata reads registered memory. So a mover looks,
after its agent has begun, at what the kernel says of its sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvmanager.errors import ConfigError

_SIOCGIFADDR: Final = 0x8915
_LISTEN: Final = "0A"


def interface_addresses(names: Iterable[str]) -> set[str]:
    """IP addresses of network interfaces; a name that is none (an InfiniBand port) has none.

    Raises ConfigError where no name is of this machine.
    """
    names = list(names)
    found: set[str] = set()
    known = {name for _, name in socket.if_nameindex()}
    ports = Path("/sys/class/infiniband")
    for name in names:
        if name not in known and not (ports / name.partition(":")[0]).exists():
            there = ", ".join(sorted(known))
            raise ConfigError(f"[mover] data_interface: this machine has no {name!r}; it has {there}")
        if name not in known:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found.add(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            address, *_, name = line.split()
            if name in names:
                found.add(str(ipaddress.IPv6Address(bytes.fromhex(address))))
    return found


def listening() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process listens."""
    ours = set(_socket_inodes())
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in ours:
                host, _, port = fields[1].partition(":")
                found.add((_address(host), int(port, 16)))
    return found


def _socket_inodes() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]


def _address(text: str) -> str:
    """The kernel writes 32-bit words in the machine's own order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    data = struct.pack(f"={len(words)}I", *words)
    return str(ipaddress.ip_address(data))


def check_listeners(names: Iterable[str]) -> None:
    """Raises ConfigError where this process listens on an address that is none of these interfaces'."""
    names = list(names)
    allowed = interface_addresses(names)
    strange = sorted(f"{host}:{port}" for host, port in listening() if host not in allowed)
    if strange:
        raise ConfigError(
            f"NIXL listens on {', '.join(strange)}, and data_interface in [mover] is {', '.join(names)} "
            f"({', '.join(sorted(allowed)) or 'no IP address'}): anybody there could read the cache"
        )
