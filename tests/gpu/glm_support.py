"""What the tests of the GLM kernels share: poisoned regions with rows in them, and attention in float64.

With TRITON_INTERPRET=1 the Triton kernels run on a CPU, on smaller regions; CUDA kernels need a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.gpu.pages import DevicePages, device_pages
from kvmanager.clients.glm.gpu.sparse_mla import INTERPRETED
from kvmanager.geometry import TokenOrder
from kvmanager.layout import Component, KVLayout, Section

if INTERPRETED:
    import interpreted

    interpreted.mend()

DEVICE = "cpu" if INTERPRETED else "cuda"
SEED = 20261130
POISON = 0xFF
"""NaN as e4m3, as bfloat16 and as float32."""
FAR_PAGE = 0 if INTERPRETED else 1_240
"""The first page that tests use: in the native layout it lies beyond 4 GiB."""
SCALE = 256**-0.5
LEADER, LAYERS = 6, (6, 8)
"""A leader of a group of four, and layers of its group."""


def generator() -> torch.Generator:
    print(f"seed {SEED}")
    return torch.Generator().manual_seed(SEED)


def poisoned(layout_bytes: int) -> Tensor:
    """A region of this many bytes, and of the pages before the first that is used."""
    return torch.full((layout_bytes,), POISON, dtype=torch.uint8, device=DEVICE)


def region_of(layout: KVLayout, pages: int) -> Tensor:
    """Room for `pages` pages from FAR_PAGE on."""
    return poisoned((FAR_PAGE + pages) * layout.page_bytes)


def rows_of(region: Tensor, component: Component) -> Tensor:
    """`[page, slot, byte]` of a component."""
    last = 63 * component.slot_stride + component.row_bytes
    pages = (region.numel() - component.offset - last) // component.page_stride + 1
    return region.as_strided(
        (pages, 64, component.row_bytes), (component.page_stride, component.slot_stride, 1), component.offset
    )


class Request:
    """Tokens of one request in one region: spans of one order, on pages in random order."""

    def __init__(self, tokens: int, order: TokenOrder, free: list[int]) -> None:
        self.tokens, self.order = tokens, order
        count = -(-tokens // (64 * order.segments)) * order.segments
        self.pages = np.array([free.pop() for _ in range(count)], dtype=np.int64)

    def spans(self) -> list[tuple[TokenOrder, np.ndarray]]:
        return [(self.order, pages) for pages in self.pages.reshape(-1, self.order.segments)]

    def places(self) -> tuple[Tensor, Tensor]:
        """(page, slot) of every position."""
        span, offset = np.divmod(np.arange(self.tokens), 64 * self.order.segments)
        page, slot = self.order.place(offset)
        pages = self.pages[span * self.order.segments + page] if self.tokens else np.zeros(0, np.int64)
        return torch.from_numpy(pages).to(DEVICE), torch.from_numpy(slot).to(DEVICE)


def shuffled_pages(count: int, random: torch.Generator) -> list[int]:
    return (FAR_PAGE + torch.randperm(count, generator=random)).tolist()


def table_of(requests: list[Request]) -> DevicePages:
    return device_pages([request.spans() for request in requests], DEVICE)


def random_rows(tokens: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Encoded latent rows uint8[T, 656] of very different sizes, and their values float64[T, 576]."""
    sizes = torch.randint(-3, 2, (tokens, 1), generator=random)
    latent = torch.ldexp(torch.randn((tokens, 512), generator=random), sizes)
    rows = Fp8Codec().encode_latent(latent, torch.randn((tokens, 64), generator=random))
    values = torch.cat(Fp8Codec().decode_latent(rows, torch.float64), dim=-1)
    return rows.to(DEVICE), values.to(DEVICE)


def attention(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one query [64, 576] over keys [n, 576], in float64: output, log-sum-exp, and the mean size of values."""
    if len(keys) == 0:
        zeros = torch.zeros((64, 512), dtype=torch.float64, device=q.device)
        return zeros, torch.full((64,), float("-inf"), dtype=torch.float64, device=q.device), zeros
    scores = q.double() @ keys.T * SCALE
    p = scores.softmax(dim=-1)
    return p @ keys[:, :512], scores.logsumexp(dim=-1), p @ keys[:, :512].abs()


def check_attention(out: Tensor, lse: Tensor, expected: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Weights are rounded to bfloat16 (2^-9 of each) before values are added up in float32; twice that is allowed."""
    for number, (want, want_lse, size) in enumerate(expected):
        error = (out[number].double() - want).abs()
        worst = float((error - 2**-8 * size).max())
        print(f"query {number}: worst error {float(error.max()):.3e}, beyond its bound by {worst:.3e}")
        assert not out[number].isnan().any(), f"query {number}: {int(out[number].isnan().sum())} NaN"
        assert worst <= 1e-6, f"query {number}: head, dim {divmod(int((error - 2**-8 * size).argmax()), 512)}"
        empty = want_lse == float("-inf")
        assert torch.equal(lse[number] == float("-inf"), empty), f"query {number}: {lse[number]}"
        drift = (lse[number].double() - want_lse)[~empty].abs()
        assert (drift <= 2e-4 * (1 + want_lse[~empty].abs())).all(), f"query {number}: lse off by {drift.max()}"


def latent(layout: KVLayout, layer: int) -> Component:
    return layout.by_key[Section.LATENT, layer]


def poisoned_outputs(queries: int, splits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(parts, their lse, merged output, its lse), full of NaN."""
    nan = float("nan")
    return (
        torch.full((queries, splits, 64, 512), nan, device=DEVICE),
        torch.full((queries, splits, 64), nan, device=DEVICE),
        torch.full((queries, 64, 512), nan, device=DEVICE),
        torch.full((queries, 64), nan, device=DEVICE),
    )
