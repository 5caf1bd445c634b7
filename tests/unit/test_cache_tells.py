"""Lease calls that nobody waits for, and several with one write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmanager.clients.callline import UNREAD_MOST
from kvmanager.clients.leases import Lease, LeaseCalls
from kvmanager.errors import StaleBoot, UnknownLease
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import error_to_proto
from tests.calldaemon import WAIT_S, Daemon, attachment, calls_of, serving, tokens_told


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with serving(tmp_path) as served:
        yield served


def test_who_tells_does_not_wait_and_answers_keep_their_order(daemon: Daemon) -> None:
    go_on = threading.Event()
    heard: list[int] = []

    def slow(call: pb.CacheCall) -> pb.CacheAnswer:
        if call.WhichOneof("what") != "done":
            return tokens_told(call)
        go_on.wait(WAIT_S)
        heard.append(call.done.lease_id)
        return pb.CacheAnswer(done=pb.DoneReply())

    daemon.answered = slow
    calls = calls_of(daemon)
    for lease in range(3):
        calls.release(lease)
    assert heard == []
    go_on.set()
    assert calls.lookup(b"", 5) == 5, "the answers before it are not its own"
    for lease in range(3, 3 * UNREAD_MOST):
        calls.release(lease)
    calls.settle()
    assert heard == list(range(3 * UNREAD_MOST))


def test_a_refusal_that_nobody_waits_for_is_logged_and_fails_no_other_call(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    calls = calls_of(daemon)
    daemon.answered = lambda _call: pb.CacheAnswer(error=error_to_proto(UnknownLease("it ended")))
    calls.release(1)
    calls.settle()
    assert "it ended" in caplog.text
    daemon.answered = tokens_told
    assert calls.lookup(b"", 2) == 2


@pytest.mark.parametrize("refused", [False, True], ids=["never heard", "of another boot"])
def test_what_was_told_is_told_again_to_the_daemon_after(daemon: Daemon, refused: bool) -> None:
    """One that ended before it heard, or one that heard and was not the daemon that the client knew."""
    boots: list[int] = []
    client: Any = SimpleNamespace(boot_id=1, epoch=1)
    calls = LeaseCalls(attachment(daemon), client, 30.0)
    daemon.clients.append(calls)
    assert calls.lookup(b"", 1) == 1

    def answered(call: pb.CacheCall) -> pb.CacheAnswer:
        if call.WhichOneof("what") != "done":
            return tokens_told(call)
        boots.append(call.done.boot_id)
        if call.done.boot_id == 1:
            return pb.CacheAnswer(error=error_to_proto(StaleBoot("attach again")))
        return pb.CacheAnswer(done=pb.DoneReply())

    daemon.answered = answered
    if refused:
        calls.release(5)
        calls.settle()
        client.boot_id = 2
    else:
        calls.release(5)
        daemon.stop()
        client.boot_id = 2
        daemon.start()
    assert calls.lookup(b"", 2) == 2
    calls.settle()
    assert boots[-1] == 2


def test_a_commit_and_the_next_reserve_go_together(daemon: Daemon) -> None:
    asked: list[str] = []
    fails: set[str] = set()

    def answered(call: pb.CacheCall) -> pb.CacheAnswer:
        step = str(call.store.WhichOneof("step"))
        asked.append(step)
        if step in fails:
            return pb.CacheAnswer(error=error_to_proto(UnknownLease(f"no {step}")))
        return pb.CacheAnswer(store=pb.StoreReply(tokens=7 if step == "reserve" else 0))

    daemon.answered = answered
    calls = calls_of(daemon)

    def both() -> Lease:
        return calls.commit_and_reserve(1, pb.Fence(), calls.questions.reserve(2, b""))

    assert both().tokens == 7
    assert asked == ["commit", "reserve"]
    fails.add("reserve")
    with pytest.raises(UnknownLease, match="no reserve"):
        both()
    assert asked[2:] == ["commit", "reserve"]
    fails.add("commit")
    with pytest.raises(UnknownLease, match="no commit"):
        both()
    fails.remove("reserve")
    with pytest.raises(UnknownLease, match="no commit"):
        both()
    calls.settle()
    assert asked[6:] == ["commit", "reserve", "abort"], "pages that nobody was told of are given back"
