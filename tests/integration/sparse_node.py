"""A decode rank on a real node, CPU or GPU: its engine computes prompts itself, and has too little memory for all."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from nodes_support import Node, node_head

from kvmanager.clients.decode_engine import DecodeEngine
from kvmanager.clients.decode_stores import StoresOf
from kvmanager.clients.decode_work import DecodeWork
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.reference import ReferenceRun
from kvmanager.demo.expected import demo_model
from kvmanager.demo.nodes import HOT_ROWS, NAMESPACE, PAGE_ROWS
from kvmanager.protos import kvmanager_pb2 as pb

SEED = 5
PROMPTS = (75, 90)
OUTPUT = 30
SLABS = 16
MODEL = demo_model(SEED)
SLAB_BYTES = TINY.format.slab_bytes(PAGE_ROWS)


def sparse_toml(
    runtime_dir: Path,
    *,
    name: str,
    device: str = "cpu",
    residency: str = "hybrid",
    slabs: int = SLABS,
    token_order: str = "sequential",
) -> str:
    """More is promised than there is: both requests begin, and the node can't keep both to the end."""
    return f"""{node_head(runtime_dir, name, device=device)}
[admission]
overcommit = 3.0
[[group]]
name = "decode-0"
kind = "hisparse"
format = "{TINY.format.name}"
ranks = 1
page_rows = {PAGE_ROWS}
hbm_bytes_per_rank = {slabs * SLAB_BYTES}
host_bytes_per_rank = {60 * SLAB_BYTES}
token_order = "{token_order}"
source_ranks = 2
source_interleave = 1
hot_rows = {HOT_ROWS}
residency = "{residency}"
"""


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng([SEED, length]).integers(0, TINY.vocab, length)


@cache
def expected(length: int) -> tuple[int, ...]:
    """Of the run with one contiguous store."""
    return tuple(ReferenceRun(MODEL).turn(prompt_of(length).tolist(), OUTPUT))


def decode_all(served: Node, stores: StoresOf) -> int:
    """Both answers are the reference's, also when the prompts are asked for again; rows brought from the host."""
    engine = DecodeEngine(
        served.runtime_dir, "decoder", group="decode-0", namespace=NAMESPACE, page_rows=PAGE_ROWS, hot_rows=HOT_ROWS,
        model=MODEL, stores=stores,
    )  # fmt: skip
    swapped = 0
    try:
        for turn in range(2):
            lengths = {}
            for length in PROMPTS:
                session = pb.SessionHint(session_id=f"{turn}-{length}")
                lengths[engine.submit(DecodeWork(prompt_of(length), None, None, OUTPUT, session, ""))] = length
            while not engine.idle:
                for decoded in engine.step().finished:
                    length = lengths.pop(decoded.request_id)
                    print(f"turn {turn}, prompt of {length}: {decoded}")
                    assert decoded.tokens == expected(length), (turn, length)
                    swapped += decoded.swap_in_rows
            assert not lengths
        print(f"{engine.retractions} retractions, {swapped} rows swapped in")
    finally:
        engine.close()
    return swapped


def check_account(served: Node) -> dict[str, int]:
    """All that the node did for it, and nothing is held at the end."""
    served.wait_at_rest()
    counters = served.counters()
    print({name: count for name, count in counters.items() if count})
    assert counters["failed_plan"] == 0
    for name in ("mirror", "spill", "retraction", "resumption", "onboard", "prefix_hit"):
        assert counters[name] > 0, (name, counters)
    assert counters["retraction"] == counters["resumption"]
    return counters
