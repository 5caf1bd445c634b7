"""A configuration that is read again: what may change, what may not, and that a bad file changes nothing."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.reading import parse_config, read_config
from kvmanager.configuration.reload import RELOADABLE, Reloader, changes, reread
from kvmanager.errors import ConfigError
from tests.minimal_config import minimal_toml

SAFE = """
[fence]
action = "kill"
[mover]
to_host_gb_per_s = 2.5
[health]
core_ms = 8000
[history]
max_bytes = "1 MiB"
[checksums]
restart_spans = 7
"""
UNSAFE = [
    ("[fence]\nafter_ms = 1", "[fence] after_ms: 30000 -> 1"),
    ("[eviction]\npolicy = 'lru'", '[eviction] policy: "return-rate" -> "lru"'),
    ("[mover]\nstaging_bytes = '32 MiB'", "[mover] staging_bytes: 67108864 -> 33554432"),
    ("[history]\nmax_bytes = 0", "[history] max_bytes: 67108864 -> 0"),
    ("[[tenant]]\nname = 'a'\nuids = [1]", "[[tenant]] 'a': \"not there\" -> \"new\""),
]  # fmt: skip


def test_the_table_names_keys_that_there_are() -> None:
    tables = {field.name: field.type for field in dataclasses.fields(NodeConfig)}
    config = parse_config(minimal_toml())
    for table, keys in RELOADABLE.items():
        assert table in tables
        assert keys <= {field.name for field in dataclasses.fields(getattr(config, table))}, table


def test_what_is_safe_takes_effect_and_each_difference_is_named(tmp_path: Path) -> None:
    before = parse_config(minimal_toml())
    file = tmp_path / "node.toml"
    file.write_text(minimal_toml() + SAFE)
    after, found = reread(file, before)
    assert after.health.core_ms == 8000
    assert [str(change) for change in found] == [
        '[fence] action: "hold" -> "kill"',
        "[mover] to_host_gb_per_s: 0.0 -> 2.5",
        "[checksums] restart_spans: 256 -> 7",
        "[health] core_ms: 5000 -> 8000",
        "[history] max_bytes: 67108864 -> 1048576",
    ]
    assert all(change.safe for change in found)
    assert changes(after, after) == []


@pytest.mark.parametrize(("text", "said"), UNSAFE)
def test_what_takes_a_restart_is_refused_by_name_with_all_else(tmp_path: Path, text: str, said: str) -> None:
    before = parse_config(minimal_toml())
    file = tmp_path / "node.toml"
    file.write_text(minimal_toml() + "[health]\ncore_ms = 8000\n" + text)
    with pytest.raises(ConfigError) as caught:
        reread(file, before)
    assert said in str(caught.value)
    assert "core_ms" not in str(caught.value)


def test_groups_that_change_come_or_go_are_refused() -> None:
    one = parse_config(minimal_toml())
    other = minimal_toml()[minimal_toml().index("[[group]]") :].replace('"g"', '"h"')
    two = parse_config(minimal_toml() + other)
    turned = dataclasses.replace(two, groups=two.groups[::-1])
    larger = parse_config(minimal_toml().replace("1MiB", "2MiB"))
    assert [str(c) for c in changes(one, two)] == ["[[group]] 'h': \"not there\" -> \"new\""]
    assert [str(c) for c in changes(two, one)] == ["[[group]] 'h': \"there\" -> \"gone\""]
    assert [c.where for c in changes(two, turned)] == ["[[group]] order"]
    assert [str(c) for c in changes(one, larger)] == ["[[group]] 'g' hbm_bytes_per_rank: 1048576 -> 2097152"]
    assert not any(c.safe for pair in ((one, two), (two, one), (two, turned), (one, larger)) for c in changes(*pair))


def test_a_reloader_keeps_what_it_had_until_a_file_can_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    file = tmp_path / "node.toml"
    file.write_text(minimal_toml())
    used: list[NodeConfig] = []
    failures: list[BaseException] = []
    reloader = Reloader(file, read_config(file), used.append, failures.append)
    reloader.start()
    for text in ("[node", minimal_toml() + "[fence]\nafter_ms = 1\n", minimal_toml() + SAFE, minimal_toml() + SAFE):
        file.write_text(text)
        reloader.reload()
    file.unlink()
    reloader.ask()
    reloader.close()
    assert [config.fence.action for config in used] == ["kill", "kill"]
    assert reloader.config().health.core_ms == 8000
    assert failures == []
    said = [record.getMessage() for record in caplog.records]
    assert "not valid TOML" in said[0]
    assert "takes a restart: [fence] after_ms: 30000 -> 1" in said[1]
    assert "reloaded: [health] core_ms: 5000 -> 8000" in said
    assert said[-2] == "reloaded: nothing differs"
    assert "can't read the configuration" in said[-1]
