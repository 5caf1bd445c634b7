"""KV made on a decode node goes back to the prefill node's cache, so that the next turn computes only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes_support import (
    GROUP,
    LAYOUT,
    RANKS,
    ROWS,
    SPAN,
    Node,
    decode_engine,
    decode_toml,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.geometry import TokenOrder
from kvmanager.layout import KVLayout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.pulled import pattern, places, put

PROMPT, ANSWERED = 2 * SPAN, 2 * SPAN + 40
NEXT = 4 * SPAN
"""The answer ends inside a span, whose rest the next turn's prompt fills."""


def returning_toml(runtime_dir: Path, *, name: str, residency: str) -> str:
    text = decode_toml(runtime_dir, name=name)
    text = text.replace("pull_deadline_ms = 5000", "return_path = true")
    return f'{text}residency = "{residency}"\n'


@pytest.fixture(scope="module")
def prefill_node(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("p"), "prefill", prefill_toml, pages=40) as running:
        yield running


def on_ranks(pages: np.ndarray, tokens: int) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """(rank, pages, slots, positions) of a prefill request's tokens."""
    number, slot = places(TokenOrder(RANKS, 1), ROWS, tokens)
    ranks = [np.flatnonzero(number % RANKS == rank) for rank in range(RANKS)]
    return [(rank, pages[number[mine] // RANKS], slot[mine], mine) for rank, mine in enumerate(ranks)]


def compute(engine: AttachedEngine, request_id: int, opened: pb.OpenReply, first: int, end: int) -> None:
    """Writes the rows of tokens [first, end) on all ranks of the prefill engine, and commits."""
    for rank, pages, slots, positions in on_ranks(pages_of(opened, "kv"), end):
        new = positions >= first
        put(engine.workers.ranks[rank].classes["kv"].device, LAYOUT, pages[new], slots[new], positions[new])
    engine.step([RequestStep(request_id, end, end)])


def pages_of(opened: pb.OpenReply, page_class: str) -> np.ndarray:
    data = b"".join(p.device_pages for run in opened.spans for p in run.pages if p.page_class == page_class)
    return np.frombuffer(data, "<u4").astype(np.int64)


def spread(opened: pb.OpenReply, page_class: str, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(page, slot) of a decode request's tokens, span by span in each one's order."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    pages = pages_of(opened, page_class)
    for run in opened.spans:
        for segments, interleave in zip(
            np.frombuffer(run.segments, "<u4").tolist(), np.frombuffer(run.interleave, "<u4").tolist(), strict=True
        ):
            number, slot = places(TokenOrder(segments, interleave), ROWS, segments * ROWS)
            found.append((pages[:segments][number], slot))
            pages = pages[segments:]
    page, slot = (np.concatenate(part)[:tokens] for part in zip(*found, strict=True))
    return page, slot


def rows_at(memory: np.ndarray, layout: KVLayout, key, pages: np.ndarray, slots: np.ndarray) -> np.ndarray:
    c = layout.by_key[key]
    at = c.offset + pages * c.page_stride + slots * c.slot_stride
    return memory[at[:, None] + np.arange(c.row_bytes)]


def answer(decode: AttachedEngine, ticket: pb.Ticket, tokens: np.ndarray) -> None:
    """Takes the prompt over and decodes on: rows of the answer in both classes of pages."""
    opened = decode.open(open_of(1, tokens[:ANSWERED], ticket=ticket, growth=ROWS))
    assert opened.cached_tokens == PROMPT
    for name, memory in decode.workers.ranks[0].classes.items():
        page, slot = spread(opened, name, ANSWERED)
        mine = np.arange(PROMPT, ANSWERED)
        put(memory.device, memory.layout, page[mine], slot[mine], mine)
    decode.step([RequestStep(1, ANSWERED, ANSWERED)])


@pytest.mark.parametrize("residency", ["hybrid", "always-host"])
def test_an_answer_comes_back_and_the_next_turn_finds_it(
    tmp_path: Path, prefill_node: Node, residency: str
) -> None:
    seed = 70 + len(residency)
    tokens = tokens_of(seed, NEXT + 1)
    with node(tmp_path, "decode", returning_toml, residency=residency) as decode_node:
        prefill, decode = prefill_engine(prefill_node.runtime_dir), decode_engine(decode_node.runtime_dir)
        first = prefill.open(open_of(1, tokens[:PROMPT], growth=0))
        compute(prefill, 1, first, 0, PROMPT)
        there = prefill.client.export(1)
        prefill.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
        answer(decode, there, tokens)
        if residency == "always-host":

            def on_host() -> bool:
                decode.step()
                return any(request.host_only_spans for request in decode_node.admin.requests().requests)

            wait_for(on_host)
            assert prefill_node.admin.reset(GROUP).forgotten_spans > 0, "then all comes back, from both tiers"
        back = decode.client.export(1)
        assert back.committed_tokens == ANSWERED
        decode.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
        before = prefill_node.counters()["handoff"]
        opened = prefill.open(open_of(2, tokens[:NEXT], ticket=back, growth=0))
        assert opened.cached_tokens == ANSWERED
        assert prefill_node.counters()["handoff"] == before + 1
        for rank, pages, slots, positions in on_ranks(pages_of(opened, "kv"), ANSWERED):
            memory = prefill.workers.ranks[rank].classes["kv"].device
            for key in LAYOUT.by_key:  # the MTP layer's too: its row at the last position is what the donor had
                found = rows_at(memory, LAYOUT, key, pages, slots)
                assert np.array_equal(found, pattern(LAYOUT, key, positions)), (rank, key)
        compute(prefill, 2, opened, ANSWERED, NEXT)
        prefill.step(closes=[pb.CloseRequest(request_id=2, reason=pb.FINISHED)])
        again = prefill.open(open_of(3, tokens, growth=0))
        assert again.cached_tokens == NEXT
        prefill.step(closes=[pb.CloseRequest(request_id=3, reason=pb.ABORTED)])
        wait_for(lambda: not decode_node.admin.leases().leases)
        decode.close()
        prefill.close()
        decode_node.wait_at_rest()
        prefill_node.wait_at_rest()
