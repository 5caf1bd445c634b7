"""The core at the deployment's true size: one request of 1,048,576 tokens, accounting only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from kvmanager.config import NodeConfig
from kvmanager.core.events import (
    AttachRank,
    Close,
    Closing,
    CopyOutcome,
    Open,
    PlanEnded,
    Progress,
    RegisterEngine,
    Step,
    SubmitPlan,
    TimelinesRead,
)
from kvmanager.core.node import Node
from kvmanager.groups import core_limits, plan_memory
from tests.bench.figure import Figure, median_s

TOKENS = 1 << 20
PAGE_ROWS = 64
CONFIG = """
[node]
name = "bench"
runtime_dir = "/tmp/kvmanager-bench"
[[group]]
name = "prefill"
kind = "sharded"
format = "glm-5.3-fp8_ds_mla"
ranks = 8
page_rows = 64
hbm_bytes_per_rank = "15 GiB"
host_bytes_per_rank = "64 GiB"
"""


class _Driver:
    """Drives one sharded engine on an accounting-only core."""

    def __init__(self) -> None:
        config = NodeConfig.from_text(CONFIG)
        memory = plan_memory(config)
        self.node = Node(list(memory.groups), core_limits(config))
        self._now = 0
        layouts = tuple(c.layout.fingerprint for c in memory.groups[0].chains[0].classes)
        self._apply(RegisterEngine("engine", "prefill", b"bench", 16, PAGE_ROWS, layouts, 8))
        self._attaches = [self._apply(AttachRank("engine", 1, r, r))[0].answer.attach_id for r in range(8)]
        self._number = 0
        self._request = 0

    def _apply(self, event: object) -> list:
        self._now += 1
        return self.node.apply(event, self._now)

    def _step(self, **parts: tuple) -> list:
        self._number += 1
        fence = dict.fromkeys(self._attaches, self._number)
        effects = self._apply(Step("engine", 1, self._number, fence=fence, **parts))
        effects += self._apply(TimelinesRead(fence))
        for effect in list(effects):
            while isinstance(effect, SubmitPlan):
                more = self._apply(PlanEnded(effect.plan.plan_id, CopyOutcome.DONE))
                effects += more
                effect = next((e for e in more if isinstance(e, SubmitPlan)), None)
        return effects

    def request(self, keys: bytes, tokens: int) -> int:
        """Open, commit, close; returns the cached tokens."""
        self._request += 1
        opened = self._step(opens=(Open(self._request, tokens, 0, keys),))[0].answer.opened[0]
        assert opened.state == "runnable", opened.error
        self._step(progress=(Progress(self._request, tokens, tokens),))
        self._step(closes=(Close(self._request, Closing.FINISHED),))
        return opened.cached_tokens


def _keys(session: int, segments: int) -> bytes:
    rng = np.random.Generator(np.random.Philox(session))
    return rng.bytes(segments * 16)


def figures() -> Iterator[Figure]:
    """Match + reserve + commit + release of 2,048 spans; and the prefix match alone."""
    driver = _Driver()
    spans = TOKENS // (8 * PAGE_ROWS)
    sessions = iter(range(1_000))

    def cold() -> None:
        driver.request(_keys(next(sessions), TOKENS // PAGE_ROWS), TOKENS)

    def naive() -> None:
        free = list(range(spans))
        table = {}
        for span in range(spans):
            table[hashlib.sha256(span.to_bytes(8, "little")).digest()] = free.pop()
        for page in table.values():
            free.append(page)

    cold_s = median_s(cold, 5)
    naive_s = median_s(naive, 5)
    yield Figure(
        "core: 1,048,576-token request, DCP8, cold", cold_s * 1e3, "ms", "a dict and a list handing out 2,048 pages",
        cold_s / naive_s,
    )
    keys = _keys(5_000, TOKENS // PAGE_ROWS)
    driver.request(keys, TOKENS)
    chain = driver.node.state.groups["prefill"].chains[0]
    match_s = median_s(lambda: chain.index.match(keys, TOKENS // PAGE_ROWS - 1), 20)
    hash_s = median_s(lambda: hashlib.sha256(keys).digest(), 20)
    yield Figure(
        "core: prefix match of 1,048,576 tokens", match_s * 1e6, "us", "one sha256 over its keys", match_s / hash_s
    )
