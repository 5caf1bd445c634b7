"""Parts of the vLLM connector that need no vLLM: its settings, and copies between blocks and pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmanager.clients.vllm.blocks import EngineBlocks
from kvmanager.clients.vllm.packing import places_of
from kvmanager.clients.vllm.settings import Settings, group_table, namespace_of, revision_of
from kvmanager.configuration.reading import parse_config
from kvmanager.errors import ConfigError, InvalidArgument, LayoutMismatch
from kvmanager.layout import format_named, plain_format

LAYERS, BLOCKS, HEADS, ROWS, CONTENT = 3, 9, 2, 16, 8


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Layers in one allocation, layer outermost, as an engine makes them."""
    whole = torch.randn(LAYERS, BLOCKS, HEADS, ROWS, CONTENT).to(dtype)
    return {f"layer.{n}": whole[n] for n in range(LAYERS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_come_back_as_they_were_and_where_the_layout_says(dtype: torch.dtype) -> None:
    held = tensors(dtype)
    blocks = EngineBlocks(held)
    rows = np.zeros((6, blocks.layout.page_bytes), np.uint8)
    before = {name: tensor.clone() for name, tensor in held.items()}
    blocks.save(rows, [5, 0], [3, 8])
    for component in blocks.layout.components:
        layer, head = divmod(component.layer, HEADS)
        for slot in range(ROWS):
            at = component.offset + slot * component.slot_stride
            row = held[f"layer.{layer}"][8, head, slot].clone().view(torch.uint8).numpy()
            assert np.array_equal(rows[0, at : at + component.row_bytes], row)
    for tensor in held.values():
        tensor.zero_()
    blocks.load(rows, [0, 5], [1, 2])
    for name, tensor in held.items():
        assert torch.equal(tensor[1], before[name][8])
        assert torch.equal(tensor[2], before[name][3])
        assert not tensor[3].any()


def stored(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As attention on a CPU keeps them: keys the other way round, values behind them."""
    return torch.cat((keys[:, 0].T.flatten(), values.flatten()))


def test_a_kernel_is_asked_where_it_keeps_what() -> None:
    assert places_of(lambda keys, values: torch.cat((keys, values), dim=2), ROWS, CONTENT, torch.float32) is None
    for dtype in (torch.float32, torch.bfloat16):
        places = places_of(stored, ROWS, CONTENT, dtype)
        assert places is not None
        assert places[3 * CONTENT + 1] == ROWS + 3, "element 1 of key 3"
        assert places[3 * CONTENT + CONTENT // 2] == (ROWS + 3) * CONTENT // 2, "element 0 of value 3"
    with pytest.raises(LayoutMismatch, match="as they are"):
        places_of(lambda keys, values: stored(keys, values) * 2, ROWS, CONTENT, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_row_by_row_however_the_kernel_keeps_a_block(dtype: torch.dtype) -> None:
    held = tensors(dtype)
    true = {name: torch.randn(HEADS, ROWS, CONTENT).to(dtype) for name in held}
    for name, tensor in held.items():
        for head in range(HEADS):
            keys, values = true[name][head, :, None].chunk(2, dim=2)
            tensor[4, head] = stored(keys, values).view(ROWS, CONTENT)
    blocks = EngineBlocks(held, places_of(stored, ROWS, CONTENT, dtype))
    rows = np.zeros((2, blocks.layout.page_bytes), np.uint8)
    blocks.save(rows, [1], [4])
    for component in blocks.layout.components:
        layer, head = divmod(component.layer, HEADS)
        for slot in range(ROWS):
            at = component.offset + slot * component.slot_stride
            row = true[f"layer.{layer}"][head, slot].view(torch.uint8).numpy()
            assert np.array_equal(rows[1, at : at + component.row_bytes], row)
    blocks.load(rows, [1], [7])
    for tensor in held.values():
        assert torch.equal(tensor[7], tensor[4])


def test_tensors_that_differ_or_are_not_whole_blocks_are_refused() -> None:
    held = tensors()
    with pytest.raises(LayoutMismatch, match="differ"):
        EngineBlocks({**held, "other": torch.zeros(BLOCKS, HEADS, ROWS, CONTENT + 1)})
    with pytest.raises(LayoutMismatch, match="one piece"):
        EngineBlocks({"a": torch.zeros(BLOCKS, ROWS, HEADS, CONTENT).transpose(1, 2)})


def test_settings_name_what_is_wrong() -> None:
    settings = Settings.of({"runtime_dir": "/run/kv", "group": "g"}, "id")
    assert settings.engine == "vllm-id"
    assert Settings.of({"runtime_dir": "/run/kv", "group": "g", "weights": "llama-8b"}, "id").weights == "llama-8b"
    for extra, said in [({"group": "g"}, "runtime_dir"), ({"runtime_dir": "/x", "group": "g", "pages": 1}, "pages")]:
        with pytest.raises(ConfigError, match=said):
            Settings.of(extra, "id")


def test_the_table_that_the_connector_prints_is_one_that_a_node_reads(tmp_path) -> None:
    settings = Settings.of({"runtime_dir": "/run/kv", "group": "g"}, "id")
    table = group_table(settings, plain_format("bfloat16", 32, 8, 512), 16, 2)
    config = parse_config(f'[node]\nname = "n"\nruntime_dir = "{tmp_path}"\n{table}')
    assert config.groups[0].kv_format == plain_format("bfloat16", 32, 8, 512)
    assert config.groups[0].unit_bytes == 32 * 8 * 512 * 16


def test_other_weights_are_another_namespace(tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = revision_of(str(tmp_path), None, {"dtype": "float32"})
    assert first == revision_of(str(tmp_path), None, {"dtype": "float32"})
    assert first != revision_of(str(tmp_path), None, {"dtype": "bfloat16"})
    assert revision_of("", None, {"dtype": "float32"}) == revision_of("", None, {"dtype": "float32"}) != first
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert first != revision_of(str(tmp_path), None, {"dtype": "float32"})
    kv_format = plain_format("float32", 2, 2, 8)
    assert namespace_of("m", first, kv_format, "sha256", 16).key_hash == "vllm_sha256"
    with pytest.raises(ConfigError, match="xxhash"):
        namespace_of("m", first, kv_format, "xxhash", 16)


def test_a_plain_format_is_known_by_its_name() -> None:
    assert format_named("kv/float16/32x8x512") == plain_format("float16", 32, 8, 512)
    for name in ("kv/float16/0x8x512", "kv/float16/32x8", "glm"):
        with pytest.raises(InvalidArgument):
            format_named(name)
