"""`kvmanager replay --node`: a short stream on a running node, beside the same on the core in virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvmanager.command.cli import app
from kvmanager.demo.nodes import NodeProcess
from kvmanager.layout import GLM53_TINY

ROWS, RANKS = 64, 2
SPAN = ROWS * RANKS
DEVICE_SPANS, HOST_SPANS = 120, 300
PAGE_BYTES = GLM53_TINY.page_bytes(ROWS)
SESSIONS = 6


def _toml(runtime_dir: Path) -> str:
    return f"""
[node]
name = "replayed"
runtime_dir = "{runtime_dir}"
spare = false
[mover]
staging_bytes = "4 MiB"
chunk_bytes = "1 MiB"
[eviction]
policy = "lru"
[offload]
batch_spans = 4096
[[group]]
name = "prefill"
kind = "sharded"
format = "{GLM53_TINY.name}"
ranks = {RANKS}
page_rows = {ROWS}
interleave = 1
hbm_bytes_per_rank = {DEVICE_SPANS * PAGE_BYTES}
host_bytes_per_rank = {HOST_SPANS * PAGE_BYTES}
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    where = tmp_path_factory.mktemp("n")
    with NodeProcess("r", where, _toml(where / "r")) as running:
        running.wait_serving().close()
        yield running


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions that grow by a span and a half a turn, one of them with a fork: HBM holds three at once, both five."""
    lines = []
    for number in range(SESSIONS):
        timing = {"type": "s", "think_time": 2 + number, "api_time": 4, "stop": "tool_use"}
        steps = [{**timing, "hash_runs": [[1, 60 + 3 * turn]]} for turn in range(8)]
        if number == 2:
            steps[5]["hash_runs"] = [[1, 20], [900, 40]]
        lines.append(json.dumps({"block_size": 64, "requests": steps}) + "\n")
    path = tmp_path_factory.mktemp("s") / "sessions.jsonl"
    path.write_text("".join(lines))
    return path


def _replayed(*asked: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["replay", *asked, "--json"])
    assert result.exit_code == 0, result.output
    report: dict[str, object] = json.loads(result.stdout)
    return report


@pytest.mark.parametrize("hold", ["0", "1"])
def test_a_live_run_finds_what_the_virtual_one_does(node: NodeProcess, recorded: Path, hold: str) -> None:
    stream = [str(recorded), "--lanes", "5", "--requests", "40", "--seed", "3", "--hold", hold]
    live = _replayed(*stream, "--node", str(node.runtime_dir), "--bytes")
    pools = ["--pool-tokens", str(DEVICE_SPANS * SPAN), "--host-tokens", str(HOST_SPANS * SPAN)]
    virtual = _replayed(*stream, *pools, "--ranks", str(RANKS), "--policy", "lru")
    assert set(virtual) <= set(live), "the same keys"
    assert 0.8 < float(str(virtual["prefix_hit_rate"])) < 0.95, "live sessions fit, and HBM alone holds them not"
    assert float(str(virtual["host_hit_rate"])) > 0.3
    assert float(str(live["host_hit_rate"])) > 0.3
    assert live["prefix_hit_rate"] == pytest.approx(virtual["prefix_hit_rate"], abs=0.005)
    same = ("prompt_tokens", "requests", "counted_requests", "device_tokens", "host_tokens", "span_tokens", "policy")
    assert {name: live[name] for name in same} == {name: virtual[name] for name in same}
    assert int(str(live["checked_rows"])) > 0
    assert live["wrong_bytes"] == 0
    copied = live["copied_bytes"]
    assert isinstance(copied, dict)
    assert copied["onboard"] == RANKS * int(str(live["host_to_device_link_bytes"]))
    for report in (live, virtual):
        high = report["high_water_bytes"]
        assert isinstance(high, dict)
        assert len(high) == 2
        assert all(size > 0 for size in high.values())
    if hold == "1":
        assert int(str(virtual["queued"])) > 0, "five prompts at one time find no room"
        assert live["queued"] == virtual["queued"]
        assert live["most_open"] == virtual["most_open"]


def test_at_a_speed_requests_come_when_they_came(node: NodeProcess, recorded: Path) -> None:
    live = _replayed(
        str(recorded), "--lanes", "2", "--requests", "8", "--node", str(node.runtime_dir), "--speed", "40"
    )  # fmt: skip
    assert live["counted_requests"] == 6
    assert live["speed"] == 40.0
    assert float(str(live["open_p50_ms"])) > 0


def test_what_it_refuses(node: NodeProcess, recorded: Path, tmp_path: Path) -> None:
    where = ["--node", str(node.runtime_dir)]
    assert "no group 'other'" in CliRunner().invoke(app, ["replay", str(recorded), *where, "--group", "other"]).stderr
    assert CliRunner().invoke(app, ["replay", str(recorded), "--node", str(tmp_path)]).exit_code == 3
