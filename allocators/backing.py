"""Host memory behind regions: sealed memfds whose space is reserved before anybody maps them.

A memfd has no name in /dev/shm to leak, lives as long as any process holds the fd, and can be handed
on with SCM_RIGHTS. Its size is sealed, so a mapping can never be cut short under a reader (SIGBUS).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmanager.errors import ConfigError, InvalidArgument
from kvmanager.units import KIB, format_bytes

ByteArray = npt.NDArray[np.uint8]

_UNLIMITED_BYTES = 1 << 62
"""cgroup v1 writes a number near 2**63 for `no limit`; nothing real is as large as this."""


def create_memfd(name: str, size_bytes: int) -> int:
    """A new memfd of `size_bytes` bytes, zeroed, all of it reserved, its size sealed, close-on-exec.

    The caller owns the fd. Raises ConfigError when the host can't hold it: the check against
    `available_host_bytes` comes first because a cgroup kills the process that outgrows it.
    """
    if size_bytes <= 0:
        raise InvalidArgument(f"memory {name!r} of {size_bytes} bytes: the size must be positive")
    available = available_host_bytes()
    if size_bytes > available:
        raise _no_room(name, size_bytes, available)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError as error:
        os.close(fd)
        raise _no_room(name, size_bytes, available) from error
    return fd


def _no_room(name: str, size_bytes: int, available: int) -> ConfigError:
    return ConfigError(
        f"memory {name!r} needs {size_bytes} bytes ({format_bytes(size_bytes)}), the host has {available} "
        f"({format_bytes(available)}) left: configure a smaller pool or raise the memory limit"
    )


def check_sealed(fd: int, size_bytes: int) -> None:
    """Refuses (InvalidArgument) an fd that could shrink below `size_bytes` under its mapping."""
    actual = os.fstat(fd).st_size
    if actual != size_bytes:
        raise InvalidArgument(f"fd {fd} holds {actual} bytes, the region says {size_bytes}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidArgument(f"fd {fd} can't be sealed: regions are memfds made by create_memfd") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise InvalidArgument(f"fd {fd} is not sealed against shrinking: a reader of it could meet SIGBUS")


def map_fd(fd: int, size_bytes: int) -> ByteArray:
    """The first `size_bytes` bytes of `fd`, shared and writable, as uint8[size_bytes].

    The array keeps the mapping alive; the fd may be closed at once. Raises InvalidArgument when the
    file is shorter.
    """
    actual = os.fstat(fd).st_size
    if not 0 < size_bytes <= actual:
        raise InvalidArgument(f"can't map {size_bytes} bytes of fd {fd}, which holds {actual}")
    mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(mapping, dtype=np.uint8)


def available_host_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: MemAvailable, or less where a cgroup leaves less.

    `root` stands before /proc and /sys (tests give a directory). Every cgroup from the process's own up
    to the mount's top counts, version 2 and version 1; one that is absent or unlimited does not.
    """
    return min([_mem_available(root), *_cgroup_left(root)])


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise ConfigError(f"{root / 'proc/meminfo'} has no MemAvailable line: Linux 3.14 or later is needed")


def _cgroup_left(root: Path) -> Iterator[int]:
    """Room left in each limiting cgroup: limit less use, where reclaimable file cache is not use."""
    table = root / "proc/self/cgroup"
    if not table.exists():
        return
    for line in table.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        for group in _up_to_mount(mount, path):
            left = _group_left(group, *names)
            if left is not None:
                yield left


def _up_to_mount(mount: Path, path: str) -> Iterator[Path]:
    """The group and its parents. Inside a container the path may name nothing; the mount's top still counts."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _group_left(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit_file, usage_file = group / limit_name, group / usage_name
    if not (limit_file.exists() and usage_file.exists()):
        return None
    text = limit_file.read_text().strip()
    if text == "max" or int(text) >= _UNLIMITED_BYTES:
        return None
    used = int(usage_file.read_text()) - _inactive_file(group / "memory.stat", cache_name)
    return max(int(text) - used, 0)


def _inactive_file(stat: Path, name: str) -> int:
    if not stat.exists():
        return 0
    for line in stat.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
