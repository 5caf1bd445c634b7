"""Operators' pins and evictions: what they keep, what they let go, and what they refuse."""

import numpy as np
import pytest

from kvmanager.core.events import CopyOutcome, PlanEnded, Trim
from kvmanager.core.operatorevents import (
    Cordon,
    Evicted,
    EvictPool,
    EvictPrefix,
    EvictTenant,
    Forgot,
    Loss,
    Pinned,
    PinPrefix,
    Reset,
    UnpinPrefix,
)
from kvmanager.core.pool import PageState
from kvmanager.errors import InvalidArgument, LimitExceeded, PoolExhausted, UnknownLease
from tests.sim.driver import Client, Driver, chain_keys, sharded_group

SPAN = 512
WIDTH = 16


def key(what: object, segment: int) -> bytes:
    return chain_keys(what, segment + 1)[-WIDTH:]


def start(pages: int, host_pages: int = 0) -> tuple[Driver, Client]:
    driver = Driver([sharded_group(pages, host_pages)])
    return driver, Client(driver, "p")


def found(client: Client, request_id: int, spans: int, what: object) -> int:
    """Cached tokens of one more request for the session."""
    return client.serve(request_id, spans * SPAN + 1, what).cached_tokens


def test_a_pinned_prefix_outlives_what_would_have_evicted_it() -> None:
    driver, client = start(12)
    client.serve(1, 4 * SPAN, "kept")
    assert driver.apply(PinPrefix("boss", "p", key("kept", 4 * 8 - 1))) == Pinned("boss", 4, 4 * SPAN)
    for number in range(6):
        client.serve(10 + number, 4 * SPAN, f"other {number}")
    assert found(client, 2, 4, "kept") == 4 * SPAN
    assert driver.apply(UnpinPrefix("boss")) == Pinned("boss", 4, 4 * SPAN)
    client.serve(20, 12 * SPAN, "all")
    assert client.open(3, 4 * SPAN + 1, "kept").cached_tokens == 0
    client.close(3)
    client.run()
    driver.leave(client)


def test_a_pin_ends_with_the_span_of_its_key() -> None:
    driver, client = start(12)
    client.serve(1, 4 * SPAN, "a")
    assert driver.apply(PinPrefix("x", "p", key("a", 8))) == Pinned("x", 2, 2 * SPAN)
    done = driver.apply(EvictPrefix("p", key("a", 0)))
    assert done == Evicted(2, 2), "what lies behind the pinned spans goes, they stay"
    assert found(client, 2, 4, "a") == 2 * SPAN
    driver.apply(UnpinPrefix("x"))
    driver.leave(client)


def test_a_pin_keeps_content_not_a_place() -> None:
    """Its device copies may go where the host has them: HBM is not lost to a pin."""
    driver, client = start(8, 16)
    client.serve(1, 4 * SPAN, "a")
    assert driver.counters["offload"] == 4
    driver.apply(PinPrefix("x", "p", key("a", 31)))
    assert client.open(2, 8 * SPAN, "b").state == "runnable"
    client.close(2)
    client.run()
    driver.end_all()
    opened = client.open(3, 4 * SPAN + 1, "a")
    assert (opened.state, opened.cached_tokens) == ("waiting", 4 * SPAN)
    driver.end_all()
    client.close(3)
    client.run()
    driver.apply(UnpinPrefix("x"))
    driver.leave(client)


def test_what_was_promised_is_not_pinned() -> None:
    driver, client = start(8)
    client.serve(1, 4 * SPAN, "a")
    assert client.open(2, SPAN, "b", growth=5 * SPAN).state == "runnable"
    answer = driver.apply(PinPrefix("x", "p", key("a", 31)))
    assert isinstance(answer, PoolExhausted)
    assert not driver.node.state.pins
    assert isinstance(driver.apply(PinPrefix("x", "p", key("a", 7))), Pinned), "one span was promised to nobody"
    grown = client.commit(2, 0, capacity=6 * SPAN)
    assert not grown.errors
    assert grown.grown[0].error is None
    client.close(2)
    client.run()
    driver.apply(UnpinPrefix("x"))
    driver.leave(client)


def test_a_reset_ends_pins_on_what_it_forgets() -> None:
    driver, client = start(12)
    client.serve(1, 4 * SPAN, "a")
    driver.apply(PinPrefix("x", "p", key("a", 31)))
    driver.apply(Reset("p"))
    assert driver.pages("p/hbm", PageState.FREE) == 12
    assert driver.apply(UnpinPrefix("x")) == Pinned("x", 0, 0)
    driver.leave(client)


def test_a_load_that_fails_ends_the_pin_on_what_was_lost() -> None:
    driver, client = start(6, 16)
    client.serve(1, 4 * SPAN, "a")
    driver.apply(PinPrefix("x", "p", key("a", 31)))
    client.serve(2, 6 * SPAN, "push")
    client.open(3, 4 * SPAN + 1, "a")
    (plan,) = driver.plans
    driver.plans.pop(plan)
    driver.apply(PlanEnded(plan, CopyOutcome.FAILED))
    driver.end_all()
    assert driver.apply(UnpinPrefix("x")) == Pinned("x", 0, 0)
    client.run()
    driver.leave(client)


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (PinPrefix("x", "nowhere", key("a", 0)), InvalidArgument),
        (PinPrefix("x", "p", b"short"), InvalidArgument),
        (PinPrefix("x", "p", key("unknown", 0)), InvalidArgument),
        (PinPrefix("", "p", key("a", 0)), InvalidArgument),
        (PinPrefix("y" * 65, "p", key("a", 0)), InvalidArgument),
        (PinPrefix("taken", "p", key("a", 0)), InvalidArgument),
        (UnpinPrefix("x"), UnknownLease),
        (EvictPrefix("p", key("unknown", 0)), InvalidArgument),
        (EvictPrefix("p", b""), InvalidArgument),
        (EvictTenant("p", "nobody"), InvalidArgument),
        (EvictPool("p", "p/nothing", 1), InvalidArgument),
        (EvictPool("p", "p/hbm", 0), InvalidArgument),
        (EvictPool("p", "p/hbm", 13), InvalidArgument),
    ],
)
def test_what_can_not_be_done_is_refused_and_changes_nothing(event: object, error: type[Exception]) -> None:
    driver, client = start(12)
    client.serve(1, 2 * SPAN, "a")
    driver.apply(PinPrefix("taken", "p", key("a", 15)))
    pins = driver.node.state.groups["p"].chains[0].table.pins.copy()
    assert isinstance(driver.apply(event), error)
    assert np.array_equal(driver.node.state.groups["p"].chains[0].table.pins, pins)
    assert sorted(driver.node.state.pins) == ["taken"]
    driver.apply(UnpinPrefix("taken"))
    driver.leave(client)


def test_there_is_a_most_of_pins() -> None:
    driver, client = start(4)
    client.serve(1, SPAN, "a")
    answers = [driver.apply(PinPrefix(f"{n}", "p", key("a", 7))) for n in range(257)]
    assert isinstance(answers[-1], LimitExceeded)
    assert all(isinstance(answer, Pinned) for answer in answers[:-1])
    for n in range(256):
        driver.apply(UnpinPrefix(f"{n}"))
    driver.leave(client)


def test_a_pool_and_a_tenant_are_evicted() -> None:
    driver = Driver([sharded_group(12, 0)])
    clients = [Client(driver, "p", name, name.encode(), tenant=name) for name in ("a", "b")]
    for client in clients:
        client.serve(1, 4 * SPAN, client.name)
    assert driver.apply(EvictPool("p", "p/hbm", 6)) == Evicted(2, 6)
    assert driver.pages("p/hbm", PageState.FREE) == 6
    held = clients[1].open(2, 4 * SPAN, "b")
    assert held.cached_tokens == 4 * SPAN - 64
    done = driver.apply(EvictTenant("p", "b"))
    assert done == Evicted(0, 4), "a running request uses them"
    clients[1].close(2)
    clients[1].run()
    assert driver.apply(EvictTenant("p", "b")) == Evicted(4, 0)
    assert clients[0].open(3, 4 * SPAN, "a").cached_tokens == 2 * SPAN, "the other tenant's stay"
    driver.leave(*clients)


def test_forgotten_spans_are_told_with_their_reason() -> None:
    driver, client = start(4)
    client.serve(1, 4 * SPAN, "a")

    def told(event: object) -> list[Forgot]:
        driver.now += 1
        return [e for e in driver.node.apply(event, driver.now) if isinstance(e, Forgot)]  # type: ignore[arg-type]

    (evicted,) = told(Trim("p", "p/hbm", 1))
    assert (evicted.why, evicted.pool, evicted.first_tokens.tolist()) == (Loss.EVICTED, "p/hbm", [3 * SPAN])
    keys = np.frombuffer(chain_keys("a", 32), np.uint64).reshape(32, 2)[:, 0]
    assert np.array_equal(evicted.keys, keys[24:].reshape(1, 8))
    (by_hand,) = told(EvictPrefix("p", key("a", 16)))
    assert (by_hand.why, by_hand.first_tokens.tolist()) == (Loss.OPERATOR, [2 * SPAN])
    reset = told(Reset("p"))
    assert [(each.why, each.first_tokens.tolist()) for each in reset] == [(Loss.RESET, [SPAN, 0])]
    driver.leave(client)


def test_a_cordon_is_part_of_the_state() -> None:
    driver, client = start(4)
    driver.apply(Cordon("maintenance"))
    assert driver.node.state.cordon == "maintenance"
    driver.apply(Cordon(""))
    assert driver.node.state.cordon == ""
    driver.leave(client)
