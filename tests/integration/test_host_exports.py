"""Two real nodes: a prefix that waits on the source's host is handed over from there, before the source has it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from nodes_support import (
    RANKS,
    ROWS,
    SLAB_BYTES,
    SPAN,
    Node,
    decode_engine,
    decode_toml,
    device_pages,
    kill_and_wait,
    node,
    open_of,
    page_bytes_of,
    prefill_engine,
    prefill_toml,
    put,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.errors import NotReady
from kvmanager.keeper import lockfile
from kvmanager.layout import GLM53_TINY
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import KEEPER_LOCK

SLOW = ("chunk_bytes", "to_device_gb_per_s = 0.001\nchunk_bytes")
"""Onboards at the least rate that there is: a session takes a quarter of a minute, unless the pace is set anew."""
KEPT = 100
"""Spans of each session."""
PAGES = KEPT + 4
"""Of HBM: another session leaves a few spans of the one before."""
LATENT_BYTES = GLM53_TINY.latent_page_bytes(ROWS)


def slow_toml(runtime_dir: Path, *, name: str, more: str = "") -> str:
    lease = "ticket_ttl_ms = 5000\ngrace_ms = 100"  # of a ticket whose release met the daemon that died
    return prefill_toml(runtime_dir, name=name, more=more, pages=PAGES, lease=lease).replace(*SLOW)


def large_toml(runtime_dir: Path, *, name: str) -> str:
    """A decode rank that takes a whole session into its HBM."""
    text = decode_toml(runtime_dir, name=name)
    for slabs in (40, 60):
        text = text.replace(f"= {slabs * SLAB_BYTES}\n", f"= {3 * PAGES * SLAB_BYTES}\n")
    return text


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("source"), "prefill", slow_toml) as running:
        yield running


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("target"), "decode", large_toml) as running:
        yield running


def set_pace(served: Node, *, slow: bool) -> None:
    """The node reads its file anew."""
    text = slow_toml(served.runtime_dir, name="prefill")
    text = text if slow else text.replace(*reversed(SLOW))
    if served.process.config_path.read_text() == text:
        return
    served.process.config_path.write_text(text)
    before = len(served.log())
    keeper = lockfile.holder(served.runtime_dir / KEEPER_LOCK)
    assert keeper
    os.kill(keeper, signal.SIGHUP)
    wait_for(lambda: "to_device_gb_per_s" in served.log()[before:], served.process.log_tail)


def on_the_host(served: Node, engine: AttachedEngine, seed: int) -> None:
    """A session that lies on the host, all but a few spans: another one has pushed it out of HBM."""
    for each in (seed, seed + 50):
        run_request(engine, 1_000 + each, tokens_of(each, KEPT * SPAN), each)
        served.wait_at_rest()


def check(decode: AttachedEngine, opened: pb.OpenReply, seed: int, spans: int) -> None:
    """Pages of a span come one by one, rank by rank, as they were; latents and indexers apart."""
    memory = decode.workers.ranks[0].classes
    for name, part in (("latent", slice(0, LATENT_BYTES)), ("indexer", slice(LATENT_BYTES, None))):
        held = memory[name]
        stride = held.layout.components[0].page_stride
        pages = device_pages(opened, name).tolist()
        for place in range(spans * RANKS):
            wanted = page_bytes_of(seed, place % RANKS, place // RANKS)[part]
            at = pages[place] * stride
            assert np.array_equal(held.device[at : at + len(wanted)], wanted), (name, place)


def test_a_hand_off_from_the_host_is_over_before_the_onboard(source: Node, target: Node) -> None:
    prefill, decode = prefill_engine(source.runtime_dir), decode_engine(target.runtime_dir)
    on_the_host(source, prefill, seed=1)
    tokens = tokens_of(1, (KEPT + 1) * SPAN)
    onboarded = source.counters()["onboard"]
    assert prefill.step(opens=[open_of(1, tokens, growth=0)]).opened[1].state == pb.OpenReply.WAITING
    with pytest.raises(NotReady, match="waits for bytes"):
        prefill.client.export(1, timeout_s=0.0)
    ticket = prefill.client.export(1, expected_tokens=KEPT * SPAN)
    assert ticket.final
    opened = decode.open(open_of(1, tokens[: KEPT * SPAN], ticket=ticket), timeout_s=60.0)
    assert opened.cached_tokens == KEPT * SPAN
    check(decode, opened, 1, KEPT)
    assert prefill.client.take_ready(1) is None
    assert source.counters()["onboard"] == onboarded
    wait_for(lambda: not source.admin.leases().leases)
    decode.step(closes=[pb.CloseRequest(request_id=1, reason=pb.ABORTED)])
    set_pace(source, slow=False)
    prefill.client.wait_ready(1, 60.0)
    prefill.step(closes=[pb.CloseRequest(request_id=1, reason=pb.ABORTED)])
    for engine, served in ((prefill, source), (decode, target)):
        engine.close()
        served.wait_at_rest()


def test_a_ticket_goes_on_over_both_tiers_and_the_death_of_the_daemon(source: Node, target: Node) -> None:
    """It begins on the host, its source's daemon is killed, and what is computed later is read on the device."""
    set_pace(source, slow=True)
    prefill, decode = prefill_engine(source.runtime_dir), decode_engine(target.runtime_dir)
    on_the_host(source, prefill, seed=2)
    tokens = tokens_of(2, (KEPT + 1) * SPAN)
    assert prefill.step(opens=[open_of(2, tokens, growth=0)]).opened[2].state == pb.OpenReply.WAITING
    ticket = prefill.client.export(2, expected_tokens=len(tokens))
    assert not ticket.final
    assert decode.step(opens=[open_of(2, tokens, ticket=ticket)]).opened[2].state == pb.OpenReply.WAITING
    wait_for(lambda: [lease.holder for lease in source.admin.leases().leases] not in ([], [""]))
    kill_and_wait(source.pid_of("daemon"))
    source.reopen()
    set_pace(source, slow=False)
    opened = prefill.client.wait_ready(2, 60.0)
    pages = device_pages(opened)
    for rank, worker in enumerate(prefill.workers.ranks):
        put(worker.classes["kv"].device, int(pages[KEPT]), page_bytes_of(2, rank, KEPT))
    prefill.step([RequestStep(2, len(tokens), len(tokens))])
    prefill.step()
    try:
        got = decode.client.wait_ready(2, 60.0)
    except Exception:
        # The target met the daemon that died: it asks once more, with the same ticket or another one.
        ticket = prefill.client.export(2)
        got = decode.open(open_of(3, tokens, ticket=ticket), timeout_s=60.0)
    assert got.cached_tokens == len(tokens)
    check(decode, got, 2, KEPT + 1)
    decode.step(closes=[pb.CloseRequest(request_id=got.request_id, reason=pb.ABORTED)])
    prefill.step(closes=[pb.CloseRequest(request_id=2, reason=pb.ABORTED)])
    for engine, served in ((prefill, source), (decode, target)):
        engine.close()
        served.wait_at_rest()
