"""What the all-gather of a PCP x DCP step costs, waited for and beside the compute: two processes, gloo, a tiny model.

    python -m tests.bench gather

The same step in three ways, in turn, in one run: the next layer's shards gathered while a layer is computed; the same
gathers waited for where they begin; and no gathers of shards at all. Times are wall clock, since waiting is what is
measured; the three ways of a round follow each other at once, so that other load on the machine meets them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.config import TINY
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.pcp_rank import prefill_over_shards
from kvmanager.clients.glm.ranks import Gather, RankGroup, gather
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.torch_ranks import join_ranks
from kvmanager.clients.glm.weights import Profile, make_weights
from kvmanager.clients.glm.workspace import GatheredStore, Workspace, workspace_bytes
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import native_layout
from tests.bench.figure import Figure

ROOT = Path(__file__).parents[2]
RANKS, ROWS = 2, 16
CONTEXTS = (2_048, 8_192)
CHUNK = 32
ROUNDS = 15


class _Landed:
    def wait(self) -> list[Tensor]:
        return []


class Waited:
    """Each gather has ended when `start_gather` returns."""

    def __init__(self, ranks: RankGroup) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks = ranks

    def start_gather(self, tensor: Tensor, received: Tensor) -> Gather:
        gather = self._ranks.start_gather(tensor, received)
        gather.wait()
        return gather


class WithoutShards(Waited):
    """Gathers into the workspace are left out; what lies there is computed from."""

    def __init__(self, ranks: RankGroup, workspace: Tensor) -> None:
        super().__init__(ranks)
        self._first, self._bytes = workspace.data_ptr(), workspace.numel()

    def start_gather(self, tensor: Tensor, received: Tensor) -> Gather:
        if self._first <= received.data_ptr() < self._first + self._bytes:
            return _Landed()
        return super().start_gather(tensor, received)


def _filled_shard(rank: int, geometry: ShardGeometry, tokens: int) -> ShardStore:
    layout, codec = native_layout(TINY.format, ROWS), Fp8Codec()
    spans = geometry.spans(tokens + CHUNK)
    shard = ShardStore(np.zeros(spans * layout.page_bytes, dtype=np.uint8), layout, geometry, rank)
    shard.set_span_pages(np.arange(spans))
    positions = torch.arange(tokens)
    random = torch.Generator().manual_seed(rank)
    for layer in range(TINY.layers):
        latents = torch.randn((tokens, TINY.kv_lora + TINY.rope_dim), generator=random)
        rows = codec.encode_latent(latents[:, : TINY.kv_lora], latents[:, TINY.kv_lora :])
        shard.write_latent(layer, positions, rows)
        if layer in TINY.format.leaders:
            keys = torch.randn((tokens, TINY.index_dim), generator=random)
            shard.write_index(layer, positions, *codec.encode_index(keys))
    return shard


def _steps(ranks: RankGroup, tokens: int) -> dict[str, list[float]]:
    """Seconds of this rank's steps, by the way of gathering."""
    geometry = ShardGeometry(ranks.size, ROWS, 1)
    shard = _filled_shard(ranks.rank, geometry, tokens)
    memory = torch.zeros(workspace_bytes(geometry, tokens + CHUNK), dtype=torch.uint8)
    model = Glm(TINY, make_weights(TINY, 1, Profile.CALM), torch.float32, Fp8Codec())
    ways: dict[str, RankGroup] = {
        "beside": ranks, "waited": Waited(ranks), "without": WithoutShards(ranks, memory)
    }  # fmt: skip
    layers = tuple(range(TINY.layers))
    stores = {way: GatheredStore(shard, group, Workspace(memory), layers) for way, group in ways.items()}
    chunk = np.random.default_rng(1).integers(0, TINY.vocab, CHUNK).tolist()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS + 1):
        for way, store in stores.items():
            gather(ranks, torch.zeros(1))  # both begin together
            began = time.perf_counter()
            prefill_over_shards(model, store, ways[way], chunk, tokens, chunk[1:])
            gather(ranks, torch.zeros(1))
            if number:
                seconds[way].append(time.perf_counter() - began)
    return seconds


def _run_ranks(work: str, size: int) -> str:
    """Runs this module's `work` on ranks that are processes; what rank 0 printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.gather_figures", work, f"{directory}/meeting", str(rank)],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a rank failed: {said}")
    return said[0]


def figures() -> Iterator[Figure]:
    """All of them; a ratio is the median of the rounds' own."""
    for tokens in CONTEXTS:
        seconds = {way: np.array(times) for way, times in json.loads(_run_ranks(str(tokens), RANKS)).items()}
        name = f"PCP2xDCP2 step, {CHUNK} of {tokens:,} tokens"
        for way, words in (("waited", "gather waited for"), ("beside", "gather beside compute")):
            ratio = float(np.median(seconds[way] / seconds["without"]))
            yield Figure(f"{name}: {words}", float(np.median(seconds[way])) * 1e3, "ms", "no gather", ratio)
        ratio = float(np.median(seconds["beside"] / seconds["waited"]))
        yield Figure(f"{name}: beside", float(np.median(seconds["beside"])) * 1e3, "ms", "waited for", ratio)


def _rank(tokens: str, meeting: str, rank: str) -> None:
    torch.set_num_threads(1)
    with join_ranks(Path(meeting), int(rank), RANKS) as ranks:
        print(json.dumps(_steps(ranks, int(tokens))), flush=True)


if __name__ == "__main__":
    _rank(*sys.argv[1:])
