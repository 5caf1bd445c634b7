"""The allocator behind a GPU memory pool, compiled and called without a GPU."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from kvmanager.clients.vllm.gpu_pool import compile_allocator
from kvmanager.errors import DeviceError


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_pieces_follow_each_other_until_the_region_is_full(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(compile_allocator(tmp_path)))
    library.kvm_alloc.restype = ctypes.c_void_p
    library.kvm_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    library.kvm_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    library.kvm_region.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    base = 1 << 40
    library.kvm_region(base, 10_000)
    given = [library.kvm_alloc(size, 0, None) for size in (1, 512, 513, 5000)]
    assert given == [base, base + 512, base + 1024, base + 2048]
    assert library.kvm_alloc(5000, 0, None) is None
    assert library.kvm_alloc(-1, 0, None) is None
    library.kvm_free(base, 1, 0, None)
    assert library.kvm_alloc(2000, 0, None) == base + 7168, "what was given stays given"


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    with pytest.raises(DeviceError, match="compiler"):
        compile_allocator(tmp_path)
