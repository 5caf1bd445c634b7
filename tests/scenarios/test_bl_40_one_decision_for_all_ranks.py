"""BL-40: a span is granted on every rank or on none; one page index means the same page everywhere."""

from kvmanager.errors import PoolExhausted
from tests.sim.bytes_driver import start


def test_two_page_indexes() -> None:
    driver, client = start(2, 4)
    first = client.open(1, 513, "a")
    client.write(first, "a", 0, 513)
    assert len(first.spans[0].pages["kv"][0]) == 2
    assert isinstance(client.open(2, 5, "b").error, PoolExhausted)
    client.commit(1, 513)
    client.run()
    (plan,) = driver.plans.values()
    assert len({(c.source_region, c.target_region) for c in plan.copies}) == 8
    assert len({c.source_offsets.tobytes() for c in plan.pieces()}) == 1, "the same page on all ranks"
    driver.end_all()
    client.close(1)
    client.run()
    assert client.serve(3, 1024, "push").state == "runnable"
    waiting = client.open(4, 513, "a")
    assert waiting.state == "waiting"
    (plan,) = driver.plans.values()
    assert {len(c.target_offsets) for c in plan.pieces()} == {1}, "every rank loads the same spans"
    loaded = client.ready(waiting)
    client.read(loaded, "a", 512)
    client.finish(loaded, 513, "a")
    driver.leave(client)
