"""What the GPU tests share: the processes of `gpu_process.py`, and what the GPU says of its memory."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

WAIT_S = 60.0


class Process:
    """A process of `gpu_process.py`."""

    def __init__(self, role: str, *arguments: int, fds: Sequence[int] = ()) -> None:
        command = [sys.executable, str(Path(__file__).parent / "gpu_process.py"), role, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=tuple(fds)
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    def hear(self) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        return line.strip()

    def tell(self, line: str) -> None:
        """A line for it to obey."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def ask(self, line: str) -> str:
        """Its answer to a line."""
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL; does not wait."""
        self._process.kill()

    def wait_dead(self) -> None:
        """Until the kernel reports its exit, by pidfd."""
        assert select.select([self.pidfd], [], [], WAIT_S)[0]

    def close(self) -> None:
        """Kills it if it still lives, and takes its exit."""
        self._process.kill()
        self._process.wait()
        os.close(self.pidfd)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def processes() -> Iterator[Callable[..., Process]]:
    """Starts processes; all are gone at the end."""
    with contextlib.ExitStack() as stack:

        def start(role: str, *arguments: int, fds: Sequence[int] = ()) -> Process:
            process = Process(role, *arguments, fds=fds)
            stack.callback(process.close)
            return process

        yield start


def used_mib() -> int:
    """Memory of GPU 0 in use, in MiB, as nvidia-smi tells."""
    return int(_smi("--query-gpu=memory.used", "--id=0"))


def compute_pids() -> set[int]:
    """Processes with a context on GPU 0."""
    return {int(line) for line in _smi("--query-compute-apps=pid", "--id=0").split() if line.isdigit()}


def _smi(*query: str) -> str:
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _others_mib() -> int:
    """Memory in use, once torch here has given back what it only keeps for later."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()
    return used_mib()


@contextlib.contextmanager
def memory_is_given_back() -> Iterator[int]:
    """What is done within leaves the GPU's memory as it was; yields the MiB in use before."""
    before = _others_mib()
    yield before
    give_up = time.monotonic() + WAIT_S
    while _others_mib() > before:
        assert time.monotonic() < give_up, f"{used_mib()} MiB in use, {before} before"
        time.sleep(0.1)
