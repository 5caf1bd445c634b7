"""A decode engine whose node runs out of room: the newest request gives way and goes on later, with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes_support import Node, node, node_head
from sparse_node import MODEL, OUTPUT, PROMPTS, expected, prompt_of, sparse_toml

from kvmanager.clients.decode_engine import DecodeEngine
from kvmanager.clients.decode_work import DecodeWork
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.workspace import workspace_bytes
from kvmanager.clients.prefill_engine import PrefillEngine
from kvmanager.demo.nodes import HOT_ROWS, NAMESPACE, PAGE_ROWS
from kvmanager.geometry import ShardGeometry
from kvmanager.protos import kvmanager_pb2 as pb

RANKS = 2
SLABS = 18


def prefill_toml(directory: Path, *, name: str) -> str:
    pages = 40 * TINY.format.page_bytes(PAGE_ROWS)
    return f"""{node_head(directory, name)}
[[group]]
name = "prefill"
kind = "sharded"
format = "{TINY.format.name}"
ranks = {RANKS}
page_rows = {PAGE_ROWS}
interleave = 1
hbm_bytes_per_rank = {pages}
host_bytes_per_rank = {pages}
workspace_bytes_per_rank = {workspace_bytes(ShardGeometry(RANKS, PAGE_ROWS, 1), max(PROMPTS))}
"""


def decode_toml(directory: Path, *, name: str) -> str:
    """`sparse_node`'s, with `SLABS` slabs; it takes the spans of two prefill ranks as they are."""
    return sparse_toml(directory, name=name, slabs=SLABS, token_order="keep")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("s"), "prefill", prefill_toml) as running:
        yield running


def decode_all(source: Node, target: Node) -> tuple[dict[int, tuple[int, ...]], int]:
    """Answers by prompt length, and how often a request was retracted."""
    prefill = PrefillEngine(
        source.runtime_dir, "p", group="prefill", namespace=NAMESPACE, geometry=ShardGeometry(RANKS, PAGE_ROWS, 1),
        model=MODEL,
    )  # fmt: skip
    decode = DecodeEngine(
        target.runtime_dir, "d", group="decode-0", namespace=NAMESPACE, page_rows=PAGE_ROWS, hot_rows=HOT_ROWS,
        model=MODEL,
    )  # fmt: skip
    try:
        lengths = {}
        for length in PROMPTS:
            session = pb.SessionHint(session_id=str(length))
            done = prefill.prefill(prompt_of(length), session, lambda _: None)
            work = DecodeWork(prompt_of(length), done.first_token, done.ticket, OUTPUT, session, "")
            lengths[decode.submit(work)] = length
        answers = {}
        while not decode.idle:
            for decoded in decode.step().finished:
                answers[lengths[decoded.request_id]] = decoded.tokens
        return answers, decode.retractions
    finally:
        decode.close()
        prefill.close()


@pytest.mark.long
def test_the_newest_gives_way_and_goes_on(source: Node, tmp_path: Path) -> None:
    """More is promised than there is: the node can't keep both to the end."""
    with node(tmp_path, "decode", decode_toml) as target:
        answers, retractions = decode_all(source, target)
        target.wait_at_rest()
        counters = target.counters()
    source.wait_at_rest()
    assert retractions == counters["retraction"] == counters["resumption"] > 0
    for length in PROMPTS:
        assert answers[length] == expected(length), length
