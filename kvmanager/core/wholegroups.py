"""Groups that one engine holds as a whole: it keeps blocks of its own in them, and hands them out itself.

The engine opens one request over every page, so who holds the memory, and when it is free again, is what it is for any
request. Nothing is committed there: what the bytes mean is known to the engine alone.
"""

from __future__ import annotations

from kvmanager.core.events import Open, RegisterEngine
from kvmanager.core.group import Group
from kvmanager.core.state import State
from kvmanager.errors import InvalidArgument, PoolExhausted


def check_nobody_holds(state: State, event: RegisterEngine) -> None:
    """Raises PoolExhausted while an engine, of whatever name, is there: it may still write anywhere in the memory."""
    tenants = state.tenants
    for other in state.all_engines():
        if other.group == event.group:
            ours = tenants.of_namespace[other.namespace] == tenants.numbers.get(event.tenant, -1)
            holder = f"engine {other.name!r}" if ours else "another tenant's engine"
            (pool,) = state.groups[event.group].spec.pools
            raise PoolExhausted(
                f"the memory of group {event.group!r} belongs to {holder} until its processes are dead; wait, end it, "
                "or give this engine a group of its own",
                pool=pool.name, needed=pool.slabs, free=0, holder=holder, retry_after_ns=state.limits.retry_after_ns,
            )  # fmt: skip


def check_takes_all(group: Group, event: Open) -> None:
    """Raises InvalidArgument for a request over a part of the memory, or one that takes KV from elsewhere."""
    (pool,) = group.spec.pools
    tokens = pool.slabs * group.spec.page_rows
    if event.prompt_tokens != tokens or event.growth_tokens or event.ticket is not None:
        raise InvalidArgument(
            f"group {group.spec.name!r} is one engine's as a whole: open one request of {tokens} tokens there, "
            "without growth or ticket"
        )
