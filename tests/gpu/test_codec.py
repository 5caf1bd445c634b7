"""The row codec on a GPU gives the bytes that it gives on a CPU, so rows may be made on either."""

import pytest
import torch

from kvmanager.clients.glm.codec import Fp8Codec

pytestmark = pytest.mark.gpu
SEED = 20261129
ROWS = 100_000


def _values(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different size: whole rows scaled by powers of two, with zeros and tiny groups among them."""
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    values = torch.randn((ROWS, width), generator=generator, dtype=dtype)
    exponents = torch.randint(-20, 12, (ROWS, 1), generator=generator)
    values = torch.ldexp(values, exponents)
    values[::97] = 0
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_latent_rows_have_the_same_bytes(dtype: torch.dtype) -> None:
    codec = Fp8Codec()
    latents, rope = _values(512, torch.float64).to(dtype), _values(64, torch.float64).to(dtype)
    on_cpu = codec.encode_latent(latents, rope)
    on_gpu = codec.encode_latent(latents.cuda(), rope.cuda())
    assert on_gpu.is_cuda
    assert torch.equal(on_gpu.cpu(), on_cpu)
    for here, there in zip(
        codec.decode_latent(on_cpu, torch.float64), codec.decode_latent(on_gpu, torch.float64), strict=True
    ):
        assert torch.equal(there.cpu(), here)


def test_indexer_rows_have_the_same_bytes() -> None:
    codec = Fp8Codec()
    keys = _values(128, torch.float64)
    values, scales = codec.encode_index(keys)
    gpu_values, gpu_scales = codec.encode_index(keys.cuda())
    assert torch.equal(gpu_values.cpu(), values)
    assert torch.equal(gpu_scales.cpu(), scales)
    here = codec.decode_index(values, scales, torch.float64)
    assert torch.equal(codec.decode_index(gpu_values, gpu_scales, torch.float64).cpu(), here)


def test_one_changed_value_changes_the_bytes() -> None:
    """The comparison above can fail."""
    codec = Fp8Codec()
    latents, rope = _values(512, torch.float32), _values(64, torch.float32)
    changed = latents.cuda()
    changed[3, 7] = -changed[3, 7] + 1
    assert not torch.equal(codec.encode_latent(changed, rope.cuda()).cpu(), codec.encode_latent(latents, rope))
