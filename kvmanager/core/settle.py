"""Publication: fenced segments become findable, full spans become ready and are queued for write-back."""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import promises_hold
from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState
from kvmanager.core.request import Request, RequestChain
from kvmanager.core.spans import DEVICE, NO_SPAN, CopyState
from kvmanager.core.state import State


def publish(state: State, request: Request) -> None:
    """Publishes what is fenced of a request, span by span in token order."""
    group = state.groups[request.group]
    for number, part in enumerate(request.chains):
        before = part.settled
        while part.settled < len(part.rows) and _advance(state, request, part):
            part.settled += 1
        full = part.rows[before : part.settled]
        _settle(part.chain, full)
        group.writeback[number].extend(full)


def _advance(state: State, request: Request, part: RequestChain) -> bool:
    """Brings the next unsettled span up to date; True when it is full."""
    chain, table = part.chain, part.chain.table
    width = chain.index.key_bytes
    row = part.rows[part.settled]
    first = int(table.first_token[row]) // chain.spec.page_rows
    fenced = request.fenced_tokens // chain.spec.page_rows
    segments = int(table.segments[row])
    valid = min(fenced - first, len(request.keys) // width - first, segments)
    if valid > table.valid[row]:
        table.keys[row] = bytes(request.keys[first * width : (first + valid) * width])
        table.valid[row] = valid
        _index(state.groups[request.group], part, row)
    return table.full(row)


def _index(group: Group, part: RequestChain, row: int) -> None:
    """Makes the span findable below its canonical predecessor, unless an equal one is there already."""
    chain, table = part.chain, part.chain.table
    if part.settled > 0 and (part.anchor == NO_SPAN or not table.published[part.anchor]):
        return  # its predecessor left the index: what follows stays private
    if not table.full(row):
        # A sparse group shares whole spans only.
        if group.spec.sparse is None and not table.published[row]:
            chain.index.publish(row, part.anchor)
        return
    twin = chain.index.canonical(row)
    if twin == NO_SPAN:
        if table.published[row]:
            chain.index.complete(row)
        else:
            chain.index.publish(row, part.anchor)
        part.anchor = row
        return
    if table.published[row]:
        chain.index.unpublish(row)
    table.pin([twin])
    if promises_hold(group):
        part.anchors.append(twin)
        part.anchor = twin
    else:
        # The twin's pages were promised to somebody: it stays reclaimable, and what follows here private.
        table.unpin([twin])
        part.anchor = NO_SPAN


def _settle(chain: Chain, rows: list[int]) -> None:
    """The spans' own device pages hold final content."""
    index = np.asarray(rows, np.int64)
    for page_class in range(chain.table.classes):
        filling = index[chain.table.copies[page_class, DEVICE, index] == CopyState.FILLING]
        chain.set_states(page_class, DEVICE, filling, CopyState.READY, PageState.READY)


def settle_tail(state: State, request: Request) -> None:
    """At the end of a request: a published partial tail is ready as far as it is valid."""
    group = state.groups[request.group]
    for number, part in enumerate(request.chains):
        for row in part.rows[part.settled :]:
            if part.chain.table.published[row]:
                _settle(part.chain, [row])
                group.writeback[number].append(row)
