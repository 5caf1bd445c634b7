"""Movers and daemons that die under load, and the orderly end: what the keeper restarts, what clients see."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from nodes_support import (
    SPAN,
    Node,
    kill_and_wait,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    rotate,
    run_request,
    tokens_of,
    wait_for,
)

from kvmanager.clients.engine import RequestStep
from kvmanager.clients.sessionstream import StreamEnd
from kvmanager.errors import KVError
from kvmanager.protos import kvmanager_pb2 as pb


@pytest.fixture
def served(tmp_path):
    with node(tmp_path, "prefill", prefill_toml) as running:
        yield running


def test_a_killed_mover_comes_back_and_moves_the_right_bytes(served: Node) -> None:
    rotate(served, [1, 2, 3])
    # Write-back that gave way to a refused request is taken up again with time: 3 prompts of 5 spans in the end.
    wait_for(lambda: served.counters()["offload"] >= 15, lambda: str(served.counters()))
    before = served.counters()
    assert before["onboard"] > 0
    first = served.admin.status().movers[0]
    kill_and_wait(first.pid)
    wait_for(lambda: served.admin.status().movers[0].pid not in (0, first.pid))
    assert served.admin.status().movers[0].incarnation != first.incarnation
    served.wait_at_rest()
    rotate(served, [1, 2, 3, 4])
    after = served.counters()
    assert after["onboard"] > before["onboard"]
    assert after["offload"] > before["offload"]
    assert after["failed_plan"] == before["failed_plan"] == 0, "nothing was in flight"


def test_a_mover_killed_again_and_again_while_it_copies_costs_no_byte(served: Node) -> None:
    """Onboards that die are refused or recomputed; what is hit afterwards is right (`run_request` checks it)."""
    engine = prefill_engine(served.runtime_dir)
    stop = threading.Event()
    killed = []

    def kill() -> None:
        while not stop.wait(0.3):
            pid = served.admin.status().movers[0].pid
            if pid and len(killed) < 4:  # the keeper restarts a child five times a minute
                kill_and_wait(pid)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    refused = []
    try:
        for number in range(500):
            seed = number % 5
            try:
                run_request(engine, number, tokens_of(seed, 5 * SPAN), seed)
            except KVError as error:  # a typed answer; the request is not open
                refused.append(error)
            if len(killed) == 4 and number > 30:
                break
    finally:
        stop.set()
        killer.join()
    assert len(set(killed)) == 4
    wait_for(lambda: served.admin.status().movers[0].pid not in (0, *killed))
    for number in range(1000, 1010):
        run_request(engine, number, tokens_of(number % 5, 5 * SPAN), number % 5)
    engine.close()
    served.wait_at_rest()
    assert served.counters()["quarantined_copy"] == 0, "the death of a mover leaves no copy of unknown fate"


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    """The keeper's children."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_sigterm_tells_engines_waits_for_them_and_leaves_nothing_behind(served: Node) -> None:
    engine = prefill_engine(served.runtime_dir)
    tokens = tokens_of(1, SPAN)
    engine.open(open_of(1, tokens))
    keeper = served.process._process
    shared = set(os.listdir("/dev/shm"))
    children = children_of(keeper)
    assert len(children) == 2
    keeper.send_signal(signal.SIGTERM)
    wait_for(lambda: bool(engine.client.draining))
    assert "told to stop" in engine.client.draining
    # What runs may go on; what is new is refused, in the same message too.
    result = engine.client.step(
        fence=engine.workers.fence(),
        requests=[RequestStep(1, len(tokens), len(tokens))],
        opens=[open_of(2, tokens)],
    )
    assert result.opened[2].state == pb.OpenReply.REFUSED
    assert result.opened[2].error.reason == pb.DRAINING
    assert not result.errors
    with pytest.raises(KVError, match="drains"):
        prefill_engine(served.runtime_dir, "late")
    engine.step(closes=[pb.CloseRequest(request_id=1, reason=pb.FINISHED)])
    assert keeper.wait(10) == 0
    for pid in children:
        assert not Path(f"/proc/{pid}").exists()
    assert set(os.listdir("/dev/shm")) <= shared
    assert [path.name for path in served.runtime_dir.iterdir()] == ["history"]
    with pytest.raises(KVError):
        engine.close()


def test_sigterm_with_an_engine_that_does_not_listen(tmp_path) -> None:
    """No request is open, so nothing is waited for: streams end in order."""
    with node(tmp_path, "prefill", prefill_toml) as running:
        engine = prefill_engine(running.runtime_dir)
        engine.step()
        keeper = running.process._process
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(10) == 0
        engine.client._stream._thread.join(5)
        assert engine.client._stream.end == StreamEnd()
        with pytest.raises(KVError):
            engine.close()


def test_a_broken_invariant_stops_the_daemon_and_the_keeper_starts_another(tmp_path, monkeypatch) -> None:
    """Everybody who waits for the core is answered, so the process ends (77) instead of hanging."""
    crash = tmp_path / "crash"
    hook = tmp_path / "sitecustomize.py"
    hook.write_text(
        "import sys\n"
        "if 'kvmanager.daemon' in ' '.join(sys.orig_argv):\n"
        "    import os\n"
        "    from kvmanager.core import node\n"
        "    apply = node.Node.apply\n"
        "    def broken(self, event, now):\n"
        f"        if type(event).__name__ == 'Step' and os.path.exists({str(crash)!r}):\n"
        f"            os.unlink({str(crash)!r})\n"
        "            raise AssertionError('the story of page 7')\n"
        "        return apply(self, event, now)\n"
        "    node.Node.apply = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with node(tmp_path, "prefill", prefill_toml) as running:
        engine = prefill_engine(running.runtime_dir)
        engine.step()
        crash.touch()
        engine.step()  # the event that broke it is not in the journal, and comes again
        wait_for(lambda: running.log().count("started the daemon") == 2)
        assert "the daemon ended with 77" in running.log()
        assert "the story of page 7" in running.log()
        running.reopen()
        engine.close()
        rotate(running, [1])
