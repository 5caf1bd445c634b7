"""Prefill context parallel: who computes which query tokens of a step.

Causal attention costs more for later tokens, so each rank takes one early and one late chunk. Who computes
a token and who stores it are unrelated: storage follows the DCP placement alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

WRITER: Final = 0
"""The rank whose part holds the step's last token, and that writes a step which all compute alike."""


@dataclass(frozen=True)
class PcpChunks:
    """Query offsets int64[T_r] of each rank, ascending.

    `replicated`: the batch is too small to cut, every rank computes all of it and rank 0 writes.
    """

    queries: tuple[Tensor, ...]
    replicated: bool

    @property
    def distinct(self) -> tuple[Tensor, ...]:
        """The parts that differ: all ranks', or the one that all compute alike."""
        return self.queries[:1] if self.replicated else self.queries


def pcp_chunks(queries: int, ranks: int) -> PcpChunks:
    """Cuts `queries` tokens of a step into 2 * ranks chunks; rank g takes chunks g and 2 * ranks - 1 - g."""
    assert queries > 0
    last = 2 * ranks - 1
    size = -(-queries // (2 * ranks))
    everything = torch.arange(queries)
    if last * size >= queries:
        return PcpChunks((everything,) * ranks, replicated=True)
    chunks = everything.split_with_sizes([size] * last + [queries - last * size])
    return PcpChunks(tuple(torch.cat((chunks[g], chunks[last - g])) for g in range(ranks)), replicated=False)
