"""Engines that die, hang or idle: what they held comes back when nothing of them can touch memory, and not before."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from nodes_support import (
    GROUP,
    SPAN,
    Node,
    kill_and_wait,
    node,
    prefill_engine,
    prefill_toml,
    run_request,
    says,
    script,
    tokens_of,
    wait_for,
)

from kvmanager.framing import readable

ENGINE = """
import sys, time
from pathlib import Path
from nodes_support import *
engine = prefill_engine(Path(sys.argv[1]))
seed = int(sys.argv[2])
tokens = tokens_of(seed, 4 * SPAN)
opened = engine.open(open_of(1, tokens))
pages = device_pages(opened)
fill(engine, pages, seed)
engine.step([RequestStep(1, len(tokens), 2 * SPAN)])   # two spans committed and fenced
print("holds", flush=True)
print(sys.stdin.readline())
"""
"""Opens four spans, commits two of them, and waits."""

COMMITS_UNFENCED = ENGINE.replace("print(\"holds\"", """
class Late:
    attach_ids = [rank.attach_id for rank in engine.workers.ranks]
fence = pb.Fence(attach_ids=pack_u64(Late.attach_ids), values=pack_u64([1 << 40] * len(Late.attach_ids)))
engine.client.step(fence=fence, requests=[RequestStep(1, len(tokens), len(tokens))])  # all committed, never fenced
print("holds\"""").replace("import sys, time", "import sys, time\nfrom kvmanager.wire import pack_u64")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("death"), "prefill", prefill_toml, pages=64) as running:
        yield running


def settled(served: Node) -> None:
    """Waits until no copy is on its way: what is held then is held by engines."""
    wait_for(lambda: served.held()[f"{GROUP}/host"][1] == 0 and not served.admin.status().movers[0].outstanding)


def cached_of(served: Node, seed: int) -> int:
    """Tokens of the dead engine's prompt that a new engine finds; their bytes are checked."""
    engine = prefill_engine(served.runtime_dir)
    cached = run_request(engine, 1, tokens_of(seed, 4 * SPAN), seed)
    engine.close()
    served.wait_at_rest()
    return cached


def test_a_killed_engine_leaves_what_it_had_committed_and_nothing_else(served: Node) -> None:
    with script(ENGINE, str(served.runtime_dir), "1") as process:
        says(process, "holds")
        assert served.held()[f"{GROUP}/hbm"][-2] > 0, "pinned"
        process.kill()
        served.wait_at_rest()
        assert list(served.admin.status().engines) == []
        assert list(served.admin.requests().requests) == []
    assert cached_of(served, 1) == 2 * SPAN


def test_commits_whose_fence_never_passed_are_dropped(served: Node) -> None:
    with script(COMMITS_UNFENCED, str(served.runtime_dir), "2") as process:
        says(process, "holds")
        process.kill()
        served.wait_at_rest()
    assert cached_of(served, 2) == 2 * SPAN


def test_a_stopped_engine_keeps_its_pages_until_it_is_dead(served: Node) -> None:
    with script(ENGINE, str(served.runtime_dir), "3") as process:
        says(process, "holds")
        settled(served)
        held = served.held()
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)  # two ticks
        assert served.held() == held
        newer = prefill_engine(served.runtime_dir)  # the name is free to take, the pages are not
        states = {engine.epoch: engine for engine in served.admin.status().engines}
        assert states[newer.client.epoch - 1].state == "suspect"
        assert served.held() == held
        # The prefix it has committed serves others meanwhile.
        assert run_request(newer, 1, tokens_of(3, 3 * SPAN), seed=3) == 2 * SPAN
        newer.close()
        settled(served)
        assert served.held()[f"{GROUP}/hbm"] == held[f"{GROUP}/hbm"]
        process.kill()
        served.wait_at_rest()
    assert cached_of(served, 3) == 3 * SPAN


def test_a_broken_stream_gives_nothing_back_while_the_process_lives(served: Node) -> None:
    code = ENGINE.replace('print("holds"', 'engine.client._stream.break_off(); print("holds"')
    with script(code, str(served.runtime_dir), "4") as process:
        says(process, "holds")
        wait_for(lambda: served.admin.status().engines[0].state == "suspect")
        settled(served)
        held = served.held()
        assert held[f"{GROUP}/hbm"][-2] > 0
        time.sleep(1.2)
        assert served.held() == held
        process.kill()
        served.wait_at_rest()
    assert cached_of(served, 4) == 2 * SPAN


def test_a_closed_attach_connection_makes_suspect_only(served: Node) -> None:
    code = ENGINE.replace(
        'print("holds"', 'engine.workers.ranks[1]._attachment._channel.shutdown(2); print("holds"'
    )
    with script(code, str(served.runtime_dir), "5") as process:
        says(process, "holds")
        wait_for(lambda: served.admin.status().engines[0].state == "suspect")
        assert served.held()[f"{GROUP}/hbm"][-2] > 0
        process.kill()
        served.wait_at_rest()


def test_an_idle_engine_is_left_alone(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    engine.step()
    time.sleep(2.0)
    (seen,) = served.admin.status().engines
    assert (seen.state, seen.ranks_attached) == ("attached", 2)
    assert run_request(engine, 1, tokens_of(6, SPAN), seed=6) == 0
    engine.close()
    served.wait_at_rest()


def test_a_child_that_inherited_the_sockets_keeps_nothing_alive(served: Node) -> None:
    """The pidfd is the engine's: its child may hold the sockets open, but the kernel says who is dead."""
    code = ENGINE.replace(
        'print("holds"',
        """
import os, subprocess
from kvmanager.framing import readable
from contextlib import suppress
sockets = []
for fd in os.listdir("/proc/self/fd"):
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            os.set_inheritable(int(fd), True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
print("child", child.pid, flush=True)
print("holds\"""",
    )
    with script(code, str(served.runtime_dir), "7") as process:
        child = int(says(process, "child"))
        pidfd = os.pidfd_open(child)
        try:
            says(process, "holds")
            process.kill()
            process.wait()
            served.wait_at_rest()
        finally:
            os.kill(child, signal.SIGKILL)
            assert readable([pidfd], 10)
            os.close(pidfd)
    assert cached_of(served, 7) == 2 * SPAN


def test_an_engine_that_dies_while_it_registers_or_attaches_leaves_nothing(served: Node) -> None:
    """Killed at any point of its start."""
    for delay_ms in (0, 2, 4, 6, 8, 12, 16, 24):
        code = ENGINE.replace("engine = prefill_engine", 'print("starts", flush=True)\nengine = prefill_engine')
        with script(code, str(served.runtime_dir), "8") as process:
            says(process, "starts")
            time.sleep(delay_ms / 1000)
            process.kill()
            process.wait()
            wait_for(lambda: not served.admin.status().engines, lambda: str(served.admin.status().engines))
            served.wait_at_rest()
    assert cached_of(served, 8) in (0, 2 * SPAN)


def test_timeline_words_of_dead_ranks_are_given_again(served: Node) -> None:
    """Also by the daemon that comes after one that was killed while a rank lived; never those of a living rank."""
    words = 'print("words", [rank._word for rank in engine.workers.ranks]); print("holds"'
    code = ENGINE.replace('print("holds"', words)
    first = prefill_engine(served.runtime_dir)
    first.close()  # this process lives on
    ours = {rank._word for rank in first.workers.ranks}
    seen = []
    for number in range(4):
        with script(code, str(served.runtime_dir), "40") as process:
            seen.append(says(process, "words"))
            says(process, "holds")
            if number == 2:
                kill_and_wait(served.pid_of("daemon"))
                served.reopen()
            process.kill()
            process.wait()
            served.wait_at_rest()
            wait_for(lambda: list(served.admin.status().engines) == [])
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert ours.isdisjoint(json.loads(seen[0]))


def test_letting_go_of_a_dead_client_blocks_nobody(served: Node) -> None:
    """The keeper does not answer: pages return and operators are served before the daemon gives it up."""
    with script(ENGINE, str(served.runtime_dir), "41") as process:
        says(process, "holds")
        given_up = served.log().count("the keeper is gone")
        os.kill(served.process.pid, signal.SIGSTOP)
        try:
            process.kill()
            process.wait()
            wait_for(lambda: list(served.admin.status().engines) == [])
            served.wait_at_rest()
            assert served.log().count("the keeper is gone") == given_up
        finally:
            os.kill(served.process.pid, signal.SIGCONT)
    assert cached_of(served, 41) == 2 * SPAN
