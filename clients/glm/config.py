"""Shape of a GLM-5.3-like model: enough to compute it and to name its KV format."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kvmanager.layout import KVFormat, glm_share_groups


@dataclass(frozen=True)
class GlmConfig:
    """Dimensions and constants. The MTP layer is not counted in `layers`; its layer index is `layers`.

    `rms_eps` is the epsilon of every norm over the hidden state; `latent_eps` that of the two norms
    inside MLA (query and KV latents). Engines disagree on the latter (1e-6, or the same as `rms_eps`)
    and rows differ accordingly, so both are always stated.
    """

    name: str
    hidden: int
    layers: int
    dense_layers: int
    dense_intermediate: int
    moe_intermediate: int
    experts: int
    experts_per_token: int
    shared_experts: int
    routed_scaling: float
    heads: int
    q_lora: int
    kv_lora: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    vocab: int
    rope_theta: float
    rms_eps: float
    latent_eps: float
    index_eps: float

    def __post_init__(self) -> None:
        assert 0 < self.dense_layers <= self.layers
        assert self.experts_per_token <= self.experts
        assert self.rope_dim % 2 == 0
        assert self.rope_dim <= self.index_dim

    @cached_property
    def format(self) -> KVFormat:
        """What one token's KV consists of; the MTP layer is the last share group."""
        return KVFormat(f"{self.name}-fp8_ds_mla", glm_share_groups(self.layers))

    @property
    def mtp_layer(self) -> int:
        """Index of the MTP layer, for weights and for KV rows."""
        return self.layers

    @property
    def query_dim(self) -> int:
        """Width of one attention head's query: rope dims last."""
        return self.nope_dim + self.rope_dim

    @cached_property
    def main_groups(self) -> tuple[tuple[int, ...], ...]:
        """Share groups of the main layers, leader first."""
        return self.format.share_groups[:-1]

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's FFN is one MLP; the MTP layer is always a mixture of experts."""
        return layer < self.dense_layers


TINY: Final = GlmConfig(
    name="glm-5.3-tiny",
    hidden=128,
    layers=6,
    dense_layers=2,
    dense_intermediate=256,
    moe_intermediate=64,
    experts=8,
    experts_per_token=2,
    shared_experts=1,
    routed_scaling=2.5,
    heads=4,
    q_lora=96,
    kv_lora=512,
    rope_dim=64,
    nope_dim=64,
    value_dim=64,
    index_heads=32,
    index_dim=128,
    index_topk=24,
    vocab=1024,
    rope_theta=8e6,
    rms_eps=1e-5,
    latent_eps=1e-6,
    index_eps=1e-6,
)
"""True row sizes and the true number of index heads, everything else small.

Fewer index heads would make exact ties: a key whose head products are all negative scores 0.
"""
