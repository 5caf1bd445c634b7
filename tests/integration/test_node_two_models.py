"""Two models in one host region: extents go from one to the other, and every byte that is found is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes_support import RANKS, ROWS, SPAN, Node, device_pages, kill_and_wait, node, tokens_of

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.keys import KeyChain
from kvmanager.command.screens import UNOWNED_EXTENT
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.layout import GLM53, GLM53_TINY, KVFormat, native_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import unpack_u32

LARGE_BYTES, SMALL_BYTES = GLM53.page_bytes(ROWS), GLM53_TINY.page_bytes(ROWS)
EXTENT = 4 * LARGE_BYTES
EXTENTS = 5
SMALL_PAGES = 2 * EXTENT // SMALL_BYTES
PROMPT = SMALL_PAGES // 3
"""Spans of the small model's prompts: two of them fit in its HBM."""


def _group(name: str, kv_format: KVFormat, pages: int, host_bytes: int) -> str:
    return f"""
[[group]]
name = "{name}"
kind = "sharded"
format = "{kv_format.name}"
ranks = {RANKS}
page_rows = {ROWS}
hbm_bytes_per_rank = {pages * kv_format.page_bytes(ROWS)}
host_bytes_per_rank = {host_bytes}
host_region = "ram"
host_extent_bytes = {EXTENT}
"""


def two_models_toml(runtime_dir: Path, *, name: str) -> str:
    large = _group("large", GLM53, 6, 2 * EXTENT) + 'host_floor = 0.2\n'
    small = _group("small", GLM53_TINY, SMALL_PAGES, 3 * EXTENT) + 'host_ceiling = 0.8\n'
    return f'[node]\nname = "{name}"\nruntime_dir = "{runtime_dir}"\nspare = false\n{large}{small}'


class Model:
    """An engine of one model; what it writes depends on prompt, rank and place."""

    def __init__(self, served: Node, group: str, kv_format: KVFormat) -> None:
        layout = native_layout(kv_format, ROWS)
        self.namespace = pb.Namespace()
        self.namespace.CopyFrom(NAMESPACE)
        self.namespace.kv_format = kv_format.name
        self.engine = AttachedEngine(
            served.runtime_dir, f"engine-{group}", group=group, namespace=self.namespace, layouts=[layout], ranks=RANKS
        )
        self.page_bytes = kv_format.page_bytes(ROWS)
        self._requests = 0

    def content(self, seed: int, rank: int, place: int) -> np.ndarray:
        return np.random.default_rng([seed, rank, place, self.page_bytes]).integers(
            0, 256, self.page_bytes, dtype=np.uint8
        )

    def serve(self, seed: int, spans: int) -> int:
        """A prompt of whole spans, computed as far as it is not found; spans found, all with the right bytes."""
        self._requests += 1
        tokens = tokens_of(seed, spans * SPAN)
        prompt = pb.OpenRequest(
            request_id=self._requests, prompt_tokens=len(tokens), prompt_keys=KeyChain(self.namespace).extend(tokens)
        )
        opened = self.engine.open(prompt)
        found = opened.cached_tokens // SPAN
        for rank, worker in enumerate(self.engine.workers.ranks):
            memory = worker.classes["kv"].device
            for place, page in enumerate(device_pages(opened).tolist()):
                target = memory[page * self.page_bytes : (page + 1) * self.page_bytes]
                if place < found:
                    assert np.array_equal(target, self.content(seed, rank, place)), (seed, rank, place)
                else:
                    target[:] = self.content(seed, rank, place)
        self.engine.step([RequestStep(self._requests, spans * SPAN, spans * SPAN)])
        self.engine.step(closes=[pb.CloseRequest(request_id=self._requests, reason=pb.FINISHED)])
        return int(found)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, "two", two_models_toml) as running:
        yield running


def owned(served: Node) -> dict[str, int]:
    """Extents by pool; the account of the region holds."""
    reply = served.admin.pools()
    (region,) = reply.regions
    pools = [pool for pool in reply.pools if pool.pool in region.pools]
    held = sum(pool.capacity_bytes for pool in pools) + region.unowned_bytes + region.unusable_bytes
    assert held == region.capacity_bytes == EXTENTS * EXTENT * RANKS
    owners = unpack_u32(region.owners, "owners")
    found = {pool: int((owners == number).sum()) for number, pool in enumerate(region.pools)}
    return found | {"": int((owners == UNOWNED_EXTENT).sum())}


def test_extents_follow_the_load_and_the_bytes_are_right(served: Node) -> None:
    large, small = Model(served, "large", GLM53), Model(served, "small", GLM53_TINY)
    assert owned(served) == {"large/host": 1, "small/host": 0, "": 4}
    for seed in range(6):
        small.serve(seed, PROMPT)
    served.wait_at_rest()
    assert owned(served)["small/host"] >= 3
    assert [small.serve(seed, PROMPT) > 0 for seed in (4, 5)] == [True, True]

    for seed in range(4):
        large.serve(seed, 5)
        served.wait_at_rest()
    moved = owned(served)
    assert moved["large/host"] >= 3, "what the small model had was older"
    assert served.counters()["extent_move"] >= 1
    found = [large.serve(seed, 5) for seed in (1, 2, 3)]
    assert sum(found) >= 1, "each takes nearly all of HBM, so they come from extents that were the small model's"
    assert served.counters()["onboard"] >= 1

    served.wait_at_rest()
    moved, moves = owned(served), served.counters()["extent_move"]
    kill_and_wait(served.pid_of("daemon"))
    large.engine.step()  # it goes on with the next daemon
    small.engine.step()
    served.reopen()
    now = owned(served)
    gained = sum(max(extents - moved[pool], 0) for pool, extents in now.items() if pool)
    nobodys = max(moved[""] - now[""], 0)  # a pool may have taken one since that was free
    assert gained <= served.counters()["extent_move"] - moves + nobodys, f"the journal knows whose they are: {now}"
    assert large.serve(3, 5) > 0
    for seed in range(10, 16):
        small.serve(seed, PROMPT)
        served.wait_at_rest()
    assert owned(served)["large/host"] < moved["large/host"], "and back"
    assert small.serve(15, PROMPT) > 0
    assert large.serve(9, 5) == 0
    for model in (large, small):
        model.engine.close()
    served.wait_at_rest()
