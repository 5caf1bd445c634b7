"""Which copy of a span a ticket is read from: the device's, or the host's while that is the only complete one.

A request whose prefix is being onboarded has it on the host all the while. A ticket on it names the host copies of
what is not on the device yet: the other node reads beside the onboard, not after it. A copy that is named stays until
the ticket is over (`SpanTable.host_readers`), and it is read on there though the device has it meanwhile. Where the
host copies of a chain can't be named, its tickets grow as its bytes reach the device.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvmanager.core.events import SpanRunTable
from kvmanager.core.group import Chain
from kvmanager.core.request import RequestChain
from kvmanager.core.rows import BoolArray, RowArray
from kvmanager.core.spans import DEVICE, HOST, NO_PAGE, READY
from kvmanager.core.spec import Limits
from kvmanager.core.state import HostRead


def reads_host(limits: Limits, chain: Chain) -> bool:
    """Whether tickets may name host copies: of a chain of one class of pages, where the device is what is used."""
    return limits.export_from_host and chain.table.classes == 1 and chain.has_host(0) and not chain.swaps


def readable_tokens(limits: Limits, part: RequestChain, tokens: int) -> int:
    """How many of the first `tokens` tokens of a request that waits can be read now, on one tier or the other."""
    chain, table = part.chain, part.chain.table
    rows = part.rows.array
    held = rows[table.first_token[rows] < tokens]
    there = (table.copies[:, DEVICE, held] == READY).all(axis=0)
    if reads_host(limits, chain):
        there |= _on_host(chain, held)
    missing = held[~there]
    return int(table.first_token[missing[0]]) if len(missing) else tokens


def _on_host(chain: Chain, rows: RowArray) -> BoolArray:
    """Spans whose content is final, and complete on the host alone (bool[rows])."""
    table = chain.table
    alone: BoolArray = (table.copies[0, DEVICE, rows] != READY) & (table.copies[0, HOST, rows] == READY)
    return alone & table.published[rows]


def name_copies(limits: Limits, chain: Chain, read: HostRead, rows: list[int]) -> None:
    """The ticket takes these spans in: host copies that it names are held."""
    index = np.asarray(rows, np.int64)
    if len(index) == 0 or not reads_host(limits, chain):
        return
    mine = index[_on_host(chain, index)]
    chain.table.hold_host(mine)
    read.rows = np.concatenate((read.rows, mine))
    read.pages = np.concatenate((read.pages, chain.table.page_lists(0, HOST, mine)))


def let_copies_go(chain: Chain, read: HostRead) -> None:
    """The ticket is over."""
    chain.table.let_host_go(read.rows)


def table_of(part: RequestChain, read: HostRead) -> SpanRunTable:
    """Where the ticket's spans are read."""
    table = part.table_from(0)
    if len(read.rows) == 0:
        return table
    (name,) = table.pages
    mine = _pages_named(part.chain, part.rows.array, read)
    device, host = (pages.copy() for pages in table.pages[name])
    device[mine], host[~mine] = NO_PAGE, NO_PAGE
    host[mine] = read.pages
    return replace(table, pages={name: (device, host)})


def generations(chain: Chain, rows: RowArray, read: HostRead) -> npt.NDArray[np.uint32]:
    """Of the pages that are read, in the order of `rows`, which some name on the host."""
    mine, name = _pages_named(chain, rows, read), chain.spec.classes[0].name
    on_device = rows[~np.isin(rows, read.rows)]
    found = np.empty(len(mine), np.uint32)
    found[mine] = chain.pool(0, HOST).spaces[name].generation[read.pages]
    found[~mine] = chain.pool(0, DEVICE).spaces[name].generation[chain.table.page_lists(0, DEVICE, on_device)]
    return found


def _pages_named(chain: Chain, rows: RowArray, read: HostRead) -> BoolArray:
    """Which of the spans' pages are read on the host (bool[pages])."""
    named: BoolArray = np.isin(rows, read.rows).repeat(chain.widths(rows))
    return named


def lost(chain: Chain, read: HostRead) -> bool:
    """Whether a copy that was named is no longer what it was: its bytes were found to be wrong."""
    if len(read.rows) == 0:
        return False
    table, pool, name = chain.table, chain.pool(0, HOST), chain.spec.classes[0].name
    if not (table.copies[0, HOST, read.rows] == READY).all():
        return True
    bad = pool.condemned.get(name, ())
    moved = not np.array_equal(table.page_lists(0, HOST, read.rows), read.pages)
    return moved or any(page in bad for page in read.pages.tolist())
