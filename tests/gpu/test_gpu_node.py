"""A whole node on a GPU: `kvmanager serve` with device "cuda:0", real engines, and what dies in it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_support import compute_pids, memory_is_given_back
from nodes_support import (
    PAGE_BYTES,
    PAGES,
    RANKS,
    ROWS,
    SPAN,
    Node,
    check_filled,
    device_pages,
    fill,
    get,
    kill_and_wait,
    node,
    open_of,
    page_bytes_of,
    prefill_engine,
    prefill_toml,
    rotate,
    run_request,
    says,
    script,
    tokens_of,
    wait_for,
)

from kvmanager.clients.engine import RequestStep
from kvmanager.core.plans import StridedCopies
from kvmanager.errors import KVError
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.cuda_copies import CudaCopies
from kvmanager.transport.executor import RegionMap

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def context() -> None:
    """This process's context is in the baseline, with what the driver makes at a first batched copy."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")
    regions = RegionMap()
    regions.add_gpu(1, memory.data_ptr(), memory.numel())
    offsets = np.arange(2, dtype=np.int64) * 65_536
    copies = StridedCopies(1, 1, offsets, offsets + 500_000, (), (), (), 32_768)
    CudaCopies(regions, 0).issue(copies, torch.cuda.Stream().cuda_stream)
    assert memory.clone().cpu().sum() == 0
    assert torch.equal(memory, memory.clone())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    with memory_is_given_back(), node(tmp_path, "prefill", prefill_toml, device="cuda:0") as running:
        yield running


def test_hbm_is_offloaded_and_comes_back_and_the_daemon_stays_out_of_the_gpu(served: Node) -> None:
    rotate(served, [1, 2, 3])
    # Write-back that gave way to a refused request is taken up again with time: 3 prompts of 5 spans in the end.
    wait_for(lambda: served.counters()["offload"] >= 15, lambda: str(served.counters()))
    served.wait_at_rest()
    counters = served.counters()
    assert counters["onboard"] > 0
    assert counters["failed_plan"] == 0
    pids = compute_pids()
    if served.pid_of("mover") in pids:  # some machines list no processes
        assert served.pid_of("daemon") not in pids
    with open(f"/proc/{served.pid_of('daemon')}/maps", encoding="ascii") as maps:
        assert "libtorch" not in maps.read()


def test_a_rank_gets_tensors_of_the_daemons_memory(served: Node) -> None:
    first, second = (prefill_engine(served.runtime_dir) for _ in range(2))  # two epochs of one engine
    for rank in range(RANKS):
        mine, theirs = (engine.workers.ranks[rank].classes["kv"].device for engine in (first, second))
        assert mine.is_cuda
        assert mine.numel() == PAGES * PAGE_BYTES
        mine[7 * PAGE_BYTES :] = rank + 5
        torch.cuda.synchronize()
        assert bool((theirs[7 * PAGE_BYTES :] == rank + 5).all())
        regions = [r for r in first.workers.ranks[rank].descriptors.values() if r.kind == pb.DEVICE]
        assert [(r.device, r.rdma_capable) for r in regions] == [("cuda:0", True)]
    with contextlib.suppress(KVError):  # its epoch is over
        first.close()
    second.close()


def test_a_shared_half_span_is_copied_on_write_in_the_stream(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    run_request(engine, 1, tokens_of(1, 2 * SPAN), 1)
    half = np.concatenate([tokens_of(1, SPAN + ROWS), tokens_of(2, ROWS)])
    opened = engine.open(open_of(2, half, growth=0))
    assert opened.cached_tokens == SPAN + ROWS
    assert len(opened.worker_plans) == 1
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # the batched call; on the default stream copies go one by one
        engine.workers.run_plans(opened.worker_plans)
        pages = device_pages(opened)
        moved = 0
        for rank, worker in enumerate(engine.workers.ranks):
            side.synchronize()
            copy, was = get(worker.classes["kv"].device, int(pages[1])), page_bytes_of(1, rank, 1)
            moved += int((copy == was).sum())
        # Half of the span's slots, on every rank; bytes of the others agree by chance, one in 256.
        assert 0.49 * RANKS * PAGE_BYTES < moved < 0.52 * RANKS * PAGE_BYTES
    engine.step([RequestStep(2, len(half), len(half))])
    engine.step(closes=[pb.CloseRequest(request_id=2, reason=pb.FINISHED)])
    engine.close()


SPINNER = """
import sys
from pathlib import Path
import cupy, numpy as np
sys.path.insert(0, sys.argv[2])
from nodes_support import *
from gpu_process import SPIN
engine = prefill_engine(Path(sys.argv[1]))
opened = engine.open(open_of(1, tokens_of(1, PAGES * SPAN), growth=0))
pages = device_pages(opened)
assert len(pages) == PAGES, pages
kernel = cupy.RawKernel(SPIN, "spin")
for worker in engine.workers.ranks:
    memory = worker.classes["kv"].device
    with cupy.cuda.Stream(non_blocking=True):
        kernel((16,), (256,), (np.uint64(memory.data_ptr()), np.uint64(memory.numel() // 8)))
print("spins", os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("attempt", range(3))
def test_pages_of_a_worker_killed_in_mid_kernel_are_given_out_when_nothing_writes_any_more(
    served: Node, attempt: int
) -> None:
    """All pages are the victim's. They come back with its pidfd, and from their grant on no byte changes."""
    print(f"attempt {attempt}")
    with script(SPINNER, str(served.runtime_dir), str(Path(__file__).parent)) as victim:
        pid = int(says(victim, "spins"))
        pidfd = os.pidfd_open(pid)
        engine = prefill_engine(served.runtime_dir)  # its next epoch, as a restarted engine comes
        first = engine.workers.ranks[0].classes["kv"].device
        one, two = first.clone(), first.clone()
        give_up = time.monotonic() + 20
        while torch.equal(one, two):
            assert time.monotonic() < give_up, "the kernel writes"
            two.copy_(first)
        with pytest.raises(KVError, match=r"page|room|exhausted"):
            engine.open(open_of(7, tokens_of(2, SPAN), growth=0), timeout_s=0.0)
        os.kill(pid, signal.SIGKILL)
        opened = engine.open(open_of(8, tokens_of(2, PAGES * SPAN), growth=0))
        assert select.select([pidfd], [], [], 0)[0], "granted while the process could still write"
        memories = [worker.classes["kv"].device for worker in engine.workers.ranks]
        before = [memory.clone() for memory in memories]
        torch.cuda.synchronize()
        time.sleep(1.0)
        for memory, was in zip(memories, before, strict=True):
            assert torch.equal(memory, was)
        os.close(pidfd)
    pages = device_pages(opened)
    fill(engine, pages, 2)
    time.sleep(0.2)
    check_filled(engine, pages, 2)
    engine.step(closes=[pb.CloseRequest(request_id=8, reason=pb.ABORTED)])
    engine.close()
    served.wait_at_rest()


def test_a_mover_killed_again_and_again_while_it_copies_costs_no_byte(served: Node) -> None:
    """`run_request` checks what was onboarded; a copy that died is refused or recomputed."""
    engine = prefill_engine(served.runtime_dir)
    stop = threading.Event()
    killed: list[int] = []

    def kill() -> None:
        while not stop.wait(0.5):
            pid = served.admin.status().movers[0].pid
            if pid and len(killed) < 3:  # the keeper restarts a child five times a minute
                kill_and_wait(pid)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for number in range(2_000):
            try:
                run_request(engine, number, tokens_of(number % 5, 5 * SPAN), number % 5)
            except KVError as error:  # a typed answer; the request is not open
                print(error)
            if len(killed) == 3 and number > 30:
                break
    finally:
        stop.set()
        killer.join()
    assert len(set(killed)) == 3
    wait_for(lambda: served.admin.status().movers[0].pid not in (0, *killed))
    for number in range(3_000, 3_010):
        run_request(engine, number, tokens_of(number % 5, 5 * SPAN), number % 5)
    engine.close()
    served.wait_at_rest()


def test_a_killed_daemon_is_restarted_and_hbm_holds_the_right_bytes(served: Node) -> None:
    rotate(served, [1, 2, 3])
    kill_and_wait(served.pid_of("daemon"))
    wait_for(lambda: served.log().count("started the daemon") == 2)
    served.reopen()
    assert served.admin.status().ledger_ok
    rotate(served, [1, 2, 3, 4])
    assert served.counters()["onboard"] > 0


def test_a_pool_larger_than_the_gpu_is_refused_before_anybody_attaches(tmp_path: Path) -> None:
    def toml(runtime_dir: Path, *, name: str) -> str:
        text = prefill_toml(runtime_dir, name=name, device="cuda:0")
        return text.replace(f"hbm_bytes_per_rank = {PAGES * PAGE_BYTES}", f"hbm_bytes_per_rank = {1 << 42}")

    with memory_is_given_back(), pytest.raises(KVError, match="no room for it"), node(tmp_path, "prefill", toml):
        pass


def test_checksums_on_a_gpu_node_let_right_bytes_through_and_are_counted(tmp_path: Path) -> None:
    def toml(runtime_dir: Path, *, name: str) -> str:
        more = '[checksums]\ncover = "all"\n'
        return prefill_toml(runtime_dir, name=name, device="cuda:0", more=more)

    with node(tmp_path, "summed", toml) as served:
        rotate(served, [1, 2, 3])
        counters = served.counters()
        assert counters["onboard"] > 0, counters
        assert counters["summed_page"] > 0, counters
        assert counters["checked_page"] > 0, counters
        assert counters["bad_copy"] == 0, f"the GPU's sums differ from one another: {counters}"
        kill_and_wait(served.pid_of("daemon"))
        wait_for(lambda: served.log().count("started the daemon") == 2)
        served.reopen()
        wait_for(lambda: served.counters()["restart_check"] > 0, lambda: str(served.counters()))
        served.wait_at_rest()
        assert served.counters()["bad_copy"] == 0, f"sums of host memory differ from those of HBM: {served.counters()}"
