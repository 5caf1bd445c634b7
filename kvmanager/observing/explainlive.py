"""What the core says now of a page or a request, in words."""

from __future__ import annotations

import numpy as np

from kvmanager.core.group import Chain, Group
from kvmanager.core.node import Node
from kvmanager.core.pool import PageState, Pool
from kvmanager.core.request import Phase, Request
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.state import State
from kvmanager.errors import InvalidArgument
from kvmanager.observing.explain import is_number


def request_now(node: Node, name: str, epoch: int = 0) -> list[str]:
    """A request that is open; empty when it is not. `name`: ENGINE/REQUEST, checked. epoch: 0: whichever."""
    engine_name, _, number = name.rpartition("/")
    for engine in node.state.all_engines():
        request = engine.requests.get(int(number))
        if engine.name == engine_name and request is not None and epoch in (0, engine.epoch):
            return _request(node.state, request)
    return []


def _request(state: State, request: Request) -> list[str]:
    part = request.chains[0]
    said = [
        f"{request.phase.value} for {(state.now - request.since) / 1e9:,.1f} s: {request.prompt_tokens:,} tokens, "
        f"{request.cached_tokens:,} found, {request.committed_tokens:,} committed, {request.fenced_tokens:,} fenced",
        f"holds {len(part.rows):,} spans in {request.group}, {part.shared:,} of them shared with the cache",
    ]
    for pool, slabs in request.promised.items():
        if slabs:
            said.append(f"is promised {slabs:,} more slabs of {pool}")
    if request.phase is Phase.WAITING:
        plans = ", ".join(map(str, sorted(request.waiting_on)))
        said.append(f"waits for plan {plans} (kvmanager transfers)")
    tickets = [ticket.ticket_id for ticket in state.tickets.values()
               if (ticket.engine, ticket.request_id) == (request.engine, request.request_id)]  # fmt: skip
    said += [f"is exported as ticket {ticket}" for ticket in tickets]
    return said


def page_now(node: Node, text: str) -> list[str]:
    """A page with its owner and who holds that. `text`: POOL:PAGE or POOL:CLASS:PAGE. Raises InvalidArgument."""
    group, pool, name, page = _page_named(node.state, text)
    space = pool.spaces[name]
    said = [f"{PageState(int(space.state[page])).name.lower()}, generation {int(space.generation[page])}"]
    owner = _span_of(group, pool, name, page)
    if owner is not None:
        return said + _span(node.state, group, *owner)
    for request in node.state.holders(group.spec.name):
        if page in request.hot and group.spec.sparse is not None and group.spec.sparse.hot_class == name:
            return [*said, f"hot buffer of {request.engine}/{request.request_id}"]
    for engine in node.state.all_engines():
        for entry in [*engine.fences, engine.covered]:
            if any((p, c) == (pool.name, name) and page in pages for p, c, pages in entry.frees):
                return [*said, f"given back; drains until a fence of engine {engine.name} has passed"]
    for _, quarantined, name_, pages in node.state.quarantine:
        if (quarantined, name_) == (pool.name, name) and page in pages:
            return [*said, "in quarantine: a plan of unknown fate may still write to it until the mover's process ends"]
    if page in pool.withheld.get(name, ()):
        return [*said, "withheld: it lost its content once; it returns when the node starts cold"]
    return [*said, "nobody's"]


def _page_named(state: State, text: str) -> tuple[Group, Pool, str, int]:
    pool_name, _, rest = text.partition(":")
    *middle, number = rest.split(":")
    found = [(group, group.pools[pool_name]) for group in state.groups.values() if pool_name in group.pools]
    if not found:
        known = sorted(pool for group in state.groups.values() for pool in group.pools)
        ways = f"{text!r} names no page: write POOL:PAGE or POOL:CLASS:PAGE"
        raise InvalidArgument(f"{ways}; pools are {', '.join(known)}")
    group, pool = found[0]
    classes = list(pool.spaces)
    if len(middle) > 1 or not is_number(number) or (middle and middle[0] not in classes):
        raise InvalidArgument(f"{text!r} names no page: pool {pool_name} has pages of {', '.join(classes)}")
    if not middle and len(classes) > 1:
        raise InvalidArgument(f"pool {pool_name} has several classes: write {pool_name}:CLASS:{number}, CLASS one of "
                              f"{', '.join(classes)}")  # fmt: skip
    name = middle[0] if middle else classes[0]
    if int(number) >= pool.spaces[name].pages:
        raise InvalidArgument(f"pool {pool_name} has pages 0 to {pool.spaces[name].pages - 1} of {name}, not {number}")
    return group, pool, name, int(number)


def _span_of(group: Group, pool: Pool, name: str, page: int) -> tuple[int, int] | None:
    """(chain index, row) of the span whose copy lies in the page."""
    for number, chain in enumerate(group.chains):
        for c, page_class in enumerate(chain.spec.classes):
            for tier in (DEVICE, HOST) if chain.has_host(c) else (DEVICE,):
                if page_class.name == name and chain.pool(c, tier) is pool:
                    has = (chain.table.pages[c, tier] == page).any(axis=1) & chain.table.live
                    if has.any():
                        return number, int(np.argmax(has))
    return None


def _span(state: State, group: Group, number: int, row: int) -> list[str]:
    chain = group.chains[number]
    table = chain.table
    first, rows = int(table.first_token[row]), group.spec.page_rows
    end = first + int(table.valid[row]) * rows
    tenant = state.tenants.specs[state.tenants.of_namespace[int(table.namespace[row])]].name
    key = table.keys[row][-group.key_bytes :].hex()
    said = [
        f"of a span of chain {chain.spec.name}: tokens {first:,} to {end:,} of its prompt, tenant {tenant or '-'}",
        f"last key {key or '(none yet)'}; {'can be found' if table.published[row] else 'can not be found'}",
        f"copies: {_copies(chain, row)}; last used {(state.now - int(table.last_used[row])) / 1e9:,.1f} s ago",
    ]
    said.append(f"{int(table.pins[row])} pins, {int(table.busy[row])} plans on it")
    return said + _holders(state, group, number, row)


def _copies(chain: Chain, row: int) -> str:
    said = []
    for c, page_class in enumerate(chain.spec.classes):
        for tier, where in ((DEVICE, "device"), (HOST, "host")):
            copy = CopyState(int(chain.table.copies[c, tier, row]))
            if copy is not CopyState.ABSENT:
                said.append(f"{page_class.name} {copy.name.lower()} on the {where}")
    return ", ".join(said) or "none"


def _holders(state: State, group: Group, number: int, row: int) -> list[str]:
    said = []
    for request in state.holders(group.spec.name):
        who = f"{request.engine}/{request.request_id} ({request.phase.value})"
        if request.chains[number].ordinal(row) is not None:
            said.append(f"held by request {who}")
        elif row in request.chains[number].anchors.array:
            said.append(f"stands in for a span of request {who}")
        elif (number, row) in request.donors:
            said.append(f"request {who} copies its first tokens")
    for ticket in state.tickets.values():
        if ticket.group == group.spec.name and any(at == number and row in rows for at, rows in ticket.rows):
            said.append(f"held by ticket {ticket.ticket_id} of {ticket.engine}/{ticket.request_id}")
    for pin in state.pins.values():
        if pin.group == group.spec.name and any(at == number and row in rows for at, rows in pin.rows):
            said.append(f"kept by an operator's pin {pin.pin_id!r}")
    return said
