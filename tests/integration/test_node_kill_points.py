"""Kill points of clients and of hand-offs, each passed for real: who dies there costs nobody else a byte."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from nodes_support import (
    SPAN,
    WAIT_S,
    Node,
    decode_engine,
    decode_toml,
    device_pages,
    fill,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    script,
    tokens_of,
    wait_for,
)

from kvmanager.clients.engine import RequestStep
from kvmanager.errors import KVError
from kvmanager.killpoints import VARIABLE as KILL_AT
from kvmanager.protos import kvmanager_pb2 as pb

ENGINE = """
import sys
from pathlib import Path
from nodes_support import SPAN, prefill_engine, run_request, tokens_of
engine = prefill_engine(Path(sys.argv[1]), "victim")
for number in range(100):
    run_request(engine, number, tokens_of(number % 4, 5 * SPAN), number % 4)
"""


def test_an_engine_killed_at_its_points_leaves_the_node_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduler and workers are one process here; what it had published stays, with the right bytes."""
    with node(tmp_path, "prefill", prefill_toml) as running:
        for point in (
            "engine.step.before_send:5", "engine.step.after_send:5",
            "worker.timeline.before_raise:8", "worker.timeline.after_raise:11",
        ):  # fmt: skip
            monkeypatch.setenv(KILL_AT, point)
            with script(ENGINE, str(running.runtime_dir)) as victim:
                assert victim.wait(WAIT_S) == -signal.SIGKILL, point
            wait_for(lambda: all(engine.state == "gone" for engine in running.admin.status().engines))
            running.wait_at_rest()
        engine = prefill_engine(running.runtime_dir)
        hits = [run_request(engine, number, tokens_of(number, 5 * SPAN), number) for number in range(4)]
        assert any(hits)
        engine.close()
        running.wait_at_rest()


def hand_off(source: Node, target: Node, seed: int) -> None:
    """A request that is prefilled at the source and pulled by the target; raises whatever went wrong."""
    tokens = tokens_of(seed, 4 * SPAN)
    with contextlib.ExitStack() as stack:
        prefill = prefill_engine(source.runtime_dir)
        stack.callback(prefill.close)
        pages = device_pages(prefill.open(open_of(1, tokens, growth=0)))
        fill(prefill, pages, seed)
        prefill.step([RequestStep(1, len(tokens), len(tokens))])
        ticket = prefill.client.export(1)
        prefill.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
        decode = decode_engine(target.runtime_dir)
        stack.callback(decode.close)
        opened = decode.open(open_of(1, tokens, ticket=ticket))
        assert opened.cached_tokens == len(tokens)
        decode.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "side"),
    [
        ("daemon.ticket.exported:1", "source"),
        ("daemon.pull.begun:1", "target"),
        ("mover.pull.chunk_read:1", "target"),
        ("mover.pull.chunk_placed:1", "target"),
        ("mover.pull.ended:1", "target"),
    ],
)
def test_a_hand_off_that_dies_at_a_point_works_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, side: str
) -> None:
    with contextlib.ExitStack() as stack:
        nodes = {}
        for name, toml in (("source", prefill_toml), ("target", decode_toml)):
            if name == side:
                monkeypatch.setenv(KILL_AT, point)
            else:
                monkeypatch.delenv(KILL_AT, raising=False)
            # A dead target's ticket ends with its lease.
            options = {"lease": "ticket_ttl_ms = 800\ngrace_ms = 100"} if name == "source" else {}
            nodes[name] = stack.enter_context(node(tmp_path, name, toml, **options))
        # A daemon that comes back goes on, so this may work or not; what arrives is right in any case.
        with contextlib.suppress(KVError):
            hand_off(nodes["source"], nodes["target"], seed=1)
        victim = "daemon" if point.startswith("daemon") else "mover-cpu"
        wait_for(lambda: f"the {victim} ended with -9" in nodes[side].log())
        nodes[side].reopen()
        wait_for(lambda: nodes[side].admin.status().movers[0].pid != 0)
        hand_off(nodes["source"], nodes["target"], seed=2)
        for running in nodes.values():
            running.wait_at_rest()
