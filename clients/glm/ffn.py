"""Feed-forward blocks: one MLP, or a mixture of experts with shared ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvmanager.clients.glm.config import GlmConfig


@dataclass(frozen=True, slots=True)
class Mlp:
    """`down(silu(gate x) * up x)`."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return (silu(x @ self.gate.T) * (x @ self.up.T)) @ self.down.T


@dataclass(frozen=True, slots=True)
class Moe:
    """Sigmoid-routed experts plus a shared MLP.

    `router` [E, hidden]; `bias` [E] counts in the choice of experts only; `gate_up` [E, 2I, hidden] with the
    gate's rows first; `down` [E, hidden, I].
    """

    config: GlmConfig
    router: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor
    shared: Mlp

    def expert_weights(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, E]: what each expert's output counts, 0 for those not chosen."""
        scores = torch.sigmoid(x @ self.router.T)
        chosen = (scores + self.bias).topk(self.config.experts_per_token, dim=-1).indices
        picked = scores.gather(-1, chosen)
        picked = self.config.routed_scaling * picked / (picked.sum(dim=-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter_(-1, chosen, picked)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        # At this size, running all experts in two batched products costs less than sorting tokens by expert.
        weights = self.expert_weights(x)
        gate, up = torch.matmul(x, self.gate_up.transpose(-1, -2)).chunk(2, dim=-1)
        outputs = torch.matmul(silu(gate) * up, self.down.transpose(-1, -2))
        return torch.einsum("te,eth->th", weights, outputs) + self.shared(x)
