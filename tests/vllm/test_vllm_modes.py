"""Other ways to run an engine: latent attention (MLA), and scheduler and worker in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from nodes_support import Node, node
from vllm_support import (
    MLA_FORMATS,
    Engine,
    cache_toml,
    checkpoint,
    memory_toml,
    prompt,
    reference,
    skip_without_vllm,
    transfer,
    wait_for,
)

pytestmark = pytest.mark.vllm


def served_twice(engine: Engine, served: Node, tokens: list[int], expected: list[int] | None, least: int) -> None:
    """Computed, stored, and loaded: the same tokens each time. expected: of another implementation, if there is one."""
    engine.generate(prompt(99, 40), tokens=8)
    (cold,) = engine.generate(tokens)["tokens"]
    expected = expected or cold
    assert cold == expected
    engine.generate(prompt(98, 40), tokens=8)
    wait_for(lambda: served.counters()["stored_tokens"] >= least, "nothing was stored")
    engine.ask("reset")
    loaded = engine.generate(tokens)
    assert loaded["tokens"] == [expected]
    assert served.counters()["acquired_tokens"] >= least
    assert loaded["cached"][0] >= least


def test_latent_attention_is_what_hugging_face_says(tmp_path: Path) -> None:
    """In float32, by the kernel that is there for every CPU; its blocks have 16 tokens."""
    skip_without_vllm()
    model = checkpoint("mla", tmp_path / "mla")
    tokens = prompt(5, 300)
    expected = reference(model, [tokens], 16)[0]
    with (
        node(tmp_path, "cache", cache_toml, format_=MLA_FORMATS["float32"], rows=16) as served,
        Engine(
            model, served.runtime_dir, tmp_path / "log", block_size=16, attention_config={"backend": "CPU_MLA"}
        ) as engine,
    ):
        served_twice(engine, served, tokens, expected, least=288)
        # The control: what is loaded does decide the tokens.
        engine.ask("spoil_loads")
        spoiled = engine.generate(tokens)
        assert spoiled["cached"][0] >= 288
        assert spoiled["tokens"] != [expected]


def test_latent_attention_in_bfloat16(tmp_path: Path) -> None:
    """By the kernel that vLLM chooses: on a CPU with AMX one of its own, whose blocks have 32 tokens."""
    skip_without_vllm()
    block = 32 if "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8") else 16
    model = checkpoint("mla", tmp_path / "mla")
    with (
        node(tmp_path, "cache", cache_toml, format_=MLA_FORMATS["bfloat16"], rows=block) as served,
        Engine(model, served.runtime_dir, tmp_path / "log", block_size=block, dtype="bfloat16") as engine,
    ):
        served_twice(engine, served, prompt(5, 300), None, least=256)


def test_an_engine_that_the_node_refuses_goes_on_without_the_cache(tmp_path: Path) -> None:
    """Its blocks are not the node's pages: the log says what the node's configuration would need.

    Nor is the node's device a GPU: the engine asked for its own blocks' memory before it made them, and makes its own.
    """
    skip_without_vllm()
    model = checkpoint("llama", tmp_path / "llama")
    tokens = prompt(7, 300)
    expected = reference(model, [tokens], 16)[0]
    with (
        node(tmp_path, "cache", cache_toml, more=memory_toml("hbm", rows=64)) as served,
        Engine(
            model, served.runtime_dir, tmp_path / "log", block_size=64, kv_transfer_config=transfer(
                served.runtime_dir, memory_group="hbm", memory_wait_s=0.0
            ),
        ) as engine,
    ):  # fmt: skip
        for _ in range(2):
            answer = engine.generate(tokens)
            assert answer["tokens"] == [expected]
            engine.ask("reset")
        # A hand-off that can't be is a prefill for nobody else.
        alone = engine.generate(tokens, transfer={"do_remote_decode": True})
        assert alone["tokens"] == [expected]
        assert alone["transfer"] == [None]
        assert served.counters()["stored_tokens"] == 0
        logged = "".join(engine.logged)
        assert "refused" in logged
        assert "page_rows = 64" in logged
        assert "get_mem_pool_context failed" in logged, logged
        assert "the node's device is the CPU" in logged


def test_scheduler_and_worker_in_processes_of_their_own(tmp_path: Path) -> None:
    skip_without_vllm()
    model = checkpoint("llama", tmp_path / "llama")
    tokens = prompt(6, 500)
    expected = reference(model, [tokens], 16)[0]
    several = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (
        node(tmp_path, "cache", cache_toml) as served,
        Engine(model, served.runtime_dir, tmp_path / "log", env=several) as engine,
    ):
        served_twice(engine, served, tokens, expected, least=448)
