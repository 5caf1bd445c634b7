"""A real vLLM engine, told what to do by lines of JSON on stdin; answers are lines that begin with `@`.

Runs in the environment of vLLM, not in the project's.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams

from kvmanager.clients.vllm import connector as module

HOOKS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
         "update_connector_output", "request_finished")  # fmt: skip
WORKER_HOOKS = ("start_load_kv", "wait_for_save", "get_finished", "get_block_ids_with_load_errors",
                "build_connector_worker_meta")  # fmt: skip
times: dict[str, list[float]] = {}
first_asked: dict[str, float] = {}
answered: dict[str, float] = {}
asked: dict[str, int] = {}


def timed(name: str) -> None:
    """Notes how long each call of a hook takes, and when a request was first asked about and answered."""
    cls = module.KVManagerConnector
    hook = getattr(cls, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = hook(self, *args, **kwargs)
        end = time.perf_counter()
        times.setdefault(name, []).append(end - start)
        if name == "on_new_request":
            first_asked.setdefault(args[0].request_id, start)
        if name == "get_num_new_matched_tokens" and args[0].request_id not in answered:
            asked[args[0].request_id] = asked.get(args[0].request_id, 0) + 1
            if result[0] is not None:
                answered[args[0].request_id] = end
        return result

    setattr(cls, name, call)


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
    llm = LLM(**config)
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"]:
            case "generate":
                say(generate(llm, order))
            case "reset":
                say({"reset": llm.reset_prefix_cache()})
            case "metrics":
                say({m.name: getattr(m, "value", None) for m in llm.get_metrics()})
            case "times":
                say({"times": times, "answer_s": [answered[r] - first_asked[r] for r in answered if r in first_asked],
                     "asked": list(asked.values())})  # fmt: skip
            case "abort":
                say(abort_while_loading(llm, order))
            case "break_loads":
                break_loads()
                say({"broken": True})


def break_loads() -> None:
    """From now on every load fails after its copy."""
    from kvmanager.clients.vllm.blocks import EngineBlocks

    def load(self: Any, _rows: Any, _pages: Any, block_ids: Any) -> None:
        for view in self._views:
            view[list(block_ids)] = 77
        raise RuntimeError("broken on purpose")

    EngineBlocks.load = load  # type: ignore[method-assign]


def abort_while_loading(llm: LLM, order: dict[str, Any]) -> dict[str, Any]:
    """Adds a request, steps a few times, aborts it; then all goes on."""
    engine = llm.llm_engine
    engine.add_request("victim", {"prompt_token_ids": order["prompts"][0]}, sampling(order))
    for _ in range(order["steps"]):
        engine.step()
    engine.abort_request(["victim"])
    return generate(llm, {"prompts": order["prompts"][1:]})


def say(answer: dict[str, Any]) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
