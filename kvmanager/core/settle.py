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
        _advance_untouched(state, request, part)
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


def _advance_untouched(state: State, request: Request, part: RequestChain) -> None:
    """Settles the leading spans of which nothing was known and which are full now, run by run."""
    rows = _newly_full(request, part)
    if len(rows) == 0:
        return
    table, index = part.chain.table, part.chain.index
    ends = _take_keys(request, part, rows)
    known = [end in index.ends for end in ends]
    if len(set(ends)) < len(ends):
        known = [True] * len(ends)  # keys that repeat are no chained keys: each is looked at when its turn comes
    group = state.groups[request.group]
    at = 0
    while at < len(rows):
        if known[at]:
            _index(group, part, rows[at])
            part.settled += 1
            at += 1
            continue
        stop = next((i for i in range(at + 1, len(rows)) if known[i]), len(rows))
        if _findable(part):
            index.publish_run(rows[at:stop], part.anchor, ends[at:stop])
            part.anchor = rows[stop - 1]
        part.settled += stop - at
        at = stop
    assert (table.valid[rows] == table.segments[rows]).all()


def _newly_full(request: Request, part: RequestChain) -> list[int]:
    """The leading unsettled spans with no valid segment so far that are fenced as a whole now."""
    table, rows = part.chain.table, part.rows[part.settled :]
    page_rows = part.chain.spec.page_rows
    known = min(request.fenced_tokens // page_rows, len(request.keys) // part.chain.index.key_bytes)
    if not rows or table.valid[rows[0]] or table.first_token[rows[0]] // page_rows + table.segments[rows[0]] > known:
        return []
    index = np.asarray(rows, np.int64)
    full = (table.valid[index] == 0) & (table.first_token[index] // page_rows + table.segments[index] <= known)
    return rows if full.all() else rows[: int(np.argmin(full))]


def _take_keys(request: Request, part: RequestChain, rows: list[int]) -> list[tuple[int, bytes]]:
    """Gives full spans their keys; returns (namespace, last key) of each."""
    table, width = part.chain.table, part.chain.index.key_bytes
    index = np.asarray(rows, np.int64)
    starts = table.first_token[index] // part.chain.spec.page_rows
    stops = (starts + table.segments[index]) * width
    base = int(starts[0]) * width
    text = bytes(request.keys[base : int(stops[-1])])
    ends = []
    for row, start, stop in zip(rows, (starts * width - base).tolist(), (stops - base).tolist(), strict=True):
        table.keys[row] = keys = text[start:stop]
        ends.append((request.namespace, keys[-width:]))
    table.valid[index] = table.segments[index]
    return ends


def _findable(part: RequestChain) -> bool:
    """Whether the next span's predecessor is in the index; else it stays private, and all that follows."""
    return part.settled == 0 or (part.anchor != NO_SPAN and bool(part.chain.table.published[part.anchor]))


def _index(group: Group, part: RequestChain, row: int) -> None:
    """Makes the span findable below its canonical predecessor, unless an equal one is there already."""
    chain, table = part.chain, part.chain.table
    if not _findable(part):
        return
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
    table.anchor(twin)
    if promises_hold(group):
        part.anchors.append(twin)
        part.anchor = twin
    else:
        # The twin's pages were promised to somebody: it stays reclaimable, and what follows here private.
        table.unanchor([twin])
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
