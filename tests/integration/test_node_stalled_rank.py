"""A rank's process that is stopped while its scheduler lives: noticed by its timeline, then held or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from nodes_support import (
    GROUP,
    LAYOUT,
    RANKS,
    SPAN,
    Node,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    says,
    script,
    tokens_of,
    wait_for,
)

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.clients.engine import EngineClient, RequestStep
from kvmanager.clients.worker import connect_worker
from kvmanager.demo.nodes import NAMESPACE
from kvmanager.errors import Suspect
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import pack_u64

STALL = '[fence]\naction = "{}"\nafter_ms = 600\nstall_ms = 500\n'
RANK = """
import sys
from pathlib import Path
from kvmanager.clients.worker import connect_worker
rank = connect_worker(Path(sys.argv[1]), "engine", int(sys.argv[2]), 1)
print("attached", rank.attach_id, flush=True)
for line in sys.stdin:
    if line.strip() == "leave":
        rank.detach()
        break
    rank.raise_timeline(int(line))
rank.close()
"""
"""Rank 1 in a process of its own, which raises its word to each number that it reads."""


class SplitEngine:
    """Scheduler and rank 0 in this process, rank 1 in another one."""

    def __init__(self, served: Node, process: subprocess.Popen[str], client: EngineClient) -> None:
        self.process, self.client, self.value = process, client, 0
        self.rank = connect_worker(served.runtime_dir, "engine", client.epoch, 0)
        self._ids = [self.rank.attach_id, int(says(process, "attached"))]

    def tell(self, word: object) -> None:
        """To rank 1."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def step(self, requests: list[RequestStep] = [], **parts: object) -> None:  # noqa: B006
        """A message whose fence both ranks reach, if they can."""
        self.value += 1
        self.rank.raise_timeline(self.value)
        self.tell(self.value)
        fence = pb.Fence(attach_ids=pack_u64(self._ids), values=pack_u64([self.value] * RANKS))
        self.client.step(fence=fence, requests=requests, **parts)  # type: ignore[arg-type]


@contextmanager
def split_engine(served: Node) -> Iterator[SplitEngine]:
    attachment = attach(served.runtime_dir, "engine", "engine")
    channel = grpc_channel(attachment)
    client = EngineClient(
        channel, attachment=attachment, engine="engine", group=GROUP, namespace=NAMESPACE,
        layout_fingerprints=[LAYOUT.fingerprint], ranks=RANKS,
    )  # fmt: skip
    with script(RANK, str(served.runtime_dir), str(client.epoch)) as process:
        engine = SplitEngine(served, process, client)
        try:
            yield engine
        finally:
            engine.rank.detach()
            engine.rank.close()
            client.close()
            channel.close()
            attachment.close()


@pytest.fixture(params=["hold", "kill"])
def served(request, tmp_path) -> Iterator[tuple[str, Node]]:
    toml = STALL.format(request.param)
    with node(tmp_path, "node", prefill_toml, pages=64, more=toml) as running:
        yield request.param, running


def engine_of(served: Node) -> pb.EngineStatus:
    (engine,) = served.admin.status().engines
    return engine


def test_a_stopped_rank_behind_a_live_scheduler(served: tuple[str, Node]) -> None:
    action, running = served
    with split_engine(running) as engine:
        engine.step()
        engine.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert engine_of(running).state == "attached", "it is idle: nothing waits for it"
        tokens = tokens_of(1, 4 * SPAN)
        engine.client.step(opens=[open_of(1, tokens, growth=0)])
        engine.step([RequestStep(1, len(tokens), 2 * SPAN)])
        wait_for(lambda: engine_of(running).state == "suspect")
        assert engine_of(running).held_by == f"pid {engine.process.pid} stands still while work waits for it"
        held = running.held()[f"{GROUP}/hbm"]
        with pytest.raises(Suspect, match="rank 1 of engine 'engine' has not moved"):
            engine.client.step()
        if action == "kill":
            assert engine.process.wait(20) == -signal.SIGKILL
            assert f"killed pid {engine.process.pid}" in running.log()
            assert f"killed pid {os.getpid()}" not in running.log(), "the scheduler lives"
            wait_for(lambda: engine_of(running).ranks_attached == 1)
        else:
            wait_for(lambda: engine_of(running).fence == "hold")
            time.sleep(0.7)
            assert running.held()[f"{GROUP}/hbm"] == held
            engine.process.send_signal(signal.SIGCONT)
            wait_for(lambda: "stands still" not in engine_of(running).held_by)
            engine.client.step()  # on a new stream
            assert engine_of(running).state == "attached"
            engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
            engine.tell("leave")
            assert engine.process.wait(20) == 0
    running.wait_at_rest()
    again = prefill_engine(running.runtime_dir)
    found = again.open(open_of(1, tokens_of(1, 4 * SPAN), growth=0)).cached_tokens
    again.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
    again.close()
    assert found == (2 * SPAN if action == "hold" else 0), "what was never fenced is not published"

