"""Which NUMA node a GPU is nearest to, and memory that is placed there. Linux on x86-64 and arm64."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

from kvmanager.allocators.cuda_driver import call, device_ordinal, driver

NO_NODE: Final = -1
_MPOL_PREFERRED: Final = 1
_MPOL_MF_MOVE: Final = 2
_MPOL_F_NODE_OF_ADDRESS: Final = 1 | 2  # MPOL_F_NODE, MPOL_F_ADDR
_SYSCALLS: Final = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of mbind and get_mempolicy: the C library has no names for them."""
_MASK_BITS: Final = 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def gpu_node(device: str, root: Path = Path("/")) -> int:
    """The NUMA node of "cuda:N", as the kernel says; NO_NODE where there is but one or it says none, and for "cpu".

    Makes no CUDA context. `root` stands before /sys (tests give a directory). Raises DeviceError.
    """
    return NO_NODE if device == "cpu" else pci_node(_pci_address(device), root)


def pci_node(address: str, root: Path = Path("/")) -> int:
    """The NUMA node of a PCI device ("0000:1b:00.0"); NO_NODE where the kernel says none."""
    file = root / "sys/bus/pci/devices" / address / "numa_node"
    try:
        return max(int(file.read_text()), NO_NODE)
    except (OSError, ValueError):
        return NO_NODE


def _pci_address(device: str) -> str:
    attribute = driver().CUdevice_attribute
    handle = call("cuDeviceGet", device_ordinal(device))
    domain, bus, slot = (
        int(call("cuDeviceGetAttribute", kind, handle))
        for kind in (
            attribute.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            attribute.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            attribute.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        )
    )
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def prefer_node(address: int, size_bytes: int, node: int) -> None:
    """Pages of a mapping are taken from a node, or from another where it is full; those that are there are moved.

    Of a shared mapping of a memfd this holds for the memory itself, whoever faults it in. `address` is that of an OS
    page. Raises OSError: ENOSYS on a kernel without NUMA, EINVAL for a node that is not there, EPERM in a sandbox.
    """
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    _call(0, ctypes.c_void_p(address), ctypes.c_ulong(size_bytes), _MPOL_PREFERRED, mask, _MASK_BITS, _MPOL_MF_MOVE)


def node_of(address: int) -> int:
    """The node of the page at an address, which is faulted in. Raises OSError."""
    node = ctypes.c_int()
    _call(1, ctypes.byref(node), None, ctypes.c_ulong(0), ctypes.c_void_p(address), _MPOL_F_NODE_OF_ADDRESS)
    return node.value


def _call(which: int, *arguments: object) -> None:
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"no NUMA calls known for {platform.machine()}")
    if _libc.syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
