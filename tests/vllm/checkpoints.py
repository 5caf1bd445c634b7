"""Tiny checkpoints whose output depends on all of the context, so that wrong KV changes the tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, LlamaConfig

VOCABULARY = 2048


def llama(seed: int) -> LlamaConfig:
    del seed
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


def mla(seed: int) -> DeepseekV2Config:
    """Dense layers only; with YaRN, since plain rotary embeddings of MLA are wrong in vLLM on a CPU."""
    del seed
    return DeepseekV2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=64, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        first_k_dense_replace=3, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1, rope_scaling={
            "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
            "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707, "rope_theta": 10000.0,
        },
    )  # fmt: skip


def write(kind: str, folder: Path, seed: int) -> None:
    """A checkpoint with weights large enough that attention is sharp."""
    torch.manual_seed(seed)
    config = {"llama": llama, "mla": mla}[kind](seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15 if "embed" not in name and "lm_head" not in name else 1.0)
    model.save_pretrained(folder)


def reference(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of Hugging Face's own model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        tokens, cache, made = torch.tensor([prompt]), None, []
        for _ in range(count):
            with torch.no_grad():
                output = model(tokens, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            made.append(int(output.logits[0, -1].argmax()))
            tokens = torch.tensor([[made[-1]]])
        answers.append(made)
    return answers


if __name__ == "__main__":
    if sys.argv[1] == "reference":
        print(json.dumps(reference(Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))))
    else:
        write(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
