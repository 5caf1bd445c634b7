"""Publication: fenced segments become findable, full spans become ready and are queued for write-back."""

from __future__ import annotations

import numpy as np

from kvmanager.core.admission import promises_hold
from kvmanager.core.group import Chain, Group
from kvmanager.core.pool import PageState
from kvmanager.core.request import Request, RequestChain
from kvmanager.core.rows import RowArray, all_true, any_true, as_range, no_rows, places
from kvmanager.core.spans import DEVICE, FILLING, NO_SPAN, TOKEN_ID_BYTES, CopyState, SpanTable
from kvmanager.core.state import State


def publish(state: State, request: Request) -> None:
    """Publishes what is fenced of a request, span by span in token order."""
    group = state.groups[request.group]
    known = min(request.fenced_tokens // group.spec.page_rows, len(request.keys) // group.key_bytes)
    if known == request.known_segments:
        return
    request.known_segments = known
    for number, part in enumerate(request.chains):
        before = part.settled
        _advance_untouched(state, request, part)
        while part.settled < len(part.rows) and _advance(state, request, part):
            part.settled += 1
        if part.settled == before:
            continue
        full = part.rows[before : part.settled]
        _settle(part.chain, full)
        if part.chain.offloads:
            group.writeback[number].extend(full)


def _advance(state: State, request: Request, part: RequestChain) -> bool:
    """Brings the next unsettled span up to date; True when it is full."""
    chain, table = part.chain, part.chain.table
    width = chain.index.key_bytes
    row = part.rows[part.settled]
    first = table.first_token.item(row) // chain.spec.page_rows
    fenced = request.fenced_tokens // chain.spec.page_rows
    segments = table.segments.item(row)
    valid = min(fenced - first, len(request.keys) // width - first, segments)
    if valid > table.valid.item(row):
        table.keys[row] = bytes(request.keys[first * width : (first + valid) * width])
        table.valid[row] = valid
        _take_token_ids(request, part, [row])
        table.touched.append(row)
        _index(state.groups[request.group], part, row)
    return table.valid.item(row) == segments


def _advance_untouched(state: State, request: Request, part: RequestChain) -> None:
    """Settles the leading spans of which nothing was known and which are full now, those of one size at a time.

    A single one is left to `_advance`.
    """
    if part.settled + 1 >= len(part.rows):
        return
    rows = _newly_full(request, part)
    if len(rows) <= 1:
        return
    group = state.groups[request.group]
    for alike in _of_one_size(part.chain.table, rows):
        _take_keys(request, part, alike)
        _index_run(group, request, part, alike)
        part.settled += len(alike)


def _of_one_size(table: SpanTable, rows: RowArray) -> list[RowArray]:
    """The rows, cut where the spans' size changes."""
    segments = table.segments[as_range(rows)]
    changes = segments[1:] != segments[:-1]
    return np.split(rows, places(changes) + 1) if any_true(changes) else [rows]


def _index_run(group: Group, request: Request, part: RequestChain, rows: RowArray) -> None:
    """`_index` for unpublished full spans of one size that follow each other."""
    index = part.chain.index
    if not _findable(part):
        return
    twins = index.follow(request.keys, rows, part.anchor)
    if len(twins):
        _stand_in(group, part, twins)
        rows = rows[len(twins) :]
        if part.anchor == NO_SPAN:
            return
    if len(rows):
        index.publish_run(rows, part.anchor)
        part.anchor = int(rows[-1])


def _newly_full(request: Request, part: RequestChain) -> RowArray:
    """The leading unsettled spans with no valid segment so far that are fenced as a whole now."""
    table, rows = part.chain.table, part.rows.array[part.settled :]
    page_rows = part.chain.spec.page_rows
    known = min(request.fenced_tokens // page_rows, len(request.keys) // part.chain.index.key_bytes) * page_rows
    if len(rows) == 0 or table.valid[rows[0]]:
        return no_rows()
    if int(table.first_token[rows[0]]) + int(table.segments[rows[0]]) * page_rows > known:
        return no_rows()
    at = as_range(rows)
    if part.end_token <= known and not table.valid[at].any():
        return rows.copy()
    full = (table.valid[at] == 0) & (table.first_token[at] + table.segments[at] * page_rows <= known)
    return rows.copy() if all_true(full) else rows[: int(np.argmin(full))].copy()


def _take_keys(request: Request, part: RequestChain, rows: RowArray) -> None:
    """Gives full spans of one size that follow each other their keys."""
    table, width = part.chain.table, part.chain.index.key_bytes
    size = int(table.segments[rows[0]])
    first = int(table.first_token[rows[0]]) // part.chain.spec.page_rows * width
    text = np.frombuffer(request.keys, np.uint8, len(rows) * size * width, first)
    table.keys.put(rows, text.reshape(len(rows), size * width))
    table.valid[as_range(rows)] = size
    _take_token_ids(request, part, rows)


def _take_token_ids(request: Request, part: RequestChain, rows: RowArray | list[int]) -> None:
    """Gives spans the token ids of what is valid of them, where the request has any."""
    if not request.token_ids:
        return
    table, page_rows = part.chain.table, part.chain.spec.page_rows
    for row in np.asarray(rows).tolist():
        first = int(table.first_token[row])
        end = first + int(table.valid[row]) * page_rows
        table.token_ids[row] = bytes(request.token_ids[first * TOKEN_ID_BYTES : end * TOKEN_ID_BYTES])


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
    twin = chain.index.canonical(row, part.anchor)
    if twin == NO_SPAN:
        if table.published[row]:
            chain.index.complete(row)
        else:
            chain.index.publish(row, part.anchor)
        part.anchor = row
        return
    if table.published[row]:
        chain.index.unpublish(row)
    _stand_in(group, part, np.asarray([twin], np.int64))


def _stand_in(group: Group, part: RequestChain, twins: RowArray) -> None:
    """Equal spans, pinned, stand for the request's own: what follows is published below the last of them."""
    table = part.chain.table
    table.pin(twins)
    table.anchor(twins)
    if promises_hold(group):
        part.anchors.extend(twins)
        part.anchor = int(twins[-1])
        return
    table.unanchor(twins)
    table.unpin(twins)
    for row in np.split(twins, len(twins)):
        table.pin(row)
        table.anchor(row)
        if not promises_hold(group):
            # The twin's pages were promised to somebody: it stays reclaimable, and what follows here private.
            table.unanchor(row)
            table.unpin(row)
            part.anchor = NO_SPAN
            return
        part.anchors.extend(row)
        part.anchor = int(row[0])


def _settle(chain: Chain, rows: RowArray) -> None:
    """The spans' own device pages hold final content."""
    for page_class in range(chain.table.classes):
        copies = chain.table.copies[page_class, DEVICE]
        if len(rows) == 1:
            if copies[rows[0]] == FILLING:
                chain.set_state(page_class, DEVICE, int(rows[0]), CopyState.READY, PageState.READY)
            continue
        filling = copies[as_range(rows)] == FILLING
        some = rows if all_true(filling) else rows[filling]
        chain.set_states(page_class, DEVICE, some, CopyState.READY, PageState.READY)


def settle_tail(state: State, request: Request) -> None:
    """At the end of a request: a published partial tail is ready as far as it is valid."""
    group = state.groups[request.group]
    for number, part in enumerate(request.chains):
        for row in part.rows.array[part.settled :].tolist():
            if part.chain.table.published[row]:
                _settle(part.chain, np.asarray([row], np.int64))
                group.writeback[number].append(row)
