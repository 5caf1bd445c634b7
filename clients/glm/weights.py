"""Reproducible weights by parameter name.

Every parameter has a Philox stream of its own, keyed by sha256("seed:name"), so that a reader in
any language can make the same numbers, in any order. Names are those of the published checkpoints,
except that the experts of a layer are packed into one array (gate rows first, then up rows).

Two profiles: in `calm` each block adds little to the residual stream, so that rounding a KV row to
fp8 stays a small change; in `sharp` blocks add as much as the stream holds, which makes the smallest
mistake visible in the logits (never use it with fp8 rows).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvmanager.clients.glm.config import GlmConfig

Weights = dict[str, npt.NDArray[np.float32]]


class Profile(StrEnum):
    """How strongly the blocks write into the residual stream."""

    CALM = "calm"
    SHARP = "sharp"


BRANCH_GAIN = {Profile.CALM: 0.15, Profile.SHARP: 1.0}
HEAD_GAIN = 4.0
"""Standard deviation of the logits: wide enough that greedy choices have a margin."""
MTP_HIDDEN_GAIN = 0.1
"""Share of the previous hidden state in the MTP layer's input, next to the embedding at gain 1."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Name and shape of one parameter; values are `center + spread * normal`."""

    name: str
    shape: tuple[int, ...]
    center: float
    spread: float


def generator(seed: int, name: str) -> np.random.Generator:
    """The stream of random numbers that belongs to one parameter."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def make_weights(config: GlmConfig, seed: int, profile: Profile) -> Weights:
    """All parameters as float32 arrays, MTP layer included."""
    weights: Weights = {}
    for p in parameters(config, BRANCH_GAIN[profile]):
        normal = generator(seed, p.name).standard_normal(p.shape, dtype=np.float32)
        weights[p.name] = np.float32(p.center) + np.float32(p.spread) * normal
    return _with_predictive_mtp(config, weights)


def parameters(config: GlmConfig, branch_gain: float) -> Iterator[Parameter]:
    """Every parameter of the model."""
    hidden = config.hidden
    yield Parameter("model.embed_tokens.weight", (config.vocab, hidden), 0.0, 1.0)
    yield _norm("model.norm.weight", hidden)
    yield _linear("lm_head.weight", config.vocab, hidden, HEAD_GAIN)
    for layer in range(config.layers + 1):
        yield from _layer_parameters(config, layer, branch_gain)
    base = f"model.layers.{config.mtp_layer}."
    yield _norm(base + "enorm.weight", hidden)
    yield _norm(base + "hnorm.weight", hidden)
    yield _linear(base + "eh_proj.weight", hidden, 2 * hidden, MTP_HIDDEN_GAIN)
    yield _norm(base + "shared_head.norm.weight", hidden)


def _norm(name: str, width: int) -> Parameter:
    return Parameter(name, (width,), 1.0, 0.2)


def _linear(name: str, out_width: int, in_width: int, gain: float = 1.0) -> Parameter:
    return Parameter(name, (out_width, in_width), 0.0, gain / in_width**0.5)


def _layer_parameters(config: GlmConfig, layer: int, branch_gain: float) -> Iterator[Parameter]:
    base = f"model.layers.{layer}."
    yield _norm(base + "input_layernorm.weight", config.hidden)
    yield _norm(base + "post_attention_layernorm.weight", config.hidden)
    yield from _attention_parameters(config, base + "self_attn.", branch_gain)
    if layer in config.format.leaders:
        yield from _indexer_parameters(config, base + "self_attn.indexer.")
    if config.is_dense(layer):
        yield from _mlp_parameters(base + "mlp.", config.hidden, config.dense_intermediate, branch_gain)
    else:
        yield from _moe_parameters(config, base + "mlp.", branch_gain)


def _attention_parameters(config: GlmConfig, base: str, branch_gain: float) -> Iterator[Parameter]:
    yield _linear(base + "q_a_proj.weight", config.q_lora, config.hidden)
    yield _norm(base + "q_a_layernorm.weight", config.q_lora)
    yield _linear(base + "q_b_proj.weight", config.heads * config.query_dim, config.q_lora, 1.5)
    yield _linear(base + "kv_a_proj_with_mqa.weight", config.kv_lora + config.rope_dim, config.hidden)
    yield _norm(base + "kv_a_layernorm.weight", config.kv_lora)
    yield _linear(base + "kv_b_proj.weight", config.heads * (config.nope_dim + config.value_dim), config.kv_lora)
    yield _linear(base + "o_proj.weight", config.hidden, config.heads * config.value_dim, branch_gain)


def _indexer_parameters(config: GlmConfig, base: str) -> Iterator[Parameter]:
    yield _linear(base + "wq_b.weight", config.index_heads * config.index_dim, config.q_lora)
    yield _linear(base + "wk.weight", config.index_dim, config.hidden)
    yield _norm(base + "k_norm.weight", config.index_dim)
    yield Parameter(base + "k_norm.bias", (config.index_dim,), 0.0, 0.2)
    yield _linear(base + "weights_proj.weight", config.index_heads, config.hidden)


def _mlp_parameters(base: str, hidden: int, width: int, branch_gain: float) -> Iterator[Parameter]:
    yield _linear(base + "gate_proj.weight", width, hidden)
    yield _linear(base + "up_proj.weight", width, hidden)
    yield _linear(base + "down_proj.weight", hidden, width, branch_gain)


def _moe_parameters(config: GlmConfig, base: str, branch_gain: float) -> Iterator[Parameter]:
    hidden, width, experts = config.hidden, config.moe_intermediate, config.experts
    yield _linear(base + "gate.weight", experts, hidden)
    yield Parameter(base + "gate.e_score_correction_bias", (experts,), 0.0, 0.1)
    yield Parameter(base + "experts.gate_up_proj", (experts, 2 * width, hidden), 0.0, hidden**-0.5)
    yield Parameter(base + "experts.down_proj", (experts, hidden, width), 0.0, branch_gain / width**0.5)
    yield from _mlp_parameters(base + "shared_experts.", hidden, width * config.shared_experts, branch_gain)


def _with_predictive_mtp(config: GlmConfig, weights: Weights) -> Weights:
    """Makes the MTP layer a useful guesser.

    A trained MTP layer predicts what the model says; a random one never does, and drafts would always be
    rejected. So its input keeps the next token's embedding as it is, and its final norm resembles the model's:
    in the calm profile, where the last token decides much, a good part of the drafts is then accepted.
    """
    base = f"model.layers.{config.mtp_layer}."
    weights[base + "eh_proj.weight"][:, : config.hidden] = np.eye(config.hidden, dtype=np.float32)
    weights[base + "enorm.weight"][:] = 1.0
    weights[base + "shared_head.norm.weight"][:] = weights["model.norm.weight"]
    return weights
