"""New rows written by kernels have the codec's bytes, in their places and nowhere else."""

import pytest
import torch

pytest.importorskip("triton")

from glm_support import DEVICE, FAR_PAGE, POISON, generator, region_of, rows_of

from kvmanager.clients.glm.codec import Fp8Codec
from kvmanager.clients.glm.gpu.append import append_index, append_latent, quantise_index_queries
from kvmanager.layout import GLM53, Section, layer_major_layout, native_layout

pytestmark = pytest.mark.gpu
LAYER = 6
PAGES = 3
TOKENS = 2 * 64 + 21


def _values(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Very different sizes, zeros, and amax values just at and beside a change of scale."""
    random = generator()
    values = torch.randn((TOKENS, width), generator=random)
    values = torch.ldexp(values, torch.randint(-20, 12, (TOKENS, 1), generator=random))
    values[::17] = 0
    for row, edge in ((1, 448.0), (2, 448.0 * (1 + 2**-23)), (3, 448.0 * (1 - 2**-24)), (4, 448e-4), (5, 1e-30)):
        values[row] = values[row].clamp(-edge / 2, edge / 2)
        values[row, 7] = -edge
    return values.to(dtype)


def _places() -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct places of all tokens in random order; every fifth belongs to another shard."""
    places = torch.randperm(PAGES * 64, generator=generator())[:TOKENS]
    pages, slots = FAR_PAGE + places // 64, places % 64
    pages[::5] = -1
    return pages.to(DEVICE), slots.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make_layout", [native_layout, layer_major_layout])
def test_latent_rows(make_layout, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    layout = make_layout(GLM53, 64)
    component = layout.by_key[Section.LATENT, LAYER]
    region = region_of(layout, PAGES)
    latents, rope = _values(512, dtype).to(DEVICE), _values(64, dtype).to(DEVICE)
    pages, slots = _places()
    append_latent(latents, rope, pages, slots, region, component)
    want = torch.full((PAGES * layout.page_bytes,), POISON, dtype=torch.uint8)
    kept = pages >= 0
    rows = Fp8Codec().encode_latent(latents.cpu(), rope.cpu())
    rows_of(want, component)[pages[kept].cpu() - FAR_PAGE, slots[kept].cpu()] = rows[kept.cpu()]
    wrote = region[FAR_PAGE * layout.page_bytes :].cpu()
    wrong = (wrote != want).nonzero().flatten()
    assert len(wrong) == 0, _tell(wrong, wrote, want, component.offset)


def test_indexer_rows() -> None:
    layout = native_layout(GLM53, 64)
    values, scales = layout.by_key[Section.INDEX_VALUE, LAYER], layout.by_key[Section.INDEX_SCALE, LAYER]
    region = region_of(layout, PAGES)
    keys = _values(128, torch.float32).to(DEVICE)
    pages, slots = _places()
    append_index(keys, pages, slots, region, values, scales)
    want = torch.full((PAGES * layout.page_bytes,), POISON, dtype=torch.uint8)
    kept = (pages >= 0).cpu()
    codes, factors = Fp8Codec().encode_index(keys.cpu())
    at = pages.cpu()[kept] - FAR_PAGE, slots.cpu()[kept]
    rows_of(want, values)[at] = codes[kept]
    rows_of(want, scales)[at] = factors[kept].view(torch.uint8).view(-1, 4)
    wrote = region[FAR_PAGE * layout.page_bytes :].cpu()
    wrong = (wrote != want).nonzero().flatten()
    assert len(wrong) == 0, _tell(wrong, wrote, want, values.offset)


def test_index_queries_are_quantised_as_keys() -> None:
    queries = _values(128, torch.float32).to(DEVICE)[: TOKENS // 4 * 4].view(-1, 4, 128)
    codes, scales = quantise_index_queries(queries)
    want_codes, want_scales = Fp8Codec().encode_index(queries.cpu())
    assert torch.equal(scales.cpu(), want_scales)
    assert torch.equal(codes.cpu(), want_codes)


def _tell(wrong: torch.Tensor, wrote: torch.Tensor, want: torch.Tensor, offset: int) -> str:
    some = wrong[:8]
    return (
        f"{len(wrong)} wrong bytes; the first at {some.tolist()} ({(some - offset).tolist()} from the component): "
        f"{wrote[some].tolist()} instead of {want[some].tolist()}"
    )
