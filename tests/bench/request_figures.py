"""Whole requests on the core against vLLM's block pool doing the same for the same pages, in the same run.

A request opens, commits, is published once its fence has passed, and closes: five events, no host memory, at DCP1
(16,384 pages of 64 tokens, one a span) and DCP8 (2,048 page indexes over eight ranks). vLLM's side is its prefix
lookup, `BlockPool` and publication, called directly on ready-made hashes. Both sides count CPU time of one thread, so
that a busy machine does not decide.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from time import thread_time

from kvmanager.core.pool import Pool
from tests.bench import vllm_reference
from tests.bench.core_figures import KEY_BYTES, PAGE_ROWS, TOKENS, Driver, session_keys
from tests.bench.figure import Figure

PAGES = TOKENS // PAGE_ROWS
HELD = 4
"""Whole requests that fit in HBM; vLLM's pool is as large."""
NOTHING = "nothing: vLLM is not here"


def figures() -> Iterator[Figure]:
    """Requests of 16,384 pages and of one, and the pool alone."""
    theirs: dict[int, dict[str, float]] = {}
    try:
        for pages in (PAGES, 1):
            theirs[pages] = vllm_reference.block_pool_s(pages, HELD * PAGES + 2)
    except vllm_reference.Unavailable as error:
        print(f"vLLM can't be measured here, so these figures have no ratio: {error}", flush=True)
    for ranks in (1, RANKS_DCP8):
        ours = _requests_s(ranks)
        for name, seconds in ours.items():
            yield _figure(f"request of 1,048,576 tokens, DCP{ranks}, {name}", seconds, theirs.get(PAGES), name)
    yield _figure("request of one page", _one_page_s(), theirs.get(1), "cold")
    yield _figure("pool: one page out and back", _pool_s(1), theirs.get(1), "pool")
    yield _figure("pool: 16,384 pages out and back", _pool_s(PAGES), theirs.get(PAGES), "pool")


RANKS_DCP8 = 8
PARTS = {
    "cold": ("cold_lookup", "cold_take", "cold_publish", "cold_give"),
    "full hit": ("hit_lookup", "hit_touch", "hit_give"),
    "evicting": ("evicting_lookup", "evicting_take", "evicting_publish", "evicting_give"),
    "pool": ("warm_pair",),
}


def _figure(name: str, seconds: float, theirs: dict[str, float] | None, kind: str) -> Figure:
    if theirs is None:
        return Figure(name, seconds * 1e6, "us", NOTHING, float("nan"))
    same = sum(theirs[part] for part in PARTS[kind])
    return Figure(name, seconds * 1e6, "us", f"vLLM's {' + '.join(PARTS[kind])} ({same * 1e6:.1f} us)", seconds / same)


def _requests_s(ranks: int) -> dict[str, float]:
    """Medians of cold requests, full hits, and cold requests into full memory."""
    seconds: dict[str, list[float]] = {"cold": [], "full hit": [], "evicting": []}
    for start in (0, 100, 200):
        driver = Driver(ranks=ranks, hbm_gib=HELD * 54 // ranks + 1, host_gib=0)
        driver.request(session_keys(start, TOKENS), TOKENS)
        plan = [("cold", start + i) for i in (1, 2, 3)] + [("full hit", start + 3)] * 4
        plan += [("evicting", start + i) for i in range(4, 8)]
        for kind, session in plan:
            keys = session_keys(session, TOKENS)
            begun = thread_time()
            cached = driver.request(keys, TOKENS)
            seconds[kind].append(thread_time() - begun)
            assert cached == (TOKENS - PAGE_ROWS if kind == "full hit" else 0)
        assert driver.node.state.counters["eviction"] > 0
    return {kind: statistics.median(times) for kind, times in seconds.items()}


def _one_page_s() -> float:
    driver = Driver(ranks=1, hbm_gib=54, host_gib=0)
    times = []
    for session in range(400):
        keys = session_keys(session, PAGE_ROWS)
        begun = thread_time()
        driver.request(keys, PAGE_ROWS)
        times.append(thread_time() - begun)
    return statistics.median(times)


def _pool_s(pages: int) -> float:
    pool = Pool("hbm", "device", 1, HELD * PAGES, {"kv": 1}, PAGE_ROWS * KEY_BYTES)
    pairs = max(1, 500 // pages)
    rounds = []
    for _ in range(200):
        begun = thread_time()
        for _ in range(pairs):
            taken = pool.take("kv", pages)
            assert taken is not None
            pool.give("kv", taken)
        rounds.append((thread_time() - begun) / pairs)
    return min(rounds)
