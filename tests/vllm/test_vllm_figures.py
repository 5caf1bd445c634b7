"""Figures of the connector, in one run: printed and kept in build/vllm.json. Nothing here asserts a time."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles

import pytest
from nodes_support import node
from vllm_support import ROOT, Engine, cache_toml, checkpoint, prompt, skip_without_vllm, wait_for

pytestmark = pytest.mark.vllm
PROMPT_TOKENS = 1500
ROUNDS = 8
STEP = ("build_connector_meta", "start_load_kv", "wait_for_save", "get_finished", "get_block_ids_with_load_errors",
        "build_connector_worker_meta")  # fmt: skip
SCHEDULER = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
             "update_connector_output", "request_finished")  # fmt: skip


def first_tokens_s(engine: Engine, seeds: range) -> list[float]:
    """Seconds to the first token of a prompt, one prompt after the other."""
    return [engine.generate(prompt(seed, PROMPT_TOKENS), tokens=1)["seconds"] for seed in seeds]


def quantile(values: list[float], share: float) -> float:
    return quantiles(values, n=1000)[round(1000 * share) - 1]


def since(now: dict[str, list[float]], before: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: times[len(before.get(name, ())) :] for name, times in now.items()}


def test_figures(tmp_path: Path) -> None:
    skip_without_vllm()
    model = checkpoint("llama", tmp_path / "llama")
    figures: dict[str, float] = {}
    with (
        node(tmp_path, "cache", cache_toml, pages=1024) as served,
        Engine(model, served.runtime_dir, tmp_path / "log") as engine,
    ):
        engine.generate(prompt(999, 1400), tokens=4)
        seeds = range(100, 100 + ROUNDS)
        figures["miss_ttft_s"] = median(first_tokens_s(engine, seeds))

        def stored() -> bool:
            engine.generate(prompt(998, 40), tokens=8)  # an engine that has nothing to do does not save either
            return served.counters()["stored_tokens"] >= ROUNDS * 1472

        wait_for(stored, "not all was stored", seconds=60)
        engine.ask("reset")
        figures["hit_ttft_s"] = median(first_tokens_s(engine, seeds))
        seen = engine.ask("times")
        scheduler = [took for name in SCHEDULER for took in seen["times"][name]]
        figures["scheduler_hook_p50_s"] = median(scheduler)
        figures["scheduler_hook_p99_s"] = quantile(scheduler, 0.99)
        figures["first_hook_to_answer_p50_s"] = median(seen["answer_s"])
        figures["asked_until_answered_most"] = max(seen["asked"])
        engine.generate(prompt(997, 40), tokens=400)
        alone = since(engine.ask("times")["times"], seen["times"])
        figures["step_without_traffic_s"] = sum(median(alone[name]) for name in STEP)
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "disk")},
    }  # fmt: skip
    with Engine(model, None, tmp_path / "log2", kv_transfer_config=example) as engine:
        engine.generate(prompt(999, 1400), tokens=4)
        figures["example_connector_miss_ttft_s"] = median(first_tokens_s(engine, seeds))
        engine.ask("reset")
        figures["example_connector_hit_ttft_s"] = median(first_tokens_s(engine, seeds))
    figures["hit_per_miss"] = figures["hit_ttft_s"] / figures["miss_ttft_s"]
    figures["hit_per_example_connector_hit"] = figures["hit_ttft_s"] / figures["example_connector_hit_ttft_s"]
    (ROOT / "build" / "vllm.json").write_text(json.dumps(figures, indent=2) + "\n")
    print()
    for name, value in figures.items():
        print(f"{name:34} {value:.6f}")
