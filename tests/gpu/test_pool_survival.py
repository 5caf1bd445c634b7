"""A KV cache that torch made in the daemon's HBM: the engine is killed, the next one finds the same bytes in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_support import memory_is_given_back

from kvmanager.units import MIB

pytestmark = pytest.mark.gpu
SIZE = 256 * MIB


class Engine:
    """A `pool_process.py`."""

    def __init__(self, fd: int) -> None:
        copy = os.dup(fd)
        os.set_inheritable(copy, True)
        command = [sys.executable, str(Path(__file__).parent / "pool_process.py"), str(copy), str(SIZE)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(copy,)
        )
        os.close(copy)
        self.offsets = [int(word) for word in self.hear().split()]

    def hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended with {self._process.wait()}"
        return line.strip()

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def memory() -> Iterator[int]:
    """HBM as the daemon makes it: this process has no CUDA context of its own."""
    from kvmanager.allocators.device_memory import create_device_memory

    with memory_is_given_back():
        fd = create_device_memory("test", "cuda:0", SIZE)
        yield fd
        os.close(fd)


def test_a_kv_cache_outlives_its_engine(memory: int) -> None:
    first = Engine(memory)
    try:
        assert first.ask("write 7") == "written"
        assert first.ask("check 7") == "right"
        assert first.ask("check 8") == "WRONG", "the check can fail"
        used = int(first.ask("used"))
        print(f"offsets {first.offsets}, {used} bytes of {SIZE} given out")
        assert used >= 96 * MIB, "the tensors lie elsewhere"
        assert first.ask("full") == "refused"
    finally:
        first.kill()
    second = Engine(memory)
    try:
        assert second.offsets == first.offsets
        assert second.ask("check 7") == "right"
        assert second.ask("write 9") == "written"
    finally:
        second.kill()
    third = Engine(memory)
    try:
        assert third.ask("check 9") == "right"
    finally:
        third.kill()
