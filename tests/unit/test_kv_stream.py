"""A stream of KV events by itself: all that is told is published, and a stream that stands still is seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvmanager.configuration.eventsconfig import EventsSection
from kvmanager.configuration.operationsconfig import HealthSection
from kvmanager.core.kvevents import KvEvent, SegmentsRemoved, SegmentsStored
from kvmanager.observing.health import Health, JobVitals, Tellers
from kvmanager.observing.kvstream import BATCH_EVENTS, KvStream

WIDTH = 16
HOUR_NS = 3_600 * 10**9
WAIT_S = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(WIDTH, "big")


def stored(number: int) -> SegmentsStored:
    return SegmentsStored("g", 0, 0, "device", key(number), b"", 0)


def removed(number: int) -> SegmentsRemoved:
    return SegmentsRemoved("g", 0, 0, "device", key(number))


def until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.005)


class Ear:
    """Reads what a stream kept, from its replay socket."""

    def __init__(self, section: EventsSection) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(section.replay_endpoint)

    def events(self) -> list[dict[str, Any]]:
        """All from the beginning."""
        self._socket.send_multipart([b"", (0).to_bytes(8, "big")])
        found: list[dict[str, Any]] = []
        while True:
            assert self._socket.poll(WAIT_S * 1000), "no answer to a replay request"
            _, topic, sequence, batch = self._socket.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                return found
            assert topic == b"t"
            found += msgpack.unpackb(batch)[1]

    def close(self) -> None:
        self._context.destroy(linger=0)


class Told:
    """A stream and who hears it."""

    def __init__(self, directory: Path) -> None:
        where = {name: f"ipc://{directory}/{name}" for name in ("endpoint", "replay_endpoint")}
        self.section = EventsSection(group="g", model="m", weights_revision="", topic="t", **where)
        self.stream = KvStream(self.section, 4, 1)
        self.failures: list[BaseException] = []

    def start(self) -> None:
        self.stream.start(self.failures.append)

    def tell(self, *events: KvEvent) -> None:
        for event in events:
            self.stream.tell(event, WIDTH)

    def until_told(self) -> None:
        until(lambda: not self.stream.vitals().waiting)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.stream.close()
    assert not made.failures


def test_what_was_there_at_the_start_counts_as_told(told: Told) -> None:
    told.tell(stored(1))
    assert told.stream.vitals() == JobVitals(waiting=True, done=0)
    told.start()
    told.until_told()
    assert told.stream.vitals().done == 1
    assert told.stream.name == f"events at {told.section.endpoint}"


def test_changes_behind_many_that_mean_nothing_to_listeners_are_published_too(told: Told) -> None:
    """A second span of the same key comes and goes: a whole batch of that publishes nothing."""
    told.tell(stored(1))
    told.start()
    told.until_told()
    hold, go = threading.Event(), threading.Event()
    taking = told.stream._blocks.take

    def held(event: KvEvent, width: int) -> list[Any]:
        hold.set()
        go.wait(WAIT_S)
        return taking(event, width)

    told.stream._blocks.take = held  # type: ignore[method-assign]
    told.tell(stored(1))
    assert hold.wait(WAIT_S)
    for _ in range(BATCH_EVENTS):
        told.tell(removed(1), stored(1))
    told.tell(stored(2))
    go.set()
    told.until_told()
    ear = Ear(told.section)
    hashes = [event["block_hashes"] for event in ear.events() if event["type"] == "BlockStored"]
    ear.close()
    assert hashes == [[key(1)], [key(2)]]


def test_a_socket_that_takes_nothing_is_seen_until_it_does(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told.start()
    told.until_told()
    stuck, go = threading.Event(), threading.Event()
    sending = told.stream._publisher.send_multipart

    def send(frames: list[bytes]) -> None:
        stuck.set()
        go.wait(WAIT_S)
        sending(frames)

    monkeypatch.setattr(told.stream._publisher, "send_multipart", send)
    health = Health(HealthSection(), 0)

    def late(hours: int) -> str:
        return health.late(hours * HOUR_NS, Tellers(None, {"events": told.stream.vitals()}))["events"]

    told.tell(stored(1))
    assert stuck.wait(WAIT_S)
    assert late(1) == "", "it counts from the first look"
    told.tell(stored(2))
    assert late(2) == "has work and did none for 3600.0 s"
    go.set()
    told.until_told()
    monkeypatch.undo()
    assert late(3) == ""
    assert told.stream.vitals() == JobVitals(waiting=False, done=2)


def test_a_daemon_ends_though_a_stream_hangs(
    told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told.start()
    told.until_told()
    go = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr("kvmanager.observing.kvstream.CLOSE_S", 0.01)
        patched.setattr(told.stream._publisher, "send_multipart", lambda _frames: go.wait(WAIT_S))
        told.tell(stored(1))
        told.stream.close()
        assert "sends nothing for 0.01 s" in caplog.text
        go.set()
        told.stream._thread.join()
