"""A vLLM engine's KV cache in a real node's HBM: taken as the connector takes it, killed, and taken by the next one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from gpu_support import memory_is_given_back
from nodes_support import kill_and_wait, node, says, script

from kvmanager.clients.engine_memory import EngineMemory
from kvmanager.errors import PoolExhausted
from kvmanager.layout import plain_format, plain_layout

pytestmark = pytest.mark.gpu
ROWS, BLOCKS, LAYERS = 16, 1024, 8
FORMAT = plain_format("bfloat16", LAYERS, 2, 512)
BLOCK_BYTES = plain_layout(FORMAT, ROWS).page_bytes


def engine_toml(runtime_dir: Path, *, name: str = "node") -> str:
    return f"""
[node]
name = "{name}"
runtime_dir = "{runtime_dir}"
device = "cuda:0"
spare = false
[[group]]
name = "hbm"
kind = "engine"
format = "{FORMAT.name}"
ranks = 1
page_rows = {ROWS}
hbm_bytes_per_rank = {BLOCKS * BLOCK_BYTES}
"""


ENGINE = """
import sys
from pathlib import Path
import torch
from kvmanager.clients.vllm.engine_pool import engine_pool
from kvmanager.clients.vllm.settings import Settings
from kvmanager.layout import plain_format
runtime_dir, name, form, rows, blocks, layers, size, cleared = sys.argv[1:]
layers, form = int(layers), plain_format("bfloat16", int(layers), 2, 512)
settings = Settings(Path(runtime_dir), "kv", name, memory_group="hbm", memory_wait_s=30.0)
torch.cuda.init()
memory, pool = engine_pool(settings, form, int(rows), 1, int(size))
with pool.context():  # one allocation, layer outermost, as vLLM makes it (which clears it, too)
    cache = (torch.zeros if cleared == "cleared" else torch.empty)(int(size), dtype=torch.int8, device="cuda:0")
inside = memory.address <= cache.data_ptr() and cache.data_ptr() + cache.numel() <= memory.address + memory.size_bytes
other = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")
assert not memory.address <= other.data_ptr() < memory.address + memory.size_bytes, "made outside, lies inside"
layer = cache.view(torch.bfloat16).view(layers, int(blocks), -1)
def mean():
    return [round(float(part.float().mean()), 3) for part in layer]
print("has", memory.blocks, cache.data_ptr() - memory.address, pool.used_bytes, inside, mean(), flush=True)
for line in sys.stdin:
    first = int(line)
    for number, part in enumerate(layer):
        part.fill_(first + number)
    torch.cuda.synchronize()
    print("wrote", mean(), flush=True)
"""


def engine(runtime_dir: Path, name: str, cleared: str = "kept"):
    size = BLOCKS * BLOCK_BYTES
    return script(ENGINE, str(runtime_dir), name, FORMAT.name, str(ROWS), str(BLOCKS), str(LAYERS), str(size), cleared)


def test_a_killed_engines_cache_is_there_for_the_next_one(tmp_path: Path) -> None:
    with memory_is_given_back(), node(tmp_path, "node", engine_toml) as served:
        with engine(served.runtime_dir, "vllm-0", "cleared") as first:
            has = says(first, "has")
            print(f"first engine: blocks, offset, used bytes, inside, means of layers: {has}", file=sys.stderr)
            assert has.startswith(f"{BLOCKS} 0 {BLOCKS * BLOCK_BYTES} True [0.0"), f"{has}\n{served.log()[-2000:]}"
            assert first.stdin is not None
            first.stdin.write("5\n")
            first.stdin.flush()
            written = says(first, "wrote")
            assert written == str([float(5 + n) for n in range(LAYERS)])
            with pytest.raises(PoolExhausted, match="vllm-0-memory"):
                EngineMemory(served.runtime_dir, "hbm", "thief", FORMAT, ROWS)
            kill_and_wait(served.pid_of("daemon"))
            served.reopen()
            kill_and_wait(first.pid)
        began = time.monotonic()
        with engine(served.runtime_dir, "vllm-1") as second:
            has = says(second, "has")
            print(f"second engine after {time.monotonic() - began:.2f} s: {has}", file=sys.stderr)
            assert has == f"{BLOCKS} 0 {BLOCKS * BLOCK_BYTES} True {written}", f"{has}\n{served.log()[-2000:]}"
        served.wait_at_rest()
