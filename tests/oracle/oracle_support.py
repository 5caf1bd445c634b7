"""transformers' GLM MoE DSA with the weights of the tiny GLM."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from kvmanager.clients.glm.config import TINY, GlmConfig
from kvmanager.clients.glm.weights import Weights

LEADERS = TINY.format.leaders[:-1]
"""Of the main layers."""
PROMPT_TOKENS = 160


def oracle_config(config: GlmConfig) -> GlmMoeDsaConfig:
    leaders = config.format.leaders
    return GlmMoeDsaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.dense_intermediate,
        moe_intermediate_size=config.moe_intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        n_shared_experts=config.shared_experts,
        n_routed_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        routed_scaling_factor=config.routed_scaling,
        kv_lora_rank=config.kv_lora,
        q_lora_rank=config.q_lora,
        qk_rope_head_dim=config.rope_dim,
        v_head_dim=config.value_dim,
        qk_nope_head_dim=config.nope_dim,
        rms_norm_eps=config.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        first_k_dense_replace=config.dense_layers,
        index_topk=config.index_topk,
        index_head_dim=config.index_dim,
        index_n_heads=config.index_heads,
        indexer_types=["full" if layer in leaders else "shared" for layer in range(config.layers)],
        index_topk_freq=4,
        index_skip_topk_offset=3,
        attn_implementation="eager",
    )


def make_oracle(config: GlmConfig, weights: Weights) -> GlmMoeDsaForCausalLM:
    oracle = GlmMoeDsaForCausalLM(oracle_config(config)).eval()
    state = {name: torch.from_numpy(array) for name, array in weights.items()}
    loaded = oracle.load_state_dict(state, strict=False)
    assert not loaded.missing_keys
    assert all(name.startswith(f"model.layers.{config.mtp_layer}.") for name in loaded.unexpected_keys)
    for layer in oracle.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = config.latent_eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = config.latent_eps
    return oracle


def halves_to_pairs(values: Tensor) -> Tensor:
    """The oracle keeps rotated dims as (first of each pair | second of each pair)."""
    return values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def prompt_of(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, TINY.vocab, tokens).tolist()
