"""vLLM's connector without vLLM on a live node: what its scheduler hooks cost, and when a lookup's answer is there."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import TypeVar

from kvmanager.clients.vllm.link import Link
from kvmanager.clients.vllm.orders import Ended, Orders, Report
from kvmanager.clients.vllm.scheduling import Scheduling
from kvmanager.clients.vllm.settings import Settings
from kvmanager.clients.worker import connect_worker
from kvmanager.demo.nodes import NodeProcess
from kvmanager.layout import plain_format, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.bench import vllm_engine_figures
from tests.bench.figure import Figure, median_s
from tests.sim.driver import chain_keys

ROWS, BLOCKS, REQUESTS = 16, 94, 300
"""A prompt of 1,504 tokens."""
NAP_S = 50e-6
"""What an engine that has nothing else to do waits between two questions."""
FORMAT = plain_format("bfloat16", 2, 2, 64)
T = TypeVar("T")


def figures() -> Iterator[Figure]:
    """Hooks and lookups of engines with memory of their own."""
    with tempfile.TemporaryDirectory(prefix="kvm-bench-") as directory:
        runtime_dir = Path(directory) / "cache"
        layout = plain_layout(FORMAT, ROWS)
        text = (
            f'[node]\nname = "cache"\nruntime_dir = "{runtime_dir}"\n[[group]]\nname = "kv"\nkind = "cache"\n'
            f'format = "{FORMAT.name}"\nranks = 1\npage_rows = {ROWS}\n'
            f"host_bytes_per_rank = {2 * BLOCKS * layout.page_bytes}\n"
            '[mover]\nstaging_bytes = "1 MiB"\nchunk_bytes = "1 MiB"\n'
        )
        with NodeProcess("cache", Path(directory), text) as node:
            node.wait_serving()
            namespace = pb.Namespace(
                model="bench", weights_revision="0", kv_format=FORMAT.name, key_hash="sha256_cbor", key_bytes=32,
                key_tokens=ROWS,
            )  # fmt: skip
            link = Link(Settings(runtime_dir, "kv", "bench"), namespace, layout.fingerprint, 1)
            try:
                yield from _measure(link, runtime_dir)
            finally:
                link.close()
    yield from vllm_engine_figures.figures()


class _Timed:
    """Calls hooks and notes the seconds and the CPU seconds of each."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self, hook: Callable[[], T]) -> T:
        cpu, wall = time.thread_time(), time.perf_counter()
        result = hook()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)
        return result


def _measure(link: Link, runtime_dir: Path) -> Iterator[Figure]:
    while not link.up:
        time.sleep(0.01)
    rank = _Rank(link, runtime_dir)
    scheduling = Scheduling(link, ROWS, 1, hold_s=1.0)
    scheduling.build({}, lambda _: [])
    scheduling.reported(rank.report(Orders()))
    timed, answered = _Timed(), []
    for number in range(REQUESTS):
        keys = chain_keys(f"r{number}", BLOCKS, 32)
        blocks = [keys[at : at + 32] for at in range(0, len(keys), 32)]
        answered.append(_request(scheduling, rank, timed, f"r{number}", blocks))
        link.ask(lambda _calls: None).result(timeout=10)  # nothing of it is under way
    call_s = median_s(lambda: link.read(lambda calls: calls.lookup(keys, BLOCKS * ROWS)).result(timeout=10), REQUESTS)
    joined_s = median_s(lambda: b"".join(blocks), REQUESTS)
    yield Figure(
        "vLLM lookup: first hook to answer, p50", median(answered) * 1e6, "us", "the call alone, waited for",
        median(answered) / call_s,
    )  # fmt: skip
    for what, values in (("", timed.wall), (", CPU", timed.cpu)):
        for share in (0.5, 0.99):
            value = quantiles(values, n=100)[round(share * 100) - 1]
            yield Figure(
                f"vLLM scheduler hook{what}, p{share * 100:.0f}", value * 1e6, "us", "94 keys joined", value / joined_s
            )
    rank.close()


def _request(scheduling: Scheduling, rank: _Rank, timed: _Timed, name: str, blocks: list[bytes]) -> float:
    """A prompt that is not known, computed in two steps and stored; seconds from its first hook to the answer."""
    ids = list(range(BLOCKS + 1))
    start = time.perf_counter()
    timed(lambda: scheduling.arrived(name, blocks))
    while timed(lambda: scheduling.matched(name, BLOCKS * ROWS + 1, 0)) is None:
        time.sleep(NAP_S)
    answered = time.perf_counter() - start
    timed(lambda: scheduling.allocated(name, ids, 0))

    def step(ends: dict[str, int]) -> None:
        orders = timed(lambda: scheduling.build(ends, lambda _: ids))
        reports = rank.report(orders)
        timed(lambda: scheduling.reported(reports))

    for end in (BLOCKS * ROWS // 2, BLOCKS * ROWS + 1, BLOCKS * ROWS + 2):
        step({name: end})
    timed(lambda: scheduling.finished(name, "stop"))
    step({})
    return answered


class _Rank:
    """A rank that says at once that it has copied what it was told to."""

    def __init__(self, link: Link, runtime_dir: Path) -> None:
        self._worker = connect_worker(runtime_dir, "bench", link.epoch, 0)
        self._epoch, self._value = link.epoch, 0

    def report(self, orders: Orders) -> list[Report]:
        """What it has to say of a step; of an empty one, that it is attached."""
        ended = []
        for save in orders.saves:
            self._value += 1
            self._worker.raise_timeline(self._value)
            ended.append(Ended(save.lease_id, self._value, len(save.pages), True))
        return [Report(0, self._epoch, self._worker.attach_id, ended)]

    def close(self) -> None:
        """Leaves."""
        self._worker.detach()
        self._worker.close()
