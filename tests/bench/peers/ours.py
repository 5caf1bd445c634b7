"""Our side: a cache group on a real node, and the step message of a group with device memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.keys import KeyChain
from kvmanager.clients.leases import CacheEngine
from kvmanager.demo.nodes import NodeProcess
from kvmanager.errors import CapacityError
from kvmanager.keeper.lockfile import holder
from kvmanager.layout import GLM53_TINY, native_layout, plain_format, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.bench.peers.cases import (
    CAPACITY_PAGES,
    CLIENTS,
    KILLED_OBJECTS,
    LOAD_S,
    LOAD_TOKENS,
    LOOKUPS,
    NOOPS,
    PAGE_BYTES,
    PAGES,
)
from tests.bench.peers.clock import count_for, summary, times_us

ROWS = 64
FORMAT = plain_format("uint8", 1, 1, PAGE_BYTES // ROWS)
LAYOUT = plain_layout(FORMAT, ROWS)
STEP_ROWS, STEP_REQUESTS, STEPS = 16, 64, 500
PAIR = 2_300
"""Pages of the lookup's node: the longest prompt and some."""


def namespace(format_name: str, rows: int) -> pb.Namespace:
    return pb.Namespace(
        model="m", weights_revision="1", kv_format=format_name, key_hash="sha256", key_bytes=16, key_tokens=rows
    )


def cache_toml(runtime_dir: Path, pages: int, row_bytes: int) -> str:
    format_ = plain_format("uint8", 1, 1, row_bytes)
    return f"""
[node]
name = "ours"
runtime_dir = "{runtime_dir}"
[[group]]
name = "kv"
kind = "cache"
format = "{format_.name}"
ranks = 1
page_rows = {ROWS}
host_bytes_per_rank = {pages * format_.page_bytes(ROWS)}
[mover]
staging_bytes = "1 MiB"
chunk_bytes = "1 MiB"
"""


def step_toml(runtime_dir: Path) -> str:
    page = GLM53_TINY.page_bytes(STEP_ROWS)
    return f"""
[node]
name = "ours"
runtime_dir = "{runtime_dir}"
[[group]]
name = "g"
kind = "sharded"
format = "{GLM53_TINY.name}"
ranks = 1
page_rows = {STEP_ROWS}
hbm_bytes_per_rank = {60 * STEP_REQUESTS * page}
host_bytes_per_rank = 0
"""


@contextmanager
def serving(toml: str, directory: Path) -> Iterator[NodeProcess]:
    with NodeProcess("ours", directory, toml) as node:
        node.wait_serving().close()
        yield node


def engine(runtime_dir: Path, name: str, row_bytes: int) -> CacheEngine:
    format_ = plain_format("uint8", 1, 1, row_bytes)
    where = namespace(format_.name, ROWS)
    return CacheEngine(runtime_dir, name, group="kv", namespace=where, layout=plain_layout(format_, ROWS), ranks=1)


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, count)


def keys(held: CacheEngine, ids: np.ndarray) -> bytes:
    return KeyChain(held.client.namespace).extend(ids)


def store(held: CacheEngine, lease: int, made: bytes) -> int:
    """Stores what is not known of the keys; pages written."""
    reserved = held.reserve(lease, made)
    held.commit(lease)
    return len(reserved.pages)


def case_lookup(directory: Path) -> dict[str, Any]:
    """`... from ids` also makes the keys, as an engine does once for a new prompt; a later turn only extends them."""
    report: dict[str, Any] = {}
    with serving(cache_toml(directory / "ours", PAIR, 8), directory) as node:
        held = engine(node.runtime_dir, "a", 8)
        report["noop"] = summary(times_us([lambda: held.lookup(b"", 0)] * NOOPS))
        for count, calls in LOOKUPS:
            ids, other = tokens(count, count), tokens(count + 1, count)
            known, unknown = keys(held, ids), keys(held, other)
            store(held, count, known)
            while held.lookup(known, count) < count - ROWS:
                time.sleep(0.01)
            hit = times_us([lambda known=known, n=count: held.lookup(known, n)] * calls)
            report[f"lookup hit {count}"] = summary(hit)
            report[f"lookup miss {count}"] = summary(times_us([lambda u=unknown, n=count: held.lookup(u, n)] * calls))
            both = [lambda ids=ids, n=count: held.lookup(keys(held, ids), n)] * calls
            report[f"lookup hit {count} from ids"] = summary(times_us(both))
        held.close()
    return report


def case_pages(directory: Path) -> dict[str, Any]:
    """A page in and out, its bytes copied; the host pool's page is the store's own memory.

    A store is over when its commit is answered. `... in a row`: one after the other, each commit with the reserve of
    the next; a time is that from the answer to one commit to the answer to the next. A retrieve is over when the bytes
    are copied and the lease's end is on its way.
    """
    data = np.frombuffer(os.urandom(PAGE_BYTES), np.uint8)
    out = np.empty_like(data)
    with serving(cache_toml(directory / "ours", 3 * PAGES, PAGE_BYTES // ROWS), directory) as node:
        held = engine(node.runtime_dir, "a", PAGE_BYTES // ROWS)
        made = [keys(held, tokens(10 + n, ROWS)) for n in range(PAGES)]

        def put(number: int) -> None:
            (page,) = held.reserve(number + 1, made[number]).pages
            held.page(0, page)[:] = data
            held.commit(number + 1)

        def get(number: int) -> None:
            (page,) = held.acquire(1000 + number, made[number]).pages
            out[:] = held.page(0, page)
            held.release(1000 + number)

        stores = times_us([lambda n=n: put(n) for n in range(PAGES)])
        row = _row_of_stores(held, data)
        while held.lookup(made[-1], 2 * ROWS) < ROWS:
            time.sleep(0.01)
        loads = times_us([lambda n=n: get(n) for n in range(PAGES)])
        assert np.array_equal(out, data)
        held.close()
    return {"store page": summary(stores), "store page in a row": summary(row), "retrieve page": summary(loads)}


def _row_of_stores(held: CacheEngine, data: np.ndarray) -> list[float]:
    made = [keys(held, tokens(50_000 + n, ROWS)) for n in range(PAGES + 1)]
    pages = held.reserve(2000, made[0]).pages

    def put_and_go_on(number: int) -> None:
        nonlocal pages
        held.page(0, pages[0])[:] = data
        pages = held.commit_and_reserve(2000 + number, 2001 + number, made[number + 1]).pages

    found = times_us([lambda n=n: put_and_go_on(n) for n in range(PAGES)])
    held.abort(2000 + PAGES)
    return found


def case_evict(directory: Path) -> dict[str, Any]:
    """Twice what the store holds."""
    failed = 0
    with serving(cache_toml(directory / "ours", CAPACITY_PAGES, PAGE_BYTES // ROWS), directory) as node:
        held = engine(node.runtime_dir, "a", PAGE_BYTES // ROWS)
        made = [keys(held, tokens(10_000 + n, ROWS)) for n in range(2 * CAPACITY_PAGES)]
        data = np.frombuffer(os.urandom(PAGE_BYTES), np.uint8)

        def put(number: int) -> None:
            nonlocal failed
            try:
                for page in held.reserve(number + 1, made[number]).pages:
                    held.page(0, page)[:] = data
                held.commit(number + 1)
            except CapacityError:
                failed += 1

        times = times_us([lambda n=n: put(n) for n in range(len(made))])
        newest = made[-(CAPACITY_PAGES // 4) :]
        while held.lookup(made[-1], 2 * ROWS) < ROWS:
            time.sleep(0.01)
        found = sum(held.lookup(key, 2 * ROWS) >= ROWS for key in newest)
        held.close()
    return {"evict store": summary(times), "evict failed stores": failed, "evict newest quarter found": found}


def case_kill(directory: Path) -> dict[str, Any]:
    """The daemon gets SIGKILL after every store was acknowledged."""
    with serving(cache_toml(directory / "ours", 2 * KILLED_OBJECTS, 64), directory) as node:
        held = engine(node.runtime_dir, "a", 64)
        made = [keys(held, tokens(20_000 + n, ROWS)) for n in range(KILLED_OBJECTS)]
        for number, key in enumerate(made):
            store(held, number + 1, key)
        while held.lookup(made[-1], 2 * ROWS) < ROWS:
            time.sleep(0.01)
        before = sum(held.lookup(key, 2 * ROWS) >= ROWS for key in made)
        pid = holder(node.runtime_dir / "daemon.lock")
        assert pid
        start = time.perf_counter()
        os.kill(pid, 9)
        node.wait_serving().close()
        held.renew()
        back_s = time.perf_counter() - start
        after = sum(held.lookup(key, 2 * ROWS) >= ROWS for key in made)
        held.close()
    return {"kill before": before, "kill after": after, "kill s": back_s}


def case_step(directory: Path) -> dict[str, Any]:
    """One message that commits a token of each of 64 requests, and its reply; the keys are made before."""
    with serving(step_toml(directory / "ours"), directory) as node:
        where, layout = namespace(GLM53_TINY.name, STEP_ROWS), native_layout(GLM53_TINY, STEP_ROWS)
        held = AttachedEngine(node.runtime_dir, "a", group="g", namespace=where, layouts=[layout], ranks=1)
        chains = [KeyChain(where) for _ in range(STEP_REQUESTS)]
        for number, chain in enumerate(chains):
            ids = tokens(number, STEP_ROWS)
            opened = pb.OpenRequest(
                request_id=number + 1, prompt_tokens=STEP_ROWS, growth_tokens=700, prompt_keys=chain.extend(ids)
            )
            held.open(opened)
        held.step([RequestStep(n + 1, STEP_ROWS + 1, STEP_ROWS) for n in range(STEP_REQUESTS)])
        steps = [_rows_of(chains, STEP_ROWS + 1 + number) for number in range(STEPS)]
        times = times_us([lambda rows=rows: held.step(rows) for rows in steps])
        held.close()
    return {f"step of {STEP_REQUESTS} requests": summary(times)}


def _rows_of(chains: list[KeyChain], committed: int) -> list[RequestStep]:
    """A token more of each request, with the keys that it completes."""
    return [
        RequestStep(n + 1, committed + 1, committed, 0, chain.extend(np.array([committed])))
        for n, chain in enumerate(chains)
    ]


def case_load(directory: Path) -> dict[str, Any]:
    """N processes that look a prompt up, and one of them alone."""
    with serving(cache_toml(directory / "ours", PAIR, 8), directory) as node:
        held = engine(node.runtime_dir, "first", 8)
        store(held, 1, keys(held, tokens(1, LOAD_TOKENS)))
        rates = {}
        for clients in (1, CLIENTS):
            command = [sys.executable, "-m", "tests.bench.peers.ours", "client", str(node.runtime_dir)]
            running = [
                subprocess.Popen([*command, f"c{n}"], stdout=subprocess.PIPE, text=True) for n in range(clients)
            ]
            rates[clients] = sum(json.loads(process.communicate()[0])["lookups a second"] for process in running)
        held.close()
    return {f"lookups a second, {clients} clients": rate for clients, rate in rates.items()}


CASES = {"lookup": case_lookup, "pages": case_pages, "step": case_step, "evict": case_evict, "kill": case_kill,
         "load": case_load}  # fmt: skip


def measure(case: str) -> dict[str, Any]:
    """One case on a node of its own."""
    with TemporaryDirectory(prefix="kvm-b-") as made:
        return CASES[case](Path(made))


if __name__ == "__main__":
    assert sys.argv[1] == "client"
    asking = engine(Path(sys.argv[2]), sys.argv[3], 8)
    wanted = keys(asking, tokens(1, LOAD_TOKENS))
    print(json.dumps({"lookups a second": count_for(LOAD_S, lambda: asking.lookup(wanted, LOAD_TOKENS))}))
    asking.close()
