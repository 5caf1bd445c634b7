"""BL-13: spans are offloaded once, as soon as they are confirmed; announced and rejected tokens do not count."""

from dataclasses import replace

import numpy as np

from kvmanager.core.events import Closing, Opened, StepDone, Trim
from tests.sim.bytes_driver import start
from tests.sim.driver import chain_keys

SPAN, ROWS = 512, 64


def grown(opened: Opened, reply: StepDone) -> Opened:
    """The answer with the pages that a later reply added."""
    (run,) = opened.spans
    for more in (run for each in reply.grown for run in each.spans):
        device = np.concatenate((run.pages["kv"][0], more.pages["kv"][0]))
        run = replace(run, pages={"kv": (device, run.pages["kv"][1])})
    return replace(opened, spans=(run,))


def test_six_announced_one_confirmed() -> None:
    driver, client = start(4, 4)
    opened = client.open(1, 500, "a", growth=64)
    client.write(opened, "a", 0, 500)
    keys = chain_keys("a", 9)
    sent = 500 // ROWS
    for confirmed in range(500, 531):
        client.write(opened, "a", 500, confirmed)
        last = confirmed // ROWS
        reply = client.commit(1, confirmed, confirmed + 6, keys[sent * 16 : last * 16], rejected=5)
        opened, sent = grown(opened, reply), last
        client.write(opened, "rejected", confirmed, confirmed + 6)
        client.run()
        driver.end_all()
        assert driver.counters["offload"] == (1 if confirmed >= SPAN else 0), confirmed
    client.read(opened, "a", 530)
    client.close(1)
    client.run()
    found = client.open(2, 513, "a")
    assert found.cached_tokens == SPAN
    client.read(found, "a", SPAN)
    client.close(2, Closing.ABORTED)
    client.run()
    driver.apply(Trim("p", "p/hbm", 4))
    loaded = client.ready(client.open(3, 513, "a"))
    assert driver.counters["onboard"] == 1
    client.read(loaded, "a", SPAN)  # what was stored are the confirmed rows
    client.close(3, Closing.ABORTED)
    client.run()
    driver.leave(client)
