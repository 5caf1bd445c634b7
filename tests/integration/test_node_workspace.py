"""A prefill engine whose ranks are threads, with their workspaces in memory of a real daemon."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mode_engine import ROWS, SHARDED, shards_toml
from nodes_support import Node, node, says, script, wait_for

from kvmanager.clients import prefill_engine
from kvmanager.clients.glm.lent_workspace import LentWorkspace
from kvmanager.clients.glm.workspace import TOKEN_BYTES, workspace_bytes
from kvmanager.clients.prefill_engine import PrefillEngine
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import PoolExhausted
from kvmanager.layout import workspace_group
from kvmanager.protos import kvmanager_pb2 as pb
from tests.glm_ranks import PROMPT, assert_rows, expected_answer, plain_model, plain_rows, the_prompt

PAGES, CHUNK = 24, 40
PAGE = ROWS * TOKEN_BYTES
WORKSPACE = -(-workspace_bytes(SHARDED, PROMPT) // PAGE) * PAGE
SESSION = pb.SessionHint(session_id="s")


serves = partial(
    shards_toml, pages=PAGES, host_pages=PAGES, lent_bytes=workspace_bytes(SHARDED, PROMPT)
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("workspace"), "prefill", serves) as running:
        yield running


def engine(runtime_dir: Path, name: str) -> PrefillEngine:
    return PrefillEngine(
        runtime_dir, name, group="shards", namespace=NAMESPACE, geometry=SHARDED, model=plain_model()
    )


def held(served: Node) -> list[int]:
    """Bytes of each rank's workspace that somebody has, by the node's account."""
    lines = [served.pools()[f"{workspace_group('shards', rank)}/hbm"][:6] for rank in range(SHARDED.ranks)]
    assert [sum(line) for line in lines] == [WORKSPACE] * SHARDED.ranks
    return [sum(line[1:]) for line in lines]


def test_a_step_takes_the_daemons_workspace_as_one_lease(served: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and the token of one rank, in three steps; a prompt that is too long is refused and costs nothing."""
    monkeypatch.setattr(prefill_engine, "CHUNK_TOKENS", CHUNK)
    first = engine(served.runtime_dir, "first")
    spaces = first._ranks._spaces
    assert held(served) == [WORKSPACE] * SHARDED.ranks
    for space in spaces:
        space._memory.fill_(0xFF)
    done = first.prefill(np.asarray(the_prompt()), SESSION, lambda _: None)
    assert done.first_token == expected_answer()[0]
    assert [space.leases for space in spaces] == [-(-PROMPT // CHUNK)] * SHARDED.ranks
    assert not any(space.held for space in spaces)
    assert all((space._memory != 0xFF).any() for space in spaces), "layers were gathered there"
    for rank, shard in enumerate(first._ranks.shards):
        assert rank == shard.rank
        assert_rows(shard, plain_rows(plain_model(), the_prompt()), shard.own_positions(PROMPT))

    before = served.pools()
    too_long = np.asarray([*the_prompt(), *range(SHARDED.span_tokens)])
    with pytest.raises(PoolExhausted, match=r"workspace on each rank .* bytes\)") as refused:
        first.prefill(too_long, SESSION, lambda _: None)
    assert refused.value.pool == "shards-workspace-0/hbm"
    assert refused.value.needed == -(-workspace_bytes(SHARDED, len(too_long)) // PAGE)
    assert refused.value.free == WORKSPACE // PAGE
    assert served.pools() == before

    again = first.prefill(np.asarray(the_prompt()), SESSION, lambda _: None)
    assert again.cached_tokens >= 64, "what was known still is"
    assert again.first_token == done.first_token
    with pytest.raises(PoolExhausted, match="first-workspace-1"):
        LentWorkspace(served.runtime_dir, workspace_group("shards", 1), "thief", 1, ROWS)
    first.close()
    wait_for(lambda: held(served) == [0] * SHARDED.ranks, lambda: str(served.pools()))


KILLED = """
import sys
from pathlib import Path
from test_node_workspace import SESSION, engine, the_prompt
import numpy as np
mine = engine(Path(sys.argv[1]), "killed")
space = mine._ranks._spaces[0]
space.lease(1)
print("holds", space.held, flush=True)
sys.stdin.read()
"""


def test_the_workspace_of_a_killed_engine_comes_back(served: Node) -> None:
    """In the middle of a step, as far as anybody can tell from outside."""
    with script(KILLED, str(served.runtime_dir)) as victim:
        assert says(victim, "holds") == "True"
        assert held(served) == [WORKSPACE] * SHARDED.ranks
        os.kill(victim.pid, signal.SIGKILL)
        wait_for(lambda: held(served) == [0] * SHARDED.ranks, lambda: str(served.pools()))
    second = engine(served.runtime_dir, "second")
    done = second.prefill(np.asarray(the_prompt()), SESSION, lambda _: None)
    assert done.first_token == expected_answer()[0]
    second.close()
