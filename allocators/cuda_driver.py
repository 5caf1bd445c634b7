"""The CUDA driver, loaded at its first use: a machine without a GPU never needs it.

Loading it ends the freedom to fork. A forked child inherits the driver's descriptors, so the kernels of a
parent that was killed might go on writing after its pidfd is readable; and CUDA does not work in the child
anyway. So a child forked from here exits at once. Programs started with `subprocess` are not affected: the
driver's descriptors close on exec.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from types import ModuleType
from typing import Any, Final

from kvmanager.errors import DeviceError, InvalidArgument

EXIT_FORKED: Final = 70
"""Exit code of a child that was forked after CUDA was loaded (EX_SOFTWARE of sysexits.h)."""
_DEVICE = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")


def device_ordinal(device: str) -> int:
    """3 for "cuda:3". Raises InvalidArgument for anything else."""
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise InvalidArgument(f"device {device!r} is no GPU; a GPU is cuda:0, cuda:1, ...")
    return int(match[1])


@functools.cache
def driver() -> ModuleType:
    """`cuda.bindings.driver`, initialised; makes no context. Raises DeviceError where there is no driver or GPU."""
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(f"no CUDA bindings for Python ({error}); install kvmanager[gpu]") from error
    forbid_fork()
    try:
        (status,) = module.cuInit(0)
    except RuntimeError as error:
        raise DeviceError(f"no CUDA driver on this machine: {error}") from error
    if status != module.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver does not start: {status.name}")
    return module


@functools.cache
def forbid_fork() -> None:
    """From now on a forked child of this process exits with EXIT_FORKED and says why."""
    os.register_at_fork(after_in_child=_leave_forked_child)


def _leave_forked_child() -> None:
    text = b"kvmanager: fork() in a process that uses GPU memory: the child ends here; start programs with exec\n"
    os.write(2, text)
    os._exit(EXIT_FORKED)


def call(name: str, *arguments: Any) -> Any:
    """Calls a driver function; its value, or None. Raises DeviceError naming function and status."""
    module = driver()
    status, *values = getattr(module, name)(*arguments)
    check(name, status)
    return values[0] if values else None


def check(name: str, status: Any) -> None:
    """Raises DeviceError unless `status` (a CUresult or its number) is success."""
    module = driver()
    if int(status) != int(module.CUresult.CUDA_SUCCESS):
        raise DeviceError(f"{name}: {module.CUresult(int(status)).name}")


def device_handle(ordinal: int) -> Any:
    """The driver's handle of a GPU. Raises DeviceError naming how many there are."""
    count = call("cuDeviceGetCount")
    if not 0 <= ordinal < count:
        raise DeviceError(f"no GPU {ordinal}: this process sees {count}")
    return call("cuDeviceGet", ordinal)


class DeviceContext:
    """The GPU's primary context (the one that torch uses), made current in the thread that constructs this."""

    def __init__(self, device: str) -> None:
        """Raises DeviceError."""
        self.ordinal = device_ordinal(device)
        self._handle = device_handle(self.ordinal)
        self._context = call("cuDevicePrimaryCtxRetain", self._handle)
        self.make_current()

    def make_current(self) -> None:
        """For calls of the current thread."""
        call("cuCtxSetCurrent", self._context)
