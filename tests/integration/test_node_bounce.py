"""Two tenants that distrust each other, and one offload pool that neither maps: real processes of two users."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes_support import Node, node, says, wait_for
from other_user import OTHER_UID, command_as, environment, needs_two_users

from kvmanager.clients.leases import CacheEngine, Lease
from kvmanager.errors import NotReady, PoolExhausted
from kvmanager.layout import plain_format, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.sim.driver import chain_keys

ROWS, RANKS = 16, 2
FORMAT = plain_format("float32", 3, 2, 64)
LAYOUT = plain_layout(FORMAT, ROWS)
BOUNCE_PAGES, POOL_PAGES = 6, 48
OURS, THEIRS = 0xA1, 0xB2
LEASES = itertools.count(1)
THEM = """
import os, sys, time
from pathlib import Path
from kvmanager.errors import KVError
from kvmanager.clients.worker import connect_worker
from test_node_bounce import OURS, THEIRS, engine, keys, load, marks, ROWS, store

runtime_dir = Path(sys.argv[1])
try:
    engine(runtime_dir, "intruder", "ours")
    print("registered")
except KVError as error:
    print("registered", type(error).__name__)
held = engine(runtime_dir, "theirs", "theirs")
print("maps", sorted({region.pool for rank in held.workers.ranks for region in rank.descriptors.values()}))
print("open", sorted({os.readlink(f"/proc/self/fd/{fd}").split(" ")[0] for fd in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{fd}") and "memfd" in os.readlink(f"/proc/self/fd/{fd}")}))
maps = {line.split("/memfd:")[1].split(" ")[0] for line in open("/proc/self/maps") if "/memfd:" in line}
print("mapped", sorted(maps))
for prompt in range(1, 5):
    store(held, prompt, 4, THEIRS)
print("loaded", [load(held, prompt, 4, THEIRS) for prompt in range(1, 5)])
print("same-keys", held.lookup(keys(100, 4), 4 * ROWS))
print("sees", [mark for mark in (OURS, THEIRS) if mark in marks(held)])
held.reserve(10**6, keys(50, 2))
print("ready", flush=True)
time.sleep(600)
"""


def toml(runtime_dir: Path, *, name: str) -> str:
    groups = "".join(
        f"""
[[group]]
name = "{group}"
kind = "cache"
format = "{FORMAT.name}"
ranks = {RANKS}
page_rows = {ROWS}
host_bytes_per_rank = {POOL_PAGES // 2 * LAYOUT.page_bytes}
host_region = "ram"
host_extent_bytes = {4 * LAYOUT.page_bytes}
bounce_bytes_per_rank = {BOUNCE_PAGES * LAYOUT.page_bytes}
trust = "{group}"
[[tenant]]
name = "{group}"
uids = [{uid}]
trust = "{group}"
"""
        for group, uid in (("ours", os.getuid()), ("theirs", OTHER_UID))
    )
    return f"""
[node]
name = "{name}"
runtime_dir = "{runtime_dir}"
spare = false
trust_uids = [{os.getuid()}, {OTHER_UID}]
[mover]
staging_bytes = "1 MiB"
chunk_bytes = "1 MiB"
{groups}
"""


def engine(runtime_dir: Path, name: str, group: str) -> CacheEngine:
    namespace = pb.Namespace(
        model="m", weights_revision="1", kv_format=FORMAT.name, key_hash="sha256_cbor", key_bytes=32, key_tokens=ROWS
    )
    return CacheEngine(runtime_dir, name, group=group, namespace=namespace, layout=LAYOUT, ranks=RANKS)


def keys(what: object, segments: int) -> bytes:
    return chain_keys(what, segments, 32)


def content(mark: int, what: int, rank: int, place: int) -> np.ndarray:
    """A tenant's mark, and what tells the page from others."""
    data = np.full(LAYOUT.page_bytes, mark, np.uint8)
    data[:3] = what, rank, place
    return data


def patiently(ask: Callable[[], Lease]) -> Lease:
    """A lease, asked for again while a busy machine answers too late: said again, it is the same."""
    while True:
        try:
            return ask()
        except NotReady:
            continue


def store(held: CacheEngine, what: int, segments: int, mark: int) -> None:
    """Stores a whole prompt: as much at a time as the bounce region has room for."""

    def stored() -> bool:
        lease = next(LEASES)
        try:
            reserved = patiently(lambda: held.reserve(lease, keys(what, segments)))
        except PoolExhausted:
            return False
        for place, page in enumerate(reserved.pages, reserved.tokens // ROWS):
            for rank in range(RANKS):
                held.page(rank, page)[:] = content(mark, what, rank, place)
        held.commit(lease)
        wait_for(lambda: held.lookup(keys(what, segments), segments * ROWS) >= reserved.tokens)
        return reserved.tokens == segments * ROWS

    wait_for(stored)


def load(held: CacheEngine, what: int, segments: int, mark: int) -> int:
    """Tokens that were found; their bytes are right."""
    lease = next(LEASES)
    got = patiently(lambda: held.acquire(lease, keys(what, segments)))
    for place, page in enumerate(got.pages):
        for rank in range(RANKS):
            assert np.array_equal(held.page(rank, page), content(mark, what, rank, place)), (what, rank, place)
    if got.tokens:
        held.done(lease)
    return got.tokens


def marks(held: CacheEngine) -> set[int]:
    """Every byte value that lies anywhere in what the engine maps."""
    seen: set[int] = set()
    for rank in held.workers.ranks:
        for memory in rank.regions.values():
            seen |= set(np.unique(memory).tolist())
    return seen


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, "bounce", toml) as running:
        yield running


def test_our_own_bytes_come_back_through_a_small_region(served: Node) -> None:
    held = engine(served.runtime_dir, "ours", "ours")
    for prompt in range(1, 6):
        store(held, prompt, 4, OURS)
    assert [load(held, prompt, 4, OURS) for prompt in range(1, 6)] == [4 * ROWS] * 5
    counters = served.counters()
    assert counters["offload"] >= 20
    assert counters["onboard"] > 0
    held.close()
    served.wait_at_rest()


@needs_two_users
def test_two_tenants_share_a_pool_and_see_nothing_of_each_other(served: Node) -> None:
    held = engine(served.runtime_dir, "ours", "ours")
    for prompt in (100, 101, 102):
        store(held, prompt, 4, OURS)
    with subprocess.Popen(
        command_as(OTHER_UID, THEM, served.runtime_dir), env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as them:  # fmt: skip
        try:
            assert says(them, "registered") == "Unauthorized"
            assert says(them, "maps") == "['theirs/bounce', 'timelines']"
            held_open = says(them, "open")
            assert "theirs/bounce" in held_open
            assert "ram" not in held_open
            assert "ours" not in held_open
            mapped = says(them, "mapped")
            assert "kvmanager:theirs/bounce" in mapped
            assert "ram" not in mapped
            assert "ours" not in mapped
            assert says(them, "loaded") == str([4 * ROWS] * 4)
            assert says(them, "same-keys") == "0"
            assert says(them, "sees") == str([THEIRS])
            says(them, "ready")
            # Their process dies while it fills pages; ours goes on.
            them.send_signal(signal.SIGKILL)
        finally:
            them.kill()
            _, errors = them.communicate()
    assert "Traceback" not in errors, errors
    assert [load(held, prompt, 4, OURS) for prompt in (100, 101, 102)] == [4 * ROWS] * 3
    assert THEIRS not in marks(held)
    pools = served.admin.pools().pools
    assert {pool.pool for pool in pools} == {"ours/bounce", "ours/host", "theirs/bounce", "theirs/host"}
    held.close()
    served.wait_at_rest()
    assert [check.broken for check in served.admin.fsck(checksum_spans=32).checks if check.broken] == []
