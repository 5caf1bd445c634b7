"""Mistakes that are easy to make in what ranks compute, each planted by replacing one function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvmanager.clients.glm import attention, codec, pcp_rank, rank_models
from kvmanager.clients.glm.attention import PartialAttention, SparseAttention
from kvmanager.clients.glm.decode import VerifiedStep
from kvmanager.clients.glm.ffn import Moe
from kvmanager.clients.glm.hisparse import HiSparseStore
from kvmanager.clients.glm.model import Glm
from kvmanager.clients.glm.norm import Rope, rms_norm
from kvmanager.clients.glm.shard_store import ShardStore
from kvmanager.clients.glm.workspace import GatheredStore
from kvmanager.geometry import ShardGeometry
from tests import glm_ranks

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True)
class Bug:
    """`found_by`: the comparison that must fail."""

    name: str
    found_by: str
    plant: Plant


BUGS: list[Bug] = []


def bug(name: str, found_by: str) -> Callable[[Plant], Plant]:
    def keep(plant: Plant) -> Plant:
        BUGS.append(Bug(name, found_by, plant))
        return plant

    return keep


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> Plant:
    """Plants `change(the function as it was, *its arguments)`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        was = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **more: change(was, *args, **more))

    return plant


def turned_in_halves(_: Any, self: Rope, x: Tensor, positions: Tensor) -> Tensor:
    angles = (positions.float().unsqueeze(-1) * self._inverse).double()
    shape = (len(positions), *(1,) * (x.dim() - 2), -1)
    cos, sin = angles.cos().to(self._dtype).view(shape), angles.sin().to(self._dtype).view(shape)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


bug("rotated dims are paired in halves", "oracle rows")(wrap(Rope, "rotate", turned_in_halves))
bug("rotation goes backwards", "oracle rows")(wrap(Rope, "rotate", lambda was, self, x, at: was(self, x, -at)))
bug("positions count from one", "oracle rows")(wrap(Rope, "rotate", lambda was, self, x, at: was(self, x, at + 1)))


def with_config(**changes: str | float) -> Plant:
    """The attention computes with another config; a name stands for that field's value."""

    def change(was: Any, self: SparseAttention, config: Any, *more: Any) -> None:
        values = {key: getattr(config, v) if isinstance(v, str) else v for key, v in changes.items()}
        was(self, dataclasses.replace(config, **values), *more)

    return wrap(SparseAttention, "__init__", change)


bug("latents are normalised with the hidden state's eps", "oracle logits, wide eps")(with_config(latent_eps="rms_eps"))
bug("hidden states are normalised with the latents' eps", "oracle logits, wide eps")(with_config(rms_eps="latent_eps"))
bug("index keys are normalised with a large eps", "oracle rows")(with_config(index_eps=1e-2))
bug("rope theta of another model", "oracle rows")(with_config(rope_theta=1e4))


def scaled_by_576(was: Any, self: SparseAttention, *args: Any) -> tuple[Tensor, Tensor]:
    config = self._config
    factor = (config.query_dim / (config.kv_lora + config.rope_dim)) ** 0.5
    return tuple(part * factor for part in was(self, *args))  # type: ignore[return-value]


bug("scores are scaled by the latents' width", "oracle attention")(wrap(SparseAttention, "_queries", scaled_by_576))
bug("the key after the query is seen", "oracle selection")(
    wrap(attention, "top_k", lambda was, scores, at, k: was(scores, at + 1, k))
)
bug("a query does not see its own key", "oracle selection")(
    wrap(attention, "top_k", lambda was, scores, at, k: was(scores, (at - 1).clamp(min=0), k))
)
bug("index products keep their sign", "oracle selection")(wrap(Tensor, "clamp_", lambda _, products, **__: products))


def last_of_equals(was: Any, scores: Tensor, allowed: Tensor, k: int) -> Tensor:
    return was(scores.flip(1), allowed.flip(1), k).flip(1)


bug("ties go to the highest position", "top-k")(wrap(attention, "best", last_of_equals))
bug("ties go to the highest position among shards", "ties")(wrap(rank_models, "best", last_of_equals))
bug("offers are taken in the order of ranks", "ties")(wrap(rank_models, "_ascending", lambda _, offered: offered))


def own_share(was: Any, scores: Tensor, own: Tensor, positions: Tensor, k: int) -> Tensor:
    offered = was(scores, own, positions, k // 4)
    return torch.cat([offered, *[torch.tensor([-1.0, float("-inf")]).expand(len(offered), k - k // 4, 2)]], dim=1)


bug("a shard offers its even share of the top-k", "ties")(wrap(rank_models, "_offer", own_share))


def mean_of_parts(_: Any, parts: Sequence[PartialAttention]) -> Tensor:
    return torch.stack([part.mixed for part in parts]).mean(dim=0)


def without_shift(_: Any, parts: Sequence[PartialAttention]) -> Tensor:
    weights = torch.stack([part.lse for part in parts]).exp()
    mixed = torch.stack([part.mixed for part in parts])
    return torch.einsum("nth,nthc->thc", weights, mixed) / weights.sum(dim=0).unsqueeze(-1)


bug("parts of attention are averaged", "shards")(wrap(rank_models, "merge_partials", mean_of_parts))
bug("parts are merged without taking off the largest", "merge")(wrap(attention, "merge_partials", without_shift))


def empty_counts(was: Any, self: SparseAttention, *args: Any) -> PartialAttention:
    part = was(self, *args)
    return PartialAttention(part.mixed, part.lse.nan_to_num(neginf=0.0))


bug("a shard without rows has a weight", "shards")(wrap(SparseAttention, "attend_partial", empty_counts))


def slot_later(was: Any, self: ShardStore, positions: Tensor) -> tuple[Any, Any]:
    pages, slots = was(self, positions)
    return pages, (slots + 1) % self.geometry.page_rows


def read_slot_later(_: Any, self: ShardStore, section: Any, layer: int, positions: Tensor) -> Tensor:
    pages, slots = slot_later(ShardStore._place, self, positions)
    return self._rows[section, layer].read(pages, slots)


bug("reads are a slot off", "shards")(wrap(ShardStore, "_read", read_slot_later))
bug("reads and writes are a slot off", "placement")(wrap(ShardStore, "_place", slot_later))


def spans_in_order(was: Any, self: ShardStore, pages: Any) -> None:
    was(self, sorted(pages))


bug("page indexes are taken in ascending order", "placement")(wrap(ShardStore, "set_span_pages", spans_in_order))


def copies_swapped(was: Any, self: GatheredStore, layer: int) -> None:
    was(self, layer)
    step = self._running
    step.copy, step.free = step.free, step.copy


bug("the layer before is read in the workspace", "shards")(wrap(GatheredStore, "_enter", copies_swapped))


def stored_only(_: Any, self: GatheredStore, layer: int, positions: Tensor, rows: Tensor) -> None:
    self._shard.write_latent(layer, positions, rows)
    if layer in self._next:
        self._enter(layer)


bug("a step's own rows do not reach the workspace", "shards")(wrap(GatheredStore, "write_latent", stored_only))


def begun_with_interleave_one(was: Any, self: GatheredStore, start: int, end: int, leaders: Any) -> None:
    was(self, start, end, leaders)
    geometry, step = self._shard.geometry, self._running
    spans, ranks, slots = ShardGeometry(geometry.ranks, geometry.page_rows, 1).place(torch.arange(end).numpy())
    step.rows = torch.from_numpy(ranks * step.longest + spans * geometry.page_rows + slots)


bug("another interleave in the workspace than in the pages", "shards")(
    wrap(GatheredStore, "begin", begun_with_interleave_one)
)
bug("rows come in the opposite order of ranks", "whole copies")(
    wrap(pcp_rank, "gather_uneven", lambda was, *args: was(*args)[::-1])
)
bug("each rank keeps the output of its own heads", "heads")(wrap(rank_models, "gather_sum", lambda _, __, own: own))
bug("experts are not scaled", "oracle experts")(wrap(Moe, "expert_weights", lambda was, self, x: was(self, x) / 2.5))


def biased_weights(_: Any, self: Moe, x: Tensor) -> Tensor:
    scores = torch.sigmoid(x @ self.router.T) + self.bias
    chosen = scores.topk(self.config.experts_per_token, dim=-1).indices
    picked = scores.gather(-1, chosen)
    picked = self.config.routed_scaling * picked / picked.sum(dim=-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, chosen, picked)


bug("the router's bias counts in the weights", "oracle experts")(wrap(Moe, "expert_weights", biased_weights))


def first_selection(was: Any, self: Glm, leader: int, hidden: Tensor, positions: Tensor, store: Any) -> Tensor:
    if leader == 0:
        self._first = was(self, leader, hidden, positions, store)  # type: ignore[attr-defined]
    return self._first  # type: ignore[attr-defined, no-any-return]


bug("every group takes the first group's selection", "oracle logits, wide eps")(wrap(Glm, "choose", first_selection))


def mtp_input(self: Glm, next_tokens: Tensor, post_norm: Tensor, swapped: bool) -> Tensor:
    parts = [
        rms_norm(self.embed(next_tokens), self._mtp.embedding_norm, self.config.rms_eps),
        rms_norm(post_norm, self._mtp.hidden_norm, self.config.rms_eps),
    ]
    return torch.cat(parts[::-1] if swapped else parts, dim=-1) @ self._mtp.project.T


bug("the MTP layer sees an embedding at position 0", "oracle drafts")(
    wrap(Glm, "mtp_input", lambda _, self, tokens, hidden, __: mtp_input(self, tokens, hidden, False))
)
bug("the MTP layer's inputs are swapped", "oracle drafts")(
    wrap(Glm, "mtp_input", lambda _, self, tokens, hidden, __: mtp_input(self, tokens, hidden, True))
)
bug("row scales are twice as large", "codec")(
    wrap(codec, "power_of_two_scale", lambda was, values: 2 * was(values))
)
bug("a rank drops the scales of its rows", "oracle fp8 rows")(
    wrap(codec, "power_of_two_scale", lambda was, values: torch.ones_like(was(values)))
)


def one_too_many(was: Any, *args: Any) -> VerifiedStep:
    step = was(*args)
    return VerifiedStep(step.accepted + step.drafts[:1], step.hidden, step.drafts[1:])


bug("a draft is accepted unseen", "shards")(wrap(glm_ranks, "verify_step", one_too_many))
bug("the dense path sees the key after the query", "short prompts")(
    wrap(SparseAttention, "_attend_dense", lambda was, self, w, hidden, at, rows: was(self, w, hidden, at + 1, rows))
)


def swapped_in_later(was: Any, self: HiSparseStore, leader: int, where: Any, missed: Any, rows: Any) -> None:
    slots = (where.slots + 1) % self._page_rows
    was(self, leader, dataclasses.replace(where, slots=slots), missed, rows)


def leader_only(was: Any, self: HiSparseStore, leader: int, *args: Any) -> None:
    groups, self._groups = self._groups, {leader: self._groups[leader][:1]}
    was(self, leader, *args)
    self._groups = groups


bug("swap-in takes the slot after", "hisparse")(wrap(HiSparseStore, "_swap_in", swapped_in_later))
bug("swap-in fills the leader's layer only", "hisparse")(wrap(HiSparseStore, "_swap_in", leader_only))
