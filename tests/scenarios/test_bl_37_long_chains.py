"""BL-37: 1,048,576 tokens, 2,048 spans of eight pages: no recursion, and work that grows with the length alone."""

import sys
from collections.abc import Callable

import pytest

from kvmanager.core.audit import audit
from kvmanager.core.events import Closing, Open
from kvmanager.core.pool import PageState
from kvmanager.core.spec import Limits
from tests.sim.driver import Client, Driver, chain_keys, sharded_group

SPAN = 512


@pytest.fixture
def shallow() -> object:
    """A recursion of one frame a span would end at once."""
    limit = sys.getrecursionlimit()
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    sys.setrecursionlimit(depth + 150)
    yield None
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("shallow")
def test_a_million_tokens_in_out_and_gone() -> None:
    driver = Driver([sharded_group(2100, 2100)], Limits(batch_spans=128), audited=False)
    client = Client(driver, "p")
    tokens = 1_048_576
    opened = client.open(1, tokens, "a", growth=4096)
    assert len(opened.spans[0].first_tokens) == 2048
    client.commit(1, tokens)
    client.run()
    driver.end_all()
    assert driver.counters["offload"] == 2048
    client.close(1)
    client.run()
    again = client.open(2, tokens, "a")
    assert again.cached_tokens == tokens - 64
    client.close(2, Closing.ABORTED)
    client.run()
    # All of it leaves HBM, comes back, and is forgotten.
    assert client.open(3, 2100 * SPAN, "b").state == "runnable"
    client.close(3, Closing.ABORTED)
    client.run()
    assert driver.counters["reclaim"] == 2048
    assert client.open(4, tokens + 1, "a").state == "waiting"
    driver.end_all()
    client.close(4)
    client.run()
    audit(driver.node.state)
    table = driver.node.state.groups["p"].chains[0].table
    index = driver.node.state.groups["p"].chains[0].index
    root = next(row for row in table if table.first_token[row] == 0)
    assert len(index.descendants(root)) == 2047
    client.serve(5, 2100 * SPAN, "c")
    assert driver.counters["eviction"] == 2048
    driver.leave(client)
    assert driver.pages("p/host", PageState.READY) == 2100


def calls(work: Callable[[], object]) -> int:
    """How many functions, ours and built-in, a piece of work calls: the same on every machine."""
    count = 0

    def saw(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(saw)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def calls_by_message(tokens: int) -> list[int]:
    """A request is opened, committed and believed; a second one finds it and is given back."""
    driver = Driver([sharded_group(2100, 0)], audited=False)
    client = Client(driver, "p")
    whole = chain_keys("a", tokens // 64)
    first, again = (Open(request, tokens, 0, whole) for request in (1, 2))
    counted = [
        calls(lambda: client.step(opens=(first,))),
        calls(lambda: client.commit(1, tokens)),
        calls(client.run),
        calls(lambda: client.step(opens=(again,))),
        calls(lambda: client.close(2, Closing.ABORTED)),
        calls(client.run),
    ]
    driver.leave(client)
    return counted


def test_work_at_a_million_is_at_most_five_times_that_at_a_quarter() -> None:
    """What one message does holds up all others of its daemon."""
    quarter, million = calls_by_message(262_144), calls_by_message(1_048_576)
    assert all(m <= 5 * q for q, m in zip(quarter, million, strict=True)), (quarter, million)
