"""Hand-offs between cache groups of two nodes whose pages differ in size, by requests of the engines' sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes_support import Node, device_pages, kill_and_wait, node, wait_for

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.errors import InvalidArgument, KVError, LayoutMismatch, TransferFailed, UnknownLease
from kvmanager.layout import plain_format, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from tests.sim.driver import chain_keys

LAYERS, HEADS, ROW = 3, 2, 64
FORMAT = plain_format("float32", LAYERS, HEADS, ROW)
ROWS = {"source": 16, "target": 48}
PAGES = {"source": 48, "target": 16}
TOKENS = 16 * 16 + 7
"""Whole pages on neither side."""


def toml(runtime_dir: Path, *, name: str = "source", ranks: int = 1, lease: str = "") -> str:
    return f"""
[node]
name = "{name}"
runtime_dir = "{runtime_dir}"
spare = false
[lease]
{lease}
[[group]]
name = "kv"
kind = "cache"
format = "{FORMAT.name}"
ranks = {ranks}
page_rows = {ROWS[name]}
host_bytes_per_rank = {PAGES[name] * plain_layout(FORMAT, ROWS[name]).page_bytes}
[mover]
staging_bytes = "192 KiB"
chunk_bytes = "64 KiB"
pull_deadline_ms = 20000
"""


def namespace(rows: int, model: str = "m") -> pb.Namespace:
    return pb.Namespace(
        model=model, weights_revision="1", kv_format=FORMAT.name, key_hash="sha256_cbor", key_bytes=32, key_tokens=rows
    )


def engine(at: Node, side: str, model: str = "m", ranks: int = 1) -> AttachedEngine:
    rows = ROWS[side]
    return AttachedEngine(
        at.runtime_dir, side, group="kv", namespace=namespace(rows, model), layouts=[plain_layout(FORMAT, rows)],
        ranks=ranks,
    )  # fmt: skip


def open_of(request_id: int, what: int, tokens: int, rows: int, ticket: pb.Ticket | None = None) -> pb.OpenRequest:
    keys = chain_keys((what, rows), tokens // rows, 32)
    return pb.OpenRequest(request_id=request_id, prompt_tokens=tokens, prompt_keys=keys, ticket=ticket)


def content(what: int, tokens: int) -> np.ndarray:
    """uint8[layers, heads, tokens, row bytes]."""
    longest = np.random.default_rng(what).integers(0, 256, (2048, LAYERS, HEADS, ROW), dtype=np.uint8)
    return np.moveaxis(longest[:tokens], 0, 2)


def page(held: AttachedEngine, side: str, index: int) -> np.ndarray:
    """uint8[layers, heads, rows, row bytes] of a page; a view."""
    size = plain_layout(FORMAT, ROWS[side]).page_bytes
    memory = held.workers.ranks[0].classes["kv"].device
    return memory[index * size : (index + 1) * size].reshape(LAYERS, HEADS, ROWS[side], ROW)


def fill(held: AttachedEngine, side: str, opened: pb.OpenReply, what: int, tokens: int) -> None:
    rows, data = ROWS[side], content(what, tokens)
    for place, index in enumerate(device_pages(opened).tolist()):
        part = data[:, :, place * rows : (place + 1) * rows]
        page(held, side, index)[:, :, : part.shape[2]] = part


def check(held: AttachedEngine, side: str, opened: pb.OpenReply, what: int, tokens: int) -> None:
    rows, data = ROWS[side], content(what, tokens)
    for place, index in enumerate(device_pages(opened).tolist()):
        part = data[:, :, place * rows : (place + 1) * rows]
        assert np.array_equal(page(held, side, index)[:, :, : part.shape[2]], part), place


def prefill(held: AttachedEngine, request_id: int, what: int, tokens: int = TOKENS) -> pb.Ticket:
    """Computes a prompt and exports it."""
    opened = held.open(open_of(request_id, what, tokens, ROWS["source"]))
    fill(held, "source", opened, what, tokens)
    held.step([RequestStep(request_id, tokens, tokens)])
    ticket = held.client.export(request_id)
    close(held, request_id)
    return ticket


def close(held: AttachedEngine, request_id: int) -> None:
    held.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    lease = "ticket_ttl_ms = 1500\ngrace_ms = 100"
    with node(tmp_path_factory.mktemp("source"), "source", toml, lease=lease) as running:
        yield running


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("target"), "target", toml) as running:
        yield running


@pytest.fixture
def reader(target: Node) -> Iterator[AttachedEngine]:
    held = engine(target, "target")
    yield held
    held.close()
    target.wait_at_rest()


@pytest.fixture
def writer(source: Node) -> Iterator[AttachedEngine]:
    held = engine(source, "source")
    yield held
    held.close()
    source.wait_at_rest()


def test_pages_of_another_size_arrive_row_by_row(
    source: Node, target: Node, writer: AttachedEngine, reader: AttachedEngine
) -> None:
    ticket = prefill(writer, 1, what=1)
    opened = reader.open(open_of(1, 1, TOKENS, ROWS["target"], ticket))
    assert opened.cached_tokens == TOKENS
    check(reader, "target", opened, 1, TOKENS)
    wait_for(lambda: not source.admin.leases().leases)
    close(reader, 1)
    # It is a cached prefix from now on, and only what follows it is pulled.
    longer = TOKENS + 90
    ticket = prefill(writer, 2, what=1, tokens=longer)
    opened = reader.open(open_of(2, 1, longer, ROWS["target"], ticket))
    check(reader, "target", opened, 1, longer)
    assert target.counters()["handoff"] == 2
    close(reader, 2)


def test_a_prompt_is_pulled_while_it_is_computed(writer: AttachedEngine, reader: AttachedEngine) -> None:
    opened = writer.open(open_of(3, 3, TOKENS, ROWS["source"]))
    ticket = writer.client.export(3, expected_tokens=TOKENS)
    assert not ticket.final
    wanted = open_of(3, 3, TOKENS, ROWS["target"], ticket)
    assert reader.step(opens=[wanted]).opened[3].state == pb.OpenReply.WAITING
    fill(writer, "source", opened, 3, TOKENS)
    for done in (40, 130, TOKENS):
        assert reader.client.take_ready(3) is None
        writer.step([RequestStep(3, TOKENS, done)])
    got = reader.client.wait_ready(3, 60.0)
    check(reader, "target", got, 3, TOKENS)
    close(writer, 3)
    close(reader, 3)


def test_a_prefill_that_is_aborted_is_a_failed_hand_off(writer: AttachedEngine, reader: AttachedEngine) -> None:
    writer.open(open_of(4, 4, TOKENS, ROWS["source"]))
    ticket = writer.client.export(4, expected_tokens=TOKENS)
    writer.step(closes=[pb.CloseRequest(request_id=4, reason=pb.ABORTED)])
    with pytest.raises(TransferFailed, match="its request ended"):
        reader.open(open_of(4, 4, TOKENS, ROWS["target"], ticket))


def test_a_decode_that_is_aborted_gives_the_ticket_back(
    source: Node, target: Node, writer: AttachedEngine, reader: AttachedEngine
) -> None:
    writer.open(open_of(5, 5, TOKENS, ROWS["source"]))
    ticket = writer.client.export(5, expected_tokens=TOKENS)
    assert reader.step(opens=[open_of(5, 5, TOKENS, ROWS["target"], ticket)]).opened[5].state == pb.OpenReply.WAITING
    reader.step(closes=[pb.CloseRequest(request_id=5, reason=pb.ABORTED)])
    wait_for(lambda: not source.admin.leases().leases)
    target.wait_at_rest()
    writer.step(closes=[pb.CloseRequest(request_id=5, reason=pb.ABORTED)])


def test_a_ticket_that_nobody_uses_expires(source: Node, writer: AttachedEngine, reader: AttachedEngine) -> None:
    ticket = prefill(writer, 6, what=6)
    expired = source.counters()["expired_ticket"]
    wait_for(lambda: source.counters()["expired_ticket"] > expired)
    with pytest.raises(UnknownLease):
        reader.open(open_of(6, 6, TOKENS, ROWS["target"], ticket))


def test_another_models_ticket_is_refused(target: Node, writer: AttachedEngine, reader: AttachedEngine) -> None:
    ticket = prefill(writer, 7, what=7)
    ticket.namespace.model = "another"
    with pytest.raises(LayoutMismatch, match="another"):
        reader.open(open_of(7, 7, TOKENS, ROWS["target"], ticket))
    target.wait_at_rest()


def test_the_targets_daemon_dies_in_between(target: Node, writer: AttachedEngine) -> None:
    """The request waits on, and the new daemon ends it with an error."""
    reader = engine(target, "target")
    writer.open(open_of(8, 8, TOKENS, ROWS["source"]))
    ticket = writer.client.export(8, expected_tokens=TOKENS)
    assert reader.step(opens=[open_of(8, 8, TOKENS, ROWS["target"], ticket)]).opened[8].state == pb.OpenReply.WAITING
    kill_and_wait(target.pid_of("daemon"))
    target.reopen()
    with pytest.raises(KVError):
        reader.client.wait_ready(8, 60.0)
    writer.step(closes=[pb.CloseRequest(request_id=8, reason=pb.ABORTED)])
    reader.close()
    target.wait_at_rest()


def test_groups_of_several_ranks_hand_nothing_over(tmp_path: Path) -> None:
    """Every rank has a part of its own of a page, and a hand-off reads one."""
    with node(tmp_path, "source", toml, ranks=2) as served:
        held = engine(served, "source", ranks=2)
        held.open(open_of(1, 1, 32, ROWS["source"]))
        with pytest.raises(InvalidArgument, match="ranks"):
            held.client.export(1, expected_tokens=32)
        ticket = pb.Ticket(
            ticket_id="0" * 32, node_address=str(tmp_path), committed_tokens=32, kv_fingerprint=FORMAT.fingerprint,
            namespace=namespace(16),
        )  # fmt: skip
        with pytest.raises(InvalidArgument, match="ranks"):
            held.open(open_of(2, 2, 32, ROWS["source"], ticket))
        held.close()
        served.wait_at_rest()
