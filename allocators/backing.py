"""Host memory behind regions: sealed memfds whose space is reserved before anybody maps them.

A memfd has no name in /dev/shm to leak, lives as long as any process holds the fd, and can be handed
on with SCM_RIGHTS. Its size is sealed, so a mapping can never be cut short under a reader (SIGBUS).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmanager.allocators.numa import prefer_node
from kvmanager.errors import ConfigError, InvalidArgument
from kvmanager.units import KIB, format_bytes

ByteArray = npt.NDArray[np.uint8]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap module
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

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
    fd = open_memfd(name, size_bytes)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        os.close(fd)
        raise _no_room(name, size_bytes, available) from error
    return fd


def open_memfd(name: str, size_bytes: int) -> int:
    """A new memfd of `size_bytes` bytes, its size sealed, close-on-exec; it takes memory only as it is faulted in.

    The caller owns the fd. For memory so large that reserving it takes a while: `populate` does that in pieces.
    """
    if size_bytes <= 0:
        raise InvalidArgument(f"memory {name!r} of {size_bytes} bytes: the size must be positive")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd


def place(fd: int, size_bytes: int, node: int) -> None:
    """The memory of a memfd is to lie on a NUMA node, as far as that has room. Raises OSError (`numa.prefer_node`)."""
    with mmap.mmap(fd, size_bytes) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        try:
            prefer_node(ctypes.addressof(start), size_bytes, node)
        finally:
            del start  # the mapping can't be closed under it


def populate(fd: int, offset_bytes: int, size_bytes: int) -> None:
    """Faults a piece of a memfd in, zeroed where it is new; content that is there stays. Other threads run meanwhile.

    `offset_bytes` is a multiple of the system's page size. Before Linux 5.14 the space is reserved only, and faulted
    in on first use. Raises ConfigError when the host has no more memory.
    """
    with mmap.mmap(fd, size_bytes, offset=offset_bytes) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        failed = _libc.madvise(ctypes.addressof(start), size_bytes, _MADV_POPULATE_WRITE)
        reason = ctypes.get_errno()
        del start  # the mapping can't be closed under it
    if failed and reason == errno.EINVAL:
        try:
            os.posix_fallocate(fd, offset_bytes, size_bytes)
        except OSError as error:
            failed, reason = -1, error.errno or 0
        else:
            return
    if failed:
        raise ConfigError(
            f"the host's memory ran out while regions were faulted in: {os.strerror(reason)}; configure smaller pools "
            "or raise the memory limit"
        )


def fault_in(piece: ByteArray) -> None:
    """Lets this process write to mapped memory without a fault a page from now on; its content stays.

    Other threads run meanwhile. The piece begins at a multiple of the system's page size. Best effort: before Linux
    5.14 nothing happens, and memory that lacks shows itself when it is used.
    """
    _libc.madvise(piece.ctypes.data, piece.nbytes, _MADV_POPULATE_WRITE)


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


@dataclass(frozen=True, order=True)
class HostRoom:
    """Bytes that this process may still take, and what says so: "MemAvailable of the host", or a cgroup's file."""

    available_bytes: int
    limit: str


def host_room(root: Path = Path("/")) -> HostRoom:
    """The tightest of MemAvailable and what the cgroups leave.

    `root` stands before /proc and /sys (tests give a directory). Every cgroup from the process's own up to the
    mount's top counts, version 2 (memory.max, and memory.high, over which a process is slowed to a halt) and
    version 1; one that is absent or unlimited does not.
    """
    return min([HostRoom(_mem_available(root), "MemAvailable of the host"), *_cgroup_left(root)])


def available_host_bytes(root: Path = Path("/")) -> int:
    """The bytes of `host_room`."""
    return host_room(root).available_bytes


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise ConfigError(f"{root / 'proc/meminfo'} has no MemAvailable line: Linux 3.14 or later is needed")


def _cgroup_left(root: Path) -> Iterator[HostRoom]:
    """Room left in each limiting cgroup: limit less use, where reclaimable file cache is not use."""
    table = root / "proc/self/cgroup"
    if not table.exists():
        return
    for line in table.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits: tuple[str, ...] = ("memory.max", "memory.high")
            use = ("memory.current", "inactive_file")
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            limits = ("memory.limit_in_bytes",)
            use = ("memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        for group in _up_to_mount(mount, path):
            for limit in limits:
                left = _group_left(group, limit, *use)
                if left is not None:
                    yield HostRoom(left, str(group / limit))


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
