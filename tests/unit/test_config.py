"""Configuration: the example loads, and every bad input is refused with the key, the value and the remedy."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import pytest

from kvmanager.configuration.groups import core_limits, plan_memory
from kvmanager.configuration.reading import parse_config, read_config
from kvmanager.configuration.sizing import size_of
from kvmanager.errors import ConfigError
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53_TINY
from kvmanager.units import MIB
from tests.minimal_config import minimal_toml

EXAMPLE = files("kvmanager.demo").joinpath("data/example.toml").read_text(encoding="utf-8")
MINIMAL = minimal_toml()


def test_example_loads() -> None:
    config = parse_config(EXAMPLE)
    prefill, decode = config.groups
    assert config.node.trust_uids == (os.getuid(),)
    assert config.mover.pull_deadline_ns == 20_000_000_000
    assert prefill.geometry.span_tokens == 128
    assert prefill.unit_bytes == GLM53_TINY.page_bytes(16)
    assert prefill.hbm_units == 4 * MIB // GLM53_TINY.page_bytes(16)
    assert decode.arrival_order == TokenOrder(8, 1)
    assert decode.hot_slabs == 4
    assert config.planned_bytes() == 64 * MIB + 8 * 20 * MIB + 40 * MIB
    assert config.group("decode") is decode


def test_minimal_takes_documented_defaults() -> None:
    """The defaults that the example's comments state are the ones in force."""
    commented = parse_config(EXAMPLE)
    written = "\n".join(
        line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in EXAMPLE.splitlines()
    ).replace("[1000]", f"[{os.getuid()}]")
    assert parse_config(written) == commented
    assert parse_config(MINIMAL).groups[0].host_units == 0


def test_sequential_order() -> None:
    config = parse_config(EXAMPLE.replace('token_order = "keep"', 'token_order = "sequential"'))
    assert config.group("decode").arrival_order == SEQUENTIAL


def _swap(old: str, new: str) -> str:
    assert EXAMPLE.count(old) >= 1, old
    return EXAMPLE.replace(old, new, 1)


ENGINE = """
[[group]]
name = "hbm"
kind = "engine"
format = "kv/bfloat16/4x2x512"
ranks = 1
page_rows = 16
hbm_bytes_per_rank = "1 MiB"
"""
WITH_ENGINE = EXAMPLE + ENGINE


def test_device_memory_for_an_engines_own_blocks() -> None:
    """Whole blocks of it; no host memory, nothing that a mover copies."""
    config = parse_config(WITH_ENGINE.replace('# chunk_bytes = "8 MiB"', "chunk_bytes = 90000"))
    group = config.group("hbm")
    assert (group.unit_bytes, group.hbm_units, group.host_units) == (65536, 16, 0)
    (spec,) = [spec for spec in plan_memory(config).groups if spec.name == "hbm"]
    assert spec.one_holder
    assert [(pool.name, pool.tier, pool.slabs) for pool in spec.pools] == [("hbm/hbm", "device", 16)]
    assert [other.name for other in plan_memory(config).groups if other.one_holder] == ["hbm"]
    regions = [region for region in plan_memory(config).regions if region.pool == "hbm/hbm"]
    assert [region.size_bytes for region in regions] == [1 << 20]


REPLICATED = _swap('kind = "sharded"', 'kind = "replicated"')


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (_swap('name = "node0"', 'name = "node0"\nruntime_dirr = "/x"'), ["'runtime_dirr'", "[node]", "'runtime_dir'"]),
        (_swap("[mover]", "[mover]\nstagingbytes = 1"), ["'stagingbytes'", "[mover]", "did you mean 'staging_bytes'"]),
        (_swap("[offload]", "[ofload]"), ["'ofload'", "did you mean 'offload'"]),
        (_swap("ranks = 8", "ranks = 8\nrank = 8"), ["'rank'", "[[group]] 'prefill'", "did you mean 'ranks'"]),
        ("top = 1\n" + EXAMPLE, ["'top'", "top level"]),
        (_swap("[node]", "[node"), ["not valid TOML", "line"]),
        ("node = 3\n" + MINIMAL[MINIMAL.index("[[group]]") :], ["'node'", "[node]"]),
        (_swap('name = "node0"', ""), ["missing key 'name'", "[node]"]),
        (_swap('name = "node0"', 'name = ""'), ["[node] name", "non-empty"]),
        (_swap('"/run/kvmanager/node0"', '"run/node0"'), ["runtime_dir", "'run/node0'", "absolute"]),
        (_swap('"/run/kvmanager/node0"', f'"/{"x" * 90}"'), ["runtime_dir", "91 bytes", "80"]),
        (_swap('# device = "cpu"', 'device = "cuda:x" #'), ["device", "'cuda:x'", "cuda:0"]),
        (_swap('# device = "cpu"', 'device = "cuda:01" #'), ["device", "'cuda:01'", "cuda:0"]),
        (_swap('# device = "cpu"', 'device = "tpu" #'), ["device", "'tpu'", "cpu"]),
        (_swap("# grace_ms = 5000", "grace_ms = true"), ["grace_ms", "True"]),
        (_swap("# grace_ms = 5000", "grace_ms = 1.5"), ["grace_ms", "1.5"]),
        (_swap("# trust_uids = [1000]", 'trust_uids = ["me"]'), ["trust_uids", "'me'"]),
        (_swap("# trust_uids = [1000]", "trust_uids = []"), ["trust_uids", "[]"]),
        (_swap("# trust_uids = [1000]", "trust_uids = 0"), ["trust_uids", "list"]),
        (_swap('# staging_bytes = "64 MiB"', 'staging_bytes = "1 MiB"'), ["chunk_bytes", "staging_bytes = 1048576"]),
        (_swap('# staging_bytes = "64 MiB"', 'staging_bytes = "64 MB"'), ["staging_bytes", "'64 MB'", "64MiB"]),
        (_swap('# staging_bytes = "64 MiB"', "staging_bytes = 1.5"), ["staging_bytes", "1.5"]),
        (_swap('# staging_bytes = "64 MiB"', "staging_bytes = -1"), ["staging_bytes", "negative"]),
        (_swap('# chunk_bytes = "8 MiB"', "chunk_bytes = 1024"), ["chunk_bytes", "1024", "'prefill'", "81920"]),
        (_swap("# overcommit = 1.0", "overcommit = 0.5"), ["overcommit", "0.5", "1.0"]),
        (_swap("# overcommit = 1.0", "overcommit = nan"), ["overcommit", "nan"]),
        (_swap("# growth_cap_tokens = 65536", "growth_cap_tokens = 0"), ["growth_cap_tokens", "0"]),
        (_swap("# batch_spans = 32", "batch_spans = 0"), ["batch_spans", "0"]),
        (_swap('kind = "sharded"', 'kind = "shared"'), ["kind", "'shared'", "did you mean 'sharded'"]),
        (REPLICATED.replace("interleave = 1 ", "interleave = 2 "), ["interleave", "every rank", "remove"]),
        (_swap("glm-5.3-tiny-fp8_ds_mla", "glm-5.3-tiny"), ["format", "'glm-5.3-tiny'", "did you mean"]),
        (_swap("interleave = 1 ", "interleave = 3 "), ["'prefill' interleave", "3", "page_rows = 16"]),
        (_swap('hbm_bytes_per_rank = "4 MiB"', "hbm_bytes_per_rank = 81919"), ["'prefill' hbm", "81919", "81920"]),
        (_swap('host_bytes_per_rank = "16 MiB"', "host_bytes_per_rank = 9"), ["'prefill' host", "9 bytes", "81920"]),
        (_swap("ranks = 1 ", "ranks = 2 "), ["'decode' ranks", "2", "ranks = 1"]),
        (_swap("hot_rows = 64", "hot_rows = 65"), ["hot_rows", "65", "page_rows"]),
        (_swap("hot_rows = 64", "hot_rows = 6400"), ["'decode' hbm_bytes_per_rank", "hot buffer (400 slabs)"]),
        (_swap('host_bytes_per_rank = "32 MiB"', "host_bytes_per_rank = 0"), ["'decode' host", "a span"]),
        (_swap("source_interleave = 1", "source_interleave = 5"), ["source_interleave", "5", "16"]),
        (_swap("hot_rows = 64", "#"), ["missing key 'hot_rows'", "hisparse"]),
        (_swap("ranks = 8", "ranks = 8\nhot_rows = 16"), ["'prefill' hot_rows", "hisparse", "remove"]),
        (_swap("ranks = 8", 'ranks = 8\nresidency = "hybrid"'), ["'prefill' residency", "hisparse", "remove"]),
        (_swap("hot_rows = 64", 'hot_rows = 64\nresidency = "host"'), ["residency", "always-host"]),
        (_swap("hot_rows = 64", 'hot_rows = 64\nhost_split = "strict"'), ["offload_bytes_per_rank", "strict"]),
        (_swap("hot_rows = 64", "hot_rows = 64\noffload_bytes_per_rank = 1"), ["offload_bytes_per_rank", "strict"]),
        (_swap('name = "decode"', 'name = "prefill"'), ["'prefill' number 2", "taken"]),
        (EXAMPLE.split("[[group]]")[0], ["no memory group", "[[group]]"]),
        (WITH_ENGINE + 'host_bytes_per_rank = "1 MiB"', ["'hbm' host_bytes_per_rank", "device memory only", "remove"]),
        (WITH_ENGINE + 'host_region = "ram"', ["'hbm' host_region", "device memory only", "remove"]),
        (WITH_ENGINE.replace('"1 MiB"', "65535"), ["'hbm' hbm_bytes_per_rank", "65535", "65536"]),
        (EXAMPLE + ENGINE.replace("ranks = 1", "ranks = 2"), ["'hbm' ranks", "2", "ranks = 1"]),
        (EXAMPLE + ENGINE.replace("hbm_bytes_per_rank", "#"), ["missing key 'hbm_bytes_per_rank'"]),
        (EXAMPLE + ENGINE.replace("kv/bfloat16/4x2x512", "glm-5.3-bf16"), ["'hbm' format", "plain format"]),
        (_swap("host_bytes_per_rank", "#"), ["missing key 'host_bytes_per_rank'", "'prefill'"]),
        ("group = [3]\n" + EXAMPLE.split("[[group]]")[0], ["[[group]] number 1", "table"]),
    ],
)
def test_bad_input_names_key_value_and_remedy(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    for part in parts:
        assert part in str(caught.value)


def test_hbm_on_a_gpu_is_no_host_memory() -> None:
    config = parse_config(_swap('# device = "cpu"', 'device = "cuda:3" #'))
    host = config.mover.staging_bytes + sum(g.ranks * g.host_bytes_per_rank for g in config.groups)
    assert host < config.planned_bytes()
    config.check_memory(host)
    with pytest.raises(ConfigError, match=f"{host} bytes .* needed"):
        config.check_memory(host - 1)


def test_pool_larger_than_memory() -> None:
    config = parse_config(EXAMPLE)
    config.check_memory(config.planned_bytes())
    with pytest.raises(ConfigError, match="pool larger than memory") as caught:
        config.check_memory(config.planned_bytes() - 1)
    message = str(caught.value)
    assert str(config.planned_bytes()) in message
    assert str(config.planned_bytes() - 1) in message
    assert "[[group]] 'prefill' host_bytes_per_rank" in message


def test_unknown_group() -> None:
    with pytest.raises(ConfigError, match=r"no group 'decod'.*did you mean 'decode'"):
        parse_config(EXAMPLE).group("decod")


def test_file_errors_name_the_path(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"none\.toml"):
        read_config(missing)
    broken = tmp_path / "broken.toml"
    broken.write_text("[[group]]\nnam = 1\n")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        read_config(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="can't read"):
        read_config(broken)


@pytest.mark.parametrize(("cover", "one_in"), [("auto", 1), ("all", 1), ("off", 0), ("1/16", 16)])
@pytest.mark.parametrize("device", ["cpu", "cuda:3"])
def test_host_copies_have_checksums_as_configured_on_every_device(device: str, cover: str, one_in: int) -> None:
    text = _swap('# device = "cpu"', f'device = "{device}" #').replace('# cover = "auto"', f'cover = "{cover}" #')
    assert core_limits(parse_config(text)).checksums == one_in


def test_the_account_of_an_engines_own_blocks_is_all_of_them() -> None:
    (held,) = [fit for fit in size_of(parse_config(WITH_ENGINE), 1000).fits if fit.group == "hbm"]
    assert (held.refusal, held.tokens, held.held) == (None, 16 * 16, {"hbm/hbm": (16, 1 << 20)})
