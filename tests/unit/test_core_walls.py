"""Tenants in the core: nobody finds, is told of, or takes over what is another's."""

from __future__ import annotations

import pytest

from kvmanager.core.events import AcceptTicket, ExportRequestKV, RegisterEngine
from kvmanager.core.spec import Limits, TenantSpec
from kvmanager.errors import PoolExhausted, Unauthorized
from kvmanager.services.admin_service import _leases, _prefixes, _requests, _status
from tests.sim.driver import Client, Driver, sharded_group

SPAN = 512


@pytest.fixture
def two() -> tuple[Driver, Client, Client]:
    driver = Driver([sharded_group(10, 0)], Limits(tenants=(TenantSpec("a"), TenantSpec("b"))))
    a, b = (Client(driver, "p", f"engine-{name}", name.encode(), tenant=name) for name in ("a", "b"))
    return driver, a, b


def test_the_same_prompt_of_two_tenants_is_found_by_its_own(two: tuple[Driver, Client, Client]) -> None:
    driver, a, b = two
    a.serve(1, 2 * SPAN, "same")
    assert b.open(1, 2 * SPAN, "same").cached_tokens == 0
    assert a.open(2, 2 * SPAN, "same").cached_tokens > 0
    a.close(2)
    b.close(1)
    driver.leave(a, b)


def test_a_refusal_does_not_name_what_others_hold(two: tuple[Driver, Client, Client]) -> None:
    driver, a, b = two
    assert a.open(41, 4 * SPAN, "x").state == "runnable"
    assert a.open(42, 3 * SPAN, "y").state == "runnable"
    assert b.open(7, 2 * SPAN, "z").state == "runnable"
    error = b.open(8, 4 * SPAN, "w").error
    assert isinstance(error, PoolExhausted)
    assert error.holder == "other tenants (7 pages), engine-b/7 (2 pages)"
    assert "engine-a" not in f"{error}{error.holder}"
    error = a.open(43, 4 * SPAN, "w").error
    assert isinstance(error, PoolExhausted)
    assert error.holder == "engine-a/41 (4 pages), engine-a/42 (3 pages), other tenants (2 pages)"
    driver.leave(a, b)


def test_an_engines_name_is_its_tenants_while_it_is_there(two: tuple[Driver, Client, Client]) -> None:
    driver, a, b = two
    assert a.open(1, SPAN, "x").state == "runnable"
    before = driver.node.state.engines["engine-a"]
    spec = driver.node.state.groups["p"].spec
    taken = RegisterEngine(
        "engine-a", "p", b"c", 16, spec.page_rows,
        tuple(c.layout.fingerprint for chain in spec.chains for c in chain.classes), spec.ranks, tenant="c",
    )  # fmt: skip
    assert isinstance(driver.apply(taken), Unauthorized)
    assert driver.node.state.engines["engine-a"] is before
    assert before.trusted
    driver.leave(a, b)


def test_a_ticket_is_its_tenants(two: tuple[Driver, Client, Client]) -> None:
    driver, a, _ = two
    a.open(1, 2 * SPAN, "x")
    a.commit(1, 2 * SPAN)
    a.run()
    driver.apply(ExportRequestKV("engine-a", a.epoch, 1, "t" * 32))
    refused = driver.apply(AcceptTicket("t" * 32, "node", "b"))
    assert isinstance(refused, Unauthorized)
    assert driver.node.state.tickets["t" * 32].holder == ""
    assert isinstance(driver.apply(AcceptTicket("t" * 32, "node", "")), Unauthorized)
    a.close(1)
    a.run()
    pages = driver.apply(AcceptTicket("t" * 32, "node", "a"))
    assert pages.committed_tokens == 2 * SPAN
    refused = driver.apply(AcceptTicket("t" * 32, "node", "b"))
    assert isinstance(refused, Unauthorized), "also of an engine that has closed its request"
    assert [lease.tokens for lease in _leases(driver.node.state, "a").leases] == [2 * SPAN]
    assert list(_leases(driver.node.state, "b").leases) == []
    assert len(_leases(driver.node.state, None).leases) == 1


def test_views_of_one_tenant(two: tuple[Driver, Client, Client]) -> None:
    driver, a, b = two
    a.serve(1, 2 * SPAN, "x")
    b.serve(1, SPAN, "y")
    a.open(5, SPAN, "z")
    node = driver.node
    for tenant, tokens in (("a", 2 * SPAN), ("b", SPAN), ("nobody", 0), (None, 3 * SPAN)):
        seen = _prefixes(node.state, 100, tenant)
        assert (seen.tokens, sum(prefix.tokens for prefix in seen.prefixes)) == (tokens, tokens), tenant
    assert [(r.engine, r.request_id) for r in _requests(node, "a").requests] == [("engine-a", 5)]
    assert list(_requests(node, "b").requests) == []
    assert [engine.engine for engine in _status(node, "b").engines] == ["engine-b"]
    assert not _status(node, "b").counters
    assert _status(node, None).counters
    driver.leave(a, b)
