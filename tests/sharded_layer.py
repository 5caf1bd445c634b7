"""One layer of a context in the pages of N ranks, brought together shard by shard, on one device and without kernels.

As PCP x DCP ranks gather it into their workspace: whole pages of latent rows and of indexer rows, the shards one after
the other. Every page that nobody wrote is full of poison, and so is the workspace before.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.geometry import Int64Array, ShardGeometry, TokenOrder
from kvmanager.layout import INDEX_VALUE_BYTES, LATENT_ROW_BYTES, Component, KVLayout, Section

POISON = 0xFF
"""NaN as e4m3, as bfloat16 and as float32."""
ROWS = 64
INDEX_PAGE_BYTES = ROWS * (INDEX_VALUE_BYTES + 4)
LATENTS = Component(Section.LATENT, 0, 0, ROWS * LATENT_ROW_BYTES, LATENT_ROW_BYTES, LATENT_ROW_BYTES)
INDEX_VALUES = Component(Section.INDEX_VALUE, 0, 0, INDEX_PAGE_BYTES, INDEX_VALUE_BYTES, INDEX_VALUE_BYTES)
INDEX_SCALES = Component(Section.INDEX_SCALE, 0, ROWS * INDEX_VALUE_BYTES, INDEX_PAGE_BYTES, 4, 4)
"""Where they lie in the copy, whose pages are the shards' in turn."""


class ShardedLayer:
    """`latents` float64[T, 576], `keys` float64[T, 128]: what the rows say; `spans`: of a shard, pages in any order."""

    def __init__(
        self, layout: KVLayout, leader: int, geometry: ShardGeometry, tokens: int, random: torch.Generator, device: str
    ) -> None:
        assert geometry.page_rows == ROWS
        self.geometry, self.tokens = geometry, tokens
        self.spans = geometry.spans(tokens)
        codec, parts = Fp8Codec(), layout.by_key
        sizes = torch.randint(-3, 2, (tokens, 1), generator=random)
        latents, rope = (torch.randn((tokens, width), generator=random) for width in (512, 64))
        rows = codec.encode_latent(torch.ldexp(latents, sizes), rope)
        self.latents = torch.cat(codec.decode_latent(rows, torch.float64), dim=-1).to(device)
        codes, scales = codec.encode_index(torch.ldexp(torch.randn((tokens, 128), generator=random), sizes))
        self.keys = codec.decode_index(codes, scales, torch.float64).to(device)
        pages = torch.randperm(self.spans + 3, generator=random)[: self.spans]
        span, rank_of, slot = geometry.place(np.arange(tokens))
        self._shards: list[tuple[Tensor, Tensor]] = []
        for rank in range(geometry.ranks):
            region = torch.full(((self.spans + 3) * layout.page_bytes,), POISON, dtype=torch.uint8, device=device)
            mine = torch.from_numpy(np.flatnonzero(rank_of == rank))
            at = pages[torch.from_numpy(span)[mine]].to(device), torch.from_numpy(slot)[mine].to(device)
            written = (
                (Section.LATENT, rows), (Section.INDEX_VALUE, codes),
                (Section.INDEX_SCALE, scales.contiguous().view(torch.uint8).view(-1, 4)),
            )  # fmt: skip
            for section, data in written:
                _rows_of(region, parts[section, leader], self.spans + 3)[at] = data[mine].to(device)
            index = parts[Section.INDEX_VALUE, leader]
            shape = (self.spans + 3, INDEX_PAGE_BYTES)
            whole = region.as_strided(shape, (index.page_stride, 1), index.offset)
            held = pages.to(device)
            self._shards.append((_rows_of(region, parts[Section.LATENT, leader], self.spans + 3)[held], whole[held]))

    def gather(self) -> tuple[Tensor, Tensor]:
        """The full copy: latent pages uint8[N * spans * 64 * 656], indexer pages uint8[N * spans * 64 * 132]."""
        ranks, device = self.geometry.ranks, self.latents.device
        latents = torch.full((ranks, self.spans, ROWS, LATENT_ROW_BYTES), POISON, dtype=torch.uint8, device=device)
        index = torch.full((ranks, self.spans, INDEX_PAGE_BYTES), POISON, dtype=torch.uint8, device=device)
        for rank, (rows, keys) in enumerate(self._shards):
            latents[rank].copy_(rows)
            index[rank].copy_(keys)
        return latents.view(-1), index.view(-1)

    def table(self) -> list[tuple[TokenOrder, Int64Array]]:
        """Pages of the copy in which each span lies, one of each shard."""
        pages = np.arange(self.geometry.ranks) * self.spans
        return [(self.geometry.order, pages + span) for span in range(self.spans)]


def _rows_of(region: Tensor, c: Component, pages: int) -> Tensor:
    """`[page, slot, byte]` of a component."""
    return region.as_strided((pages, ROWS, c.row_bytes), (c.page_stride, c.slot_stride, 1), c.offset)
