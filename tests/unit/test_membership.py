"""Who is gone: sequences of what sockets and pidfds say, and the events that follow."""

from __future__ import annotations

import random

import pytest

from kvmanager.core.events import DetachRank, EngineGone, EngineSuspect, Event, TimelinesRead
from kvmanager.daemon.membership import Membership, Registration
from kvmanager.errors import StaleEpoch, UnknownLease
from kvmanager.protos import kvmanager_pb2 as pb


class Watched:
    """A membership and everything it said."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended: list[int] = []
        self.gone: list[tuple[str, int]] = []
        self.freed: list[int] = []
        self.of = Membership(self.events.append, self.end_word, lambda *key: self.gone.append(key), self.freed.extend)

    def end_word(self, attach_id: int) -> int:
        self.ended.append(attach_id)
        return 1000 + attach_id

    def engine(self, epoch: int = 1, token: str = "scheduler", ranks: int = 2) -> None:
        """An engine with a stream and `ranks` ranks; rank r attached as 10 * epoch + r by process "rank-r"."""
        self.of.registered("e", epoch, Registration(token, "g", pb.Namespace()))
        for rank in range(ranks):
            self.of.attached("e", epoch, 10 * epoch + rank, f"rank-{rank}")
        self.of.stream_opened("e", epoch)


SUSPECT, GONE = EngineSuspect("e", 1), EngineGone("e", 1)


def dead(attach_id: int) -> list[Event]:
    """A rank's end: its word's last value first."""
    return [TimelinesRead({attach_id: 1000 + attach_id}), DetachRank(attach_id)]


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    made.engine()
    return made


def test_a_clean_leave(watched: Watched) -> None:
    watched.of.rank_ended(10)
    watched.of.rank_ended(11)
    assert watched.events == []
    watched.of.stream_ended("e", 1)
    assert watched.events == [SUSPECT]
    watched.of.leaving("scheduler")
    assert watched.events == [SUSPECT, GONE]
    watched.of.disconnected("scheduler")
    assert watched.events == [SUSPECT, GONE]
    assert watched.ended == [10, 11]
    assert watched.gone == [("e", 1)]


def test_a_broken_stream_alone_gives_nothing_back(watched: Watched) -> None:
    watched.of.stream_ended("e", 1)
    watched.of.disconnected("scheduler")
    assert watched.events == [SUSPECT, SUSPECT]
    watched.of.exited("scheduler")
    assert watched.events == [SUSPECT, SUSPECT]
    assert watched.of.processes("e", 1) == ("rank-0", "rank-1")


def test_every_rank_must_be_dead(watched: Watched) -> None:
    watched.of.stream_ended("e", 1)
    watched.of.disconnected("rank-1")
    watched.of.exited("rank-1")
    assert watched.events == [SUSPECT, SUSPECT, *dead(11)]
    watched.of.exited("rank-0")
    assert watched.events[4:] == dead(10)
    assert watched.of.processes("e", 1) == ("scheduler",)
    watched.of.exited("scheduler")
    assert watched.events[6:] == [GONE]
    assert watched.of.processes("e", 1) == ()


def test_a_scheduler_that_lives_may_come_back(watched: Watched) -> None:
    """Its ranks are dead, its stream and connection broke; only its end, or its own word, ends the engine."""
    watched.of.stream_ended("e", 1)
    watched.of.exited("rank-0")
    watched.of.exited("rank-1")
    watched.of.disconnected("scheduler")
    assert GONE not in watched.events
    watched.of.stream_opened("e", 1)
    watched.of.leaving("scheduler")
    assert GONE not in watched.events
    watched.of.stream_ended("e", 1)
    assert watched.events[-1] == GONE


def test_a_process_that_registers_anew_has_left_its_older_epoch(watched: Watched) -> None:
    watched.of.stream_ended("e", 1)
    watched.of.registered("e", 2, Registration("scheduler", "g", pb.Namespace()))
    assert watched.of.processes("e", 1) == ("rank-0", "rank-1")
    watched.of.exited("rank-0")
    watched.of.rank_ended(11)
    assert watched.events[-1] == GONE
    assert watched.of.processes("e", 2) == ("scheduler",)


def test_dead_ranks_under_a_live_stream_do_not_end_the_engine(watched: Watched) -> None:
    watched.of.exited("rank-0")
    watched.of.exited("rank-1")
    assert watched.events == [*dead(10), *dead(11)]
    watched.of.stream_ended("e", 1)
    watched.of.leaving("scheduler")
    assert watched.events[4:] == [SUSPECT, GONE]


def test_a_dead_scheduler_whose_stream_a_child_holds_open_is_gone_with_its_ranks(watched: Watched) -> None:
    watched.of.exited("scheduler")
    assert watched.events == []
    watched.of.exited("rank-0")
    watched.of.exited("rank-1")
    assert watched.events[-1] == GONE
    watched.of.stream_ended("e", 1)
    assert watched.events.count(GONE) == 1


def test_a_stream_that_replaces_another_keeps_the_engine_trusted(watched: Watched) -> None:
    watched.of.stream_opened("e", 1)
    watched.of.stream_ended("e", 1)
    assert watched.events == []


def test_an_engine_that_never_opened_a_stream() -> None:
    watched = Watched()
    watched.of.registered("e", 1, Registration("scheduler", "g", pb.Namespace()))
    watched.of.exited("somebody")
    assert watched.events == []
    watched.of.disconnected("scheduler")
    assert watched.events == [SUSPECT]
    watched.of.exited("scheduler")
    assert watched.events == [SUSPECT, GONE]


def test_a_rank_that_attaches_to_an_engine_that_left() -> None:
    watched = Watched()
    with pytest.raises(StaleEpoch, match="left while a rank attached"):
        watched.of.attached("e", 1, 10, "rank-0")
    with pytest.raises(StaleEpoch, match="register again"):
        watched.of.registration("e", 1)
    with pytest.raises(UnknownLease):
        watched.of.token_of(10)


def test_epochs_of_a_name_are_apart(watched: Watched) -> None:
    watched.engine(epoch=2, token="newer")
    assert watched.of.engine_of("newer", 2) == "e"
    for token, epoch in (("newer", 1), ("scheduler", 2), ("scheduler", 3)):
        with pytest.raises(StaleEpoch):
            watched.of.engine_of(token, epoch)
    watched.of.stream_ended("e", 1)
    watched.of.exited("rank-0")
    watched.of.exited("rank-1")
    watched.of.exited("scheduler")
    assert [event for event in watched.events if isinstance(event, EngineGone)] == [GONE]
    assert watched.of.engine_of("newer", 2) == "e"


@pytest.mark.parametrize("seed", range(200))
def test_gone_comes_once_and_only_when_nothing_can_touch_memory(seed: int) -> None:
    """Every order of the endings of two ranks and a scheduler with one stream."""
    rng = random.Random(seed)
    watched = Watched()
    watched.engine()
    clean = [rng.random() < 0.3 for _ in range(2)]
    endings = [("disconnected", "scheduler"), ("exited", "scheduler"), ("stream", "")]
    endings += [("leaving", "scheduler")] if rng.random() < 0.5 else []
    for rank in range(2):
        endings += [("detach", str(rank))] if clean[rank] else []
        endings += [("disconnected", f"rank-{rank}"), ("exited", f"rank-{rank}")]
    rng.shuffle(endings)
    stream, dead, left, ranks = True, False, False, {0, 1}
    for what, who in endings:
        if what == "stream":
            watched.of.stream_ended("e", 1)
            stream = False
        elif what == "detach":
            watched.of.rank_ended(10 + int(who))
            ranks.discard(int(who))
        else:
            getattr(watched.of, what)(who)
            dead |= (what, who) == ("exited", "scheduler")
            left |= what == "leaving"
            if what == "exited" and who != "scheduler":
                ranks.discard(int(who[-1]))
        over = not ranks and (dead or (left and not stream))
        assert (GONE in watched.events) == over, f"seed {seed}: after {what} {who}"
    assert watched.events.count(GONE) == 1
    assert sorted(watched.ended) == [10, 11]
    detached = [event.attach_id for event in watched.events if isinstance(event, DetachRank)]
    assert len(detached) == len(set(detached)), "told once"


def test_a_word_is_free_when_its_process_is_dead_and_not_before(watched: Watched) -> None:
    watched.of.rank_ended(10)
    with pytest.raises(StaleEpoch):
        watched.of.attached("gone", 1, 77, "rank-0")
    watched.of.disconnected("rank-0")
    watched.of.stream_ended("e", 1)
    assert watched.freed == []
    watched.of.exited("rank-0")
    assert watched.freed == [10, 77], "left in order, or never heard of it"
    watched.of.exited("rank-1")
    assert watched.freed == [10, 77, 11], "died attached"
    watched.of.exited("rank-0")
    watched.of.exited("scheduler")
    assert watched.freed == [10, 77, 11], "once each"
