"""Device memory for an engine's own blocks: it outlives the engine, and one engine has it at a time.

The node's device is the CPU here, so the memory is a memfd and torch's pool is stood in for by its own allocator.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nodes_support import Node, kill_and_wait, node, says, script, wait_for

from kvmanager.clients.attached_engine import AttachedEngine
from kvmanager.clients.engine_memory import EngineMemory
from kvmanager.clients.vllm.engine_pool import engine_pool, pool_over, segment_bytes
from kvmanager.clients.vllm.gpu_pool import compile_allocator
from kvmanager.clients.vllm.settings import Settings
from kvmanager.errors import ConfigError, InvalidArgument, LayoutMismatch, PoolExhausted
from kvmanager.layout import plain_format, plain_layout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import MIB

ROWS, BLOCKS = 16, 40
FORMAT = plain_format("bfloat16", 4, 2, 512)
LAYOUT = plain_layout(FORMAT, ROWS)


def engine_toml(runtime_dir: Path, *, name: str = "node") -> str:
    return f"""
[node]
name = "{name}"
runtime_dir = "{runtime_dir}"
[[group]]
name = "hbm"
kind = "engine"
format = "{FORMAT.name}"
ranks = 1
page_rows = {ROWS}
hbm_bytes_per_rank = {BLOCKS * LAYOUT.page_bytes + 100}
"""


HOLDER = """
import sys, ctypes
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_node_engine_memory import *
memory = EngineMemory(Path(sys.argv[1]), "hbm", sys.argv[3], FORMAT, ROWS)
piece = allocate(memory, 100 * 1024)
print("has", memory.size_bytes, memory.blocks, piece - memory.address, bytes_at(piece)[0], flush=True)
for line in sys.stdin:
    bytes_at(piece)[:] = int(line)
    print("wrote", line.strip(), flush=True)
"""


def allocate(memory: EngineMemory, size_bytes: int) -> int:
    """A piece as torch would ask for it: from the allocator that its pool is made of."""
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(str(compile_allocator(Path(folder))))
    library.kvm_region.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    library.kvm_alloc.restype = ctypes.c_void_p
    library.kvm_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    library.kvm_region(memory.address, memory.size_bytes)
    return int(library.kvm_alloc(size_bytes, 0, None))


def bytes_at(address: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * (100 * 1024)).from_address(address))


def holder(served: Node, name: str) -> AbstractContextManager[Any]:
    return script(HOLDER, str(served.runtime_dir), str(Path(__file__).parent), name)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, "node", engine_toml) as running:
        yield running


def take(served: Node, name: str = "other") -> EngineMemory:
    return EngineMemory(served.runtime_dir, "hbm", name, FORMAT, ROWS)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_killed_engines_memory_goes_to_the_next_one_with_its_bytes_and_never_to_two(served: Node) -> None:
    all_of_it = f"{BLOCKS * LAYOUT.page_bytes} {BLOCKS}"
    with holder(served, "first") as first:
        assert says(first, "has") == f"{all_of_it} 0 0"
        assert first.stdin is not None
        first.stdin.write("7\n")
        first.stdin.flush()
        says(first, "wrote")
        for name in ("second", "first"):  # also one of the same name: the one that lives keeps it
            with pytest.raises(PoolExhausted, match="'first'") as refusal:
                take(served, name)
            assert "first" in refusal.value.holder
            assert refusal.value.retry_after_ns > 0
        assert sum(served.held()["hbm/hbm"][:2]) == BLOCKS * LAYOUT.page_bytes, "the ledger knows whose it is"
        # The daemon dies and comes back: the engine goes on, and still nobody else gets in.
        kill_and_wait(served.pid_of("daemon"))
        served.reopen()
        wait_for(lambda: [e.state for e in served.admin.status().engines] == ["attached"])
        with pytest.raises(PoolExhausted, match="'first'"):
            take(served)
        kill_and_wait(first.pid)
    with holder(served, "second") as second:
        assert says(second, "has") == f"{all_of_it} 0 7", "the bytes that the first one wrote"
    served.wait_at_rest()


def test_an_engine_waits_for_the_one_before_and_gives_up(served: Node) -> None:
    settings = Settings(served.runtime_dir, "kv", "vllm-0", memory_group="hbm", memory_wait_s=0.3)
    one = take(served)
    with pytest.raises(PoolExhausted):
        engine_pool(settings, FORMAT, ROWS, 1, MIB)
    one.close()
    served.wait_at_rest()
    with pytest.raises(ConfigError, match="CPU"):
        engine_pool(settings, FORMAT, ROWS, 1, MIB)
    with pytest.raises(ConfigError, match="2 workers"):
        engine_pool(settings, FORMAT, ROWS, 2, MIB)
    served.wait_at_rest()  # nothing is held by one that can't use it
    with pytest.raises(LayoutMismatch, match="kv_format"):
        EngineMemory(served.runtime_dir, "hbm", "x", plain_format("float16", 4, 2, 512), ROWS)
    with pytest.raises(InvalidArgument, match="no group"):
        EngineMemory(served.runtime_dir, "nothing", "x", FORMAT, ROWS)


def test_a_part_of_the_memory_is_nobodys(served: Node) -> None:
    namespace = pb.Namespace(model="m", kv_format=FORMAT.name, key_hash="sha256", key_bytes=16, key_tokens=ROWS)
    engine = AttachedEngine(
        served.runtime_dir, "x", group="hbm", namespace=namespace, layouts=[LAYOUT], ranks=1
    )
    for blocks, growth in ((BLOCKS - 1, 0), (BLOCKS - 1, ROWS), (BLOCKS, ROWS)):
        with pytest.raises(InvalidArgument, match="as a whole"):
            engine.open(
                pb.OpenRequest(
                    request_id=1, prompt_tokens=blocks * ROWS, growth_tokens=growth, prompt_keys=bytes(16 * blocks)
                )
            )
    engine.close()
    served.wait_at_rest()


class OnGpu:
    """A memory that says that it is on a GPU; its pool is `Recorded`."""

    device, address, size_bytes = "cuda:0", 1 << 40, 24 * MIB


class Recorded:
    def __init__(self, address: int, size_bytes: int) -> None:
        self.region = address, size_bytes

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext(self)


def test_a_cache_that_does_not_fit_is_refused_before_torch_asks() -> None:
    memory: Any = OnGpu()
    pool: Any = pool_over(memory, 23 * MIB, Recorded)
    assert pool.region == (1 << 40, 24 * MIB)
    assert pool.context().__enter__() is pool
    with pytest.raises(ConfigError, match=f"{26 * MIB}.*{24 * MIB}.*kv_cache_memory_bytes"):
        pool_over(memory, 24 * MIB + 1, Recorded)
    assert [segment_bytes(size) for size in (1, MIB, MIB + 1, 10 * MIB, 10 * MIB + 1)] == [
        2 * MIB, 2 * MIB, 20 * MIB, 10 * MIB, 12 * MIB,
    ]  # fmt: skip
