"""Times of a real vLLM engine with the connector on a node, and with vLLM's own ExampleConnector, in one run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench.figure import Figure

for _folder in ("vllm", "integration"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))

from nodes_support import node  # noqa: E402
from vllm_support import MADE, Engine, cache_toml, checkpoint, prompt, wait_for  # noqa: E402

PROMPT_TOKENS = 1500
ROUNDS = 8
STEP = ("build_connector_meta", "start_load_kv", "wait_for_save", "get_finished", "get_block_ids_with_load_errors",
        "build_connector_worker_meta")  # fmt: skip
SCHEDULER = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
             "update_connector_output", "request_finished")  # fmt: skip


def figures() -> Iterator[Figure]:
    """Those of `measure`, as ratios within the run; nothing where vLLM's environment was not made."""
    if not MADE.exists():
        print("no figures of a real vLLM engine: its environment is not there (make test-vllm makes it)")
        return
    with TemporaryDirectory(prefix="kvm-bench-") as directory:
        seen = measure(Path(directory))
    miss, hit = seen["miss_ttft_s"], seen["hit_ttft_s"]
    example_miss, example_hit = seen["example_connector_miss_ttft_s"], seen["example_connector_hit_ttft_s"]
    of = f"{PROMPT_TOKENS:,} tokens"
    yield Figure(f"vLLM TTFT of {of}, hit", hit * 1e3, "ms", "a miss", hit / miss)
    yield Figure(f"vLLM TTFT of {of}, hit", hit * 1e3, "ms", "ExampleConnector's hit", hit / example_hit)
    yield Figure(f"vLLM TTFT of {of}, miss", miss * 1e3, "ms", "ExampleConnector's miss", miss / example_miss)
    step, alone = seen["step_without_traffic_s"], seen["decode_step_s"]
    yield Figure("vLLM connector, a step without traffic", step * 1e6, "us", "the whole decode step", step / alone)
    p50, p99 = seen["scheduler_hook_p50_s"], seen["scheduler_hook_p99_s"]
    yield Figure("vLLM scheduler hook in an engine, p99", p99 * 1e6, "us", "its p50", p99 / p50)
    answer, asked = seen["first_hook_to_answer_p50_s"], seen["asked_until_answered_most"]
    yield Figure("vLLM first hook to answer in an engine, p50", answer * 1e6, "us", "a miss's TTFT", answer / miss)
    yield Figure("vLLM times asked until answered, most", asked, "", "once", asked)


def measure(directory: Path) -> dict[str, float]:
    """All of it: seconds, and how often the daemon was asked."""
    model = checkpoint("llama", directory / "llama")
    seen: dict[str, float] = {}
    seeds = range(100, 100 + ROUNDS)
    with (
        node(directory, "cache", cache_toml, pages=1024) as served,
        Engine(model, served.runtime_dir, directory / "log") as engine,
    ):
        engine.generate(prompt(999, 1400), tokens=4)
        seen["miss_ttft_s"] = median(_first_tokens_s(engine, seeds))

        def stored() -> bool:
            engine.generate(prompt(998, 40), tokens=8)  # an engine that has nothing to do does not save either
            return bool(served.counters()["stored_tokens"] >= ROUNDS * 1472)

        wait_for(stored, "not all was stored", seconds=60)
        engine.ask("reset")
        seen["hit_ttft_s"] = median(_first_tokens_s(engine, seeds))
        times = engine.ask("times")
        scheduler = [took for name in SCHEDULER for took in times["times"][name]]
        seen["scheduler_hook_p50_s"] = median(scheduler)
        seen["scheduler_hook_p99_s"] = quantiles(scheduler, n=100)[98]
        seen["first_hook_to_answer_p50_s"] = median(times["answer_s"])
        seen["asked_until_answered_most"] = max(times["asked"])
        seen["decode_step_s"] = engine.generate(prompt(997, 40), tokens=400)["seconds"] / 400
        alone = _since(engine.ask("times")["times"], times["times"])
        seen["step_without_traffic_s"] = sum(median(alone[name]) for name in STEP)
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "disk")},
    }  # fmt: skip
    with Engine(model, None, directory / "log2", kv_transfer_config=example) as engine:
        engine.generate(prompt(999, 1400), tokens=4)
        seen["example_connector_miss_ttft_s"] = median(_first_tokens_s(engine, seeds))
        engine.ask("reset")
        seen["example_connector_hit_ttft_s"] = median(_first_tokens_s(engine, seeds))
    return seen


def _first_tokens_s(engine: Any, seeds: range) -> list[float]:
    """Seconds to the first token of a prompt, one prompt after the other."""
    return [engine.generate(prompt(seed, PROMPT_TOKENS), tokens=1)["seconds"] for seed in seeds]


def _since(now: dict[str, list[float]], before: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: times[len(before.get(name, ())) :] for name, times in now.items()}
