"""CUDA C++ from `kernels/`, compiled when it is first needed and launched into torch's current stream."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, Final

import torch

from kvmanager.errors import DeviceError

_FOLDER: Final = Path(__file__).parent / "kernels"


def cupy() -> Any:
    """The module. Raises DeviceError where it is missing."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(f"no cupy ({error}); install kvmanager[gpu]") from error


class _TorchStream:
    """Torch's current stream, by the protocol that cupy takes streams of others by."""

    def __init__(self) -> None:
        self._handle = int(torch.cuda.current_stream().cuda_stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


@functools.cache
def compiled(file: str, constants: tuple[tuple[str, int], ...] = ()) -> Any:
    """`kernels/<file>` as a cupy module, with these macros. Raises DeviceError, cupy's error for a bad source."""
    options = tuple(f"-D{name}={value}" for name, value in constants)
    return cupy().RawModule(code=(_FOLDER / file).read_text(encoding="utf-8"), options=options)


_DYNAMIC_SHARED_BYTES: Final = 8
"""The driver's number of a function's attribute: shared memory that a launch may ask for."""


@functools.cache
def compiled_for(architecture: str, file: str, kernel: str, shared_bytes: int, device: int = 0) -> Any:
    """One kernel of a file that needs an architecture's own instructions ("sm_90a"), for launches on one GPU.

    cupy's own modules are compiled for what all GPUs of a generation share. Raises DeviceError, with the compiler's
    words, for a bad source.
    """
    nvrtc = cupy().cuda.nvrtc
    program = nvrtc.createProgram((_FOLDER / file).read_text(encoding="utf-8"), file, [], [])
    try:
        nvrtc.compileProgram(program, (f"-arch={architecture}", "--std=c++17"))
        binary = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise DeviceError(f"{file} for {architecture}: {error}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    with cupy().cuda.Device(device):
        module = cupy().cuda.Module()
        module.load(binary)
        function = module.get_function(kernel)
        cupy().cuda.driver.funcSetAttribute(function.ptr, _DYNAMIC_SHARED_BYTES, shared_bytes)
    return function


def most_shared_bytes(device: int = 0) -> int:
    """Shared memory that one block may have on this GPU, static and dynamic."""
    return int(cupy().cuda.runtime.getDeviceProperties(device)["sharedMemPerBlockOptin"])


def launch(kernel: Any, blocks: int, threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
    """Queues a kernel; allocates nothing, so a CUDA graph may capture it.

    Tensors are passed by their address, numbers as numpy scalars of the parameter's width.
    """
    plain = tuple(part.data_ptr() if isinstance(part, torch.Tensor) else part for part in arguments)
    with cupy().cuda.Stream.from_external(_TorchStream()):
        kernel((blocks,), (threads,), plain, shared_mem=shared_bytes)
