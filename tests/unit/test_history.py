"""The history: reasons of misses, bounded files, events dropped and counted; stories read back from files alone."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmanager.configuration.operationsconfig import HealthSection
from kvmanager.core.events import Closing, Event, Tick
from kvmanager.core.operatorevents import EvictPrefix, Reset
from kvmanager.errors import InvalidArgument, UnknownRequest
from kvmanager.observing.explain import Story, offline
from kvmanager.observing.health import Health, JobVitals, Tellers
from kvmanager.observing.history import FILES, WAITING_MAX, History, files_in, lines
from kvmanager.observing.historyrecords import Lately, Recorder
from tests.sim.driver import Client, Driver, chain_keys, sharded_group

SPAN = 512
MAX_BYTES = 1 << 20


class Recorded(Driver):
    """A driver whose events a history notes, as the owner loop would have it."""

    history: History | None = None

    def apply(self, event: Event, passes: int = 1_000) -> object:
        before = self.node.apply
        history = self.history

        def applied(event: Event, now: int) -> list:
            effects = before(event, now)
            if history is not None:
                history.note(event, now, effects)
            return effects

        self.node.apply = applied  # type: ignore[method-assign]
        try:
            return super().apply(event, passes)
        finally:
            self.node.apply = before  # type: ignore[method-assign]


def start(directory: Path, pages: int = 12, max_bytes: int = MAX_BYTES) -> tuple[Recorded, Client, History]:
    driver = Recorded([sharded_group(pages, 0)])
    history = History(directory, max_bytes, Recorder(driver.node.state, "lru"))
    driver.history = history
    history.start()
    return driver, Client(driver, "p"), history


def words(story: Story) -> str:
    return " | ".join(line.text for line in story.lines)


def test_each_miss_has_its_reason(tmp_path: Path) -> None:
    driver, client, history = start(tmp_path)
    other = Client(driver, "p", "other", b"another namespace", tenant="b")
    client.serve(1, 4 * SPAN, "a")
    client.serve(2, 4 * SPAN + 1, "a")
    other.serve(3, 4 * SPAN, "a")
    client.serve(4, 10 * SPAN, "big")
    client.serve(5, 4 * SPAN, "a")
    driver.apply(EvictPrefix("p", chain_keys("a", 17)[-16:]))
    client.serve(6, 4 * SPAN, "a")
    driver.apply(Reset("p"))
    client.serve(7, 4 * SPAN, "a")
    driver.apply(Reset("p"))
    client.open(8, SPAN, "new")
    client.open(9, SPAN, "new")
    history.close()

    def why(name: str) -> str:
        return words(offline(tmp_path, "miss", name))

    assert "never seen" in why("e/1")
    assert "nothing was missed" in why("e/2")
    assert "only in another namespace" in why("other/3")
    assert "by policy lru, for room in p/hbm" in why("e/5")
    assert "an operator had it evicted" in why("e/6")
    assert f"at token {2 * SPAN:,}" in why("e/6")
    assert "group reset" in why("e/7")
    assert "e/8 was writing it" in why("e/9")


def test_what_an_aborted_request_would_have_written_is_not_waited_for(tmp_path: Path) -> None:
    driver, client, history = start(tmp_path)
    client.open(1, SPAN, "a")
    client.close(1, Closing.ABORTED)
    client.run()
    client.open(2, SPAN, "a")
    history.close()
    assert "never seen" in words(offline(tmp_path, "miss", "e/2"))
    assert driver.audited


def test_a_refusal_is_kept_with_need_free_and_holder(tmp_path: Path) -> None:
    _, client, history = start(tmp_path)
    client.open(1, 8 * SPAN, "a")
    assert client.open(2, 8 * SPAN, "b").state == "refused"
    history.close()
    told = words(offline(tmp_path, "refusal", "e/2"))
    assert "pool p/hbm: needed 8, free 4, held by e/1 (8 pages)" in told


def test_files_stay_within_their_bound_and_the_newest_is_kept(tmp_path: Path) -> None:
    most = 40_000
    _, client, history = start(tmp_path, max_bytes=most)
    for number in range(400):
        client.serve(number, SPAN, number)
        if number % 50 == 0:
            history.catch_up()
    history.close()
    files = files_in(tmp_path)
    assert len(files) == FILES
    assert sum(path.stat().st_size for path in files) <= most
    kept = [record["request"] for record in lines(tmp_path) if record["what"] == "open"]
    assert kept[-1] == "e/399"
    assert kept == [f"e/{number}" for number in range(400 - len(kept), 400)]
    with pytest.raises(UnknownRequest, match=r"begins at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}$"):
        offline(tmp_path, "miss", "e/0")


def test_who_falls_behind_drops_and_says_how_many(tmp_path: Path) -> None:
    driver = Driver([sharded_group(4, 0)])
    history = History(tmp_path, MAX_BYTES, Recorder(driver.node.state, "lru"))
    for number in range(WAITING_MAX + 7):
        history.note(Reset("p"), number, [])
    history.note(Tick(), 0, [])
    assert history.dropped == 7
    history.start()
    history.close()
    assert [record["events"] for record in lines(tmp_path) if record["what"] == "dropped"] == [7]
    assert history.written == WAITING_MAX + 1


def test_a_daemon_that_comes_back_knows_what_was_forgotten_before(tmp_path: Path) -> None:
    driver, client, history = start(tmp_path)
    client.serve(1, 4 * SPAN, "a")
    client.open(2, SPAN, "b")
    driver.apply(Reset("p"))
    history.close()
    again = History(tmp_path, MAX_BYTES, Recorder(driver.node.state, "lru"))
    driver.history = again
    again.start()
    client.open(3, 4 * SPAN, "a")
    client.open(4, SPAN, "b")
    again.close()
    assert "group reset" in words(offline(tmp_path, "miss", "e/3"))
    assert "e/2 was writing it" in words(offline(tmp_path, "miss", "e/4")), "requests are known from the state"


def test_a_history_that_can_not_be_written_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = tmp_path / "history"
    driver, client, history = start(where)
    client.serve(1, SPAN, "a")
    history.catch_up()
    (where / "history.jsonl").unlink()
    (where / "history.jsonl").mkdir()
    client.serve(2, SPAN, "b")
    history.catch_up()
    client.serve(3, SPAN, "c")
    history.catch_up()
    assert history.vitals().waiting, "who tries and never can gets nowhere either"
    lost = history.dropped
    assert lost == history._noted - history.vitals().done
    (where / "history.jsonl").rmdir()
    history.catch_up()
    assert not history.vitals().waiting
    client.serve(4, SPAN, "d")
    history.close()
    assert [record["events"] for record in lines(where) if record["what"] == "dropped"] == [lost]
    assert history.dropped == lost > 0
    assert caplog.text.count("history is lost") == 1
    assert driver.counters["request"] == 4


def until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not done():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_a_writer_that_hangs_has_work_and_does_none_until_its_disk_answers(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for the disk: opening it takes until somebody does."""
    driver, client, history = start(tmp_path)
    client.serve(1, SPAN, "a")
    history.catch_up()
    before = history.vitals()
    assert before == JobVitals(waiting=False, done=before.done)
    assert before.done > 0
    file = tmp_path / "history.jsonl"
    file.unlink()
    os.mkfifo(file)
    client.serve(2, SPAN, "b")
    health = Health(HealthSection(), 0)
    hours = 3_600 * 10**9
    assert health.late(0, Tellers(history.vitals(), {})) == {"history": ""}
    assert history.vitals() == JobVitals(waiting=True, done=before.done)
    client.serve(3, SPAN, "c")
    assert health.late(hours, Tellers(history.vitals(), {})) == {"history": "has work and did none for 3600.0 s"}
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    file.unlink()
    until(lambda: not history.vitals().waiting)
    os.close(reader)
    assert health.late(2 * hours, Tellers(history.vitals(), {})) == {"history": ""}
    client.serve(4, SPAN, "d")
    history.close()
    assert history.dropped == 0, "the pipe took it in the end"
    assert [record["request"] for record in lines(tmp_path) if record["what"] == "open"][-1] == "e/4"
    assert driver.counters["request"] == 4


def test_a_daemon_ends_though_its_history_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvmanager.observing.history.CLOSE_S", 0.01)
    _, client, history = start(tmp_path)
    os.mkfifo(tmp_path / "history.jsonl")
    client.serve(1, SPAN, "a")
    history.close()
    assert "the history is left unfinished" in caplog.text
    assert history.vitals().waiting
    reader = os.open(tmp_path / "history.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    history._thread.join()
    os.close(reader)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    _, client, history = start(tmp_path)
    client.serve(1, SPAN, "a")
    history.close()
    with (tmp_path / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"what":"open","request":"e/1"')
    assert all(json.dumps(record) for record in lines(tmp_path))
    assert offline(tmp_path, "miss", "e/1").lines


@pytest.mark.parametrize(("kind", "named"), [("page", "p/hbm:1"), ("dream", "e/1"), ("miss", "")])
def test_what_can_not_be_asked_of_files(tmp_path: Path, kind: str, named: str) -> None:
    with pytest.raises(InvalidArgument):
        offline(tmp_path, kind, named)


def test_lately_keeps_the_newest_and_never_more_than_that() -> None:
    lately, put = Lately[int, int](100), dict[int, int]()
    dice = random.Random(3)
    for turn in range(5_000):
        key = dice.randrange(400) if dice.random() < 0.5 else dice.randrange(20)
        lately.put(key, turn)
        put.pop(key, None)
        put[key] = turn
        assert len(lately) <= 100
    newest = list(put)[-50:]
    assert [lately.get(key) for key in newest] == [put[key] for key in newest]
    assert sum(lately.get(key) is not None for key in range(400)) <= 100
    assert all(lately.get(key) in (None, put[key]) for key in put)


def test_what_a_daemon_remembers_at_its_start_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmanager.observing.historyrecords.FORGOTTEN_MAX", 4)
    driver, client, history = start(tmp_path)
    for number in range(1, 6):
        client.serve(number, 4 * SPAN, str(number))
        driver.apply(Reset("p"))
    history.close()
    assert sum(len(record["keys"]) for record in lines(tmp_path, '"what":"forgot"')) > 4
    again = Recorder(driver.node.state, "lru")
    History(tmp_path, MAX_BYTES, again)
    assert len(again._forgotten) in (3, 4)
