"""The connector's line to the daemon: what a break means for calls that wait, and for those that must be heard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvmanager.clients.vllm import link as module
from kvmanager.clients.vllm.settings import Settings
from kvmanager.errors import InvalidArgument, KVError, NotReady, StaleBoot, StaleEpoch, VersionMismatch
from kvmanager.protos import kvmanager_pb2 as pb


class FakeDaemon:
    """Stands for all connections. `gone`: nobody answers. `cold`: the next one knows nothing of us."""

    def __init__(self) -> None:
        self.gone = False
        self.cold = False
        self.refuses: KVError | None = None
        self.asked = 0
        self.epochs = 0
        self.heard: list[str] = []
        self.broken_calls = 0

    def connect(self, *_: object) -> FakeConnection:
        if self.gone:
            raise NotReady("no daemon")
        self.asked += 1
        if self.refuses is not None:
            raise self.refuses
        self.cold = False
        self.epochs += 1
        return FakeConnection(self, self.epochs)


class FakeConnection:
    def __init__(self, daemon: FakeDaemon, epoch: int) -> None:
        self._daemon = daemon
        self.client = type("Client", (), {"epoch": epoch, "checksum_one_in": 0, "namespace": pb.Namespace()})()
        self.calls = self.questions = self

    def reads(self, _heard: object) -> FakeConnection:
        return self

    broken = False

    def hang_up(self) -> None: ...

    def look(self) -> None:
        if self._daemon.gone:
            raise NotReady("no daemon")
        if self._daemon.cold:
            raise StaleBoot("unknown")

    def say(self, what: str) -> str:
        if self._daemon.gone:
            raise NotReady("no daemon")
        if self._daemon.broken_calls:
            self._daemon.broken_calls -= 1
            raise StaleBoot("another boot")
        self._daemon.heard.append(what)
        return what

    def close(self) -> None: ...


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    made = FakeDaemon()
    monkeypatch.setattr(module, "_Connection", made.connect)
    return made


@pytest.fixture
def line(daemon: FakeDaemon) -> Iterator[module.Link]:
    assert daemon.epochs == 0
    settings = Settings(Path("/nowhere"), "g", "e")
    made = module.Link(settings, pb.Namespace(), "print", 1)
    wait(lambda: made.up)
    yield made
    made.close()
    assert not any(thread.name == "kvmanager-link" for thread in threading.enumerate())


def wait(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_a_call_is_answered(line: module.Link, daemon: FakeDaemon) -> None:
    assert line.epoch == 1
    assert line.ask(lambda calls: calls.say("a")).result(timeout=20) == "a"  # type: ignore[attr-defined]
    assert daemon.heard == ["a"]


def test_while_the_daemon_is_away_questions_fail_and_ends_are_kept(line: module.Link, daemon: FakeDaemon) -> None:
    daemon.gone = True
    with pytest.raises(NotReady):
        line.ask(lambda calls: calls.say("lost")).result(timeout=20)  # type: ignore[attr-defined]
    wait(lambda: not line.up)
    with pytest.raises(NotReady):
        line.ask(lambda calls: calls.say("lost")).result(timeout=0)  # type: ignore[attr-defined]
    ends = [line.tell(lambda calls, n=n: calls.say(f"end {n}")) for n in range(3)]  # type: ignore[attr-defined]
    daemon.gone = False
    assert [end.result(timeout=20) for end in ends] == ["end 0", "end 1", "end 2"]
    assert (line.epoch, daemon.heard) == (1, ["end 0", "end 1", "end 2"])


def test_a_replaced_daemon_that_knows_us_keeps_the_epoch(line: module.Link, daemon: FakeDaemon) -> None:
    daemon.broken_calls = 1
    assert line.tell(lambda calls: calls.say("end")).result(timeout=20) == "end"  # type: ignore[attr-defined]
    assert line.epoch == 1


def test_a_cold_daemon_is_a_new_epoch_and_old_ends_are_over(line: module.Link, daemon: FakeDaemon) -> None:
    daemon.gone = daemon.cold = True
    wait(lambda: not line.up)
    end = line.tell(lambda calls: calls.say("end"))  # type: ignore[attr-defined]
    daemon.gone = False
    with pytest.raises(StaleEpoch):
        end.result(timeout=20)
    wait(lambda: line.up)
    assert line.epoch == 2
    assert daemon.heard == []


def test_a_refusal_is_the_callers_and_the_line_goes_on(line: module.Link) -> None:
    def refused(_calls: object) -> None:
        raise InvalidArgument("no")

    with pytest.raises(InvalidArgument):
        line.ask(refused).result(timeout=20)
    assert line.up
    assert line.ask(lambda calls: calls.say("b")).result(timeout=20) == "b"  # type: ignore[attr-defined]


def test_a_daemon_of_another_version_is_said_once_and_tried_again(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "REFUSED_RETRY_S", 0.01)
    daemon.refuses = VersionMismatch("the client is kvmanager 0.0.9, older than this daemon, 0.1.0")
    line = module.Link(Settings(Path("/nowhere"), "g", "e"), pb.Namespace(), "print", 1, "[[group]]")
    try:
        wait(lambda: daemon.asked >= 3)
        assert not line.up
        with pytest.raises(NotReady):
            line.ask(lambda calls: calls.say("anything")).result(timeout=60)
        (said,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert "0.0.9" in said
        assert "0.1.0" in said
        assert "[[group]]" not in said, "no configuration helps"
        daemon.refuses = None  # it was upgraded
        wait(lambda: line.up)
    finally:
        line.close()
