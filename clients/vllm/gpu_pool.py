"""A torch memory pool over GPU memory of the daemon: tensors made in it outlive the process that made them.

torch takes its allocators from a shared object, which is compiled here with the system's C compiler (no CUDA headers).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvmanager.errors import DeviceError

SOURCE = Path(__file__).with_name("region_allocator.c")


def compile_allocator(folder: Path) -> Path:
    """The shared object, in `folder`. Raises DeviceError where there is no C compiler."""
    target = folder / "libkvm_region_allocator.so"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror"]
    command = [os.environ.get("CC", "cc"), *flags, "-o", str(target), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        raise DeviceError(f"no C compiler: {error}; install one, or set CC") from error
    if done.returncode:
        raise DeviceError(f"{' '.join(command)}: {done.stderr.strip()}")
    return target


class RegionPool:
    """A pool over [address, address + size_bytes) of GPU memory that this process has mapped; one a process.

    Pieces are given out in the order in which they are asked for and never taken back, so an engine that makes the
    same tensors in the same order finds the same bytes in them after a restart.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        """Raises DeviceError where the allocator can't be compiled."""
        import torch

        self._folder = tempfile.TemporaryDirectory(prefix="kvmanager-")
        path = compile_allocator(Path(self._folder.name))
        self._library = ctypes.CDLL(str(path))
        self._library.kvm_region.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        self._library.kvm_used.restype = ctypes.c_size_t
        self._library.kvm_region(address, size_bytes)
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "kvm_alloc", "kvm_free")
        self._pool: Any = torch.cuda.MemPool(self._allocator.allocator())  # type: ignore[no-untyped-call]

    @property
    def used_bytes(self) -> int:
        """Given out so far."""
        return int(self._library.kvm_used())

    def context(self) -> AbstractContextManager[Any]:
        """Tensors made within lie in the region."""
        import torch

        context: AbstractContextManager[Any] = torch.cuda.use_mem_pool(self._pool)
        return context
