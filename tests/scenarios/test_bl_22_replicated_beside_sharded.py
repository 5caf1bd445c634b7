"""BL-22: a draft chain that every rank holds in full next to a main chain that is sharded."""

import numpy as np

from kvmanager.core.events import Progress
from kvmanager.core.plans import Purpose
from tests.sim.driver import Client, Driver
from tests.sim.worlds import Regions, two_chains

RANKS, ROWS = 4, 4


def test_each_chain_has_its_own_map() -> None:
    driver = Driver([two_chains(Regions({}), "g", 16, 16)])
    client = Client(driver, "g")
    opened = client.open(1, 33, "a")
    main, draft = opened.spans
    assert (main.chain, draft.chain) == ("main", "draft")
    assert len(main.first_tokens) == -(-33 // (RANKS * ROWS)) == 3
    assert len(draft.first_tokens) == -(-33 // ROWS) == 9
    assert (np.diff(draft.first_tokens) == ROWS).all()
    client.commit(1, 33)
    client.run()
    draft_bytes = driver.node.state.groups["g"].chains[1].spec.classes[0].page_bytes
    main_bytes = driver.node.state.groups["g"].chains[0].spec.classes[0].page_bytes
    moved = {plan.total_bytes for plan in driver.plans.values() if plan.purpose is Purpose.OFFLOAD}
    assert moved == {2 * main_bytes * RANKS, 8 * draft_bytes}, "a draft page leaves once, a main page once a rank"
    driver.end_all()
    driver.leave(client)


def test_a_wrong_request_does_not_stop_the_next() -> None:
    driver = Driver([two_chains(Regions({}), "g", 16, 16)])
    client = Client(driver, "g")
    client.open(1, 33, "a")
    reply = client.step((Progress(1, 33, 999), Progress(2, 1, 1)))
    assert len(reply.errors) == 2
    assert client.commit(1, 33).errors == ()
    client.run()
    again = client.open(3, 33, "a")
    assert again.cached_tokens == 32
    driver.leave(client)
