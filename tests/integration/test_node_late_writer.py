"""A worker that writes late, in real memory: what it said before is believed when its timeline says so, not before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from nodes_support import (
    SPAN,
    Node,
    device_pages,
    fill,
    get,
    node,
    open_of,
    page_bytes_of,
    prefill_engine,
    prefill_toml,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import pack_u64

LATE = 1
OLD = 99
SPANS = 5


@pytest.fixture
def served(tmp_path) -> Iterator[Node]:
    with node(tmp_path, "prefill", prefill_toml) as running:
        yield running


def commit_before_writing(engine: AttachedEngine) -> tuple[np.ndarray, int]:
    """Commits and closes a request whose work is still to come; its pages, and the value that stands for that work."""
    tokens = tokens_of(LATE, SPANS * SPAN)
    pages = device_pages(engine.open(open_of(1, tokens, growth=0)))
    fill(engine, pages, seed=OLD)
    value = engine.workers._value + 1
    ranks = engine.workers.ranks
    fence = pb.Fence(attach_ids=pack_u64([rank.attach_id for rank in ranks]), values=pack_u64([value] * len(ranks)))
    engine.workers._value = value
    done = [pb.CloseRequest(request_id=1, reason=pb.FINISHED)]
    result = engine.client.step(fence=fence, requests=[RequestStep(1, len(tokens), len(tokens))], closes=done)
    assert not result.errors
    return pages, value


def push_out(engine: AttachedEngine, served: Node) -> None:
    """Other prompts take all of HBM."""
    for number, seed in enumerate((20, 21, 22, 23), start=100):
        run_request(engine, number, tokens_of(seed, SPANS * SPAN), seed)
    served.wait_at_rest()


def found_bytes(engine: AttachedEngine, seed: int) -> tuple[int, int]:
    """(pages found of the late request's prompt but its last, pages of them that hold what `seed` writes)."""
    opened = engine.open(open_of(2, tokens_of(LATE, SPANS * SPAN), growth=0))
    pages = device_pages(opened)[: opened.cached_tokens // SPAN].tolist()
    right = 0
    for place, page in enumerate(pages):
        right += all(
            np.array_equal(get(worker.classes["kv"].device, page), page_bytes_of(seed, rank, place))
            for rank, worker in enumerate(engine.workers.ranks)
        )
    engine.step(closes=[pb.CloseRequest(request_id=2, reason=pb.ABORTED)])
    return len(pages), right


def test_what_is_written_late_is_offloaded_after_it_was_written(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    pages, value = commit_before_writing(engine)
    assert served.counters()["offload"] == 0
    held = served.pools()["prefill/hbm"]
    fill(engine, pages, seed=LATE)
    assert served.counters()["offload"] == 0, "nothing was copied while the work was not done"
    assert served.pools()["prefill/hbm"] == held, "nor given back"
    for rank in engine.workers.ranks:
        rank.raise_timeline(value)
    wait_for(lambda: served.counters()["offload"] == SPANS)
    push_out(engine, served)
    found, right = found_bytes(engine, LATE)
    assert found == right == SPANS - 1
    engine.close()
    served.wait_at_rest()


def test_without_the_fence_the_bytes_would_be_wrong(served: Node) -> None:
    """The same work with a timeline that runs ahead of it: the test above can see the difference."""
    engine = prefill_engine(served.runtime_dir)
    pages, value = commit_before_writing(engine)
    for rank in engine.workers.ranks:
        rank.raise_timeline(value)
    wait_for(lambda: served.counters()["offload"] == SPANS)
    fill(engine, pages, seed=LATE)
    push_out(engine, served)
    found, right = found_bytes(engine, LATE)
    assert found == SPANS - 1
    assert right == 0
    assert found_bytes(engine, OLD) == (SPANS - 1, SPANS - 1)
    engine.close()
    served.wait_at_rest()
