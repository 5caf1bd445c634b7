"""The full copy that shards make is the context: read by table and components alone, as kernels do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.geometry import ShardGeometry
from kvmanager.layout import GLM53_TINY, Component, native_layout
from tests.sharded_layer import INDEX_SCALES, INDEX_VALUES, LATENTS, POISON, ROWS, ShardedLayer


@pytest.mark.parametrize("interleave", [1, 16, 64])
@pytest.mark.parametrize("tokens", [1, 65, 700, 1_024])
def test_every_row_lies_where_the_table_says(tokens: int, interleave: int) -> None:
    geometry = ShardGeometry(8, ROWS, interleave)
    leader = GLM53_TINY.leaders[1]
    random = torch.Generator().manual_seed(tokens)
    layer = ShardedLayer(native_layout(GLM53_TINY, ROWS), leader, geometry, tokens, random, "cpu")
    latents, index = layer.gather()
    order, _pages = layer.table()[0]
    assert order == geometry.order
    span, offset = np.divmod(np.arange(tokens), geometry.span_tokens)
    page, slot = order.place(offset)
    at = np.stack([pages for _, pages in layer.table()])[span, page]

    def read(copy: torch.Tensor, c: Component) -> torch.Tensor:
        starts = torch.from_numpy(c.offset + at * c.page_stride + slot * c.slot_stride)
        return copy[starts[:, None] + torch.arange(c.row_bytes)]

    codec = Fp8Codec()
    rows = torch.cat(codec.decode_latent(read(latents, LATENTS), torch.float64), dim=-1)
    assert torch.equal(rows, layer.latents)
    scales = read(index, INDEX_SCALES).contiguous().view(torch.float32).view(-1)
    assert torch.equal(codec.decode_index(read(index, INDEX_VALUES), scales, torch.float64), layer.keys)
    written = tokens * (LATENTS.row_bytes + INDEX_VALUES.row_bytes + INDEX_SCALES.row_bytes)
    rest = latents.numel() + index.numel() - written
    assert int((latents == POISON).sum() + (index == POISON).sum()) >= rest, "rows of nobody are poison"
