"""On two GPUs: a context of 1,048,576 tokens from eight shards on one to a decode rank on the other, through NIXL."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvmanager.layout import GLM53, native_layout
from kvmanager.mover.movertransfers import AHEAD_ON_GPU
from kvmanager.transport.cuda import BOUNCE_BYTES
from kvmanager.units import MIB
from tests.bench.figure import Figure

TOKENS = 1_048_576
ROWS = 64
CHUNK_PAGES = int(os.environ.get("HANDOFF_CHUNK_PAGES", "24"))
RING_BYTES = 1_024 * MIB
GB = 1e9


def possible() -> bool:
    """Whether there are two GPUs and NIXL; says so when not."""
    import torch

    if torch.cuda.device_count() > 1 and any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12")):
        return True
    print("no hand-off figures: they need two GPUs and NIXL", file=sys.stderr)
    return False


class Other:
    """A role of `handoff_roles` in a process of its own."""

    def __init__(self, role: str, device: str, *shape: Any) -> None:
        command = [sys.executable, "-m", "tests.bench.handoff_roles", role, device, *map(str, shape)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> dict[str, Any]:
        """The next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()}"
        said: dict[str, Any] = json.loads(line)
        print(f"# {said if len(line) < 400 else sorted(said)}", file=sys.stderr, flush=True)
        return said

    def tell(self, *words: Any) -> None:
        """A command for a target."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def ask(self, *words: Any) -> dict[str, Any]:
        """Its answer to a command."""
        self.tell(*words)
        return self.hear()

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def figures(devices: tuple[str, str] = ("cuda:0", "cuda:1")) -> Iterator[Figure]:
    """Every ratio within this run; bytes of drawn tokens are checked after each hand-off."""
    started = time.perf_counter()
    shape = (TOKENS, "glm53", ROWS, RING_BYTES, CHUNK_PAGES)
    source, target = Other("source", devices[0], *shape), Other("target", devices[1], *shape)
    try:
        target.hear()
        peer = source.hear()
        print(f"# both sides are ready after {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        target.ask("meet", peer)
        rate = max(source.ask("pack")["rate"] for _ in range(3))
        yield Figure(f"hand-off gpu: {CHUNK_PAGES} pages of eight shards packed", rate / GB, "GB/s", "itself", 1.0)
        yield from _link(target)
        yield from _hand_offs(target, devices[1])
    finally:
        source.close()
        target.close()


def _link(target: Other) -> Iterator[Figure]:
    chunk = CHUNK_PAGES * native_layout(GLM53, ROWS).page_bytes
    target.ask("nixl", 64 * MIB, 1)
    long = max(target.ask("nixl", 64 * MIB, n)["rate"] for n in (1, 4))
    yield Figure("hand-off gpu: NIXL, runs of 64 MiB, ring to ring", long / GB, "GB/s", "itself", 1.0)
    rate = target.ask("nixl", chunk, 4)["rate"]
    yield Figure(
        f"hand-off gpu: NIXL, chunks of {CHUNK_PAGES} pages, 4 in flight",
        rate / GB,
        "GB/s",
        "runs of 64 MiB",
        rate / long,
    )


def _hand_offs(target: Other, device: str) -> Iterator[Figure]:
    down, bare = target.ask("down")["rate"], target.ask("bare")["rate"]
    yield Figure("hand-off gpu: plain copy, device to host", down / GB, "GB/s", "itself", 1.0)
    yield Figure("hand-off gpu: bare 3-D copy, device to host", bare / GB, "GB/s", "plain copy", bare / down)
    loop = _Loop(device)
    yield from _reads_alone(target, loop)
    ways = [(order, True, bounced) for bounced in (0, 1) for order in ("kept", "permuted")]
    for order, may_turn, bounced in (*ways, ("permuted", False, 0)):
        target.ask("shape", AHEAD_ON_GPU, CHUNK_PAGES, {"bounce_bytes": bounced * BOUNCE_BYTES})
        target.ask("pull", order, may_turn)
        done = target.ask("pull", order, may_turn)
        print(f"# {target.ask('stages', order, may_turn)}", file=sys.stderr, flush=True)
        # Only what goes to the host crosses its link; all of it is counted, as the figure does.
        rate = done["placed"] / done["seconds"]
        how = {"kept": "kept", "permuted": "permuted by the source's kernel" if may_turn else "permuted by the target"}
        what = f"hand-off gpu: {TOKENS:,} tokens, {how[order]}{', indexers by way of host memory' * bounced}"
        yield Figure(what, rate / GB, "GB/s", "plain copy", rate / down)
        if order == "permuted":
            yield Figure(what, rate / GB, "GB/s", "bare 3-D copy", rate / bare)
        yield Figure(f"{what}: in all", done["seconds"] * 1e3, "ms", "itself", 1.0)
        yield Figure(
            f"{what}: first chunk placed", done["first_s"] * 1e3, "ms", "in all", done["first_s"] / done["seconds"]
        )
        yield Figure(f"{what}: plan", done["plan_s"] * 1e3, "ms", "in all", done["plan_s"] / done["seconds"])
        yield Figure(
            f"{what}: descriptors", done["descriptors"], "count", "chunks", done["descriptors"] / done["chunks"]
        )
        alone = loop.median_s(lambda: False)
        target.tell("pull", order, may_turn)
        seen = loop.median_s(_ends(target))
        yield Figure(f"{what}: a step of a decode-like loop beside it", seen * 1e3, "ms", "alone", seen / alone)
        target.hear()


def _reads_alone(target: Other, loop: _Loop) -> Iterator[Figure]:
    """What reading does to the loop when nothing is placed."""
    alone = loop.median_s(lambda: False)
    target.tell("reads", 50.0, 1.0)
    seen = loop.median_s(_ends(target))
    rate = target.hear()["rate"]
    what = f"hand-off gpu: a step of a decode-like loop beside reads alone, {rate / GB:.0f} GB/s"
    yield Figure(what, seen * 1e3, "ms", "alone", seen / alone)


def _ends(target: Other) -> Callable[[], bool]:
    """Whether it has answered."""
    import select

    stdout = target._process.stdout
    return lambda: bool(select.select([stdout], [], [], 0)[0])


class _Loop:
    """20 products of 4096^3 and 20 passes over 256 MB a step, as in the measured facts."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._device = torch, torch.device(device)
        self._a, self._b = (torch.randn((4_096, 4_096), device=device, dtype=torch.bfloat16) for _ in range(2))
        self._big = torch.empty(256 * MIB, device=device, dtype=torch.uint8)
        for _ in range(20):
            self._step()

    def _step(self) -> float:
        started = time.perf_counter()
        for _ in range(20):
            self._torch.matmul(self._a, self._b)
            self._big.add_(1)
        self._torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def median_s(self, over: Callable[[], bool], most: int = 150) -> float:
        times: list[float] = []
        while len(times) < most and not over():
            times.append(self._step())
        return sorted(times)[len(times) // 2]
