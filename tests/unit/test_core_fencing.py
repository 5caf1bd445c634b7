"""Timelines of dead writers, fences that go back, and engines that stay suspect: what the core makes of them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kvmanager.core.events import (
    AttachRank,
    DetachRank,
    EngineGone,
    EngineResumed,
    EngineSuspect,
    FenceEngine,
    Progress,
    RegisterEngine,
    Tick,
    TimelinesRead,
)
from kvmanager.core.spec import Limits
from kvmanager.core.state import Engine
from kvmanager.errors import InvalidArgument, Suspect
from tests.sim.driver import Client, Driver, sharded_group
from tests.unit.test_core_steps import ROWS, SPAN, picture

FENCE_AFTER_NS = Limits().fence_after_ns


@pytest.fixture
def driver() -> Driver:
    return Driver([sharded_group(8, 8)])


@pytest.fixture
def client(driver: Driver) -> Client:
    return Client(driver, "p")


def found_by_another(driver: Driver, tokens: int) -> int:
    """Tokens of session 0 that a new engine finds in the cache."""
    newer = Client(driver, "p")
    opened = newer.open(1, tokens + ROWS)
    newer.die()
    return opened.cached_tokens


def commit_two_spans(client: Client) -> None:
    client.open(1, 2 * SPAN)
    client.commit(1, 2 * SPAN)


@pytest.mark.parametrize("victim", [0, 3, 7])
def test_a_rank_killed_before_it_raised_its_word_publishes_nothing(driver: Driver, client: Client, victim: int) -> None:
    commit_two_spans(client)
    client.run(but=(victim,))
    driver.apply(DetachRank(client.attaches[victim]))
    driver.leave(client)
    assert found_by_another(driver, 2 * SPAN) == 0


@pytest.mark.parametrize("victim", [0, 3, 7])
def test_a_rank_killed_after_it_raised_its_word_publishes_the_span(
    driver: Driver, client: Client, victim: int
) -> None:
    commit_two_spans(client)
    client.run(but=tuple(rank for rank in range(8) if rank != victim))
    driver.apply(DetachRank(client.attaches[victim]))
    assert client.attaches[victim] in driver.node.state.timelines, "a fence still names it"
    client.run(but=(victim,))
    driver.leave(client)
    assert found_by_another(driver, 2 * SPAN) == 2 * SPAN


def test_a_word_that_falls_is_not_believed(driver: Driver, client: Client) -> None:
    commit_two_spans(client)
    client.run()
    driver.apply(TimelinesRead(dict.fromkeys(client.attaches, 0)))
    driver.leave(client)
    assert found_by_another(driver, 2 * SPAN) == 2 * SPAN


def test_fence_values_never_go_back(driver: Driver, client: Client) -> None:
    commit_two_spans(client)
    good = client.message((Progress(1, 2 * SPAN, 2 * SPAN),))
    for rank in (0, 5):
        back = dict(good.fence) | {client.attaches[rank]: good.fence[client.attaches[rank]] - 2}
        before = picture(driver)
        answer = driver.apply(dataclasses.replace(good, fence=back))
        assert isinstance(answer, InvalidArgument)
        assert "goes back from 1 to 0" in str(answer)
        assert picture(driver) == before
    empty = dataclasses.replace(good, progress=(), fence=dict.fromkeys(client.attaches, 0))
    assert isinstance(driver.apply(empty), InvalidArgument), "also where nothing depends on it"
    client.step((Progress(1, 2 * SPAN, 2 * SPAN),))
    driver.leave(client)


def test_a_new_attach_begins_at_zero(driver: Driver, client: Client) -> None:
    commit_two_spans(client)
    client.run()
    old = client.attaches[2]
    driver.apply(DetachRank(old))
    client.attaches[2] = driver.apply(AttachRank("e", client.epoch, 2, 99)).attach_id
    assert client.attaches[2] != old
    reply = driver.apply(
        dataclasses.replace(client.message(), fence=client.message().fence | {client.attaches[2]: 0})
    )
    assert not isinstance(reply, Exception), reply
    client.number += 1
    driver.leave(client)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_remembered_of_attaches_that_nobody_names(driver: Driver, client: Client, seed: int) -> None:
    """Ranks come and go under commits; the audit after every event knows who may be remembered."""
    rng = random.Random(seed)
    state = driver.node.state
    client.open(1, 2 * SPAN, growth=0)
    for _ in range(40):
        rank = rng.randrange(8)
        match rng.randrange(4):
            case 0:
                driver.apply(DetachRank(client.attaches[rank]))
                client.attaches[rank] = driver.apply(AttachRank("e", client.epoch, rank, 0)).attach_id
            case 1:
                client.run(but=(rank,))
            case 2:
                client.run()
            case 3:
                done = rng.randrange(2 * SPAN)
                committed = max(done, state.engines["e"].requests[1].committed_tokens)
                client.commit(1, committed, 2 * SPAN)
        assert len(state.timelines) <= 8 + len(state.engines["e"].fences) * 8
    client.run()
    assert set(state.timelines) == set(client.attaches), f"seed {seed}"
    assert state.dead_attaches == set()
    driver.leave(client)
    assert state.timelines == {}
    assert state.dead_attaches == set()


def wait(driver: Driver, passes: int) -> None:
    driver.apply(Tick(), passes=passes)


def test_a_suspect_engine_is_fenced_once_after_the_time(driver: Driver, client: Client) -> None:
    wait(driver, 100 * FENCE_AFTER_NS)
    assert driver.fenced == [], "idle is not suspect"
    driver.apply(EngineSuspect("e", client.epoch))
    wait(driver, FENCE_AFTER_NS - 10_000)
    driver.apply(EngineSuspect("e", client.epoch))  # said again: the time does not start anew
    assert driver.fenced == []
    wait(driver, 20_000)
    assert driver.fenced == [("e", client.epoch)]
    wait(driver, FENCE_AFTER_NS)
    assert driver.fenced == [("e", client.epoch)]
    assert isinstance(driver.apply(client.message()), Suspect)
    driver.apply(EngineSuspect("e", client.epoch))  # something new broke: it was fenced for something else
    wait(driver, FENCE_AFTER_NS)
    assert driver.fenced == [("e", client.epoch)] * 2
    driver.apply(EngineResumed("e", client.epoch))
    wait(driver, FENCE_AFTER_NS)
    driver.apply(EngineSuspect("e", client.epoch))
    wait(driver, FENCE_AFTER_NS)
    assert driver.fenced == [("e", client.epoch)] * 3
    driver.leave(client)


def test_a_replaced_engine_is_suspect_too(driver: Driver, client: Client) -> None:
    spec = client.spec
    prints = tuple(c.layout.fingerprint for chain in spec.chains for c in chain.classes)
    driver.apply(RegisterEngine("e", "p", b"ns", 16, spec.page_rows, prints, spec.ranks))
    wait(driver, FENCE_AFTER_NS)
    assert driver.fenced == [("e", client.epoch)]
    driver.apply(EngineGone("e", client.epoch))
    wait(driver, FENCE_AFTER_NS)
    assert driver.fenced == [("e", client.epoch)]
    assert driver.node.state.timelines == {}


STALL_NS = Limits().stall_after_ns


def fenced(driver: Driver, after_ns: int) -> list[FenceEngine]:
    """What a tick that much later asks for."""
    driver.now += after_ns
    effects = driver.node.apply(Tick(), driver.now)
    return [effect for effect in effects if isinstance(effect, FenceEngine)]


def waiting(driver: Driver, client: Client, still: int) -> Engine:
    """An engine whose rank `still` has not raised its word for two committed spans."""
    commit_two_spans(client)
    client.run(but=(still,))
    engine = driver.node.state.engines["e"]
    assert engine.fences
    return engine


def test_a_rank_that_stands_still_while_a_fence_waits_is_named_and_asked_for(driver: Driver, client: Client) -> None:
    engine = waiting(driver, client, 3)
    assert fenced(driver, STALL_NS - 1) == []
    assert engine.trusted
    assert fenced(driver, 1) == []
    assert (engine.stalled, engine.suspect, engine.suspect_ns) == (True, False, driver.now)
    refused = driver.apply(client.message())
    assert isinstance(refused, Suspect)
    assert "rank 3 of engine 'e' has not moved for 120 s" in str(refused)
    assert isinstance(driver.apply(EngineResumed("e", client.epoch)), Suspect), "a new stream changes nothing"
    asked = FenceEngine("e", client.epoch, (client.attaches[3],))
    assert fenced(driver, FENCE_AFTER_NS) == [asked]
    assert fenced(driver, FENCE_AFTER_NS) == [], "once"
    client.run()
    assert engine.trusted
    client.step((Progress(1, 2 * SPAN, 2 * SPAN),))
    driver.leave(client)


def test_an_idle_engine_stands_still_for_ever(driver: Driver, client: Client) -> None:
    commit_two_spans(client)
    client.run()
    engine = driver.node.state.engines["e"]
    assert fenced(driver, 1000 * STALL_NS) == []
    assert engine.trusted
    client.step((Progress(1, 2 * SPAN, 2 * SPAN),))
    assert fenced(driver, STALL_NS * 3 // 4) == [], "what waited for nothing is not held against it"
    assert engine.trusted
    driver.leave(client)


def test_a_rank_that_moves_on_slowly_does_not_stand_still(driver: Driver, client: Client) -> None:
    """Three messages are on their way; one is done each time it gets long."""
    client.open(1, 2 * SPAN)
    for tokens in (SPAN, SPAN, 2 * SPAN):
        client.step((Progress(1, 2 * SPAN, tokens),))
    engine = driver.node.state.engines["e"]
    names = [dict(entry.fence) for entry in engine.fences]
    assert len(names) >= 2
    for fence in names:
        assert fenced(driver, STALL_NS * 3 // 4) == []
        assert engine.trusted
        driver.apply(TimelinesRead(fence))
    assert not engine.fences
    driver.leave(client)


def test_a_broken_stream_is_asked_for_after_the_rank_that_stood_still(driver: Driver, client: Client) -> None:
    engine = waiting(driver, client, 0)
    fenced(driver, STALL_NS)
    driver.apply(EngineSuspect("e", client.epoch))
    assert fenced(driver, FENCE_AFTER_NS)[0].stalled == (client.attaches[0],)
    driver.apply(DetachRank(client.attaches[0]))
    assert (engine.stalled, engine.suspect) == (False, True)
    assert fenced(driver, FENCE_AFTER_NS) == [FenceEngine("e", client.epoch)]
    driver.leave(client)
