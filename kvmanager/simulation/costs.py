"""A roofline for GLM-5.3 on H200s: what a step takes, from FLOPs, bytes and links, with the committed constants. Pure.

Parts of a step follow each other, each at the slower of its compute and its memory time; a whole step takes longer by
the engine's share (`efficiency.prefill_engine`, `.decode_engine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvmanager.simulation.rates import constants


@dataclass(frozen=True)
class Chunk:
    """New tokens of one request in a step, behind `before` tokens that are there."""

    tokens: int
    before: int


@dataclass(frozen=True)
class Running:
    """One request of a decode step: tokens so far, and the share of its latent pages that are on the host alone."""

    tokens: int
    on_host: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The model of one node of `gpus` GPUs. overlap: the gather of a DCP layer runs beside the layer before it."""

    told: dict[str, dict[str, float]]
    gpus: int = 8
    overlap: bool = False

    def overlapped(self) -> Costs:
        """The same with the gather hidden as far as the rest of a step is long enough."""
        return replace(self, overlap=True)

    # ------------------------------------------------------------------------------------- parts, seconds

    def attention_flops(self, queries: float, context: float, heads: float) -> float:
        """Sparse attention of one layer."""
        model = self.told["model"]
        return queries * min(context, model["top_k"]) * heads * model["attention_flops_per_row_head"]

    def attention_bytes(self, queries: float, context: float, heads: float) -> float:
        """What it reads and writes when no row is read twice from a cache."""
        model = self.told["model"]
        rows = min(context, model["top_k"]) * model["attention_bytes_per_row"]
        return queries * (rows + heads * model["attention_bytes_per_head"])

    def indexer_flops(self, queries: float, context: float) -> float:
        """Scores of one leader's indexer."""
        return queries * context * self.told["model"]["indexer_flops_per_token"]

    def attend_s(self, queries: float, context: float, kernel: str = "attention") -> float:
        """Sparse attention and indexers of all layers, on one GPU with all heads. kernel: whose share of the peak."""
        gpu, share, model = self.told["gpu"], self.told["efficiency"], self.told["model"]
        heads = model["heads"]
        compute = self.attention_flops(queries, context, heads) / (gpu["bf16_flops"] * share[kernel])
        memory = self.attention_bytes(queries, context, heads) / (gpu["hbm_bytes_per_s"] * share["hbm"])
        scores = self.indexer_flops(queries, context) / (gpu["fp8_flops"] * share["indexer"])
        return model["layers"] * max(compute, memory) + model["leaders"] * scores

    def dense_s(self, tokens: float) -> float:
        """Products with the weights that every GPU has."""
        weights = self.told["model"]["dense_parameters"]
        return self._matrix_s(2 * tokens * weights, weights)

    def experts_s(self, tokens: float) -> float:
        """Routed experts of a GPU for `tokens` tokens of the whole node, and the way there and back."""
        model = self.told["model"]
        per_gpu = model["experts"] / self.gpus * model["expert_parameters"] * model["moe_layers"]
        touched = 1 - (1 - model["experts_per_token"] / model["experts"]) ** tokens
        flops = 2 * tokens * model["experts_per_token"] * model["expert_parameters"] * model["moe_layers"] / self.gpus
        return self._matrix_s(flops, per_gpu * touched)

    def exchange_s(self, most_tokens: float) -> float:
        """All-to-all of the GPU with the most tokens: one byte a value there, two back."""
        model = self.told["model"]
        away = model["experts_per_token"] * (self.gpus - 1) / self.gpus
        return most_tokens * away * model["hidden"] * 3 * model["moe_layers"] / self.told["link"]["nvlink_bytes_per_s"]

    def gather_s(self, context: float) -> float:
        """All-gather of each layer's shards under DCP: rows of `context` tokens, all but a GPU's own."""
        model = self.told["model"]
        row = model["layers"] * model["latent_bytes_per_token"] + model["leaders"] * model["indexer_bytes_per_token"]
        return context * row * (self.gpus - 1) / self.gpus / self.told["link"]["nvlink_bytes_per_s"]

    def _matrix_s(self, flops: float, weight_bytes: float) -> float:
        gpu, share = self.told["gpu"], self.told["efficiency"]
        compute = flops / (gpu["fp8_flops"] * share["matrix"])
        return max(compute, weight_bytes / (gpu["hbm_bytes_per_s"] * share["hbm"]))

    def _fixed_s(self, launch_s: float) -> float:
        over, layers = self.told["overhead"], self.told["model"]["layers"]
        return layers * (over["kernels_per_layer"] * launch_s + over["collectives_per_layer"] * over["collective_s"])

    # ------------------------------------------------------------------------------------- steps, seconds

    def dp_prefill_s(self, batches: Sequence[Sequence[Chunk]]) -> float:
        """One step of DP ranks, each with prompts of its own. Experts are shared, so all wait for the slowest."""
        tokens = [sum(chunk.tokens for chunk in batch) for batch in batches]
        own = max(self.dense_s(n) + self._attend_all(batch, 1) for n, batch in zip(tokens, batches, strict=True))
        parts = own + self.experts_s(sum(tokens)) + self.exchange_s(max(tokens))
        return (parts + self._fixed_s(self.told["overhead"]["launch_s"])) / self.told["efficiency"]["prefill_engine"]

    def pcp_prefill_s(self, batch: Sequence[Chunk], sharded: bool) -> float:
        """One step whose tokens are dealt out over the GPUs. sharded: under DCP; shards are gathered layer by layer."""
        tokens = sum(chunk.tokens for chunk in batch)
        parts = self.dense_s(tokens / self.gpus) + self._attend_all(batch, self.gpus)
        parts += self.experts_s(tokens) + self.exchange_s(tokens / self.gpus)
        whole = (parts + self._fixed_s(self.told["overhead"]["launch_s"])) / self.told["efficiency"]["prefill_engine"]
        gather = sum(self.gather_s(chunk.before + chunk.tokens) for chunk in batch) if sharded else 0.0
        return max(whole, gather) if self.overlap else whole + gather

    def _attend_all(self, batch: Sequence[Chunk], share: int) -> float:
        return sum(self.attend_s(chunk.tokens / share, chunk.before + chunk.tokens / 2) for chunk in batch)

    def decode_s(self, ranks: Sequence[Sequence[Running]]) -> float:
        """One step of all decode ranks: drafts verified, experts shared, all wait for the slowest."""
        queries = 1 + self.told["engine"]["draft_tokens"]
        tokens = [queries * len(rank) for rank in ranks]
        own = max(self._decode_rank_s(rank, queries) for rank in ranks)
        parts = own + self.experts_s(sum(tokens)) + self.exchange_s(max(tokens))
        parts += self._fixed_s(self.told["overhead"]["graph_kernel_s"])
        return parts / self.told["efficiency"]["decode_engine"]

    def _decode_rank_s(self, rank: Sequence[Running], queries: float) -> float:
        gpu, share, model = self.told["gpu"], self.told["efficiency"], self.told["model"]
        total = self.dense_s(queries * len(rank))
        for request in rank:
            read = request.tokens * model["indexer_bytes_per_token"] * model["leaders"]
            attend = self.attend_s(queries, request.tokens, "attention_decode")
            total += max(attend, read / (gpu["hbm_bytes_per_s"] * share["hbm"]))
        return total + self.swap_in_s(rank)

    def swap_in_s(self, rank: Sequence[Running]) -> float:
        """Rows that a step of a HiSparse rank fetches from the host, all layers."""
        sparse, model = self.told["hisparse"], self.told["model"]
        rows = sparse["missing_rows"] * sum(request.on_host for request in rank)
        if not rows:
            return 0.0
        size = rows * model["layers"] * model["latent_bytes_per_token"]
        return model["leaders"] * sparse["launch_s"] + size / sparse["bytes_per_s"]


def committed_costs() -> Costs:
    """The model with the committed constants."""
    return Costs(constants())
