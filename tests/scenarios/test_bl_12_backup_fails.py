"""BL-12: a page without a host copy is never dropped as if it had one."""

from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


def test_host_full_of_pinned_pages() -> None:
    driver = Driver([sharded_group(6, 4)])
    client = Client(driver, "p")
    client.serve(1, 4 * SPAN, "readers")
    assert driver.counters["offload"] == 4
    client.open(2, 4 * SPAN, "readers")  # pins three spans on both tiers, and takes one page of its own
    client.run()
    client.serve(3, SPAN, "dirty")
    client.serve(4, SPAN, "more")  # the device is full: something must go
    hit = client.open(5, SPAN + 1, "dirty")
    chain = driver.node.state.groups["p"].chains[0]
    if hit.cached_tokens:
        assert (chain.table.copies[0, :, driver.node.state.engines["e"].requests[5].chains[0].rows[0]] == 2).any()
    assert driver.counters["eviction"] >= 1
    assert driver.counters["onboard"] == 0, "nothing was ever believed to be on the host that was not"
    driver.leave(client)


def test_write_back_blocked_by_pins_goes_on_when_they_go() -> None:
    driver = Driver([sharded_group(8, 3)])
    client = Client(driver, "p")
    client.serve(1, 3 * SPAN, "readers")
    client.open(2, 3 * SPAN + 1, "readers")
    client.serve(3, 2 * SPAN, "blocked")
    assert driver.counters["offload"] == 3
    client.close(2)
    client.run()
    driver.end_all()
    assert driver.counters["offload"] == 5
    driver.leave(client)
