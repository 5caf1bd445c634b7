"""GPU memory that outlives its maker: made without a context, passed on as a descriptor, mapped by others.

`cuMemCreate` and the export need no CUDA context, so the daemon makes HBM and stays out of the GPU. The bytes
live as long as anybody holds the descriptor, also a process that never loaded CUDA. An imported handle can't be
exported again: it is always the first descriptor that is passed on.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
from typing import Any, Final

from kvmanager.allocators.cuda_driver import call, check, device_handle, device_ordinal, driver
from kvmanager.errors import ConfigError, DeviceError, InvalidArgument
from kvmanager.units import format_bytes

_F_DUPFD_QUERY: Final = 1027  # Linux 6.10; not in Python's fcntl module
_KCMP: Final = {"x86_64": 312, "aarch64": 272}
_KCMP_FILE: Final = 0


def create_device_memory(name: str, device: str, size_bytes: int) -> int:
    """New memory of at least `size_bytes` bytes on `device`, as a descriptor that the caller owns, close-on-exec.

    Rounded up to the driver's granularity; a NIC may reach it (the GPUDirect flag is set). The content is
    undefined. Raises ConfigError when it does not fit, DeviceError when the driver refuses.
    """
    if size_bytes <= 0:
        raise InvalidArgument(f"memory {name!r} of {size_bytes} bytes: the size must be positive")
    module = driver()
    ordinal = device_ordinal(device)
    properties = _properties(ordinal)
    rounded = _rounded(properties, size_bytes)
    status, handle = module.cuMemCreate(rounded, properties, 0)
    if status == module.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise ConfigError(
            f"memory {name!r} needs {rounded} bytes ({format_bytes(rounded)}), {device} has no room for it: "
            "configure a smaller pool, or see who holds its memory with nvidia-smi"
        )
    check("cuMemCreate", status)
    try:
        fd = int(call("cuMemExportToShareableHandle", handle, _handle_type(module), 0))
    finally:
        call("cuMemRelease", handle)
    os.set_inheritable(fd, False)
    return fd


class DeviceMapping:
    """GPU memory mapped into this process, readable and writable by its GPU. It needs no descriptor any more.

    `address` is valid in kernels and copies of any context of the device.
    """

    def __init__(self, fd: int, device: str, size_bytes: int) -> None:
        """Maps the memory behind `fd`, which stays the caller's.

        Raises InvalidArgument when that is no GPU memory or smaller than `size_bytes`, DeviceError.
        """
        module = driver()
        self.device = device
        self.size_bytes = size_bytes
        ordinal = device_ordinal(device)
        device_handle(ordinal)
        properties = _properties(ordinal)
        self._mapped_bytes = _rounded(properties, size_bytes)
        handle = self._import(fd)
        try:
            self._reserved = call("cuMemAddressReserve", self._mapped_bytes, 0, module.CUdeviceptr(0), 0)
            self.address = int(self._reserved)
            try:
                self._map(handle, properties.location)
            except BaseException:
                call("cuMemAddressFree", self._reserved, self._mapped_bytes)
                raise
        finally:
            call("cuMemRelease", handle)

    def _import(self, fd: int) -> Any:
        try:
            return call("cuMemImportFromShareableHandle", fd, _handle_type(driver()))
        except DeviceError as error:
            raise InvalidArgument(f"fd {fd} holds no GPU memory that this process can map: {error}") from error

    def _map(self, handle: Any, location: Any) -> None:
        module = driver()
        try:
            call("cuMemMap", self._reserved, self._mapped_bytes, 0, handle, 0)
        except DeviceError as error:
            raise InvalidArgument(f"the memory does not hold {self._mapped_bytes} bytes: {error}") from error
        access = module.CUmemAccessDesc()
        access.location = location
        access.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            call("cuMemSetAccess", self._reserved, self._mapped_bytes, [access], 1)
        except BaseException:
            call("cuMemUnmap", self._reserved, self._mapped_bytes)
            raise

    def close(self) -> None:
        """Ends the mapping once; nothing of this process may use it any more. Raises DeviceError."""
        if self._mapped_bytes:
            size, self._mapped_bytes = self._mapped_bytes, 0
            call("cuMemUnmap", self._reserved, size)
            call("cuMemAddressFree", self._reserved, size)


def check_no_memfd(fd: int) -> None:
    """Refuses (InvalidArgument) host memory where GPU memory is expected; needs no CUDA."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return
    raise InvalidArgument(f"fd {fd} is host memory (a memfd), the region says GPU memory")


def same_memory(fd: int, other: int) -> bool:
    """Whether two descriptors are duplicates of one. False also where the kernel won't tell: unsure is no.

    The descriptors of all GPU memory have one inode, so it says nothing.
    """
    try:
        return fcntl.fcntl(fd, _F_DUPFD_QUERY, other) == 1
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    number = _KCMP.get(platform.machine())
    if number is None:
        return False
    pid = os.getpid()
    return int(ctypes.CDLL(None).syscall(number, pid, pid, _KCMP_FILE, fd, other)) == 0


def _properties(ordinal: int) -> Any:
    module = driver()
    device_handle(ordinal)
    properties = module.CUmemAllocationProp()
    properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _handle_type(module)
    properties.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.allocFlags.gpuDirectRDMACapable = 1
    return properties


def _handle_type(module: Any) -> Any:
    return module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _rounded(properties: Any, size_bytes: int) -> int:
    option = driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = int(call("cuMemGetAllocationGranularity", properties, option))
    return -(-size_bytes // granularity) * granularity
