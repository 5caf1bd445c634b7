"""Engines that hang, fork, or stop reading: suspect, then held or killed, and nothing given back before its time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from nodes_support import (
    GROUP,
    SPAN,
    Node,
    node,
    open_of,
    prefill_engine,
    prefill_toml,
    run_request,
    says,
    script,
    tokens_of,
    wait_for,
)
from test_node_engine_death import ENGINE, settled

from kvmanager.clients import attached_engine
from kvmanager.clients.attach import Attachment, _TokenChannel
from kvmanager.errors import Suspect
from kvmanager.framing import readable
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_from_rpc

QUICK = "[fence]\naction = \"{}\"\nafter_ms = 600\nping_ms = 200\nsilence_ms = 400\n"
SPLIT_ENGINE = """
import os, sys, time
from pathlib import Path
from nodes_support import *
from kvmanager.clients.worker import connect_worker, WorkerGroup
from kvmanager.wire import pack_u64
runtime_dir, seed = Path(sys.argv[1]), int(sys.argv[2])
engine = prefill_engine(runtime_dir)
tokens = tokens_of(seed, 4 * SPAN)
opened = engine.open(open_of(1, tokens))
pages = device_pages(opened)
fill(engine, pages, seed)
ids = [rank.attach_id for rank in engine.workers.ranks]
def commit():
    fence = pb.Fence(attach_ids=pack_u64(ids), values=pack_u64([100] * len(ids)))
    engine.client.step(fence=fence, requests=[RequestStep(1, len(tokens), 2 * SPAN)])
"""
"""Opens and fills four spans; `commit()` names a fence that no word has reached yet."""


@pytest.fixture(scope="module", params=["hold", "kill"])
def quick(request, tmp_path_factory) -> Iterator[tuple[str, Node]]:
    """A node that fences after 0.6 s, with 64 pages."""
    name = f"fence-{request.param}"
    toml = QUICK.format(request.param)
    with node(tmp_path_factory.mktemp("f"), name, prefill_toml, pages=64, more=toml) as running:
        yield request.param, running


@pytest.fixture(scope="module")
def patient(tmp_path_factory) -> Iterator[Node]:
    """A node with the default fence."""
    with node(tmp_path_factory.mktemp("p"), "patient", prefill_toml, pages=64) as running:
        yield running


def only_engine(served: Node) -> pb.EngineStatus:
    (engine,) = served.admin.status().engines
    return engine


def narrow_channel(attachment: Attachment) -> grpc.Channel:
    """A channel on which few unread bytes are under way: what is not read waits in the daemon."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 64 << 10)]
    channel = grpc.insecure_channel(f"unix:{attachment.grpc_path}", options=options)
    return _TokenChannel(channel, attachment.token)


def cached_of(served: Node, seed: int, spans: int = 4) -> int:
    engine = prefill_engine(served.runtime_dir)
    cached = run_request(engine, 1, tokens_of(seed, spans * SPAN), seed)
    engine.close()
    served.wait_at_rest()
    return cached


def test_a_stopped_engine_is_killed_or_held_as_configured(quick: tuple[str, Node]) -> None:
    """Its stream is formally open; it answers no ping, so it becomes suspect without a word."""
    action, served = quick
    with script(ENGINE, str(served.runtime_dir), "1") as process:
        says(process, "holds")
        settled(served)
        held = served.held()[f"{GROUP}/hbm"]
        epoch = only_engine(served).epoch
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: f"engine engine epoch {epoch} stays suspect" in served.log(), served.log)
        if action == "kill":
            assert process.wait(20) == -signal.SIGKILL
            assert "killed pid " + str(process.pid) in served.log()
            served.wait_at_rest()
        else:
            time.sleep(0.7)
            engine = only_engine(served)
            assert (engine.state, engine.fence) == ("suspect", "hold")
            assert engine.held_by == f"pid {process.pid} lives"
            assert engine.suspect_ns > 600_000_000
            assert served.held()[f"{GROUP}/hbm"] == held
            process.kill()
            served.wait_at_rest()
    assert cached_of(served, 1) == 2 * SPAN


def test_an_engine_stopped_for_a_while_goes_on(quick: tuple[str, Node]) -> None:
    """Suspect, but awake before its time: its next message takes a new stream and it is trusted again."""
    _, served = quick
    code = ENGINE.replace(
        "print(sys.stdin.readline())", "sys.stdin.readline(); engine.step(); print('steps', flush=True)"
    )
    with script(code, str(served.runtime_dir), "2") as process:
        says(process, "holds")
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: only_engine(served).state == "suspect")
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        says(process, "steps")
        process.wait()
        served.wait_at_rest()


def test_an_idle_engine_answers_pings_and_is_never_thrown_out(quick: tuple[str, Node]) -> None:
    _, served = quick
    with script(ENGINE, str(served.runtime_dir), "3") as process:
        says(process, "holds")
        time.sleep(3.0)  # five times the time to be suspect, and fenced
        assert only_engine(served).state == "attached"
        assert process.poll() is None
    served.wait_at_rest()


def test_a_process_that_serves_a_newer_epoch_is_not_killed(quick: tuple[str, Node]) -> None:
    """It left an older epoch behind with its ranks attached; what that holds stays held."""
    action, served = quick
    older = prefill_engine(served.runtime_dir)
    older.open(open_of(1, tokens_of(4, SPAN)))
    newer = prefill_engine(served.runtime_dir)
    live = f"engine engine epoch {older.client.epoch} stays suspect, but its stream is live"
    wait_for(lambda: live in served.log())
    older.client._stream.break_off()
    held = f"engine engine epoch {older.client.epoch} stays suspect; its pages are held"
    wait_for(lambda: held in served.log())
    assert [engine.fence for engine in served.admin.status().engines if engine.state == "suspect"] == ["hold"]
    newer.step()
    if action == "kill":
        assert f"pid {os.getpid()} serves a newer epoch and is left alone" in served.log()
    older.close()
    newer.close()
    served.wait_at_rest()


def test_a_forked_child_counts_after_its_parent_died(patient: Node) -> None:
    """The engine forks and dies; the child holds the lifelines, so nothing is given back until it is dead too."""
    fork = "pid = os.fork()\nif pid == 0: time.sleep(600)\nprint('child', pid)\nprint(\"holds\""
    code = ENGINE.replace('print("holds"', fork)
    code = code.replace("import sys", "import os, sys", 1)
    with script(code, str(patient.runtime_dir), "5") as process:
        child = os.pidfd_open(int(says(process, "child")))
        try:
            says(process, "holds")
            settled(patient)
            held = patient.held()
            process.kill()
            process.wait()
            wait_for(lambda: only_engine(patient).state == "suspect")
            wait_for(lambda: "a child that it forked lives" in only_engine(patient).held_by)
            time.sleep(0.6)
            assert patient.held() == held
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            assert readable([child], 10)
            os.close(child)
        patient.wait_at_rest()
    assert cached_of(patient, 5) == 2 * SPAN


def test_a_forked_child_of_our_client_has_no_mapping_to_write_through(patient: Node) -> None:
    """The child that touches a region is ended by the kernel; no byte of the page changes."""
    touch = """
pid = os.fork()
if pid == 0:
    engine.workers.ranks[0].classes["kv"].device[:] = 255
    os._exit(0)
print("status", os.waitpid(pid, 0)[1], flush=True)
check_filled(engine, pages, seed)
print("holds\""""
    code = ENGINE.replace('print("holds"', touch).replace("import sys", "import os, sys", 1)
    with script(code, str(patient.runtime_dir), "6") as process:
        assert os.WTERMSIG(int(says(process, "status"))) == signal.SIGSEGV
        says(process, "holds")
    patient.wait_at_rest()
    assert cached_of(patient, 6) == 2 * SPAN


@pytest.mark.parametrize("raises", [0, 1, 2])
def test_a_writer_killed_around_its_words_store(patient: Node, raises: int) -> None:
    """Two ranks commit; the process dies when so many of them have raised their words. All or nothing is published."""
    seed = 10 + raises
    code = SPLIT_ENGINE + f"""
commit()
for rank in engine.workers.ranks[:{raises}]:
    rank.raise_timeline(100)
os.kill(os.getpid(), 9)
"""
    with script(code, str(patient.runtime_dir), str(seed)) as process:
        assert process.wait(30) == -signal.SIGKILL
        patient.wait_at_rest()
    assert cached_of(patient, seed) == (2 * SPAN if raises == 2 else 0)


def test_a_client_that_does_not_read_is_suspect(patient: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends steps and reads no reply: what waits for it is bounded, and it is told when it reads again."""
    monkeypatch.setattr(attached_engine, "grpc_channel", narrow_channel)
    engine = prefill_engine(patient.runtime_dir)
    client = engine.client
    over = threading.Event()
    fence = engine.workers.fence()
    closes = [pb.CloseRequest(request_id=number, reason=pb.FINISHED) for number in range(100)]  # of nothing: all fail
    sent, steps_before = 0, patient.counters()["step"]

    def steps() -> Iterator[pb.StepRequest]:
        nonlocal sent
        while not over.is_set():
            sent += 1
            yield pb.StepRequest(
                number=sent, boot_id=client.boot_id, epoch=client.epoch, fence=fence, close=closes
            )

    stream = client._engine_stub.Session(steps())
    try:
        wait_for(lambda: only_engine(patient).state == "suspect", lambda: f"{sent} steps")
    finally:
        over.set()
    read = []
    with pytest.raises(grpc.RpcError) as caught:
        read.extend(reply.number for reply in stream)
    error = error_from_rpc(caught.value)
    assert isinstance(error, Suspect)
    assert "were not read" in str(error)
    assert read == list(range(1, len(read) + 1)), "what was sent before came whole and in order"
    # The newest reply is stored: a resend on a new stream gets it, and the engine is trusted again.
    status = only_engine(patient)
    assert status.held_by == f"pid {os.getpid()} lives"
    newest = patient.counters()["step"] - steps_before
    again = pb.StepRequest(number=newest, boot_id=client.boot_id, epoch=client.epoch)
    read_it = threading.Event()

    def resend() -> Iterator[pb.StepRequest]:
        yield again
        read_it.wait()

    resent = client._engine_stub.Session(resend())
    assert next(resent).number > len(read)
    assert only_engine(patient).state == "attached"
    read_it.set()
    assert list(resent) == []
    engine.close()
    patient.wait_at_rest()
