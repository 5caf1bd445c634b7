"""BL-13: spans are offloaded once, as soon as they are confirmed; announced and rejected tokens do not count."""

from tests.sim.driver import Client, Driver, chain_keys, sharded_group

SPAN, ROWS = 512, 64


def test_six_announced_one_confirmed() -> None:
    driver = Driver([sharded_group(4, 4)])
    client = Client(driver, "p")
    client.open(1, 500, "a", growth=64)
    keys = chain_keys("a", 9)
    sent = 500 // ROWS
    for confirmed in range(500, 531):
        last = confirmed // ROWS
        client.commit(1, confirmed, confirmed + 6, keys[sent * 16 : last * 16], rejected=5)
        sent = last
        client.run()
        driver.end_all()
        assert driver.counters["offload"] == (1 if confirmed >= SPAN else 0), confirmed
    client.close(1)
    client.run()
    assert client.open(2, 513, "a").cached_tokens == SPAN
    driver.leave(client)
