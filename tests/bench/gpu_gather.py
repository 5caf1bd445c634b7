"""On two GPUs: layers of a PCP x DCP step with the shards gathered over NCCL, waited for and beside the compute.

    python -m tests.bench --gpu gather

True dimensions: 256 queries a rank, as one of eight ranks has of a 2,048-token chunk, at 142K tokens of context, of
which each of two ranks holds half: indexer and exact top-k on two of eight layers, sparse attention on all. Rows are
packed out of the rank's pages, gathered into one half of a workspace, and read there as they land, shard after shard.
The three ways of `gather_figures` follow each other in every round; times are of the GPU, by events.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.gpu.pages import device_pages, row_references
from kvmanager.clients.glm.gpu.sparse_mla import attend_parts
from kvmanager.clients.glm.ranks import Gather, RankGroup, gather
from kvmanager.clients.glm.torch_ranks import join_ranks
from kvmanager.clients.glm.workspace import TOKEN_BYTES, Workspace
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, LATENT_ROW_BYTES, Component, Section, indexer_layout, native_layout
from tests.bench.figure import Figure
from tests.bench.gather_figures import Waited, WithoutShards
from tests.bench.gpu_kernels import CONTEXT, LAYER, LEADER, SCALE, SEQUENTIAL, Indexing, K, _indexer_region

ROOT = Path(__file__).parents[2]
RANKS = 2
QUERIES = 256
LAYERS, GROUP = 8, 4
"""Layers of a round; the first of each group has an indexer."""
ROUNDS = 9
SPANS = CONTEXT // (64 * RANKS)
SHARD_ROWS = SPANS * 64
TOKENS = SHARD_ROWS * RANKS
INDEX_PAGE_BYTES = 64 * 132


def possible() -> bool:
    """Whether there are two GPUs; says so when not."""
    if torch.cuda.device_count() >= RANKS:
        return True
    print("no gather figures: they need two GPUs", file=sys.stderr)
    return False


class Step:
    """The rank's pages, queries and buffers."""

    def __init__(self, ranks: RankGroup) -> None:
        random = torch.Generator("cuda").manual_seed(ranks.rank)
        layout = native_layout(GLM53, 64)
        part = layout.by_key[Section.LATENT, LAYER]
        pages = torch.zeros(SPANS * layout.page_bytes, dtype=torch.uint8, device="cuda")
        self._rows = pages.as_strided(
            (SPANS, 64, part.row_bytes), (part.page_stride, part.slot_stride, 1), part.offset
        )
        latents = torch.randn((SPANS, 64, 512), device="cuda", generator=random)
        self._rows.copy_(Fp8Codec().encode_latent(latents, latents[..., :64]))
        keys = layout.by_key[Section.INDEX_VALUE, LEADER]
        self._index = pages.as_strided((SPANS, INDEX_PAGE_BYTES), (keys.page_stride, 1), keys.offset)
        self.memory = torch.zeros(2 * RANKS * SHARD_ROWS * TOKEN_BYTES, dtype=torch.uint8, device="cuda")
        self._halves = Workspace(self.memory).lease(RANKS * SHARD_ROWS)
        indexed = indexer_layout(GLM53, 64)
        region = _indexer_region(indexed, SPANS * RANKS)
        self._indexing = Indexing(region, indexed, SEQUENTIAL, TOKENS, QUERIES, 1)
        self._q = torch.randn((QUERIES, 64, 576), device="cuda", generator=random).to(torch.bfloat16)
        row = LATENT_ROW_BYTES
        self._component = Component(Section.LATENT, LEADER, 0, 64 * row, row, row)
        # In the workspace the shards lie one after the other, each rank's pages in the order of their spans.
        order = TokenOrder(RANKS, 1)
        spans = [(order, np.arange(RANKS) * SPANS + span) for span in range(SPANS)]
        self._table = device_pages([spans], "cuda")
        self._references = torch.empty((QUERIES, K), dtype=torch.int64, device="cuda")
        self._counts = torch.empty(QUERIES, dtype=torch.int32, device="cuda")
        self._of_request = torch.zeros(QUERIES, dtype=torch.int32, device="cuda")
        self._out = torch.empty((QUERIES, 1, 64, 512), dtype=torch.bfloat16, device="cuda")
        self._lse = torch.empty((QUERIES, 1, 64), device="cuda")

    def run(self, ranks: RankGroup) -> None:
        """All layers; each one's shards are asked for before the layer ahead of it is computed."""
        coming = self._ask(ranks, 0)
        for layer in range(LAYERS):
            for gathered in coming:
                gathered.wait()
            if layer + 1 < LAYERS:
                coming = self._ask(ranks, layer + 1)
            self._compute(layer)

    def _ask(self, ranks: RankGroup, layer: int) -> list[Gather]:
        half = self._halves[layer % 2]
        received = half.latent.view(RANKS, SHARD_ROWS, LATENT_ROW_BYTES)
        gathers = [ranks.start_gather(self._rows.reshape(SHARD_ROWS, LATENT_ROW_BYTES), received)]
        if layer % GROUP == 0:
            keys = half.index.view(RANKS, SPANS, INDEX_PAGE_BYTES)
            gathers.append(ranks.start_gather(self._index.contiguous(), keys))
        return gathers

    def _compute(self, layer: int) -> None:
        if layer % GROUP == 0:
            self._indexing.run()
            row_references(
                self._indexing.selection, self._of_request, self._table, self._component, self._references, self._counts
            )
        rows = self._halves[layer % 2].latent.view(-1)
        attend_parts(self._q, self._references, self._counts, rows, rows, 0, SCALE, self._out, self._lse)


def _seconds(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _rounds(ranks: RankGroup) -> dict[str, list[float]]:
    step = Step(ranks)
    one = torch.zeros(1, device="cuda")
    ways: dict[str, RankGroup] = {
        "without": WithoutShards(ranks, step.memory), "waited": Waited(ranks), "beside": ranks
    }  # fmt: skip
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS + 2):
        for way, group in ways.items():
            gather(ranks, one)  # both begin together
            torch.cuda.synchronize()
            took = _seconds(lambda group=group: step.run(group))
            if number >= 2:
                seconds[way].append(took)
    return seconds


def figures() -> Iterator[Figure]:
    """All of them; a ratio is the median of the rounds' own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.bench.gpu_gather", f"{directory}/meeting"]
        processes = [
            subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
            for rank in range(RANKS)
        ]
        said = [process.communicate(timeout=300)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank failed: {said}")
    seconds = {way: np.array(times) for way, times in json.loads(said[0].splitlines()[-1]).items()}
    name = f"PCP2xDCP2, {LAYERS} layers at {TOKENS:,} tokens"
    without = float(np.median(seconds["without"]))
    yield Figure(f"{name}: no gather", without * 1e3, "ms", "itself", 1.0)
    for way, words in (("waited", "gather waited for"), ("beside", "gather beside compute")):
        ratio = float(np.median(seconds[way] / seconds["without"]))
        yield Figure(f"{name}: {words}", float(np.median(seconds[way])) * 1e3, "ms", "no gather", ratio)
    waited_s = float(np.median(seconds["waited"])) - without
    moved = SHARD_ROWS * (LAYERS * LATENT_ROW_BYTES + LAYERS // GROUP * 132)
    rate = moved / waited_s
    yield Figure(f"{name}: from the other rank", rate / 1e9, "GB/s", "450 GB/s of NVLink, as published", rate / 450e9)


def _rank(meeting: str, rank: str) -> None:
    torch.cuda.set_device(int(rank))
    with join_ranks(Path(meeting), int(rank), RANKS, backend="nccl") as ranks:
        print(json.dumps(_rounds(ranks)), flush=True)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
