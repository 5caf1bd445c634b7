"""PCP x DCP ranks as processes of their own, each attached to a real daemon, with the shards in its pools."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from mode_engine import OUTPUT, RANKS, ROWS, SHARDED, prompt_of, shards_toml
from nodes_support import Node, kill_and_wait, node
from process_engine import ProcessEngine

from kvmanager.clients.glm.lent_workspace import LentWorkspace
from kvmanager.clients.glm.workspace import TOKEN_BYTES, workspace_bytes
from kvmanager.errors import PeerUnreachable, PoolExhausted

PAGES = 24
WORKSPACE_PAGE = ROWS * TOKEN_BYTES
WORKSPACE_BYTES = -(-workspace_bytes(SHARDED, 4 * SHARDED.span_tokens) // WORKSPACE_PAGE) * WORKSPACE_PAGE


serves = partial(shards_toml, pages=PAGES, host_pages=3 * PAGES, lent_bytes=WORKSPACE_BYTES)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("shards"), "prefill", serves) as running:
        yield running


def held_workspace(served: Node, rank: int) -> int:
    """Bytes of a rank's workspace that somebody has, by the node's account."""
    free, *others = served.pools()[f"shards-workspace-{rank}/hbm"][:6]
    assert free + sum(others) == WORKSPACE_BYTES
    return sum(others)


def test_rank_processes_give_the_tokens_of_one_rank(served: Node, tmp_path: Path) -> None:
    """Computed anew, hit in part with a copy on write in each process, from the host, and under another daemon."""
    seed = 60
    engine = ProcessEngine(served.runtime_dir, "processes", tmp_path / "meeting")
    try:
        assert len({process.pid for process in engine.ranks.processes} | {os.getpid()}) == RANKS + 1
        assert [held_workspace(served, rank) for rank in range(RANKS)] == [WORKSPACE_BYTES] * RANKS
        with pytest.raises(PoolExhausted, match="processes-workspace-0"):
            LentWorkspace(served.runtime_dir, "shards-workspace-0", "another", 0, ROWS)
        first = engine.answer(prompt_of(seed))
        assert first.cached == 0
        first.check(seed)

        again = engine.answer(prompt_of(seed))
        assert again.cached >= 64
        again.check(seed)
        counters = served.counters()
        assert counters["partial_span_reuse"] > 0, counters

        for rank, answer in enumerate(engine.ranks.ask("prefill", tokens=[1] * 40, start=90, following=[1] * 39)):
            assert (answer["refused"], answer["free"]) == (f"shards-workspace-{rank}/hbm", WORKSPACE_BYTES)
            assert answer["needed"] == workspace_bytes(SHARDED, 130)

        engine.displace(seed, 8)
        third = engine.prefill(prompt_of(seed))
        assert served.counters()["onboard"] > counters["onboard"]
        assert third.cached >= 64
        boot_id = engine.engine.client.boot_id
        kill_and_wait(served.pid_of("daemon"))
        while len(third.answer) < OUTPUT:
            engine.decode(third)
        third.check(seed)
        engine.close_request(third)
        assert engine.engine.client.boot_id > boot_id
    finally:
        engine.close()
    served.reopen()
    served.wait_at_rest()
    assert held_workspace(served, 0) == 0


@pytest.mark.long
def test_pages_of_an_engine_with_a_killed_rank_come_back(served: Node, tmp_path: Path) -> None:
    engine = ProcessEngine(served.runtime_dir, "broken", tmp_path / "meeting")
    try:
        request = engine.prefill(prompt_of(61))
        victim = engine.ranks.processes[1]
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        with pytest.raises(PeerUnreachable, match="a rank of the engine is gone"):
            engine.decode(request)
    finally:
        engine.close()
    served.wait_at_rest()
