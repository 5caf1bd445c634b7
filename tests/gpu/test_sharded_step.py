"""One layer of a PCP8 x DCP8 step at true dimensions, shard by shard on one GPU, against float64.

Each rank's queries are scored, chosen and attended over the copy that eight shards make (`tests.sharded_layer`, whose
arrangement is tested on the CPU); what lies outside of the context is NaN. Its time: `bench --gpu kernels`; the same
over two GPUs: `bench --gpu gather`.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("cupy")

from glm_support import SCALE, attention, check_attention, generator, poisoned_outputs

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.gpu.indexer import index_scores
from kvmanager.clients.glm.gpu.pages import device_pages, row_references
from kvmanager.clients.glm.gpu.sparse_mla import attend_parts, merge_parts
from kvmanager.clients.glm.gpu.topk import TopKWorkspace, top_k
from kvmanager.clients.glm.pcp import pcp_chunks
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import GLM53, native_layout
from tests.sharded_layer import INDEX_SCALES, INDEX_VALUES, LATENTS, ROWS, ShardedLayer

pytestmark = pytest.mark.gpu
RANKS, LEADER, K = 8, 6, 2_048
TOKENS, CHUNK = 5_003, 64
"""The chunk is the context's end; its queries see from 4,940 tokens on, so that a top-k leaves more than half out."""


class Step:
    """The chunk's queries over one gathered copy."""

    def __init__(self, interleave: int) -> None:
        random = generator()
        geometry = ShardGeometry(RANKS, ROWS, interleave)
        self.layer = ShardedLayer(native_layout(GLM53, ROWS), LEADER, geometry, TOKENS, random, "cuda")
        self.latents, self.index = self.layer.gather()
        spans = self.layer.table()
        self.table = device_pages([spans], "cuda")
        self.pages = torch.tensor([RANKS * len(spans)], dtype=torch.int32, device="cuda")
        codec = Fp8Codec()
        codes, factors = codec.encode_index(torch.randn((CHUNK, 32, 128), generator=random))
        weights = torch.randn((CHUNK, 32), generator=random)
        self.index_q, self.weights = codes.cuda(), (weights * factors).cuda()
        self.exact_q = codec.decode_index(codes, factors, torch.float64).cuda()
        self.exact_weights = weights.double().cuda()
        self.q = torch.randn((CHUNK, 64, 576), generator=random).to(torch.bfloat16).cuda()

    def scores(self, mine: torch.Tensor) -> torch.Tensor:
        """float32[queries, n] of a rank's queries over the whole context."""
        stride = -(-TOKENS // 4) * 4
        scores = torch.full((1, len(mine), stride), float("nan"), device="cuda")
        tokens = torch.tensor([TOKENS], dtype=torch.int32, device="cuda")
        index_scores(
            self.index_q[mine].unsqueeze(0).contiguous(), self.weights[mine].unsqueeze(0).contiguous(), self.table,
            self.pages, tokens, self.index, INDEX_VALUES, INDEX_SCALES, scores,
        )  # fmt: skip
        return scores[0]

    def exact_scores(self, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64[queries, TOKENS], and the sum of the sizes of what is added up."""
        q, weights, keys = self.exact_q[mine], self.exact_weights[mine], self.layer.keys
        want = torch.einsum("th,thj->tj", weights, (q @ keys.T).clamp(min=0))
        return want, torch.einsum("th,thj->tj", weights.abs(), q.abs() @ keys.T.abs())

    def choose(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        selection = torch.full((len(scores), K), -99, dtype=torch.int32, device="cuda")
        top_k(scores, lengths, selection, TopKWorkspace(len(scores), scores.shape[1], "cuda"))
        return selection

    def attend(self, mine: torch.Tensor, selection: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        references = torch.empty((len(mine), K), dtype=torch.int64, device="cuda")
        counts = torch.empty(len(mine), dtype=torch.int32, device="cuda")
        of_request = torch.zeros(len(mine), dtype=torch.int32, device="cuda")
        row_references(selection, of_request, self.table, LATENTS, references, counts)
        parts, lses, out, lse = poisoned_outputs(len(mine), 2)
        attend_parts(
            self.q[mine].contiguous(), references, counts, self.latents, self.latents, 0, SCALE, parts, lses
        )
        merge_parts(parts, lses, out, lse)
        return out, lse


@pytest.mark.parametrize("interleave", [1, 64])
def test_every_rank_computes_its_part_of_the_step_over_eight_shards(interleave: int) -> None:
    step, chunks = Step(interleave), pcp_chunks(CHUNK, RANKS)
    assert not chunks.replicated
    seen: list[int] = []
    for rank, queries in enumerate(chunks.queries):
        mine = queries.cuda()
        lengths = (TOKENS - CHUNK + queries + 1).to(torch.int32).cuda()
        scores = step.scores(mine)
        want, size = step.exact_scores(mine)
        error = (scores[:, :TOKENS].double() - want).abs()
        worst = float((error - 2**-10 * size).max())
        print(f"rank {rank}, queries {queries.tolist()}: scores off by {float(error.max()):.3e}", file=sys.stderr)
        assert not scores[:, :TOKENS].isnan().any(), "some key of the context was not read, or poison was"
        assert worst <= 0, f"rank {rank}: scores beyond their bound by {worst}"

        selection = step.choose(scores, lengths)
        for number, length in enumerate(lengths.tolist()):
            chosen = selection[number].long()
            order = (scores[number, :length] + 0.0).sort(descending=True, stable=True).indices[:K].sort().values
            assert torch.equal(chosen, order), f"rank {rank}, query {number}: {chosen[:8]} instead of {order[:8]}"
            least = want[number, :length].topk(K).values[-1]
            slack = 2 * 2**-10 * float(size[number, :length].max())
            below = float(least - want[number, chosen].min())
            assert below <= slack, f"rank {rank}, query {number}: a key {below} below the top-k, of {slack} allowed"

        out, lse = step.attend(mine, selection)
        check_attention(out, lse, [attention(step.q[q], step.layer.latents[s.long()]) for q, s in zip(
            mine.tolist(), selection, strict=True
        )])  # fmt: skip
        seen += queries.tolist()
    assert sorted(seen) == np.arange(CHUNK).tolist(), "each query by one rank"
