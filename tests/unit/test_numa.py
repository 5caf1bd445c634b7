"""Placement of memory by NUMA node: what the kernel says of a PCI device, and pages that go where they should."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import pytest

from kvmanager.allocators.backing import open_memfd, place
from kvmanager.allocators.numa import NO_NODE, gpu_node, node_of, pci_node, prefer_node
from kvmanager.daemon.faultin import FaultIn
from kvmanager.units import MIB


@pytest.fixture
def address():
    """Of 4 MiB that nobody has touched."""
    with mmap.mmap(-1, 4 * MIB) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        yield ctypes.addressof(start)
        del start


def has_numa() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        try:
            prefer_node(ctypes.addressof(start), mmap.PAGESIZE, 0)
        except OSError:
            return False
        finally:
            del start
    return True


needs_numa = pytest.mark.skipif(not has_numa(), reason="this kernel places no memory")


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", NO_NODE), ("", NO_NODE), (None, NO_NODE)])
def test_the_node_of_a_device_is_what_the_kernel_says(tmp_path, text, node) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert pci_node("0000:1b:00.0", tmp_path) == node


def test_the_cpu_is_near_to_no_node_of_its_own() -> None:
    assert gpu_node("cpu") == NO_NODE


@needs_numa
def test_pages_lie_on_the_node_that_was_asked_for(address) -> None:
    prefer_node(address, 4 * MIB, 0)
    ctypes.memset(address, 1, 4 * MIB)
    assert node_of(address + 2 * MIB) == 0


@needs_numa
def test_a_node_that_is_not_there_is_an_error(address) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        prefer_node(address, 4 * MIB, 1000)


@needs_numa
def test_a_memfd_is_placed_whoever_faults_it_in() -> None:
    fd = open_memfd("m", 4 * MIB)
    try:
        place(fd, 4 * MIB, 0)
        assert os.fstat(fd).st_blocks == 0, "it is not faulted in by that"
        with mmap.mmap(fd, 4 * MIB) as mapping:
            start = ctypes.c_char.from_buffer(mapping)
            ctypes.memset(ctypes.addressof(start), 1, 4 * MIB)
            assert node_of(ctypes.addressof(start)) == 0
            del start
    finally:
        os.close(fd)


@pytest.mark.parametrize("node", [0, 1000])
def test_faulting_in_goes_on_where_memory_cant_be_placed(node, caplog) -> None:
    fd = open_memfd("m", 4 * MIB)
    try:
        with caplog.at_level("INFO", "kvmanager.memory"):
            assert FaultIn([(fd, 4 * MIB)], node).run(lambda: False)
        assert os.fstat(fd).st_blocks * 512 == 4 * MIB
        placed = has_numa() and node == 0
        assert ("goes to NUMA node" if placed else "is not placed on NUMA node") in caplog.text
    finally:
        os.close(fd)
