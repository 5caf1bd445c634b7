"""KV events of a node that a real vLLM engine fills: a router knows what is there, by vLLM's own hashes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_router import Router
from nodes_support import Node, kill_and_wait, node, wait_for
from vllm_support import BLOCK, GROUP, Engine, attach, cache_toml, checkpoint, prompt, skip_without_vllm, transfer

pytestmark = pytest.mark.vllm
PAGES = 96
TOPIC = "kv-test"


def stream_toml(directory: Path, model: str, revision: str) -> str:
    return f"""
[[events]]
group = "{GROUP}"
model = "{model}"
weights_revision = "{revision}"
endpoint = "ipc://{directory}/live"
replay_endpoint = "ipc://{directory}/replay"
topic = "{TOPIC}"
"""


@contextlib.contextmanager
def router_of(directory: Path, live: str, replay: str) -> Iterator[Router]:
    router = Router(f"ipc://{directory}/{live}", f"ipc://{directory}/{replay}", TOPIC)
    try:
        yield router
    finally:
        router.close()


def registered(engine: Engine) -> list[tuple[str, str]]:
    """(model, revision) of each registration, as the connector logs them."""
    engine.generate(prompt(98, 8), tokens=2)  # its log comes with its answers
    said = engine.log.read_text() + "".join(engine.logged)
    return re.findall(r"registered as epoch \d+: model '(.*)', revision '(.*)'", said)


def must_agree(router: Router, served: Node) -> None:
    """The router's index is what the node says that it holds."""
    served.wait_at_rest()

    def differs() -> str:
        router.hear()
        return router.differs(served.admin.prefixes(limit=1000), BLOCK, ("CPU", ""))

    wait_for(lambda: not differs(), differs)


def stored(engine: Engine, served: Node, *prompts: list[int], tokens: int, blocks: int) -> None:
    """Runs prompts one after the other, and steps until that many blocks, or more, are stored of them."""
    before = served.counters()["stored_tokens"]
    for each in prompts:
        engine.generate(each, tokens=tokens)

    def enough() -> bool:
        engine.generate(prompt(98, 8), tokens=4)
        return served.counters()["stored_tokens"] - before >= blocks * BLOCK

    wait_for(enough, lambda: f"{served.counters()['stored_tokens'] - before} tokens stored")


def test_a_router_knows_what_the_engine_stored_by_vllms_own_hashes(tmp_path: Path) -> None:
    skip_without_vllm()
    model = checkpoint("llama", tmp_path / "llama")
    runtime_dir = tmp_path / "cache"
    with contextlib.ExitStack() as undo:
        engine = Engine(
            model, None, tmp_path / "log", kv_transfer_config=transfer(runtime_dir, token_ids=True, engine="ids"),
            kv_events_config={
                "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/own-live",
                "replay_endpoint": f"ipc://{tmp_path}/own-replay", "topic": TOPIC,
            },
            env={"VLLM_LOGGING_LEVEL": "INFO", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
        )  # fmt: skip
        undo.callback(engine.close)
        with node(tmp_path, "cache", cache_toml, pages=PAGES):
            engine.wait_ready()
            wait_for(lambda: bool(registered(engine)), lambda: "the engine did not register")
        # The node's configuration takes over what the log says, and the engine comes back by itself.
        of = registered(engine)[0]
        served = undo.enter_context(
            node(tmp_path, "cache", cache_toml, pages=PAGES, more=stream_toml(tmp_path, *of))
        )
        wait_for(lambda: registered(engine) == [of] * 2, lambda: f"{registered(engine)}")
        own = undo.enter_context(router_of(tmp_path, "own-live", "own-replay"))
        router = undo.enter_context(router_of(tmp_path, "live", "replay"))
        attach(engine, served)

        # A prompt, one that leaves it half-way, and one whose answer fills blocks.
        base = prompt(1, 800)
        prompts = [base, base[:416] + prompt(2, 300), prompt(3, 100)]
        blocks = sum((len(each) + 69) // BLOCK for each in prompts) - 416 // BLOCK
        stored(engine, served, *prompts, tokens=70, blocks=blocks)
        must_agree(router, served)
        wait_for(lambda: own.hear() >= 0 and own.blocks.get("GPU") == router.blocks.get("CPU"), lambda: "other hashes")
        told = router.blocks["CPU"]
        assert len(told) == blocks
        assert set(router.blocks) == {"CPU"}
        assert router.sizes == own.sizes == {BLOCK}
        assert {block: router.parents[block] for block in told} == {block: own.parents[block] for block in told}
        assert {block: router.token_ids[block] for block in told} == {block: own.token_ids[block] for block in told}
        paths = [[token for block in router.path(block)[::-1] for token in router.token_ids[block]] for block in told]
        for each in prompts:
            assert any(path[: len(each) // BLOCK * BLOCK] == each[: len(each) // BLOCK * BLOCK] for path in paths)

        # A daemon's death: the next one tells it all anew, and goes on with what the engine stores.
        kill_and_wait(served.pid_of("daemon"))
        served.reopen()
        wait_for(lambda: [router.hear(), router.catch_up(), router.cleared][-1] == 2, lambda: "nothing was told anew")
        must_agree(router, served)
        assert router.blocks["CPU"] == told, "nothing is lost"

        # Blocks of an engine that tells no token ids are told without them.
        with Engine(model, runtime_dir, tmp_path / "log-2", kv_transfer_config=transfer(runtime_dir)) as silent:
            attach(silent, served, 2)
            before = set(router.blocks["CPU"])
            stored(silent, served, prompt(4, 96), tokens=8, blocks=3)
            must_agree(router, served)
        new = router.blocks["CPU"] - before
        assert len(new) == 3
        assert all(router.token_ids[block] == [] for block in new)

        # More than the pool holds: what goes is taken back, one block after the other.
        assert router.removed == 0
        stored(engine, served, *[prompt(seed, 600) for seed in range(10, 16)], tokens=8, blocks=PAGES)
        must_agree(router, served)
        assert router.removed > 0
        assert router.cleared == 2
        assert len(router.blocks["CPU"]) <= PAGES

        # Forgotten on order: the node has nothing, the engine still has its own.
        assert served.admin.reset(GROUP).forgotten_spans
        must_agree(router, served)
        assert router.blocks == {"CPU": set()}
        own.hear()
        assert own.blocks["GPU"]
