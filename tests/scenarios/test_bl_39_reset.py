"""BL-39: after a reset nothing old is found in any tier; a new weights revision finds nothing old either."""

import pytest

from kvmanager.core.events import Open
from kvmanager.core.operatorevents import Reset, ResetDone
from kvmanager.core.pool import PageState
from tests.sim.bytes_driver import BytesClient, BytesDriver, start
from tests.sim.driver import chain_keys

ROWS, RANKS = 4, 2
SPAN = ROWS * RANKS


def reset(driver: BytesDriver) -> ResetDone:
    done = driver.apply(Reset("p"))
    assert isinstance(done, ResetDone), done
    return done


def on_both_tiers() -> tuple[BytesDriver, BytesClient]:
    """128 spans of one session on the device and on the host."""
    driver, client = start(140, 140, ranks=RANKS, page_rows=ROWS)
    client.serve(1, 128 * SPAN, "a")
    assert driver.counters["offload"] == 128
    return driver, client


def test_idle_content_is_gone_from_all_tiers() -> None:
    driver, client = on_both_tiers()
    assert reset(driver) == ResetDone(128, 0)
    for pool in ("p/hbm", "p/host"):
        assert driver.pages(pool, PageState.FREE) == 140
    assert client.serve(2, 128 * SPAN, "a").cached_tokens == 0
    driver.leave(client)


@pytest.mark.parametrize("when", ["before the copies end", "after"])
def test_reset_while_an_offload_and_an_onboard_are_held(when: str) -> None:
    driver, client = start(12, 40, ranks=RANKS, page_rows=ROWS)
    client.serve(1, 8 * SPAN, "a")
    client.serve(2, 12 * SPAN, "push")  # `a` is on the host alone now
    onboarding = client.open(3, 6 * SPAN + 1, "a")
    assert onboarding.state == "waiting"
    (onboard,) = driver.plans
    storing = client.open(4, 3 * SPAN, "b")
    client.finish(storing, 3 * SPAN, "b")
    offloads = [plan for plan in driver.plans if plan != onboard]
    assert offloads
    if when == "after":
        driver.end(onboard)
        driver.end(offloads[0])
    done = reset(driver)
    assert done.held_spans == (6 if when == "after" else 9), "readers and copies keep theirs"
    again = client.open(5, SPAN + 1, "b")
    assert again.cached_tokens == 0
    driver.end_all()
    # The one that waited reads the bytes that it was promised, and not another's.
    ready = next(n.ready for n in driver.notices if n.ready.request_id == 3)
    assert (ready.state, ready.cached_tokens) == ("runnable", 6 * SPAN)
    client.finish(ready, 6 * SPAN + 1, "a")
    client.close(5)
    client.run()
    driver.end_all()
    assert client.open(6, 6 * SPAN + 1, "a").cached_tokens == 0
    driver.leave(client)


def test_a_new_weights_revision_finds_nothing_of_the_old() -> None:
    """Not even what was being stored when the weights changed; and the old one finds its own again."""
    driver, client = start(24, 24, ranks=RANKS, page_rows=ROWS)
    client.serve(1, 4 * SPAN, "a")
    storing = client.open(2, 4 * SPAN, "b")
    client.finish(storing, 4 * SPAN, "b")
    held = list(driver.plans)
    assert held
    client.die()
    changed = BytesClient(driver, "p", namespace=b"weights 2")
    for plan in held:
        driver.end(plan)
    for request_id, what in ((1, "a"), (2, "b")):
        opened = changed.step(opens=(Open(request_id, 4 * SPAN, 0, chain_keys(what, 8)),)).opened[0]
        assert opened.cached_tokens == 0
        changed.finish(opened, 4 * SPAN, f"{what} with weights 2")
    changed.die()
    driver.end_all()
    back = BytesClient(driver, "p")
    opened = back.ready(back.open(1, 4 * SPAN, "a"))
    assert opened.cached_tokens == 4 * SPAN - ROWS
    back.finish(opened, 4 * SPAN, "a")
    driver.leave(back)
