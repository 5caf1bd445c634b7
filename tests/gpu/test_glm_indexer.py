"""Index scores against float64: both orders of tokens, partial tails, requests of different lengths."""

import pytest
import torch

pytest.importorskip("triton")

from glm_support import DEVICE, LEADER, Request, generator, region_of, rows_of, shuffled_pages, table_of

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.gpu.indexer import index_scores
from kvmanager.clients.glm.gpu.sparse_mla import INTERPRETED
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, Section, indexer_layout, native_layout

pytestmark = pytest.mark.gpu
LENGTHS = (1, 130, 70) if INTERPRETED else (1, 0, 63, 64, 700, 1_025, 9_999)
PAGES = 16 if INTERPRETED else 320
ORDERS = (TokenOrder(8, 1), TokenOrder(1, 64), TokenOrder(2, 16))


@pytest.mark.parametrize("queries", [4] if INTERPRETED else [1, 4, 6])
@pytest.mark.parametrize("make_layout", [native_layout, indexer_layout])
def test_scores(make_layout, queries: int) -> None:  # type: ignore[no-untyped-def]
    """Products are summed by the matrix units with 13 bits or more below the greatest: 2^-10 of the sum of sizes."""
    random = generator()
    layout = make_layout(GLM53, 64)
    values, scales = layout.by_key[Section.INDEX_VALUE, LEADER], layout.by_key[Section.INDEX_SCALE, LEADER]
    region = region_of(layout, PAGES)
    free = shuffled_pages(PAGES, random)
    requests = [Request(tokens, ORDERS[i % len(ORDERS)], free) for i, tokens in enumerate(LENGTHS)]
    codec, keys = Fp8Codec(), []
    for request in requests:
        sizes = torch.randint(-3, 4, (request.tokens, 1), generator=random)
        codes, factors = codec.encode_index(torch.ldexp(torch.randn((request.tokens, 128), generator=random), sizes))
        rows_of(region, values)[request.places()] = codes.to(DEVICE)
        rows_of(region, scales)[request.places()] = factors.view(torch.uint8).view(-1, 4).to(DEVICE)
        keys.append(codec.decode_index(codes, factors, torch.float64).to(DEVICE))
    asked = torch.randn((len(LENGTHS), queries, 32, 128), generator=random)
    codes, factors = codec.encode_index(asked)
    weights = torch.randn((len(LENGTHS), queries, 32), generator=random)
    q = codec.decode_index(codes, factors, torch.float64).to(DEVICE)
    n = (max(LENGTHS) + 3) // 4 * 4 + 8
    scores = torch.full((len(LENGTHS), queries, n), float("nan"), device=DEVICE)
    page_counts = torch.tensor([len(request.pages) for request in requests], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    index_scores(
        codes.to(DEVICE), (weights * factors).to(DEVICE), table_of(requests), page_counts, tokens, region, values,
        scales, scores,
    )  # fmt: skip
    for number, (count, key) in enumerate(zip(LENGTHS, keys, strict=True)):
        weight = weights[number].double().to(DEVICE)
        want = torch.einsum("th,thj->tj", weight, (q[number] @ key.T).clamp(min=0))
        size = torch.einsum("th,thj->tj", weight.abs(), q[number].abs() @ key.T.abs())
        got = scores[number, :, :count].double()
        assert not got.isnan().any(), f"request {number}: {int(got.isnan().sum())} of {got.numel()} scores not written"
        beyond = (got - want).abs() - 2**-10 * size
        print(f"request {number}: worst error {float((got - want).abs().max() if count else 0):.3e}")
        assert (beyond <= 0).all(), (
            f"request {number} of order {requests[number].order}: {int((beyond > 0).sum())} of {got.numel()} wrong, "
            f"first {(beyond > 0).nonzero()[0].tolist()}"
        )
        assert scores[number, :, count:].isnan().all(), "what lies beyond the last token is not touched"
