"""PCP x DCP ranks on a GPU node: shards and workspaces in the daemon's HBM, gathers there, by threads and over NCCL.

The model computes on the CPU in float64, so that its tokens are the reference's or something is wrong with the rows.
A node has one device: rank processes share its GPU's memory, and each exchanges on a GPU of its own where there are as
many as ranks. On a machine with one GPU both use it, which NCCL takes for two machines.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from mode_engine import RANKS, SHARDED, prompt_of
from nodes_support import node, wait_for
from process_engine import ProcessEngine
from test_node_rank_processes import serves as rank_processes
from test_node_workspace import SESSION, WORKSPACE, engine, held
from test_node_workspace import serves as rank_threads

from tests.glm_ranks import PROMPT, assert_rows, expected_answer, plain_model, plain_rows, the_prompt

pytestmark = pytest.mark.gpu


def test_thread_ranks_gather_into_hbm_that_the_daemon_lends(tmp_path: Path) -> None:
    with node(tmp_path, "prefill", rank_threads, device="cuda:0") as served:
        began = time.monotonic()
        mine = engine(served.runtime_dir, "threads")
        spaces = mine._ranks._spaces
        print(f"workspaces on {[str(space.device) for space in spaces]}, held {held(served)}", file=sys.stderr)
        assert {space.device.type for space in spaces} == {"cuda"}
        assert held(served) == [WORKSPACE] * SHARDED.ranks
        for space in spaces:
            space._memory.fill_(0xFF)
        done = mine.prefill(np.asarray(the_prompt()), SESSION, lambda _: None)
        print(f"first token {done.first_token}, in {time.monotonic() - began:.1f} s with attaching", file=sys.stderr)
        assert done.first_token == expected_answer()[0]
        assert [space.leases for space in spaces] == [1] * SHARDED.ranks
        assert all(bool((space._memory != 0xFF).any()) for space in spaces), "layers were gathered there"
        for shard in mine._ranks.shards:
            assert_rows(shard, plain_rows(plain_model(), the_prompt()), shard.own_positions(PROMPT))
        again = mine.prefill(np.asarray(the_prompt()), SESSION, lambda _: None)
        assert (again.first_token, again.cached_tokens >= 64) == (done.first_token, True)
        mine.close()
        wait_for(lambda: held(served) == [0] * SHARDED.ranks, lambda: str(served.pools()))


def test_rank_processes_over_nccl_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    print(f"{torch.cuda.device_count()} GPUs, NCCL {torch.cuda.nccl.version()}", file=sys.stderr)
    with node(tmp_path, "prefill", rank_processes, device="cuda:0") as served:
        began = time.monotonic()
        mine = ProcessEngine(served.runtime_dir, "processes", tmp_path / "meeting", "nccl")
        try:
            print(f"ranks began in {time.monotonic() - began:.1f} s: {mine.ranks.began}", file=sys.stderr)
            assert [said["workspace"] for said in mine.ranks.began] == ["cuda:0"] * RANKS
            assert [said["shard"] for said in mine.ranks.began] == ["cuda:0"] * RANKS
            began = time.monotonic()
            first = mine.answer(prompt_of(60))
            print(f"answered in {time.monotonic() - began:.1f} s: {first.answer}", file=sys.stderr)
            assert first.cached == 0
            first.check(60)
            again = mine.answer(prompt_of(60))
            assert again.cached >= 64
            again.check(60)
        finally:
            mine.close()
        served.wait_at_rest()
