"""KV events of real nodes: a router knows what is where, through loss, slowness and a daemon's death."""

from __future__ import annotations

import hashlib
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_router import Router
from nodes_support import (
    GROUP,
    LAYOUT,
    RANKS,
    ROWS,
    SPAN,
    Node,
    keys_of,
    kill_and_wait,
    node,
    prefill_engine,
    prefill_toml,
    rotate,
    run_request,
    tokens_of,
    wait_for,
)
from prometheus_client.parser import text_string_to_metric_families

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine import RequestStep
from kvmanager.clients.keys import KeyChain
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb

TOPIC = "kv-test"


def stream_toml(directory: Path, model: str = NAMESPACE.model, more: str = "") -> str:
    return f"""
[metrics]
listen = "127.0.0.1:0"
[tls]
plain_loopback = true
[[events]]
group = "{GROUP}"
model = "{model}"
weights_revision = "{NAMESPACE.weights_revision}"
endpoint = "ipc://{directory}/live"
replay_endpoint = "ipc://{directory}/replay"
topic = "{TOPIC}"
{more}
"""


class Streamed:
    """A node with a stream, and the routers that hear it."""

    def __init__(self, running: Node, directory: Path) -> None:
        self.node, self.directory = running, directory
        self.routers: list[Router] = []

    def router(self) -> Router:
        made = Router(f"ipc://{self.directory}/live", f"ipc://{self.directory}/replay", TOPIC)
        self.routers.append(made)
        return made

    def cached_tokens(self) -> dict[str, float]:
        port = re.findall(r"metrics and probes on 127\.0\.0\.1:(\d+)", self.node.log())[-1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        family = next(f for f in text_string_to_metric_families(text) if f.name == "kvmanager_cached_tokens")
        return {sample.labels["tier"]: sample.value for sample in family.samples}

    def truth_differs(self, router: Router) -> str:
        """What the node holds against what the router knows, tier by tier; empty when they agree."""
        router.hear()
        gpu, cpu = router.blocks.get("GPU", set()), router.blocks.get("CPU", set())
        differs = router.differs(self.node.admin.prefixes(limit=1000), ROWS)
        if differs:
            return differs
        if self.cached_tokens() != {"device": ROWS * len(gpu), "host": ROWS * len(cpu)}:
            return f"{self.cached_tokens()} but {len(gpu)} and {len(cpu)} blocks"
        return ""

    def must_agree(self, router: Router) -> None:
        self.node.wait_at_rest()
        wait_for(lambda: not self.truth_differs(router), lambda: self.truth_differs(router))


@pytest.fixture
def streamed(tmp_path: Path) -> Iterator[Streamed]:
    with node(tmp_path, "router", prefill_toml, more=stream_toml(tmp_path)) as running:
        made = Streamed(running, tmp_path)
        yield made
        for router in made.routers:
            router.close()


def test_a_router_knows_what_is_where_through_loss_and_restart(streamed: Streamed) -> None:
    router = streamed.router()
    assert router.cleared == 1, "the stream begins with everything: nothing"
    wait_for(lambda: router.hear() == 0)
    rotate(streamed.node, [1, 2, 3, 4])
    streamed.must_agree(router)
    assert router.sizes == {ROWS}
    assert router.blocks["GPU"]
    assert router.blocks["CPU"]
    # A prompt that goes on from a known one, and one that leaves it.
    engine = prefill_engine(streamed.node.runtime_dir)
    run_request(engine, 100, tokens_of(4, 6 * SPAN), 4)
    engine.close()
    streamed.must_agree(router)
    first = keys_of(tokens_of(4, 6 * SPAN))
    assert first[-16:] in router.blocks["GPU"] | router.blocks["CPU"]

    # Lost messages leave a gap, which the replay fills.
    rotate(streamed.node, [5, 6, 7])
    router.hear(lose=3)
    rotate(streamed.node, [8])
    streamed.must_agree(router)
    assert router.lost == 3
    assert router.gaps >= 1
    assert router.cleared == 1
    # One that comes late gets all of it.
    late = streamed.router()
    streamed.must_agree(late)
    assert late.blocks == router.blocks

    # The daemon dies; the next one goes on with the cache, and tells it anew under higher numbers.
    before, known = router.last, {medium: set(blocks) for medium, blocks in router.blocks.items()}
    kill_and_wait(streamed.node.pid_of("daemon"))
    streamed.node.reopen()
    for each in (router, late):
        wait_for(lambda each=each: each.hear() > 0 or each.last > before or _asked(each))  # type: ignore[misc]
        streamed.must_agree(each)
        assert each.cleared == 2
        assert each.last > before
    assert router.blocks == known, "nothing that was cached is lost, nothing else is told"
    rotate(streamed.node, [9, 10])
    streamed.must_agree(router)

    # Forgotten means removed, in every tier.
    assert streamed.node.admin.reset(GROUP).forgotten_spans
    streamed.must_agree(router)
    assert not any(router.blocks.values())


def _asked(router: Router) -> bool:
    """A router that hears nothing for a while asks."""
    router.catch_up()
    return False


def test_what_is_no_longer_kept_is_told_anew(tmp_path: Path) -> None:
    """A buffer of two batches: a slow router has missed more than that, and still knows the truth in the end."""
    with node(tmp_path, "short", prefill_toml, more=stream_toml(tmp_path, more="buffer_batches = 2")) as running:
        streamed = Streamed(running, tmp_path)
        router = streamed.router()
        try:
            rotate(running, [1, 2, 3])
            router.hear(lose=1_000_000)
            assert router.lost > 2
            time.sleep(1.1)  # RESTATE_S
            rotate(running, [4])
            streamed.must_agree(router)
            assert router.cleared == 2
        finally:
            router.close()


def test_a_stream_of_another_model_hears_nothing(tmp_path: Path) -> None:
    with node(tmp_path, "other", prefill_toml, more=stream_toml(tmp_path, model="another")) as running:
        router = Streamed(running, tmp_path).router()
        try:
            rotate(running, [1])
            router.hear(300)
            assert router.cleared == 1
            assert not any(router.blocks.values())
        finally:
            router.close()


def cbor_keys(tokens: list[int], block: int, seed: str = "vllm-none-hash") -> list[bytes]:
    """vLLM's sha256_cbor chain: h0 = H(seed), h_i = H([h_(i-1), [tokens], null]); H = sha256 of CBOR."""

    def number(major: int, value: int) -> bytes:
        if value < 24:
            return bytes([major << 5 | value])
        return bytes([major << 5 | 24, value]) if value < 256 else bytes([major << 5 | 25]) + value.to_bytes(2, "big")

    last = hashlib.sha256(number(3, len(seed)) + seed.encode()).digest()
    keys = []
    for at in range(0, len(tokens) // block * block, block):
        part = tokens[at : at + block]
        text = number(4, 3) + number(2, 32) + last + number(4, block) + b"".join(number(0, t) for t in part) + b"\xf6"
        last = hashlib.sha256(text).digest()
        keys.append(last)
    return keys


@pytest.mark.parametrize("hashes", ["bytes", "int"])
def test_keys_of_vllm_are_told_as_they_are(tmp_path: Path, hashes: str) -> None:
    """A namespace of sha256_cbor, 32 bytes at the engine's block size: events carry vLLM's own hashes."""
    namespace = pb.Namespace()
    namespace.CopyFrom(NAMESPACE)
    namespace.key_hash, namespace.key_bytes = "sha256_cbor", 32
    tokens = tokens_of(1, 2 * SPAN)
    keys = cbor_keys(tokens.tolist(), ROWS)
    more = stream_toml(tmp_path, more=f'hashes = "{hashes}"')
    with node(tmp_path, "cbor", prefill_toml, more=more) as running:
        router = Streamed(running, tmp_path).router()
        engine = AttachedEngine(
            running.runtime_dir, "vllm", group=GROUP, namespace=namespace, layouts=[LAYOUT], ranks=RANKS
        )
        try:
            engine.open(pb.OpenRequest(request_id=1, prompt_tokens=len(tokens), prompt_keys=b"".join(keys)))
            engine.step([RequestStep(1, len(tokens), len(tokens))])
            engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
            told = set(keys) if hashes == "bytes" else {int.from_bytes(key[-8:], "big") for key in keys}
            wait_for(lambda: router.hear() >= 0 and router.blocks == {"GPU": told, "CPU": told})
            last = keys[-1] if hashes == "bytes" else int.from_bytes(keys[-1][-8:], "big")
            assert len(router.path(last)) == len(keys)
        finally:
            engine.close()
            router.close()


def retold(router: Router, seed: str) -> set[bytes]:
    """Every block whose hash a router makes again from the token ids that it was told, and from those of its prefix."""
    found = set()
    for block in {*router.blocks.get("GPU", ()), *router.blocks.get("CPU", ())}:
        path = router.path(block)[::-1]
        tokens = [token for each in path for token in router.token_ids[each]]
        assert cbor_keys(tokens, ROWS, seed) == path
        found.add(block)
    return found


def test_token_ids_are_told_where_the_namespace_asks_for_them_and_make_vllms_hashes(tmp_path: Path) -> None:
    """A prompt, what is generated after it, a restart: a router can make each hash from what it heard alone."""
    namespace = pb.Namespace()
    namespace.CopyFrom(NAMESPACE)
    namespace.key_hash, namespace.key_bytes = "sha256_cbor", 32
    namespace.hash_seed, namespace.token_ids = "7", True
    tokens = tokens_of(1, 4 * SPAN)
    prompt = 2 * SPAN
    more = stream_toml(tmp_path, more='hash_seed = "7"')
    with node(tmp_path, "ids", prefill_toml, more=more) as running:
        router = Streamed(running, tmp_path).router()
        engine = AttachedEngine(
            running.runtime_dir, "told", group=GROUP, namespace=namespace, layouts=[LAYOUT], ranks=RANKS
        )
        try:
            chain = KeyChain(namespace)
            opened = pb.OpenRequest(
                request_id=1, prompt_tokens=prompt, growth_tokens=2 * SPAN, prompt_keys=chain.extend(tokens[:prompt])
            )
            with pytest.raises(InvalidArgument, match="prompt_token_ids has 0 bytes; the namespace asks for"):
                engine.open(opened)
            opened.prompt_token_ids = chain.token_ids()
            engine.open(opened)
            engine.step([RequestStep(1, len(tokens), prompt)])
            for end in range(prompt, len(tokens), 8):
                keys = chain.extend(tokens[end : end + 8])
                engine.step([RequestStep(1, len(tokens), end + 8, 0, keys, chain.token_ids(keys))])
            engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
            told = set(cbor_keys(tokens.tolist(), ROWS, "7"))
            assert len(told) == len(tokens) // ROWS
            wait_for(lambda: router.hear() >= 0 and router.blocks == {"GPU": told, "CPU": told})
            assert retold(router, "7") == told
        finally:
            engine.close()
        running.wait_at_rest()
        kill_and_wait(running.pid_of("daemon"))
        running.reopen()
        late = Streamed(running, tmp_path).router()
        for each in (router, late):
            wait_for(lambda each=each: each.hear() >= 0 and (each.cleared > 0) and _asked(each) is False  # type: ignore[misc]
                     and each.blocks.get("CPU") == told)
            assert retold(each, "7") == told
            each.close()
