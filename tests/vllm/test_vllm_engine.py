"""A real vLLM engine on a node: what it loads is what it would have computed, whoever dies in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes_support import Node, kill_and_wait, node
from vllm_support import BLOCK, Engine, cache_toml, checkpoint, prompt, reference, skip_without_vllm, wait_for

pytestmark = pytest.mark.vllm
PROMPT = prompt(1, 800)
TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_without_vllm()
    return checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Node]:
    del model
    with node(tmp_path_factory.mktemp("node"), "cache", cache_toml, pages=512) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return reference(model, [PROMPT], TOKENS)[0]


@pytest.fixture(scope="module")
def first(served: Node, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that computes and stores; killed by a test, or at the end."""
    engine = Engine(model, served.runtime_dir, tmp_path_factory.mktemp("first") / "log").wait_ready()
    engine.generate(prompt(99, 40), tokens=8)  # the ranks are attached from here on
    yield engine
    engine.kill()


def stored(served: Node, tokens: int) -> None:
    """Waits until so many more tokens are in the cache."""
    wait_for(lambda: served.counters()["stored_tokens"] >= tokens, f"stored {served.counters()['stored_tokens']}")


def test_loaded_is_computed_is_what_hugging_face_says(served: Node, first: Engine, expected: list[int]) -> None:
    before = served.counters()["stored_tokens"]
    cold = first.generate(PROMPT, session="talk")
    assert cold["cached"] == [0]
    assert cold["tokens"] == [expected]
    first.generate(prompt(98, 8), tokens=4)  # steps in which the last saves are ordered
    stored(served, before + 800)
    assert first.ask("reset")["reset"]
    loaded = first.generate(PROMPT)
    assert loaded["tokens"] == [expected]
    assert loaded["cached"][0] >= 768
    assert served.counters()["acquired_tokens"] >= 768
    # Both are told of by the ids that vLLM's user has.
    (stored_id,), (loaded_id,) = cold["ids"], loaded["ids"]

    def told(id_: str) -> list[str]:
        return [line.text for line in served.admin.explain("request", id_).lines]

    # The link's thread tells of the end; the engine does not wait for that.
    wait_for(lambda: any("ended: loaded" in line for line in told(loaded_id)), "the load's end is not told")
    stories = [told(stored_id), told(loaded_id)]
    assert any("800 tokens in vllm, 0 found" in line for line in stories[0]), stories
    assert any("stored up to token 800" in line for line in stories[0]), stories
    assert any("of session talk" in line for line in stories[0]), "the request's hint ranks what it stored"
    assert any("found" in line for line in stories[1]), stories


def test_an_abort_while_a_load_is_under_way_harms_nobody(served: Node, first: Engine, expected: list[int]) -> None:
    for steps in (1, 2, 3):
        first.ask("reset")
        after = first.ask("abort", prompts=[PROMPT, PROMPT], steps=steps)
        assert after["tokens"] == [expected]
    first.generate(prompt(97, 8), tokens=4)
    served.wait_at_rest()
    assert first.ask("reset")["reset"], "some block of an aborted request was never given back"


def test_the_daemon_dies_under_load(served: Node, first: Engine, expected: list[int]) -> None:
    prompts = [prompt(seed, 600) for seed in range(10, 16)]
    alone = first.generate(*prompts, tokens=40)["tokens"]
    first.ask("reset")
    first.tell("generate", prompts=prompts, tokens=40)
    kill_and_wait(served.pid_of("daemon"))
    assert first.hear()["tokens"] == alone
    served.reopen()
    first.ask("reset")
    assert first.generate(PROMPT)["tokens"] == [expected]

    def hits() -> bool:
        first.ask("reset")
        answer = first.generate(PROMPT)
        assert answer["tokens"] == [expected]
        return bool(answer["cached"][0] >= 768)

    wait_for(hits, "no hit after the daemon's warm start")


def test_the_engine_is_killed_and_another_in_chunks_with_few_blocks_takes_over(
    served: Node, model: Path, first: Engine, expected: list[int], tmp_path: Path
) -> None:
    """The second engine computes 64 tokens a step, and has too few blocks for two requests: it preempts.

    Both share the daemon until the first is killed.
    """
    block_bytes = 4 * 2 * BLOCK * 256
    few = {"max_num_batched_tokens": 64, "kv_cache_memory_bytes": 36 * block_bytes, "max_model_len": 1024}
    with Engine(model, served.runtime_dir, tmp_path / "log", **few) as second:
        second.generate(prompt(99, 40), tokens=4)
        taken = second.generate(PROMPT)
        assert taken["tokens"] == [expected]
        assert taken["cached"][0] >= 768, "what the other engine stored is served"
        assert first.generate(PROMPT)["tokens"] == [expected], "both go on"
        first.kill()
        second.ask("reset")
        taken = second.generate(PROMPT)
        assert taken["tokens"] == [expected]
        assert taken["cached"][0] >= 768, "what the killed engine stored is served"
        pair = [prompt(31, 500), prompt(32, 500)]
        one_by_one = [second.generate(tokens, tokens=100)["tokens"][0] for tokens in pair]
        second.ask("reset")
        assert second.generate(*pair, tokens=100)["tokens"] == one_by_one
        second.ask("reset")
        assert second.generate(*pair, tokens=100)["tokens"] == one_by_one
        # From here on every load leaves garbage in the blocks and fails.
        second.ask("break_loads")
        second.ask("reset")
        failed = second.generate(PROMPT)
        assert failed["tokens"] == [expected]
        assert failed["reasons"] == ["length"]
        # The control: what is loaded does decide the tokens.
        second.ask("spoil_loads")
        second.ask("reset")
        spoiled = second.generate(PROMPT)
        assert spoiled["cached"][0] >= 768
        assert spoiled["tokens"] != [expected]
    served.wait_at_rest()


def test_another_model_shares_no_key(served: Node, expected: list[int], tmp_path: Path) -> None:
    """Equal shapes, other weights, one group."""
    other = checkpoint("llama", tmp_path / "other", seed=2)
    with Engine(other, served.runtime_dir, tmp_path / "log") as engine:
        engine.generate(prompt(99, 40), tokens=4)
        answer = engine.generate(PROMPT)
        assert answer["cached"] == [0]
        assert answer["tokens"] == reference(other, [PROMPT], TOKENS)
        assert answer["tokens"] != [expected]
