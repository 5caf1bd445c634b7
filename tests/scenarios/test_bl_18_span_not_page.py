"""BL-18: token counts are divided by the span of all ranks, never by one rank's page."""

import pytest

from kvmanager.core.events import Closing, ExportRequestKV, Trim
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, sharded_group


@pytest.mark.parametrize(
    ("ranks", "page_rows", "tokens", "full"), [(8, 64, 4173, 8), (2, 16, 601, 18), (2, 16, 32, 1), (8, 64, 511, 0)]
)
def test_full_spans_offloaded_and_found(ranks: int, page_rows: int, tokens: int, full: int) -> None:
    driver, client = start(64, 64, ranks=ranks, page_rows=page_rows)
    span = ranks * page_rows
    opened = client.open(1, tokens, "a")
    client.write(opened, "a", 0, tokens)
    assert len(opened.spans[0].first_tokens) == -(-tokens // span)
    client.commit(1, tokens)
    client.run()
    driver.end_all()
    assert driver.counters["offload"] == full
    table = driver.node.state.groups["p"].chains[0].table
    assert int((table.published & (table.valid == table.segments)).sum()) == full
    client.close(1)
    client.run()
    driver.apply(Trim("p", "p/hbm", 64))
    found = client.ready(client.open(2, full * span + 1, "a"))
    assert found.cached_tokens == full * span
    assert driver.counters["onboard"] == full
    client.read(found, "a", full * span)
    client.close(2, Closing.ABORTED)
    client.run()
    driver.leave(client)


def test_lookahead_pages_are_not_exported() -> None:
    driver = Driver([sharded_group(8, 0, ranks=2, page_rows=16)])
    client = Client(driver, "p")
    client.open(1, 32, "a", growth=32)
    client.commit(1, 32, capacity=64)
    client.run()
    assert driver.apply(ExportRequestKV("e", client.epoch, 1, "t")).committed_tokens == 32
    ((_, rows),) = driver.node.state.tickets["t"].rows
    assert len(rows) == 1
    assert len(driver.node.state.engines["e"].requests[1].chains[0].rows) == 2
    driver.leave(client)
