"""Host memory beside its GPU: the driver's own idea of the nearest NUMA node, against ours and against pages."""

import ctypes
import mmap
import os

import pytest

from kvmanager.allocators.backing import open_memfd, place
from kvmanager.allocators.cuda_driver import call, driver
from kvmanager.allocators.numa import NO_NODE, _pci_address, gpu_node, node_of
from kvmanager.units import MIB

pytestmark = pytest.mark.gpu


def test_memory_lies_on_the_node_of_the_gpu():
    node = gpu_node("cuda:0")
    attribute = getattr(driver().CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID", None)
    drivers = None if attribute is None else int(call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", 0)))
    print(f"{_pci_address('cuda:0')}: node {node}, the driver says {drivers}")
    assert os.path.isdir(f"/sys/bus/pci/devices/{_pci_address('cuda:0')}")
    if node == NO_NODE:
        return  # one node, or a machine that does not say
    if drivers is not None and drivers >= 0:
        assert node == drivers
    fd = open_memfd("m", 4 * MIB)
    place(fd, 4 * MIB, node)
    with mmap.mmap(fd, 4 * MIB) as mapping:
        start = ctypes.c_char.from_buffer(mapping)
        ctypes.memset(ctypes.addressof(start), 1, 4 * MIB)
        assert node_of(ctypes.addressof(start) + MIB) == node
        del start
    os.close(fd)
