"""BL-29: rows are read from the host only when their copy has landed, however late that is and whatever presses.

Reported: once old rows are read from the host, output turns to noise, since their copies were never made.
"""

import numpy as np
import pytest

from kvmanager.core.events import CopyOutcome, Open, TicketInfo
from kvmanager.core.patterns import Rows
from kvmanager.geometry import SEQUENTIAL
from tests.sim.bytes_driver import BytesDriver, pattern
from tests.sim.driver import Client, chain_keys
from tests.sim.worlds import Regions, hisparse

ROWS, TOKENS = 4, 60


def running() -> tuple[BytesDriver, Client, np.ndarray]:
    """A request whose rows are written and committed; their host copies are on their way, the host is poison."""
    driver = BytesDriver([hisparse(Regions({}), "d", 36, 60, SEQUENTIAL)])
    client = Client(driver, "d")
    device = client.open(1, TOKENS, "a").spans[0].pages["latent"][0]
    c = client.spec.chains[0].classes[0]
    positions = np.arange(TOKENS)
    rows = Rows(np.full(TOKENS, c.device_regions[0], np.int32), device[positions // ROWS], positions % ROWS)
    driver.memory.fill(c.layout, rows, pattern("a", positions))
    client.commit(1, TOKENS)
    client.run()
    return driver, client, device.copy()


def press(client: Client, number: int) -> tuple:
    """Somebody asks for more HBM than there is; what the running request's worker is told."""
    ticket = TicketInfo(f"t{number}", "peer", 40, 1)
    reply = client.step(opens=(Open(number, 40, 0, chain_keys(number, 10), "s", ticket),))
    client.run()
    return reply.residency


def mirrors(driver: BytesDriver, client: Client) -> list[int]:
    host = client.spec.chains[0].classes[0].host_regions[0]
    return [p.plan_id for p in driver.plans.values() if any(c.target_region == host for c in p.pieces())]


@pytest.mark.parametrize("first", [CopyOutcome.DONE, CopyOutcome.FAILED, CopyOutcome.UNKNOWN_FATE])
def test_hisparse_reads_no_host_row_before_its_copy(first: CopyOutcome) -> None:
    driver, client, device = running()
    assert mirrors(driver, client)
    for number in range(2, 6):
        assert press(client, number) == (), "its only copy is the one on the device"
    assert driver.counters["spill"] == 0
    for plan in mirrors(driver, client):
        driver.end(plan, first)
    told = press(client, 6)
    assert first is CopyOutcome.DONE or told == (), "what did not arrive is not read"
    host = np.full(len(device), -1)
    for number in range(7, 12):
        for rows in told:
            device[rows.ordinals], host[rows.ordinals] = rows.device, rows.host
        driver.end_all()
        told = press(client, number)
    away = np.flatnonzero(device < 0)
    assert len(away) > 4
    assert (host[away] >= 0).all()
    assert (device[-2:] >= 0).all(), "the last pages stay"
    c = client.spec.chains[0].classes[0]
    positions = np.concatenate([np.arange(ROWS) + page * ROWS for page in away])
    places = Rows(np.full(len(positions), c.host_regions[0], np.int32), host[positions // ROWS], positions % ROWS)
    assert not driver.memory.wrong(c.layout, places, pattern("a", positions)).any()
    driver.leave(client)
