"""Runs inside LMCache's environment, against its running server: `lmcache_peer.py CASE RPC_URL HTTP_URL`; JSON out.

Calls are those of its own bench client (`lmcache bench server`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count

from cases import LOAD_S, LOAD_TOKENS, LOOKUPS, NOOPS, PAGE_BYTES, PAGES
from clock import count_for, summary, times_us
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.cli.commands.bench.server_bench.helpers import _wait_for_result

NUMBERS = count(int(time.time()) % 100_000 * 1_000)
CHUNK = 256


def client(tokens: int, row_bytes: int) -> ServerBenchClient:
    """One worker whose objects are of 256 tokens of `row_bytes`; prompts of `tokens`."""
    shape = f"(1,2304,64,1,{row_bytes}):uint8:1"
    made = ServerBenchClient(
        BenchConfig(sys.argv[2], sys.argv[3], "cpu", "lmcache_driven", 1, True, tokens, shape, 2304, 64),
        lambda _: None,
    )
    made.start()
    return made


def request(bench: ServerBenchClient, sequence: int):
    return bench.create_request(sequence, f"r{next(NUMBERS)}", "bench")


def lookups(bench: ServerBenchClient, calls: int, sequence: int | None) -> list[float]:
    """Hits of a stored sequence, or misses of new ones."""
    found = []
    for _ in range(calls):
        asked = request(bench, next(NUMBERS) if sequence is None else sequence)
        results = []
        found += times_us([lambda asked=asked, results=results: results.append(bench.lookup(asked))])
        assert results[0].is_full_miss if sequence is None else results[0].is_full_hit, results
        bench.end_session(asked)
    return found


def noops(bench: ServerBenchClient) -> list[float]:
    return times_us([lambda: _wait_for_result(bench._req_client.noop())] * NOOPS)


def store(bench: ServerBenchClient, sequence: int) -> bool:
    asked = request(bench, sequence)
    bench.lookup(asked)
    done = bench.store(asked, 0, asked.num_full_tokens)
    bench.end_session(asked)
    return done.succeeded


def case_lookup() -> dict[str, object]:
    report: dict[str, object] = {}
    for tokens, calls in LOOKUPS:
        bench = client(tokens, 8)
        sequence = next(NUMBERS)
        assert store(bench, sequence)
        report[f"lookup hit {tokens}"] = summary(lookups(bench, calls, sequence))
        report[f"lookup miss {tokens}"] = summary(lookups(bench, calls, None))
        if tokens == LOOKUPS[0][0]:
            report["noop"] = summary(noops(bench))
        bench.close()
    return report


def case_pages() -> dict[str, object]:
    """One object of a page's bytes in and out, each with the lookup that its protocol asks for beforehand."""
    bench = client(CHUNK, PAGE_BYTES // CHUNK)
    first = next(NUMBERS)
    stores, loads = [], []
    for sequence in range(first, first + PAGES):
        asked = request(bench, sequence)

        def put(asked=asked):
            bench.lookup(asked)
            assert bench.store(asked, 0, CHUNK).succeeded

        stores += times_us([put])
        bench.end_session(asked)
    for sequence in range(first, first + PAGES):
        asked = request(bench, sequence)

        def get(asked=asked):
            assert bench.lookup(asked).is_full_hit
            assert bench.retrieve(asked, 0, CHUNK).succeeded

        loads += times_us([get])
        bench.end_session(asked)
    bench.close()
    return {"store page": summary(stores), "retrieve page": summary(loads)}


def case_evict(pages: int) -> dict[str, object]:
    """Twice what the store holds; what is found of the newest quarter."""
    bench = client(CHUNK, PAGE_BYTES // CHUNK)
    first = next(NUMBERS) + 50_000
    failed, times = 0, []
    for sequence in range(first, first + 2 * pages):
        done = []
        times += times_us([lambda sequence=sequence, done=done: done.append(store(bench, sequence))])
        failed += not done[0]
    found = 0
    for sequence in range(first + 2 * pages - pages // 4, first + 2 * pages):
        asked = request(bench, sequence)
        found += bench.lookup(asked).is_full_hit
        bench.end_session(asked)
    bench.close()
    return {"evict store": summary(times), "evict failed stores": failed, "evict newest quarter found": found}


def case_load() -> dict[str, object]:
    bench = client(LOAD_TOKENS, 8)
    sequence = next(NUMBERS)
    store(bench, sequence)

    def look() -> None:
        asked = request(bench, sequence)
        bench.lookup(asked)
        bench.end_session(asked)

    rate = count_for(LOAD_S, look)
    return {"lookups a second": rate}


if __name__ == "__main__":
    case = sys.argv[1]
    told = case_evict(int(sys.argv[4])) if case == "evict" else globals()[f"case_{case}"]()
    print(json.dumps(told), flush=True)
    os._exit(0)  # without a word: what the model needs is shared with the clients that still ask
