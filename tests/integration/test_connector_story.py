"""An engine with vLLM's connector, but not vLLM: its blocks' checksums, KV events, and the story of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from connector_engine import ConnectorEngine
from kv_router import Router
from nodes_support import Node, node, wait_for
from test_node_cache_handoff import FORMAT, HEADS, LAYERS, ROW, ROWS, namespace, toml

from kvmanager import __version__
from kvmanager.clients import engine as client_module
from kvmanager.clients.leases import CacheEngine
from kvmanager.clients.vllm import link as link_module
from kvmanager.clients.vllm.link import Link
from kvmanager.clients.vllm.scheduling import Scheduling
from kvmanager.clients.vllm.settings import Settings
from kvmanager.layout import plain_layout
from kvmanager.wire import WIRE_VERSION

SIDE = "source"
PROMPT = [(place * 31) % 997 for place in range(16 * 6 + 3)]


def streamed_toml(runtime_dir: Path, *, name: str = SIDE, cover: str = "all") -> str:
    return toml(runtime_dir, name=name) + f"""
[checksums]
cover = "{cover}"
[[events]]
group = "kv"
model = "m"
weights_revision = "1"
endpoint = "ipc://{runtime_dir}-live"
replay_endpoint = "ipc://{runtime_dir}-replay"
topic = "t"
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path, SIDE, streamed_toml) as running:
        yield running


def engine(at: Node, name: str) -> ConnectorEngine:
    told = namespace(ROWS[SIDE])
    told.token_ids = True
    return ConnectorEngine(at.runtime_dir, name, told, rows=ROWS[SIDE], shape=(LAYERS, HEADS, ROW // 4))


def story(at: Node, request_id: str) -> list[str]:
    return [line.text for line in at.admin.explain("request", request_id).lines]


def test_a_block_that_is_not_what_was_stored_is_computed_again_and_everybody_hears_of_it(served: Node) -> None:
    router = Router(f"ipc://{served.runtime_dir}-live", f"ipc://{served.runtime_dir}-replay", "t")
    first = engine(served, "vllm-a")
    cold = first.serve("cmpl-1", PROMPT)
    assert (cold.loaded, cold.computed) == (0, len(PROMPT))
    first.rest()
    wait_for(lambda: router.hear() >= 0 and len(router.blocks.get("CPU", ())) == 6, lambda: str(router.blocks))
    keys = cold.request.block_hashes
    assert router.blocks == {"CPU": set(keys)}, "host memory, whatever the core calls the tier"
    assert [router.token_ids[key] for key in keys] == [PROMPT[at : at + 16] for at in range(0, 96, 16)]
    assert router.path(keys[-1]) == keys[::-1]
    assert served.counters()["summed_page"] == 6

    # A byte of the third block changes in the daemon's memory; another engine loads the prompt.
    told = namespace(ROWS[SIDE])
    told.token_ids = True
    peek = CacheEngine(
        served.runtime_dir, "peek", group="kv", namespace=told, layout=plain_layout(FORMAT, ROWS[SIDE]), ranks=1
    )
    pages = peek.acquire(1, b"".join(keys)).pages
    peek.page(0, pages[2])[100] ^= 4
    peek.done(1)
    second = engine(served, "vllm-b")
    loaded = second.serve("cmpl-2", PROMPT)
    assert (loaded.loaded, loaded.computed) == (32, len(PROMPT) - 32), "what precedes it is used"
    assert second.right(loaded)
    second.rest()
    wait_for(lambda: served.counters()["failed_load"] == 1)
    router.hear()
    wait_for(lambda: router.hear() >= 0 and len(router.blocks["CPU"]) == 6, lambda: str(router.blocks))
    again = second.serve("cmpl-3", PROMPT)
    assert second.right(again)
    assert again.loaded == 96, "it was stored anew"
    second.rest()

    assert [line.partition(" of epoch")[0] for line in story(served, "cmpl-1")] == ["lease vllm-a/1"] * 2
    told_of = story(served, "cmpl-2")
    assert "96 tokens in kv, 96 found" in told_of[0]
    assert "a copy failed: 1 pages are not what was written; pages that could not be read: " in told_of[1], told_of
    assert "stored up to token 96" in told_of[-1]
    assert any("found" in line for line in story(served, "cmpl-3"))
    for held in (first, second, peek):
        held.close()
    router.close()
    served.wait_at_rest()


@pytest.mark.parametrize(("cover", "expected"), [("off", 0), ("1/3", 2)])
def test_one_block_in_so_many_is_summed(tmp_path: Path, cover: str, expected: int) -> None:
    with node(tmp_path, SIDE, streamed_toml, cover=cover) as served:
        held = engine(served, "vllm-a")
        held.serve("r", PROMPT)
        held.rest()
        wait_for(lambda: served.counters()["stored_tokens"] == 96)
        assert served.counters()["summed_page"] == expected
        held.close()


def test_an_engine_of_an_older_program_runs_without_the_cache_until_it_is_the_same(
    served: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_module, "REFUSED_RETRY_S", 0.05)
    monkeypatch.setattr(client_module, "WIRE_VERSION", 0)
    fingerprint = plain_layout(FORMAT, ROWS[SIDE]).fingerprint
    link = Link(Settings(served.runtime_dir, "kv", "old"), namespace(ROWS[SIDE]), fingerprint, 1)
    try:
        wait_for(lambda: "refused" in caplog.text)
        assert f"older than this daemon, {__version__}" in caplog.text
        scheduling = Scheduling(link, ROWS[SIDE], 1, hold_s=1.0)
        scheduling.arrived("r", [bytes(32)] * 4)
        assert scheduling.matched("r", 70, 0) == 0, "a miss at once"
        assert scheduling.build({"r": 70}, lambda _: [1, 2, 3, 4, 5]).saves == []
        assert not scheduling.finished("r", "stop"), "no block is kept for a save"
        monkeypatch.setattr(client_module, "WIRE_VERSION", WIRE_VERSION)
        wait_for(lambda: link.up)
    finally:
        link.close()
