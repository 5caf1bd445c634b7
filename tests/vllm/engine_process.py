"""A real vLLM engine, told what to do by lines of JSON on stdin; answers are lines that begin with `@`.

Runs in the environment of vLLM, not in the project's.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np
from vllm import LLM, SamplingParams

from kvmanager.clients import engine as client
from kvmanager.clients.vllm import connector as module
from kvmanager.clients.vllm.blocks import EngineBlocks

HOOKS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
         "update_connector_output", "request_finished")  # fmt: skip
WORKER_HOOKS = ("start_load_kv", "wait_for_save", "get_finished", "get_block_ids_with_load_errors",
                "build_connector_worker_meta")  # fmt: skip
LOAD = EngineBlocks.load
CONTROL = "control"
times: dict[str, list[tuple[float, float]]] = {}
"""Hook -> seconds and CPU seconds of each call; `CONTROL`: of as many that read one variable in the same places."""
first_asked: dict[str, float] = {}
answered: dict[str, float] = {}
asked: dict[str, int] = {}
ALONE: list[str] = []
"""Not empty: the scheduler's hooks do nothing, and their times have this name."""
scheduler: list[Any] = []
"""The connector of the scheduler's side, once it was asked something."""


def timed(name: str) -> None:
    """Notes how long each call of a hook takes, and when a request was first asked about and answered."""
    cls = module.KVManagerConnector
    hook = getattr(cls, name)

    def nothing(self: Any) -> Any:
        return self._scheduling

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name in HOOKS:
            start, cpu = time.perf_counter(), time.thread_time()
            nothing(self)
            note(CONTROL, start, cpu)
        start, cpu = time.perf_counter(), time.thread_time()
        result = idle_hook(name, args) if ALONE and name in HOOKS else hook(self, *args, **kwargs)
        end = note(ALONE[0] if ALONE else name, start, cpu)
        if name == "on_new_request":
            scheduler[:] = [self]
            first_asked.setdefault(args[0].request_id, start)
        if name == "get_num_new_matched_tokens" and args[0].request_id not in answered:
            asked[args[0].request_id] = asked.get(args[0].request_id, 0) + 1
            if result[0] is not None:
                answered[args[0].request_id] = end
        return result

    setattr(cls, name, call)


def idle_hook(name: str, args: Any) -> Any:
    """A scheduler hook of a connector that does nothing, but answers a request the second time it is asked."""
    match name:
        case "get_num_new_matched_tokens":
            return (0 if asked.get(args[0].request_id) else None), False
        case "build_connector_meta":
            return module.StepOrders()
        case "request_finished":
            return False, None
    return None


def note(name: str, start: float, cpu: float) -> float:
    cpu_s, end = time.thread_time() - cpu, time.perf_counter()
    times.setdefault(name, []).append((end - start, cpu_s))
    return end


def engine_alone(llm: LLM, order: dict[str, Any]) -> dict[str, Any]:
    """Prompts one after the other, with hooks that do nothing. answer_s: as `hook_times` has it."""
    known = set(answered)
    ALONE[:] = ["alone"]
    for tokens in order["prompts"]:
        generate(llm, {"prompts": [tokens], "tokens": 1})
    ALONE.clear()
    mine = [name for name in answered if name not in known]
    answer_s = [answered.pop(name) - first_asked.pop(name) for name in mine]
    return {"answer_s": answer_s, "asked": [asked.pop(name) for name in mine]}


def generate(llm: LLM, order: dict[str, Any]) -> dict[str, Any]:
    prompts = [{"prompt_token_ids": tokens} for tokens in order["prompts"]]
    params = sampling(order)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "ids": [output.request_id for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "reasons": [output.outputs[0].finish_reason for output in outputs],
        "transfer": [output.kv_transfer_params for output in outputs],
        "seconds": time.perf_counter() - start,
    }


def sampling(order: dict[str, Any]) -> SamplingParams:
    """Greedy. session, transfer: what goes into the request's kv_transfer_params."""
    transfer = dict(order.get("transfer") or {})
    if order.get("session"):
        transfer["session_id"] = order["session"]
    return SamplingParams(
        temperature=0, max_tokens=order.get("tokens", 16), detokenize=False, ignore_eos=True,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )  # fmt: skip


def main() -> None:
    config = json.loads(sys.argv[1])
    for name in (*HOOKS, *WORKER_HOOKS):
        timed(name)
    if config.pop("break_loads", False):
        break_loads()
    speak(config.pop("wire_version", client.WIRE_VERSION))
    llm = LLM(**config)
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        say(ORDERS[order["do"]](llm, order))


def speak(version: int) -> dict[str, Any]:
    """From now on the client says that it is of this version of the wire's contract."""
    client.WIRE_VERSION = version  # type: ignore[misc]
    return {"speaks": version}


def metrics(llm: LLM, _: dict[str, Any]) -> dict[str, Any]:
    return {m.name: getattr(m, "value", None) for m in llm.get_metrics()}


def hook_times(_llm: LLM, _: dict[str, Any]) -> dict[str, Any]:
    """Since the start. answer_s: from a request's first hook to the one that told how much of it can be loaded."""
    answer_s = [answered[name] - first_asked[name] for name in answered if name in first_asked]
    return {"times": times, "answer_s": answer_s, "asked": list(asked.values())}


def lookups(llm: LLM, order: dict[str, Any]) -> dict[str, Any]:
    """Seconds of lookups that this thread waits for and nobody else disturbs; of each prompt one when it is done.

    Between them the engine computes, with hooks that do nothing, so that caches are as cold as they are in its hooks.
    """
    seconds = []
    for number, tokens in enumerate(order["prompts"]):
        engine_alone(llm, {"prompts": [tokens]})
        seconds.append(lookup_s(number, order["keys"]))
    return {"lookup_s": seconds}


def lookup_s(number: int, keys: int) -> float:
    link = scheduler[0]._link
    wanted = b"".join(hashlib.sha256(f"{number}.{key}".encode()).digest() for key in range(keys))
    start = time.perf_counter()
    answer = link.read(lambda questions: questions.lookup(wanted, keys), here=True)
    while not answer.done():
        link.bell.wait(10)
        link.hear()
    answer.result(timeout=0)
    return time.perf_counter() - start


def break_loads() -> dict[str, Any]:
    """From now on every load fails after its copy."""

    def load(self: Any, _rows: Any, _pages: Any, block_ids: Any) -> None:
        for view in self._views:
            view[list(block_ids)] = 77
        raise RuntimeError("broken on purpose")

    EngineBlocks.load = load  # type: ignore[method-assign]
    return {"broken": True}


def spoil_loads() -> dict[str, Any]:
    """From now on every load brings other numbers, float32, and nobody is told."""

    def load(self: Any, rows: Any, pages: Any, block_ids: Any) -> None:
        LOAD(self, rows, pages, block_ids)
        for view in self._views:
            view[list(block_ids)] = (view[list(block_ids)].view(np.float32) * 1.5).view(np.uint8)

    EngineBlocks.load = load  # type: ignore[method-assign]
    return {"spoiled": True}


def abort_while_loading(llm: LLM, order: dict[str, Any]) -> dict[str, Any]:
    """Adds a request, steps a few times, aborts it; then all goes on."""
    engine = llm.llm_engine
    engine.add_request("victim", {"prompt_token_ids": order["prompts"][0]}, sampling(order))
    for _ in range(order["steps"]):
        engine.step()
    engine.abort_request(["victim"])
    return generate(llm, {"prompts": order["prompts"][1:]})


ORDERS = {
    "generate": generate,
    "reset": lambda llm, _: {"reset": llm.reset_prefix_cache()},
    "metrics": metrics,
    "times": hook_times,
    "engine_alone": engine_alone,
    "lookups": lookups,
    "abort": lambda llm, order: abort_while_loading(llm, order),
    "break_loads": lambda _llm, _: break_loads(),
    "spoil_loads": lambda _llm, _: spoil_loads(),
    "speak": lambda _llm, order: speak(order["version"]),
}


def say(answer: dict[str, Any]) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
