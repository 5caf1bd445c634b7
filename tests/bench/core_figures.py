"""The core at the deployment's true size: requests of 1,048,576 tokens on DCP8, accounting only.

A cold request opens, commits, is published, written back and closed: 16,384 pages over eight ranks, 64 offload
plans. What a plain block pool spends on as many pages, one by one, is measured beside it.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np

from kvmanager.clients.keys import KeyChain
from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.configuration.reading import parse_config
from kvmanager.core.events import (
    AttachRank,
    Close,
    Closing,
    CopyOutcome,
    Effect,
    Event,
    Open,
    PlanEnded,
    Progress,
    RegisterEngine,
    Replied,
    Step,
    SubmitPlan,
    TimelinesRead,
)
from kvmanager.core.node import Node
from kvmanager.core.prefix import PrefixIndex
from kvmanager.core.spans import NO_SPAN, SpanTable
from kvmanager.geometry import TokenOrder
from kvmanager.protos import kvmanager_pb2 as pb
from tests.bench.figure import Figure, best_cpu_s, median_s

TOKENS = 1 << 20
STATE_TOKENS = 10_000_000
PAGE_ROWS = 64
RANKS = 8
SPAN_TOKENS = RANKS * PAGE_ROWS
KEY_BYTES = 16
CONFIG = """
[node]
name = "bench"
runtime_dir = "/tmp/kvmanager-bench"
[[group]]
name = "prefill"
kind = "sharded"
format = "glm-5.3-fp8_ds_mla"
ranks = {ranks}
page_rows = 64
hbm_bytes_per_rank = "{hbm_gib} GiB"
host_bytes_per_rank = "{host_gib} GiB"
"""
PLAIN = "16,384 pages from a plain free list, one dict look-up each"


class Driver:
    """Drives one sharded engine on an accounting-only core. HBM holds two whole requests, host memory nine."""

    def __init__(self, hbm_gib: int = 15, host_gib: int = 64, ranks: int = RANKS) -> None:
        config = parse_config(CONFIG.format(hbm_gib=hbm_gib, host_gib=host_gib, ranks=ranks))
        memory = plan_memory(config)
        self.node = Node(list(memory.groups), core_limits(config))
        self._now = 0
        layouts = tuple(c.layout.fingerprint for c in memory.groups[0].chains[0].classes)
        self._apply(RegisterEngine("engine", "prefill", b"bench", KEY_BYTES, PAGE_ROWS, layouts, ranks))
        self._attaches = [self._answer(AttachRank("engine", 1, r, r)).attach_id for r in range(ranks)]
        self._number = 0
        self._request = 0
        self.open_s = 0.0
        self.offload_s: list[float] = []

    def _apply(self, event: Event) -> list[Effect]:
        self._now += 1
        return self.node.apply(event, self._now)

    def _answer(self, event: Event) -> object:
        reply = self._apply(event)[0]
        assert isinstance(reply, Replied)
        return reply.answer

    def _step(self, **parts: tuple) -> list[Effect]:
        self._number += 1
        return self._apply(Step("engine", 1, self._number, fence=self._fence(), **parts))

    def _fence(self) -> dict[int, int]:
        return dict.fromkeys(self._attaches, self._number)

    def _copy(self, effects: list[Effect]) -> None:
        """Ends the plans that were asked for, and those that follow from their ends."""
        waiting = [effect.plan.plan_id for effect in effects if isinstance(effect, SubmitPlan)]
        while waiting:
            start = perf_counter()
            more = self._apply(PlanEnded(waiting.pop(0), CopyOutcome.DONE))
            self.offload_s.append(perf_counter() - start)
            waiting += [effect.plan.plan_id for effect in more if isinstance(effect, SubmitPlan)]

    def request(self, keys: bytes, tokens: int) -> int:
        """Open, onboard, commit, publish, offload, close; returns the cached tokens."""
        self._request += 1
        start = perf_counter()
        effects = self._step(opens=(Open(self._request, tokens, 0, keys),))
        self.open_s = perf_counter() - start
        opened = effects[0].answer.opened[0]
        assert opened.state != "refused", opened.error
        self._copy(effects)
        self._step(progress=(Progress(self._request, tokens, tokens),))
        self.offload_s.clear()
        self._copy(self._apply(TimelinesRead(self._fence())))
        self._step(closes=(Close(self._request, Closing.FINISHED),))
        self._apply(TimelinesRead(self._fence()))
        return opened.cached_tokens


def session_keys(session: int, tokens: int) -> bytes:
    """Keys that no other session has."""
    return np.random.Generator(np.random.Philox(session)).bytes(tokens // PAGE_ROWS * KEY_BYTES)


def _plain_pool() -> None:
    """The usual block pool's work for one request: look a block up, take a page, note it, take it back."""
    pages = TOKENS // PAGE_ROWS
    keys = _PLAIN_KEYS
    free = list(range(pages))
    cached: dict[bytes, int] = {}
    held = []
    for key in keys:
        if key not in cached:
            cached[key] = free.pop()
        held.append(key)
    for key in reversed(held):
        free.append(cached.pop(key))


_PLAIN_KEYS = [number.to_bytes(KEY_BYTES, "little") for number in range(TOKENS // PAGE_ROWS)]


def figures() -> Iterator[Figure]:
    """Requests, matches, and the memory that the core's state takes."""
    yield from _request_figures()
    yield from _match_figures()
    yield from _state_figures()
    yield from _key_figures()


def _key_figures() -> Iterator[Figure]:
    """A client's keys for a whole prompt and for its next turn, beside hashlib's own calls in a bare loop."""
    tokens = np.random.default_rng(0).integers(0, 150_000, TOKENS)
    text = tokens.astype("<u4").tobytes()
    namespace = pb.Namespace(model="m", key_tokens=PAGE_ROWS, key_bytes=KEY_BYTES, key_hash="sha256")

    def bare() -> bytes:
        last, made = bytes(32), []
        for start in range(0, len(text), 4 * PAGE_ROWS):
            last = hashlib.sha256(last + text[start : start + 4 * PAGE_ROWS]).digest()[:KEY_BYTES]
            made.append(last)
        return b"".join(made)

    bare_s = best_cpu_s(bare, 15)
    made_s = best_cpu_s(lambda: KeyChain(namespace).extend(tokens), 15)
    yield Figure("client: keys of 1,048,576 tokens (CPU)", made_s * 1e3, "ms", "a bare hashlib loop", made_s / bare_s)
    chain = KeyChain(namespace)
    chain.extend(tokens)
    turn_s = best_cpu_s(lambda: chain.extend(tokens[:2_048]), 50)
    yield Figure("client: keys of the next 2,048 tokens", turn_s * 1e6, "us", "that loop", turn_s / bare_s)


def _request_figures() -> Iterator[Figure]:
    driver = Driver()
    sessions = iter(range(1_000))
    plain_s = median_s(_plain_pool, 5)
    opens_s: list[float] = []
    ends_s: list[float] = []

    def cold() -> None:
        driver.request(session_keys(next(sessions), TOKENS), TOKENS)
        opens_s.append(driver.open_s)
        ends_s.extend(driver.offload_s)

    def figure(name: str, seconds: float) -> Figure:
        return Figure(f"core: {name}", seconds * 1e3, "ms", PLAIN, seconds / plain_s)

    yield figure("1,048,576-token request, DCP8, cold", median_s(cold, 6))
    assert driver.node.state.counters["reclaim"] > 0
    assert driver.node.state.counters["eviction"] == 0
    yield figure("... its open, which drops clean copies", statistics.median(opens_s[3:]))
    yield figure("... the end of one of its 64 offloads", statistics.median(ends_s))
    last = session_keys(6, TOKENS)
    opens_s.clear()

    def reopen() -> None:
        assert driver.request(last, TOKENS) == TOKENS - PAGE_ROWS
        opens_s.append(driver.open_s)

    median_s(reopen, 5)
    yield figure("open with a full hit", statistics.median(opens_s))
    for _ in range(4):  # until host memory is full
        cold()
    ends_s.clear()
    yield figure("cold request with full host memory", median_s(cold, 3))
    assert driver.node.state.counters["eviction"] > 0
    yield figure("... the end of an offload that evicts", statistics.median(ends_s))
    evicting = Driver(host_gib=0)
    opens_s.clear()

    def evict() -> None:
        evicting.request(session_keys(next(sessions), TOKENS), TOKENS)
        opens_s.append(evicting.open_s)

    median_s(evict, 7)
    assert evicting.node.state.counters["eviction"] > 0
    yield figure("open that evicts (no host memory)", statistics.median(opens_s[3:]))


def _index_of(sessions: dict[int, int]) -> PrefixIndex:
    """An index of whole spans: session -> tokens."""
    table = SpanTable(1, 1)
    index = PrefixIndex(table, KEY_BYTES)
    for session, tokens in sessions.items():
        keys, spans = session_keys(session, tokens), tokens // SPAN_TOKENS
        firsts = np.arange(spans, dtype=np.int64) * SPAN_TOKENS
        rows = table.add_many(firsts, TokenOrder(RANKS, 1), 0)
        table.keys.put(rows, np.frombuffer(keys, np.uint8).reshape(spans, RANKS * KEY_BYTES))
        table.valid[rows] = RANKS
        index.publish_run(rows, NO_SPAN)
    return index


def _match_figures() -> Iterator[Figure]:
    """A long and a short prompt in an index of 10M tokens, and in one of 100M."""
    measured = {0: TOKENS, 1: TOKENS >> 3}
    times: dict[tuple[int, int], float] = {}
    for others in (70, 770):
        index = _index_of(measured | {2 + other: 131_072 for other in range(others)})
        for session, tokens in measured.items():
            keys = session_keys(session, tokens)
            times[others, tokens] = median_s(_matching(index, keys, tokens), 200)
            hash_s = median_s(lambda keys=keys: hashlib.sha256(keys).digest(), 200)
            size = "10M" if others == 70 else "100M"
            yield Figure(
                f"core: match of {tokens:,} tokens among {size}", times[others, tokens] * 1e6, "us",
                "one sha256 over its keys", times[others, tokens] / hash_s,
            )
    for tokens in measured.values():
        growth = times[770, tokens] / times[70, tokens]
        yield Figure(f"core: growth of that match of {tokens:,}", growth, "x", "the growth of the index", growth / 10)


def _matching(index: PrefixIndex, keys: bytes, tokens: int) -> Callable[[], None]:
    segments = tokens // PAGE_ROWS

    def match() -> None:
        assert index.match(keys, segments).segments == segments

    return match


def _state_figures() -> Iterator[Figure]:
    """Memory of spans and index once 10M tokens are cached, above a node that holds nothing."""
    driver = Driver(hbm_gib=70, host_gib=70)
    gc.collect()
    tracemalloc.start()
    try:
        for session in range(-(-STATE_TOKENS // TOKENS)):
            driver.request(session_keys(10_000 + session, TOKENS), TOKENS)
        gc.collect()
        state_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    spans = int(driver.node.state.groups["prefill"].chains[0].table.published.sum())
    assert spans * SPAN_TOKENS >= STATE_TOKENS
    keys_bytes = spans * RANKS * KEY_BYTES
    yield Figure(
        f"core: state of {spans * SPAN_TOKENS:,} cached tokens", state_bytes / (1 << 20), "MiB", "their keys alone",
        state_bytes / keys_bytes,
    )
