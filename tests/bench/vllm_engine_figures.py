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
from vllm_support import BLOCK, MADE, Engine, cache_toml, checkpoint, prompt, wait_for  # noqa: E402

PROMPT_TOKENS = 1500
ROUNDS = 24
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
    for share in ("p50", "p99"):
        for kind in ("", "_cpu"):
            hook, control = seen[f"scheduler_hook{kind}_{share}_s"], seen[f"control{kind}_{share}_s"]
            name = f"vLLM scheduler hook in an engine{kind.replace('_', ', ')}, {share}"
            yield Figure(name, hook * 1e6, "us", "a hook that reads a variable", hook / control)
    answer, lookup = seen["first_hook_to_answer_p50_s"], seen["lookup_alone_p50_s"]
    asked = seen["asked_until_answered_most"]
    floor = seen["engine_alone_to_answer_p50_s"]
    name = "vLLM first hook to answer in an engine, p50"
    yield Figure(name, answer * 1e6, "us", "a lookup alone", answer / lookup)
    yield Figure(name, answer * 1e6, "us", "hooks that do nothing, asked twice", answer / floor)
    yield Figure("vLLM times asked until answered, most", asked, "", "once", asked)


def measure(directory: Path) -> dict[str, float]:
    """All of it: seconds, and how often the daemon was asked."""
    model = checkpoint("llama", directory / "llama")
    seen: dict[str, float] = {}
    seeds = range(100, 100 + ROUNDS)
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "disk")},
    }  # fmt: skip
    with (
        node(directory, "cache", cache_toml, pages=2048) as served,
        Engine(model, None, directory / "log2", kv_transfer_config=example) as other,
        Engine(model, served.runtime_dir, directory / "log") as engine,
    ):
        other.generate(prompt(999, 1400), tokens=4)
        warm = iter(range(1000, 2000))

        def stored(tokens: int, length: int) -> bool:
            engine.generate(prompt(next(warm), length), tokens=8)  # an engine that has nothing to do does not save
            return bool(served.counters()["stored_tokens"] >= tokens)

        wait_for(lambda: stored(1, 1400), "no rank was attached", seconds=60)
        before = served.counters()["stored_tokens"]
        seen["miss_ttft_s"], seen["example_connector_miss_ttft_s"] = _first_tokens_s(seeds, engine, other)
        wait_for(lambda: stored(before + ROUNDS * 1472, 40), "not all was stored", seconds=60)
        for one in (engine, other):
            one.ask("reset")
        seen["hit_ttft_s"], seen["example_connector_hit_ttft_s"] = _first_tokens_s(seeds, engine, other)
        times = engine.ask("times")
        seen |= _hook_times(times["times"])
        seen["first_hook_to_answer_p50_s"] = median(times["answer_s"])
        seen["first_hook_to_answer_p99_s"] = _share(times["answer_s"], 99)
        prompts = [prompt(seed, PROMPT_TOKENS) for seed in range(2000, 2000 + ROUNDS)]
        alone = engine.ask("engine_alone", prompts=prompts)
        seen["engine_alone_to_answer_p50_s"] = median(alone["answer_s"])
        seen["engine_alone_asked_most"] = max(alone["asked"])
        prompts = [prompt(seed, PROMPT_TOKENS) for seed in range(3000, 3000 + ROUNDS)]
        waited = engine.ask("lookups", keys=PROMPT_TOKENS // BLOCK, prompts=prompts)["lookup_s"]
        seen["lookup_alone_p50_s"] = median(waited)
        seen["asked_until_answered_most"] = max(times["asked"])
        seen["decode_step_s"] = engine.generate(prompt(997, 40), tokens=400)["seconds"] / 400
        alone = _since(engine.ask("times")["times"], times["times"])
        seen["step_without_traffic_s"] = sum(median(wall for wall, _ in alone[name]) for name in STEP)
        seen["step_without_traffic_cpu_s"] = sum(median(cpu for _, cpu in alone[name]) for name in STEP)
    return seen


def _first_tokens_s(seeds: range, *engines: Any) -> list[float]:
    """Median seconds to the first token, of each engine; they take turns, so that all meet the same load."""
    took: list[list[float]] = [[] for _ in engines]
    for seed in seeds:
        for times, engine in zip(took, engines, strict=True):
            times.append(engine.generate(prompt(seed, PROMPT_TOKENS), tokens=1)["seconds"])
    return [median(times) for times in took]


def _hook_times(times: dict[str, list[list[float]]]) -> dict[str, float]:
    """Of all calls of scheduler hooks, of the hook whose p99 is largest, and of a hook that reads one variable."""
    calls = {"scheduler_hook": [call for name in SCHEDULER for call in times[name]], "control": times["control"]}
    seen = {}
    for name, of in calls.items():
        for kind, place in (("", 0), ("_cpu", 1)):
            took = [call[place] for call in of]
            seen[f"{name}{kind}_p50_s"], seen[f"{name}{kind}_p99_s"] = median(took), _share(took, 99)
    for kind, place in (("", 0), ("_cpu", 1)):
        seen[f"worst_hook{kind}_p99_s"] = max(_share([call[place] for call in times[name]], 99) for name in SCHEDULER)
    return seen


def _share(values: list[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]


def _since(now: dict[str, list[list[float]]], before: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    return {name: times[len(before.get(name, ())) :] for name, times in now.items()}
