"""Sessions in the core: ownership, dead branches, ends of turns, through the replay's own engine."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.core.audit import audit
from kvmanager.core.events import Open
from kvmanager.core.spans import SHARED
from kvmanager.errors import InvalidArgument
from kvmanager.replay.engine import ENGINE
from kvmanager.replay.run import GROUP, _Engine, replay
from kvmanager.replay.stream import Request
from tests.sim.bytes_driver import start
from tests.sim.driver import chain_keys

SPAN_BLOCKS = 8


def _request(play: int, nodes: list[int], start_s: float, stop: str = "tool_use", last: bool = False) -> Request:
    return Request(start_s, start_s + 1, play, np.array(nodes, np.int64), stop, last)


def _engine(spans: int, policy: str = "return-rate") -> _Engine:
    return _Engine(spans * SPAN_BLOCKS * 64, 8, policy)


def _path(first: int, spans: int) -> list[int]:
    return list(range(first, first + spans * SPAN_BLOCKS))


def _run(engine: _Engine, number: int, request: Request) -> int:
    """A whole turn; cached tokens."""
    engine.at(request.start_s)
    cached = engine.request(number, request)
    engine.at(request.end_s)
    engine.turn_ends(request)
    audit(engine.node.state)
    return cached


def test_the_branch_that_a_session_left_goes_first() -> None:
    engine = _engine(6)
    _run(engine, 1, _request(1, _path(1, 4), 0))
    # The session forks after one span; its old branch is dead, though newer than the other session's spans.
    _run(engine, 2, _request(1, _path(1, 1) + _path(100, 2), 100))
    _run(engine, 3, _request(2, _path(1, 3), 101))
    assert _run(engine, 4, _request(1, _path(1, 1) + _path(100, 2), 102)) == 3 * 512
    assert _run(engine, 5, _request(1, _path(1, 4), 103)) == 512


def test_lru_keeps_the_dead_branch_instead() -> None:
    """The same history tells the policies apart."""
    engine = _engine(6, "lru")
    _run(engine, 1, _request(1, _path(1, 4), 0))
    _run(engine, 2, _request(1, _path(1, 1) + _path(100, 2), 1))
    _run(engine, 3, _request(1, _path(1, 4), 2))
    _run(engine, 4, _request(2, _path(1, 2), 3))
    assert _run(engine, 5, _request(1, _path(1, 4), 4)) == 4 * 512


def test_an_ended_session_makes_room_for_the_living() -> None:
    engine = _engine(6)
    _run(engine, 1, _request(1, _path(1, 3), 0))
    _run(engine, 2, _request(2, _path(1, 3), 50, last=True))
    _run(engine, 3, _request(3, _path(1, 3), 51))
    assert _run(engine, 4, _request(1, _path(1, 3), 52)) == 3 * 512


def test_what_two_sessions_use_is_shared() -> None:
    engine = _engine(20)
    chain = engine.node.state.groups[GROUP].chains[0]
    step = engine.node.state.engines[ENGINE]
    assert step.ranks == 8
    first = _request(1, _path(1, 3), 0)
    _run(engine, 1, first)
    # A play is a namespace of its own in a replay, so the second session borrows the first one's keys.
    twin = Request(1, 2, 1, first.nodes, "tool_use", False)
    engine.at(1)
    engine.step(opens=(Open(2, twin.tokens + 1, 0, twin.keys(), "another"),))
    owners = chain.table.owner[chain.table.live & chain.table.published]
    assert (owners == SHARED).all()


def test_sessions_that_stay_away_are_forgotten_with_time_alone() -> None:
    engine = _engine(4)
    book = engine.node.state.groups[GROUP].sessions
    _run(engine, 1, _request(1, _path(1, 3), 0))
    _run(engine, 2, _request(2, _path(1, 4), 10))
    assert len(book) == 2
    engine.at(10_000)
    engine.tick()
    assert len(book) <= 2  # one that still holds spans is kept
    held = {int(o) for o in np.unique(engine.node.state.groups[GROUP].chains[0].table.owner) if o >= 0}
    assert {book.record(key).number for key in ("0/1", "0/2") if book.record(key)} <= held


@pytest.mark.parametrize("policy", ["lru", "return-rate"])
def test_a_replay_counts_what_an_infinite_cache_would_hit(policy: str) -> None:
    requests = [_request(1, _path(1, 2), 0), _request(1, _path(1, 3), 10), _request(1, [*_path(1, 3), 999], 20)]
    report = replay(requests, 3, 1 << 20, 8, policy)
    # Nothing, then 2 of 3 spans, then all 3 and one new block: of three requests none is the warm-up's.
    assert report.prompt_tokens == (2 + 3 + 3) * 512 + 64
    assert report.ceiling == pytest.approx(5 * 512 / report.prompt_tokens)
    assert report.prefix_hit_rate == pytest.approx(report.ceiling)


def test_unknown_policies_and_pools_that_hold_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="lfu"):
        replay([], 0, 1 << 20, 8, "lfu")
    with pytest.raises(InvalidArgument, match="100 tokens"):
        replay([], 0, 100, 8, "lru")


def test_a_dead_branch_that_a_request_holds_stays() -> None:
    """The session's other request still reads what its newest prompt went on without."""
    driver, client = start(6, 0, ranks=2, page_rows=4)
    span = 8
    client.serve(1, 2 * span, "a")
    opened = client.open(2, 2 * span + 1, "a")
    client.write(opened, "a", 2 * span, 2 * span + 1)
    client.step(opens=(Open(3, span, 0, chain_keys("b", 2), "a"),))
    table = driver.node.state.groups["p"].chains[0].table
    assert (table.dead & (table.pins > 0)).sum() == 2
    assert client.open(4, 3 * span, "c").state == "refused"
    other = client.open(5, 2 * span, "c")
    client.write(other, "c", 0, 2 * span)
    client.read(opened, "a", 2 * span + 1)
    for request in (2, 3, 5):
        client.close(request)
    client.run()
    driver.leave(client)
