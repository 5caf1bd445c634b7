"""Taking spans out of the index, and saying so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvmanager.core.operatorevents import Forgot, Loss
from kvmanager.core.rows import RowArray, all_true

if TYPE_CHECKING:
    from kvmanager.core.group import Chain
    from kvmanager.core.state import State


def forgot(chain: Chain, rows: RowArray | Sequence[int], why: Loss, pool: str = "") -> Forgot:
    """What the history is told of spans that are still in the table."""
    table, index = chain.table, np.asarray(rows, np.int64)
    words = chain.index.key_bytes // 8
    valid = table.valid[index]
    keys = table.keys.words(index, int(valid.max(initial=0)) * words)[:, ::words].copy()
    keys[np.arange(keys.shape[1]) >= valid[:, None]] = 0
    return Forgot(why, pool, table.namespace[index], table.first_token[index], keys)


def condemn(state: State, chain: Chain, row: int, why: Loss) -> None:
    """Takes a span and all below it out of the index; pages go when nobody holds them."""
    if not chain.table.live[row] or not chain.table.published[row]:
        return
    rows = [*chain.index.descendants(row), row]
    state.effects.append(forgot(chain, rows, why))
    for each in rows:
        chain.index.unpublish(each)
    let_go(state, chain)
    for each in rows:
        chain.release_if_unused(each)


def let_go(state: State, chain: Chain) -> None:
    """Operators' pins end on spans that can be found no more: they would hold memory that nobody can use."""
    for pin in state.pins.values():
        chains = state.groups[pin.group].chains
        for place, (number, held) in enumerate(pin.rows):
            found = chain.table.published[held] if chains[number] is chain else None
            if found is not None and not all_true(found):
                lost = held[~found]
                pin.rows[place] = number, held[found]
                chain.table.unanchor(lost)
                chain.unpin(lost)
