"""BL-16: probing keeps nothing alive, and what is kept in another tier does not enlarge what must go."""

import numpy as np

from kvmanager.core.events import Trim
from kvmanager.core.pool import PageState
from kvmanager.core.spans import DEVICE, HOST, CopyState
from tests.sim.bytes_driver import start
from tests.sim.driver import chain_keys

ROWS, RANKS = 4, 2
SPAN = ROWS * RANKS


def test_probes_hold_nothing() -> None:
    """A hundred keys, a client that asks for all of them again and again; ten new ones are stored at once."""
    driver, client = start(100, 0, ranks=RANKS, page_rows=ROWS)
    for i in range(100):
        client.serve(i, SPAN, f"old {i}")
    chain = driver.node.state.groups["p"].chains[0]
    namespace = driver.node.state.engines["e"].namespace
    before = chain.table.last_used.copy()
    for _ in range(10):
        for i in range(100):
            assert chain.index.match(chain_keys(f"old {i}", 2), 2, namespace).segments == 2
    assert not chain.table.pins.any()
    assert (chain.table.last_used == before).all(), "a probe is no use"
    for i in range(10):
        assert client.serve(200 + i, SPAN, f"new {i}").state == "runnable"
    assert driver.counters["eviction"] == 10
    kept = [i for i in range(100) if chain.index.match(chain_keys(f"old {i}", 2), 2, namespace).segments]
    assert kept == list(range(10, 100)), "the oldest ten went, no more"
    driver.leave(client)


def test_five_of_a_hundred_not_fifty_of_a_thousand() -> None:
    """900 of 1,000 known keys are on the host alone. A twentieth of the device is asked for: five pages go."""
    driver, client = start(100, 1000, ranks=RANKS, page_rows=ROWS)
    driver.audited = False
    for i in range(1000):
        client.serve(i, SPAN, i)
    driver.audited = True
    table = driver.node.state.groups["p"].chains[0].table
    known = np.flatnonzero(table.live & table.published)
    assert len(known) == 1000
    assert int((table.copies[0, DEVICE, known] == CopyState.ABSENT).sum()) >= 900
    driver.apply(Trim("p", "p/hbm", 5))
    assert driver.pages("p/hbm", PageState.FREE) == 5
    assert driver.counters["eviction"] == 0, "clean copies go; nothing is forgotten"
    assert int((table.copies[0, HOST, known] == CopyState.READY).sum()) == 1000
    driver.leave(client)
