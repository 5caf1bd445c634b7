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


@functools.cache
def compiled(file: str, constants: tuple[tuple[str, int], ...] = ()) -> Any:
    """`kernels/<file>` as a cupy module, with these macros. Raises DeviceError, cupy's error for a bad source."""
    options = tuple(f"-D{name}={value}" for name, value in constants)
    return cupy().RawModule(code=(_FOLDER / file).read_text(encoding="utf-8"), options=options)


def launch(kernel: Any, blocks: int, threads: int, arguments: tuple[Any, ...], shared_bytes: int = 0) -> None:
    """Queues a kernel; allocates nothing, so a CUDA graph may capture it.

    Tensors are passed by their address, numbers as numpy scalars of the parameter's width.
    """
    plain = tuple(part.data_ptr() if isinstance(part, torch.Tensor) else part for part in arguments)
    with cupy().cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel((blocks,), (threads,), plain, shared_mem=shared_bytes)
