"""On a GPU: what copies of another process do to a decode-like loop and to swap-in, and what those do to the copies.

    python -m tests.bench.gpu_loop HOST_FD

is the other process: it takes a line a load (`LOADS`) and carries it out flat out until the next line.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvmanager.clients.glm.gpu_resolver import Resolution
from kvmanager.clients.glm.gpu_swapin import RowPieces, SwapIn
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.transport.cuda import DEFAULT_TUNING, CudaExecutor, Tuning
from kvmanager.transport.kernel_windows import PAUSE_NS
from kvmanager.transport.pacing import LinkRates, Pacer
from kvmanager.units import GIB, MIB, MILLISECOND_NS
from tests.bench.figure import Figure
from tests.bench.gpu_checksums import SAMPLE, summed
from tests.bench.gpu_memory import DEVICE, GB, PAGE, Memory, page_plans, permuted_plan, seconds_of

HOST_BYTES = 8 * GIB
PLANS, LOAD_PAGES = 16, 64
NO_PAUSE = Tuning(kernel_pause_ns=0)
HALF_PAUSE = Tuning(kernel_pause_ns=PAUSE_NS // 2)
BY_KERNEL = Tuning(small_copy_bytes=MIB)
FEW_BLOCKS = Tuning(sum_blocks=32)
LOADS = {
    "whole": "offload of whole pages",
    "summed": "the same, checksums of all",
    "summed-few": f"the same, checksums of all by {FEW_BLOCKS.sum_blocks} blocks",
    "summed-half": f"the same, checksums of all, kernels every {HALF_PAUSE.kernel_pause_ns // MILLISECOND_NS} ms",
    "summed-any": "the same, checksums of all, kernels at any time",
    "sampled": f"the same, checksums of one in {SAMPLE}",
    "onboard": "onboard of whole pages",
    "permuted": "permuted offload",
    "permuted-half": f"the same, kernels every {HALF_PAUSE.kernel_pause_ns // MILLISECOND_NS} ms",
    "permuted-any": "the same, kernels at any time",
    "permuted-24": "the same at 24 GB/s at most",
    "permuted-20": "the same at 20 GB/s at most",
    "kernel-permuted": "permuted offload by the kernel alone",
    "kernel-4": "the same at 4 GB/s at most",
    "kernel-2": "the same at 2 GB/s at most",
    "kernel-1": "the same at 1 GB/s at most",
}
LOAD_QUEUED = 8
"""Plans: more than a pause of the kernels takes on the link."""
LOOP_STEPS, SWAP_STEPS = 100, 300
REQUESTS, ROWS, ROW_BYTES, LAUNCHES = 16, 205, 4 * 656, 8


class Load:
    """The other process. Its host memory is ours."""

    def __init__(self, memory: Memory) -> None:
        fd = memory.host_fd
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.gpu_loop", str(fd)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, pass_fds=(fd,),
        )  # fmt: skip
        self._hear()

    def begin(self, what: str) -> None:
        """Copies from here on."""
        self._tell(what)
        self._hear()

    def end(self) -> float:
        """GB/s since it began."""
        self._tell("end")
        return float(self._hear())

    def close(self) -> None:
        """It is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the other process ended with {self._process.wait()}"
        return line.strip()


def figures() -> Iterator[Figure]:
    """The loop beside every load, then swap-in beside both directions of whole pages."""
    memory = Memory(HOST_BYTES, 64 * PAGE)
    load = Load(memory)
    alone = {what: _rate_alone(load, what) for what in LOADS}
    yield from _beside(load, "a decode-like loop", _loop(), LOOP_STEPS, list(LOADS), alone)
    rows = REQUESTS * ROWS
    name = f"swap-in of {LAUNCHES} x {rows} rows from the same memory"
    yield from _beside(load, name, _swaps(memory), SWAP_STEPS, ["whole", "summed", "onboard", "permuted"], alone)
    load.close()
    memory.close()


def _rate_alone(load: Load, what: str) -> float:
    load.begin(what)
    time.sleep(0.4)
    return load.end()


def _beside(
    load: Load, name: str, step: Callable[[], object], steps: int, loads: list[str], alone: dict[str, float]
) -> Iterator[Figure]:
    """Each load's step beside the mean of those before and after it."""
    before = _median(step, steps)
    yield Figure(f"gpu: {name}, a step", before * 1e3, "ms", "itself", 1.0)
    for what in loads:
        load.begin(what)
        beside = _median(step, steps)
        rate = load.end()
        after = _median(step, steps)
        ratio = 2 * beside / (before + after)
        yield Figure(f"gpu: {name} beside {LOADS[what]}", beside * 1e3, "ms", "alone, before and after", ratio)
        yield Figure(f"gpu: {LOADS[what]} beside {name}", rate, "GB/s", "alone", rate / alone[what])
        before = after


def _median(step: Callable[[], object], steps: int) -> float:
    for _ in range(steps // 10):
        step()
    return sorted(seconds_of(step) for _ in range(steps))[steps // 2]


def _loop() -> Callable[[], object]:
    """20 products and 20 passes over 256 MiB."""
    a = torch.randn((4_096, 4_096), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((4_096, 4_096), device="cuda", dtype=torch.bfloat16)
    big = torch.empty(256 * MIB, device="cuda", dtype=torch.uint8)

    def step() -> None:
        for _ in range(20):
            torch.matmul(a, b)
            big.add_(1)
        torch.cuda.synchronize()

    return step


def _swaps(memory: Memory) -> Callable[[], object]:
    """Launches that each read other rows of the host memory, wherever they lie."""
    target = torch.empty(REQUESTS * ROWS * ROW_BYTES, dtype=torch.uint8, device="cuda")
    swap = SwapIn(memory.host.ctypes.data, target.data_ptr())
    rng = np.random.default_rng(4)
    none = torch.empty(0, dtype=torch.int64, device="cuda")
    places = torch.arange(REQUESTS * ROWS, device="cuda").reshape(REQUESTS, ROWS) * ROW_BYTES
    count = torch.full((REQUESTS,), ROWS, dtype=torch.int32, device="cuda")
    lists = [
        Resolution(none, torch.from_numpy(rng.integers(0, len(memory.host) // ROW_BYTES, (REQUESTS, ROWS)) * ROW_BYTES)
                   .cuda(), places, count)
        for _ in range(LAUNCHES)
    ]  # fmt: skip

    def step() -> None:
        for rows in lists:
            swap.copy(rows, RowPieces(1, ROW_BYTES))
        torch.cuda.synchronize()

    return step


# The other process


@dataclass(frozen=True)
class Copies:
    """What the other process does over and over. `to_host_gb_s`: at most so fast, 0 as fast as it goes."""

    plans: list[CopyPlan]
    tuning: Tuning = DEFAULT_TUNING
    to_host_gb_s: int = 0

    def executor(self, memory: Memory) -> CudaExecutor:
        """Its own, with streams of its own."""
        pacer = Pacer(LinkRates(to_host=int(self.to_host_gb_s * GB)))
        return CudaExecutor(memory.regions, DEVICE, tuning=self.tuning, pacer=pacer)


def _loads(memory: Memory) -> dict[str, Copies]:
    down, up = (page_plans(memory, way, PLANS, LOAD_PAGES) for way in (True, False))
    permuted = [replace(permuted_plan(LOAD_PAGES), purpose=Purpose.OFFLOAD)]
    return {
        "whole": Copies(down),
        "summed": Copies(summed(down, 1)),
        "summed-few": Copies(summed(down, 1), FEW_BLOCKS),
        "summed-half": Copies(summed(down, 1), HALF_PAUSE),
        "summed-any": Copies(summed(down, 1), NO_PAUSE),
        "sampled": Copies(summed(down, SAMPLE)),
        "onboard": Copies(up),
        "permuted": Copies(permuted),
        "permuted-half": Copies(permuted, HALF_PAUSE),
        "permuted-any": Copies(permuted, NO_PAUSE),
        "permuted-24": Copies(permuted, to_host_gb_s=24),
        "permuted-20": Copies(permuted, to_host_gb_s=20),
        "kernel-permuted": Copies(permuted, BY_KERNEL),
        "kernel-4": Copies(permuted, BY_KERNEL, 4),
        "kernel-2": Copies(permuted, BY_KERNEL, 2),
        "kernel-1": Copies(permuted, BY_KERNEL, 1),
    }


def _serve(host_fd: int) -> None:
    memory = Memory(HOST_BYTES, 2 * PLANS * LOAD_PAGES * PAGE, host_fd)
    loads = _loads(memory)
    executors = {what: copies.executor(memory) for what, copies in loads.items()}
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        what = line.strip()
        print("copying", flush=True)
        print(_copy_on(executors[what], loads[what].plans), flush=True)


def _copy_on(executor: CudaExecutor, plans: list[CopyPlan]) -> float:
    """Until the next line, and what is queued then; GB/s. Plans are small: this rest does not count for much."""
    began, moved, number = time.perf_counter(), 0, 0
    while not select.select([0], [], [], 0)[0]:
        while len(executor.outstanding()) < LOAD_QUEUED:
            number += 1
            executor.submit(replace(plans[number % len(plans)], plan_id=number))
        moved += sum(completion.moved_bytes for completion in executor.poll())
        if executor.idle():
            time.sleep(0.001)
    while executor.outstanding():
        moved += sum(completion.moved_bytes for completion in executor.poll())
    seconds = time.perf_counter() - began
    os.read(0, 64)
    return moved / seconds / GB


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
