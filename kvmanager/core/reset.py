"""Reset: nothing that is cached now is found again."""

from __future__ import annotations

import numpy as np

from kvmanager.core.forgetting import condemn
from kvmanager.core.operatorevents import Loss, Reset, ResetDone
from kvmanager.core.spans import NO_SPAN
from kvmanager.core.state import State
from kvmanager.errors import InvalidArgument


def reset(state: State, event: Reset) -> ResetDone:
    """Takes every span of a group out of its index, in all tiers at once; what nobody holds is freed now.

    Spans that requests, tickets or plans hold keep their bytes until those end, and can't be found meanwhile.
    A request that is open and has published nothing yet may still do so: it computed that itself.
    """
    group = state.groups.get(event.group)
    if group is None:
        raise InvalidArgument(f"no group {event.group!r} on this node; it has {sorted(state.groups)}")
    forgotten = held = 0
    for chain in group.chains:
        table = chain.table
        known = np.flatnonzero(table.live & table.published)
        for root in known[table.parent[known] == NO_SPAN].tolist():
            condemn(state, chain, root, Loss.RESET)
        forgotten += len(known)
        held += int(table.live[known].sum())
    group.unblock()
    return ResetDone(forgotten, held)
