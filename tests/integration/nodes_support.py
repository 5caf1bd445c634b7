"""Real nodes for the integration tests: `kvmanager serve` as processes, engines, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvmanager.clients.admin import AdminClient
from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.keys import KeyChain
from kvmanager.demo.nodes import NAMESPACE, NodeProcess
from kvmanager.errors import KVError
from kvmanager.framing import readable
from kvmanager.layout import GLM53_TINY, indexer_layout, latent_layout, native_layout
from kvmanager.protos import kvmanager_pb2 as pb

WAIT_S = 60.0
ROWS = 16
GROUP = "prefill"
RANKS = 2
SPAN = ROWS * RANKS
PAGES = 12
PAGE_BYTES = GLM53_TINY.page_bytes(ROWS)
SLAB_BYTES = GLM53_TINY.slab_bytes(ROWS)
LAYOUT = native_layout(GLM53_TINY, ROWS)
SPARSE_LAYOUTS = [latent_layout(GLM53_TINY, ROWS), indexer_layout(GLM53_TINY, ROWS)]


def node_head(runtime_dir: Path, name: str, *, device: str = "cpu", spare: bool = False) -> str:
    """What most small nodes have in common. `[mover]` comes last, so that further keys of it may follow."""
    return f"""
[node]
name = "{name}"
runtime_dir = "{runtime_dir}"
device = "{device}"
spare = {str(spare).lower()}
[mover]
staging_bytes = "4 MiB"
chunk_bytes = "1 MiB"
"""


def prefill_toml(
    runtime_dir: Path,
    *,
    name: str = "prefill",
    pages: int = PAGES,
    lease: str = "",
    more: str = "",
    device: str = "cpu",
    spare: bool = False,
) -> str:
    """A node with one group of two sharded ranks: `pages` pages in HBM, as many on the host. `more`: further tables."""
    return f"""{node_head(runtime_dir, name, device=device, spare=spare)}
[lease]
{lease}
{more}
[[group]]
name = "{GROUP}"
kind = "sharded"
format = "{GLM53_TINY.name}"
ranks = {RANKS}
page_rows = {ROWS}
interleave = 1
hbm_bytes_per_rank = {pages * PAGE_BYTES}
host_bytes_per_rank = {2 * pages * PAGE_BYTES}
"""


def decode_toml(runtime_dir: Path, *, name: str = "decode") -> str:
    """A node with one HiSparse rank "decode-0" that takes two-rank spans as they are."""
    return f"""{node_head(runtime_dir, name)}
pull_deadline_ms = 5000
[[group]]
name = "decode-0"
kind = "hisparse"
format = "{GLM53_TINY.name}"
ranks = 1
page_rows = {ROWS}
hbm_bytes_per_rank = {40 * SLAB_BYTES}
host_bytes_per_rank = {60 * SLAB_BYTES}
token_order = "keep"
source_ranks = {RANKS}
source_interleave = 1
hot_rows = 32
"""


@contextlib.contextmanager
def node(directory: Path, name: str, config: Callable[..., str], **options: object) -> Iterator[Node]:
    """A node of its own, serving; stopped at the end. Where the test fails, its log is shown."""
    process = NodeProcess(name, directory, config(directory / name, name=name, **options))
    with process:
        running = Node(process, process.wait_serving())
        try:
            yield running
        except BaseException:
            print(process.log_tail(lines=80), file=sys.stderr)
            raise
        finally:
            running.admin.close()


class Node:
    """A running node and what an operator sees of it."""

    def __init__(self, process: NodeProcess, admin: AdminClient) -> None:
        self.process = process
        self.admin = admin
        self.runtime_dir = process.runtime_dir

    def log(self) -> str:
        """Everything the node's processes wrote."""
        return self.process.log_path.read_text(encoding="utf-8", errors="replace")

    def pid_of(self, module: str) -> int:
        """The newest process of the node that runs `python -m kvmanager.MODULE`."""
        return int(re.findall(rf"started the {module}\S*, pid (\d+)", self.log())[-1])

    def pools(self) -> dict[str, tuple[int, ...]]:
        """pool -> bytes (free, reserved, filling, ready, draining, quarantined, pinned, promised)."""
        return {
            p.pool: (
                p.free_bytes, p.reserved_bytes, p.filling_bytes, p.ready_bytes, p.draining_bytes, p.quarantined_bytes,
                p.pinned_bytes, p.promised_bytes,
            )
            for p in self.admin.pools().pools
        }  # fmt: skip

    def held(self) -> dict[str, tuple[int, ...]]:
        """As `pools`, without free and ready: what somebody holds or is moving. All zero on a node at rest."""
        return {name: states[1:3] + states[4:] for name, states in self.pools().items()}

    def at_rest(self) -> bool:
        """The ledger holds, nothing is held, pinned or on its way."""
        status = self.admin.status()
        moving = any(mover.outstanding for mover in status.movers)
        return status.ledger_ok and not moving and not any(any(states) for states in self.held().values())

    def wait_at_rest(self) -> None:
        """Waits until the node is at rest."""
        wait_for(self.at_rest, lambda: f"{self.held()}\n{self.admin.status()}\n{self.process.log_tail()}")

    def counters(self) -> dict[str, int]:
        """The node's counters."""
        return dict(self.admin.status().counters)

    def reopen(self) -> None:
        """Attaches the operator again, after a restart of the daemon."""
        self.admin.close()
        self.admin = self.process.wait_serving()


def wait_for(done: Callable[[], bool], describe: Callable[[], str] = lambda: "") -> None:
    """Waits until `done()`; fails after WAIT_S."""
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up, f"still not after {WAIT_S} s: {describe()}"
        time.sleep(0.02)


def wait_for_error(call: Callable[[], object], expected: type[KVError]) -> KVError:
    """Repeats a call until it raises that error."""
    seen: list[KVError] = []

    def raises() -> bool:
        try:
            call()
        except KVError as error:
            seen.append(error)
            return isinstance(error, expected)
        return False

    wait_for(raises, lambda: f"raised {seen[-1:]}")
    return seen[-1]


def tokens_of(seed: int, count: int) -> np.ndarray:
    """`count` token ids, the same for the same seed; shorter ones are prefixes of longer ones."""
    return np.random.default_rng(seed).integers(0, 500, 4096)[:count]


def keys_of(tokens: np.ndarray) -> bytes:
    """Keys of the whole segments."""
    return KeyChain(NAMESPACE).extend(tokens)


def open_of(request_id: int, tokens: np.ndarray, growth: int = 64, ticket: pb.Ticket | None = None) -> pb.OpenRequest:
    """A request to open for a prompt."""
    return pb.OpenRequest(
        request_id=request_id,
        prompt_tokens=len(tokens),
        growth_tokens=growth,
        prompt_keys=keys_of(tokens),
        ticket=ticket,
    )


def prefill_engine(runtime_dir: Path, name: str = "engine") -> AttachedEngine:
    """An engine of the prefill group, both ranks in this process."""
    return AttachedEngine(runtime_dir, name, group=GROUP, namespace=NAMESPACE, layouts=[LAYOUT], ranks=RANKS)


def decode_engine(runtime_dir: Path, name: str = "decoder") -> AttachedEngine:
    """An engine of the decode group."""
    return AttachedEngine(
        runtime_dir, name, group="decode-0", namespace=NAMESPACE, layouts=SPARSE_LAYOUTS, ranks=1
    )


def device_pages(opened: pb.OpenReply, page_class: str = "kv") -> np.ndarray:
    """Device pages of all spans of one class."""
    data = b"".join(p.device_pages for run in opened.spans for p in run.pages if p.page_class == page_class)
    return np.frombuffer(data, "<u4").astype(np.int64)


def fill(engine: AttachedEngine, pages: np.ndarray, seed: int) -> None:
    """Writes bytes that depend on seed, rank and place in the request into whole pages."""
    for rank, worker in enumerate(engine.workers.ranks):
        memory = worker.classes["kv"].device
        for place, page in enumerate(pages.tolist()):
            put(memory, page, page_bytes_of(seed, rank, place))


def put(memory: Any, page: int, data: np.ndarray) -> None:
    """Writes a page of a device region: a numpy array, or a torch tensor (then in its current stream)."""
    target = memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
    if isinstance(target, np.ndarray):
        target[:] = data
    else:
        import torch

        target.copy_(torch.from_numpy(data))


def get(memory: Any, page: int) -> np.ndarray:
    """A page of a device region; waits for the work of torch's current stream."""
    data = memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
    return data if isinstance(data, np.ndarray) else data.cpu().numpy()


def page_bytes_of(seed: int, rank: int, place: int) -> np.ndarray:
    """The bytes that `fill` writes."""
    return np.random.default_rng([seed, rank, place]).integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def check_filled(engine: AttachedEngine, pages: np.ndarray, seed: int) -> None:
    """Asserts that the pages hold what `fill` wrote."""
    for rank, worker in enumerate(engine.workers.ranks):
        memory = worker.classes["kv"].device
        for place, page in enumerate(pages.tolist()):
            assert np.array_equal(get(memory, page), page_bytes_of(seed, rank, place)), (rank, place)


def run_request(engine: AttachedEngine, request_id: int, tokens: np.ndarray, seed: int) -> int:
    """Opens, fills, commits and closes a request over whole spans; the tokens that were cached."""
    assert len(tokens) % SPAN == 0
    opened = engine.open(open_of(request_id, tokens, growth=0))
    pages = device_pages(opened)
    cached = opened.cached_tokens // SPAN
    check_filled(engine, pages[:cached], seed)
    # Everything is written again, with the same bytes: a partial hit needs no special case here.
    for rank, worker in enumerate(engine.workers.ranks):
        memory = worker.classes["kv"].device
        for place, page in list(enumerate(pages.tolist()))[cached:]:
            put(memory, page, page_bytes_of(seed, rank, place))
    engine.step([RequestStep(request_id, len(tokens), len(tokens))])
    engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])
    return int(opened.cached_tokens)


def rotate(served: Node, seeds: list[int]) -> None:
    """More prompts than HBM holds, twice: all are offloaded, evicted from HBM and onboarded, with the right bytes."""
    engine = prefill_engine(served.runtime_dir)
    for number, seed in enumerate(seeds * 2):
        run_request(engine, number, tokens_of(seed, 5 * SPAN), seed)
    engine.close()
    served.wait_at_rest()


@contextlib.contextmanager
def script(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of its own that can import this module's neighbours; killed at the end."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def says(process: subprocess.Popen[str], word: str) -> str:
    """Waits for a line that begins with `word`; the rest of it."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith(word):
            return line.removeprefix(word).strip()
    raise AssertionError(f"the process ended with {process.wait()} before it said {word!r}")


def kill_and_wait(pid: int) -> None:
    """SIGKILLs a process that is not our child, and waits for its end."""
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert readable([pidfd], WAIT_S)
    finally:
        os.close(pidfd)
