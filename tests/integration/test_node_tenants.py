"""A running node with tenants, and one with a replicated group: what the configuration promises, over the wire."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from nodes_support import (
    GROUP,
    LAYOUT,
    PAGE_BYTES,
    RANKS,
    ROWS,
    SPAN,
    device_pages,
    get,
    node,
    open_of,
    page_bytes_of,
    prefill_engine,
    prefill_toml,
    put,
    run_request,
    tokens_of,
)

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import QuotaExceeded
from kvmanager.protos import kvmanager_pb2 as pb

PAGES = 12


def _tenant(ceiling: float) -> str:
    return f"""
[[tenant]]
name = "us"
uids = [{os.getuid()}]
floor = 0.25
ceiling = {ceiling}
priority = 1
"""


def test_a_tenant_uses_its_share_and_no_more(tmp_path: Path) -> None:
    with node(tmp_path, "shared", prefill_toml, pages=PAGES, more=_tenant(0.5)) as running:
        engine = prefill_engine(running.runtime_dir)
        with pytest.raises(QuotaExceeded) as refused:
            engine.open(open_of(1, tokens_of(1, 7 * SPAN), growth=0))
        assert refused.value.pool == f"{GROUP}/hbm"
        assert refused.value.needed == 7
        run_request(engine, 2, tokens_of(2, 5 * SPAN), 2)
        # Its own cache makes room for it, and nothing else does.
        run_request(engine, 3, tokens_of(3, 6 * SPAN), 3)
        free, *_ = running.pools()[f"{GROUP}/hbm"]
        assert free >= PAGES // 2 * PAGE_BYTES * RANKS
        assert run_request(engine, 4, tokens_of(3, 6 * SPAN), 3) >= 5 * SPAN
        engine.close()
        running.wait_at_rest()


def _replicated_toml(runtime_dir: Path, *, name: str) -> str:
    return prefill_toml(runtime_dir, name=name, pages=PAGES).replace('kind = "sharded"', 'kind = "replicated"').replace(
        "interleave = 1\n", ""
    )


def _serve(engine: AttachedEngine, request_id: int, seed: int, spans: int) -> tuple[int, np.ndarray]:
    """A request of which every rank writes the same bytes; (tokens cached, its pages). Checks what was cached."""
    tokens = tokens_of(seed, spans * ROWS)
    opened = engine.open(open_of(request_id, tokens, growth=0))
    pages = device_pages(opened)
    cached = opened.cached_tokens // ROWS
    for worker in engine.workers.ranks:
        for place, page in enumerate(pages.tolist()):
            memory, data = worker.classes["kv"].device, page_bytes_of(seed, 0, place)
            if place < cached:
                assert np.array_equal(get(memory, page), data), (request_id, place)
            else:
                put(memory, page, data)
    engine.step([RequestStep(request_id, len(tokens), len(tokens))])
    engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])
    return int(opened.cached_tokens), pages


def test_a_replicated_group_is_kept_once_on_the_host_and_comes_back_to_every_rank(tmp_path: Path) -> None:
    with node(tmp_path, "copies", _replicated_toml) as running:
        engine = AttachedEngine(
            running.runtime_dir, "tp", group=GROUP, namespace=NAMESPACE, layouts=[LAYOUT], ranks=RANKS
        )
        for round_ in range(2):
            for seed in range(3):
                cached, _ = _serve(engine, 10 * round_ + seed, seed, 5)
                assert cached >= 4 * ROWS * round_
                running.wait_at_rest()
        counters = running.counters()
        assert counters["onboard"] > 0
        # Fifteen spans, each once on the host, though two ranks have each of them.
        assert running.pools()[f"{GROUP}/host"][3] == 15 * PAGE_BYTES
        engine.close()
        running.wait_at_rest()
