"""Sealed host memory, and how much of it there is."""

import ctypes
import errno
import fcntl
import os
import resource
import types
from pathlib import Path

import numpy as np
import pytest

from kvmanager.allocators import backing
from kvmanager.allocators.backing import (
    HostRoom,
    available_host_bytes,
    check_sealed,
    create_memfd,
    host_room,
    map_fd,
    open_memfd,
    populate,
)
from kvmanager.errors import ConfigError, InvalidArgument
from kvmanager.units import GIB, KIB, MIB


def test_memory_is_reserved_zeroed_sealed_and_not_inherited():
    fd = create_memfd("pool", 3 * MIB + 17)
    try:
        status = os.fstat(fd)
        assert status.st_size == 3 * MIB + 17
        assert status.st_blocks * 512 >= 3 * MIB + 17, "space must be there before the first touch"
        assert not os.get_inheritable(fd)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK) == 6
        with pytest.raises(PermissionError):
            os.ftruncate(fd, MIB)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 8 * MIB)
        check_sealed(fd, 3 * MIB + 17)
        assert not map_fd(fd, 3 * MIB + 17).any()
    finally:
        os.close(fd)


def test_two_mappings_share_bytes_and_outlive_the_fd():
    fd = create_memfd("shared", 64 * KIB)
    writer, reader = map_fd(fd, 64 * KIB), map_fd(fd, 64 * KIB)
    os.close(fd)
    writer[:] = np.arange(64 * KIB, dtype=np.uint64).astype(np.uint8)
    assert np.array_equal(reader, writer)
    assert reader.flags.writeable


def test_more_than_the_host_has_is_a_typed_error_and_leaks_no_fd():
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"'huge' needs .* smaller pool"):
        create_memfd("huge", available_host_bytes() + GIB)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_refused_reservation_is_a_typed_error_and_leaks_no_fd(monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError):
        create_memfd("refused", MIB)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_no_sizes(size):
    with pytest.raises(InvalidArgument):
        create_memfd("none", size)


def test_mapping_beyond_the_file_is_refused_not_a_bus_error():
    fd = create_memfd("short", 4 * KIB)
    try:
        with pytest.raises(InvalidArgument, match="4096"):
            map_fd(fd, resource.getpagesize() * 2)
        with pytest.raises(InvalidArgument):
            check_sealed(fd, 8 * KIB)
    finally:
        os.close(fd)


def test_unsealed_and_unsealable_files_are_told_apart_from_ours(tmp_path):
    fd = os.memfd_create("open", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(InvalidArgument, match="shrinking"):
        check_sealed(fd, 4096)
    os.close(fd)
    path = tmp_path / "plain"
    path.write_bytes(bytes(4096))
    with path.open("rb") as plain, pytest.raises(InvalidArgument, match="can't be sealed"):
        check_sealed(plain.fileno(), 4096)


def _machine(root: Path, available_kib: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def _group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(f"{text}\n")


def test_no_cgroup_limit_leaves_the_host(tmp_path):
    root = _machine(tmp_path, 1000, "0::/a/b\n")
    assert available_host_bytes(root) == 1000 * KIB
    _group(root / "sys/fs/cgroup/a/b", memory__max="max", memory__current=5)
    assert available_host_bytes(root) == 1000 * KIB


def test_the_tightest_cgroup_of_version_2_counts_without_its_file_cache(tmp_path):
    root = _machine(tmp_path, 10**9, "0::/pod/box\n")
    _group(root / "sys/fs/cgroup/pod/box", memory__max=9000, memory__current=1000)
    _group(root / "sys/fs/cgroup/pod", memory__max=5000, memory__current=4000, memory__stat="anon 1\ninactive_file 500")
    assert available_host_bytes(root) == 1500


def test_the_limit_that_binds_is_named(tmp_path):
    root = _machine(tmp_path, 10, "0::/pod\n")
    assert host_room(root) == HostRoom(10 * KIB, "MemAvailable of the host")
    group = root / "sys/fs/cgroup/pod"
    _group(group, memory__max=9000, memory__high=4000, memory__current=1000)
    assert host_room(root) == HostRoom(3000, str(group / "memory.high"))
    _group(group, memory__high="max")
    assert host_room(root) == HostRoom(8000, str(group / "memory.max"))


def test_populate_takes_the_memory_and_keeps_what_is_there():
    size = 3 * MIB + 17
    fd = open_memfd("region", size)
    try:
        assert os.fstat(fd).st_blocks == 0
        check_sealed(fd, size)
        os.pwrite(fd, b"kept", MIB + 5)
        populate(fd, MIB, MIB)
        assert 512 * os.fstat(fd).st_blocks == MIB
        for offset in (0, 2 * MIB):
            populate(fd, offset, min(MIB, size - offset))
        populate(fd, 3 * MIB, 17)
        assert 512 * os.fstat(fd).st_blocks >= size
        assert os.pread(fd, 6, MIB + 4) == b"\0kept\0"
    finally:
        os.close(fd)


def _madvise_fails(monkeypatch, code):
    def madvise(*_):
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(backing, "_libc", types.SimpleNamespace(madvise=madvise))


def test_populate_reserves_where_the_kernel_is_too_old_for_it(monkeypatch):
    _madvise_fails(monkeypatch, errno.EINVAL)
    fd = open_memfd("old", 4 * MIB)
    try:
        populate(fd, MIB, MIB)
        assert 512 * os.fstat(fd).st_blocks == MIB
    finally:
        os.close(fd)


def test_populate_says_that_memory_ran_out(monkeypatch):
    _madvise_fails(monkeypatch, errno.ENOMEM)
    fd = open_memfd("full", MIB)
    try:
        with pytest.raises(ConfigError, match=r"memory ran out .*Cannot allocate memory"):
            populate(fd, 0, MIB)
    finally:
        os.close(fd)


def test_version_1_and_a_path_that_does_not_exist_in_the_container(tmp_path):
    root = _machine(tmp_path, 10**9, "4:memory:/host/only\n0::/\n")
    top = root / "sys/fs/cgroup/memory"
    _group(top, memory__limit_in_bytes=8000, memory__usage_in_bytes=9000)
    assert available_host_bytes(root) == 0, "over its limit already: nothing left, not a negative size"
    _group(top, memory__limit_in_bytes=9223372036854771712)
    assert available_host_bytes(root) == 10**9 * KIB


def test_the_real_machine_answers():
    assert MIB < available_host_bytes() < 1 << 50
