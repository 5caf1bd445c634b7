"""fp8_ds_mla rows: bounds, exact powers of two, and the bytes' places."""

from __future__ import annotations

import math

import pytest
import torch

from kvmanager.clients.glm import codec as rounding
from kvmanager.clients.glm.codec import ExactCodec, Fp8Codec

torch.set_num_threads(1)  # small tensors: more threads only wait for each other on a busy machine

ROWS = 4000


@pytest.fixture(scope="module")
def values() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over many magnitudes: c_kv [ROWS, 512], k_pe [ROWS, 64]."""
    seed = 7
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    size = torch.logspace(-7, 5, ROWS, base=2).unsqueeze(-1)
    return (
        torch.randn((ROWS, 512), generator=generator) * size,
        torch.randn((ROWS, 64), generator=generator) * size,
    )


def naive_scale(amax: float) -> float:
    """The rule in Python floats of float32 precision."""
    need = max(float(torch.tensor(amax) / 448), float(torch.tensor(1e-4)))
    exponent = math.floor(math.log2(need)) - 2
    while 2.0**exponent < need:
        exponent += 1
    return 2.0**exponent


def test_scales_are_the_least_sufficient_powers_of_two(values: tuple[torch.Tensor, torch.Tensor]) -> None:
    groups = values[0].view(ROWS, 4, 128)
    scales = rounding.power_of_two_scale(groups)
    expected = [naive_scale(float(amax)) for amax in groups.abs().amax(-1).flatten()]
    assert scales.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("amax", "scale"), [(448.0, 1.0), (448.0001, 2.0), (224.0, 0.5), (0.0, 2.0**-13), (3584.0, 8.0)]
)
def test_scale_at_exact_powers_of_two(amax: float, scale: float) -> None:
    row = torch.zeros(128)
    row[3] = -amax
    assert float(rounding.power_of_two_scale(row)) == scale


def test_latent_error_is_bounded(values: tuple[torch.Tensor, torch.Tensor]) -> None:
    c_kv, k_pe = values
    codec = Fp8Codec()
    rows = codec.encode_latent(c_kv, k_pe)
    assert rows.dtype == torch.uint8
    assert rows.shape == (ROWS, 656)
    got_c, got_pe = codec.decode_latent(rows, torch.float64)
    scales = rounding.power_of_two_scale(c_kv.view(ROWS, 4, 128)).repeat_interleave(128, dim=-1).double()
    bound = torch.maximum(c_kv.abs().double() / 16, scales / 1024)
    assert ((got_c - c_kv).abs() <= bound).all()
    assert ((got_pe - k_pe).abs() <= k_pe.abs().double() / 256).all()
    error = (got_c - c_kv).norm() / c_kv.double().norm()
    assert 0.02 < float(error) < 0.032


def test_latent_bytes_lie_where_the_format_says() -> None:
    c_kv = torch.zeros(512)
    c_kv[128] = 448.0 * 4  # second group: scale 4, code of 448
    k_pe = torch.zeros(64)
    k_pe[1] = 1.0
    row = Fp8Codec().encode_latent(c_kv, k_pe)
    assert int(row[128]) == 0x7E
    assert row[:128].sum() == 0
    assert row[516:520].view(torch.float32).item() == 4.0
    assert row[512:516].view(torch.float32).item() == 2.0**-13
    assert row[530:532].tolist() == [0x80, 0x3F]


def test_index_keys_round_trip(values: tuple[torch.Tensor, torch.Tensor]) -> None:
    keys = values[0][:, :128]
    codec = Fp8Codec()
    codes, scales = codec.encode_index(keys)
    assert codes.shape == (ROWS, 128)
    assert scales.shape == (ROWS,)
    assert torch.equal(scales, rounding.power_of_two_scale(keys))
    bound = torch.maximum(keys.abs().double() / 16, scales.double().unsqueeze(-1) / 1024)
    assert ((codec.decode_index(codes, scales, torch.float64) - keys).abs() <= bound).all()


def test_decoding_agrees_with_torchs_conversion() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(3)[:512]  # without NaN
    row = torch.cat((codes, torch.tensor([1.0, 2.0, 0.5, 4.0]).view(torch.uint8), torch.zeros(128, dtype=torch.uint8)))
    got, _ = Fp8Codec().decode_latent(row, torch.float32)
    scales = torch.tensor([1.0, 2.0, 0.5, 4.0]).repeat_interleave(128)
    assert torch.equal(got, codes.view(torch.float8_e4m3fn).float() * scales)


def test_wider_input_gives_the_bytes_of_float32(values: tuple[torch.Tensor, torch.Tensor]) -> None:
    c_kv, k_pe = values
    codec = Fp8Codec()
    assert torch.equal(codec.encode_latent(c_kv.double(), k_pe.double()), codec.encode_latent(c_kv, k_pe))


def test_a_rows_bytes_do_not_depend_on_the_batch(values: tuple[torch.Tensor, torch.Tensor]) -> None:
    c_kv, k_pe = values
    codec = Fp8Codec()
    whole = codec.encode_latent(c_kv, k_pe)
    single = torch.stack([codec.encode_latent(c_kv[i], k_pe[i]) for i in range(0, ROWS, 97)])
    assert torch.equal(whole[::97], single)


def test_exact_codec_keeps_every_bit(values: tuple[torch.Tensor, torch.Tensor]) -> None:
    c_kv, k_pe = (v.double() / 3 for v in values)
    codec = ExactCodec(torch.float64)
    rows = codec.encode_latent(c_kv, k_pe)
    assert rows.shape == (ROWS, codec.latent_bytes)
    got_c, got_pe = codec.decode_latent(rows, torch.float64)
    assert torch.equal(got_c, c_kv)
    assert torch.equal(got_pe, k_pe)
    keys, scales = codec.encode_index(c_kv[:, :128])
    assert torch.equal(codec.decode_index(keys, scales, torch.float64), c_kv[:, :128])
