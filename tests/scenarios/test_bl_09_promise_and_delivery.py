"""BL-09: what a match promised is still there when the load comes, whatever pressure is in between."""

from kvmanager.core.events import Open
from kvmanager.core.spans import DEVICE, HOST, CopyState
from tests.sim.bytes_driver import start
from tests.sim.driver import Client, Driver, chain_keys, sharded_group

SPAN = 512


def test_match_and_load_are_one_operation() -> None:
    driver = Driver([sharded_group(8, 12)])
    client = Client(driver, "p")
    client.serve(1, 3 * SPAN, "old")
    client.serve(2, 8 * SPAN, "push")  # `old` is on the host alone now
    rows = 64
    keys = {what: chain_keys(what, 4 * SPAN // rows) for what in ("old", "x")}
    reply = client.step(
        opens=(Open(3, 3 * SPAN + rows, 0, keys["old"][: 25 * 16]), Open(4, 4 * SPAN, 0, keys["x"]))
    )
    promised, pressure = reply.opened
    assert promised.state == "waiting"
    assert promised.cached_tokens == 3 * SPAN
    assert pressure.state == "runnable"
    chain = driver.node.state.groups["p"].chains[0]
    held = driver.node.state.engines["e"].requests[3].chains[0].rows[:3]
    assert (chain.table.copies[0, HOST, held] == CopyState.READY).all()
    assert (chain.table.pins[held] == 1).all()
    driver.end_all()
    assert driver.notices[-1].ready.cached_tokens == 3 * SPAN
    assert (chain.table.copies[0, DEVICE, held] == CopyState.READY).all()
    driver.leave(client)


def test_what_was_promised_has_the_right_bytes() -> None:
    driver, client = start(8, 12)
    client.serve(1, 3 * SPAN, "old")
    client.serve(2, 8 * SPAN, "push")
    waiting = client.open(3, 3 * SPAN + 64, "old")
    assert waiting.cached_tokens == 3 * SPAN
    pressure = client.open(4, 4 * SPAN, "x")
    client.write(pressure, "x", 0, 4 * SPAN)
    ready = client.ready(waiting)
    assert ready.cached_tokens == 3 * SPAN
    client.read(ready, "old", 3 * SPAN)
    driver.leave(client)
