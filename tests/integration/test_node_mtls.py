"""Two nodes that know each other by TCP and certificates alone, as on two machines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from nodes_support import (
    SLAB_BYTES,
    SPAN,
    Node,
    decode_engine,
    decode_toml,
    device_pages,
    fill,
    node,
    open_of,
    page_bytes_of,
    prefill_engine,
    prefill_toml,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.demo.nodes import NodeProcess
from kvmanager.errors import Unauthorized
from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.layout import GLM53_TINY
from kvmanager.protos import kvmanager_pb2 as pb
from tests.authority import Authority, Signed

PEER = '[peer]\nlisten = "127.0.0.1:0"\nnodes = ["decode"]\n'


@dataclass
class Nodes:
    source: Node
    ca: Authority
    stranger: Signed


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command: no certificates here")
    ca = Authority(tmp_path_factory.mktemp("ca"))
    stranger = Authority(tmp_path_factory.mktemp("other"), "other").sign("decode")
    more = f"{ca.sign('prefill').toml()}{PEER}"
    with node(tmp_path_factory.mktemp("source"), "prefill", prefill_toml, pages=64, more=more) as source:
        yield Nodes(source, ca, stranger)


def put(signed: Signed, at: Path) -> Signed:
    """Copies a node's files to where it looks for them, each in one step."""
    at.mkdir(exist_ok=True)
    there = Signed(at / "node.crt", at / "node.key", at / "ca.crt")
    for name in ("certificate_file", "key_file", "ca_file"):
        fresh = at / "fresh"
        fresh.write_bytes(getattr(signed, name).read_bytes())
        fresh.chmod(0o600)
        fresh.rename(getattr(there, name))
    return there


def export(engine: AttachedEngine, request_id: int, seed: int) -> pb.Ticket:
    tokens = tokens_of(seed, 2 * SPAN)
    opened = engine.open(open_of(request_id, tokens, growth=0))
    fill(engine, device_pages(opened), seed)
    engine.step([RequestStep(request_id, len(tokens), len(tokens))])
    ticket = engine.client.export(request_id)
    engine.step(closes=[pb.CloseRequest(request_id=request_id, reason=pb.FINISHED)])
    return ticket


def hand_over(engine: AttachedEngine, request_id: int, seed: int, ticket: pb.Ticket) -> pb.OpenReply:
    return engine.open(open_of(request_id, tokens_of(seed, 2 * SPAN), ticket=ticket), timeout_s=60.0)


def test_hand_offs_over_mutual_tls(nodes: Nodes, tmp_path: Path) -> None:
    """Refused with the reason while the certificate is a wrong one: both nodes are as they were, the ticket is good."""
    files = put(nodes.stranger, tmp_path / "tls")

    def config(runtime_dir: Path, *, name: str) -> str:
        return decode_toml(runtime_dir, name=name) + files.toml()

    prefill = prefill_engine(nodes.source.runtime_dir)
    with node(tmp_path, "decode", config) as target:
        decode = decode_engine(target.runtime_dir)
        before = target.pools()
        ticket = export(prefill, 1, seed=1)
        assert ticket.node_address.startswith("127.0.0.1:")
        with pytest.raises(Unauthorized, match="has a certificate that is no good here"):
            hand_over(decode, 1, 1, ticket)
        put(nodes.ca.sign("unlisted"), tmp_path / "tls")
        with pytest.raises(Unauthorized, match="'unlisted' is not among nodes"):
            hand_over(decode, 2, 1, ticket)
        target.wait_at_rest()
        assert target.pools() == before
        assert [lease.holder for lease in nodes.source.admin.leases().leases] == [""]
        put(nodes.ca.sign("decode"), tmp_path / "tls")
        opened = hand_over(decode, 3, 1, ticket)
        assert opened.cached_tokens == 2 * SPAN
        latents = decode.workers.ranks[0].classes["latent"]
        latent_bytes = GLM53_TINY.latent_page_bytes(16)
        for place, page in enumerate(device_pages(opened, "latent").tolist()):
            data = page_bytes_of(1, place % 2, place // 2)[:latent_bytes]
            assert np.array_equal(latents.device[page * SLAB_BYTES :][:latent_bytes], data), place
        wait_for(lambda: not nodes.source.admin.leases().leases)
        decode.step(closes=[pb.CloseRequest(request_id=3, reason=pb.ABORTED)])
        decode.close()
        target.wait_at_rest()
    prefill.close()
    nodes.source.wait_at_rest()


def test_a_node_does_not_start_with_certificates_that_are_no_use(nodes: Nodes, tmp_path: Path) -> None:
    wrong = Signed(nodes.stranger.certificate_file, nodes.stranger.key_file, nodes.ca.ca_file)
    for number, (more, words) in enumerate(
        ((f"{wrong.toml()}{PEER}", "can't be used with"), (PEER, "[peer] listen: 127.0.0.1:0 without certificates"))
    ):
        name = f"wrong{number}"
        with NodeProcess(name, tmp_path, prefill_toml(tmp_path / name, more=more)) as process:
            assert process._process is not None
            assert process._process.wait(60) == EXIT_CONFIG
            assert words in process.log_tail()
