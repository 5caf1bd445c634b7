"""Limits of tenants, counted on sets after every event: ceilings that nobody passes, floors that others keep."""

from __future__ import annotations

from kvmanager.core.events import Event, Step
from kvmanager.core.group import Group
from kvmanager.core.node import Node
from kvmanager.core.pool import Pool
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE

Held = dict[tuple[str, str], int]
"""Pages by (pool, tenant)."""


def held_pages(node: Node) -> Held:
    """Pages of spans in pools of one page class, by the tenant of their namespace."""
    found: Held = {}
    names = {number: name for name, number in node.state.tenants.numbers.items()}
    for group in node.state.groups.values():
        for chain in group.chains:
            table = chain.table
            owners = [names[node.state.tenants.of_namespace[n]] for n in table.namespace[table.live].tolist()]
            for tier in (DEVICE, HOST) if chain.has_host(0) else (DEVICE,):
                pages = (table.pages[0, tier, table.live] != NO_PAGE).sum(axis=1).tolist()
                for tenant, count in zip(owners, pages, strict=True):
                    key = (chain.pool(0, tier).name, tenant)
                    found[key] = found.get(key, 0) + count
    return found


def check(node: Node, before: Held, event: Event) -> Held:
    """Raises where a tenant is above its ceiling, or lost pages below its floor by another's message."""
    after = held_pages(node)
    pools: dict[str, Pool] = {p.name: p for group in node.state.groups.values() for p in group.pools.values()}
    asker = ""
    if isinstance(event, Step) and event.engine in node.state.engines:
        number = node.state.tenants.of_namespace[node.state.engines[event.engine].namespace]
        asker = node.state.tenants.specs[number].name
    for spec in node.state.limits.tenants:
        for pool in pools.values():
            now, then = (held.get((pool.name, spec.name), 0) for held in (after, before))
            assert now <= int(spec.ceiling * pool.slabs), f"tenant {spec.name} holds {now} pages of {pool.name}"
            if asker not in ("", spec.name):
                floor = int(spec.floor * pool.slabs)
                assert now >= min(then, floor), f"{spec.name} lost pages of {pool.name} below its floor"
    return after


def room_for(group: Group, pool: Pool, tenant: str, node: Node) -> int:
    """Pages that a tenant's requests may surely have beside all that it holds and was promised."""
    specs = node.state.limits.tenants
    own = next(spec for spec in specs if spec.name == tenant)
    others = sum(int(spec.floor * pool.slabs) for spec in specs if spec.name != tenant)
    most = min(int(own.ceiling * pool.slabs), pool.slabs - others)
    promised = sum(
        request.promised.get(pool.name, 0)
        for request in node.state.holders(group.spec.name)
        if node.state.tenants.of_namespace[request.namespace] == node.state.tenants.numbers[tenant]
    )
    return most - held_pages(node).get((pool.name, tenant), 0) - promised
