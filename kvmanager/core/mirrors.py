"""Mirrors: host copies of spans that requests hold. Promised ones always get their pages; others what is to spare.

The class whose pages float comes first: a request may have to be pushed out to them. The other classes of a span are
mirrored so that it can leave HBM as a whole once nobody runs on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvmanager.core.admission import latent_growth, update_promises
from kvmanager.core.group import Chain, Group
from kvmanager.core.homes import latent_class, latents_of
from kvmanager.core.reclaim import droppable, reclaimable_slabs
from kvmanager.core.request import Request
from kvmanager.core.rows import BoolArray, RowArray
from kvmanager.core.spans import ABSENT, DEVICE, FILLING, HOST, READY
from kvmanager.core.state import State


def lack(chain: Chain, page_class: int, rows: RowArray) -> BoolArray:
    """The class could have a host copy of the span, and has none (bool[rows])."""
    if not chain.has_host(page_class):
        return np.zeros(len(rows), bool)
    copies = chain.table.copies[page_class]
    lacks: BoolArray = (copies[DEVICE, rows] == READY) & (copies[HOST, rows] == ABSENT)
    return lacks


def lacks_some(chain: Chain, rows: RowArray) -> BoolArray:
    """The same of any of its classes."""
    lacks = np.zeros(len(rows), bool)
    for c in range(chain.table.classes):
        lacks |= lack(chain, c, rows)
    return lacks


def take_mirrors(state: State, group: Group, chain: Chain, spans: list[int]) -> list[int]:
    """Host pages for the spans, all held by requests, class by class, as far as there are any; those that got some."""
    rows = np.asarray(spans, np.int64)
    if not _lacks_room(chain, rows):
        return _take(state, group, chain, rows)
    with _no_promised_mirror_gives_way(state):
        return _take(state, group, chain, rows)


def _lacks_room(chain: Chain, rows: RowArray) -> bool:
    """Whether something would have to go for the host copies of all these spans."""
    for c in range(chain.table.classes):
        lacking = rows[lack(chain, c, rows)]
        name = chain.page_class(c).name
        if len(lacking):
            pool = chain.pool(c, HOST)
            if pool.slabs_needed({name: int(chain.widths(lacking).sum())}) > pool.free_slabs:
                return True
    return False


@contextmanager
def _no_promised_mirror_gives_way(state: State) -> Iterator[None]:
    """Mirrors that push each other out would never end, those of two groups on one region neither.

    So pages that are promised to a request take the place of what is cached, or mirrored to spare, but not of what was
    promised as well: meanwhile such copies pass for copies under way, which are neither relied on nor chosen.
    """
    groups = [group for group in state.groups.values() if group.spec.sparse is not None]
    promised = [(group.chains[0].table.copies[latent_class(group), HOST], _promised(group)) for group in groups]

    def pass_for(copy_state: int) -> None:
        for copies, rows in promised:
            copies[rows] = copy_state
        for group in groups:
            update_promises(state, group)

    pass_for(FILLING)
    try:
        yield
    finally:
        pass_for(READY)


def _promised(group: Group) -> RowArray:
    """Spans whose mirrored latents one request's promise covers."""
    rows: RowArray = droppable(group.chains[0], latent_class(group), HOST).nonzero()[0]
    return rows[group.chains[0].table.pins[rows] > 0]


def _take(state: State, group: Group, chain: Chain, rows: RowArray) -> list[int]:
    """The same, of spans int64[n]."""
    got = np.zeros(len(rows), bool)
    for c in sorted(range(chain.table.classes), key=lambda c: not group.spec.floats(chain.page_class(c).name)):
        lacks = lack(chain, c, rows)
        lacking = rows[lacks]
        most = len(lacking)
        while most and not _fits(state, group, chain, c, lacking[:most]):
            most //= 2
        some = lacking[:most]
        if most == 0:
            continue
        name = chain.page_class(c).name
        pages = state.reclaimers[group.spec.name].take(chain.pool(c, HOST), name, int(chain.widths(some).sum()))
        if pages is None:
            continue
        chain.put_many(c, HOST, some, pages)
        chain.table.busy[some] += 1
        got |= lacks & np.isin(rows, some)
        update_promises(state, group)
    taken: list[int] = rows[got].tolist()
    return taken


def _fits(state: State, group: Group, chain: Chain, page_class: int, rows: RowArray) -> bool:
    """Whether host pages for these spans leave behind all promises but those that they keep.

    Only what was promised may take the place of something else: mirrors that push each other out would never end.
    """
    pool, name = chain.pool(page_class, HOST), chain.page_class(page_class).name
    needed = pool.slabs_needed({name: int(chain.widths(rows).sum())})
    kept = _kept(state, group, chain, page_class, rows)
    if needed > pool.free_slabs and kept < needed:
        return False
    owed = pool.owed_slabs + needed - kept
    return owed <= pool.free_slabs or owed <= pool.free_slabs + reclaimable_slabs(group, pool)


def _kept(state: State, group: Group, chain: Chain, page_class: int, rows: RowArray) -> int:
    """Promised slabs that the host copies of these spans are."""
    mine = np.zeros(len(chain.table.live), bool)
    mine[rows] = True
    pool, name = chain.pool(page_class, HOST), chain.page_class(page_class).name
    kept = 0
    for request in state.holders(group.spec.name):
        held = request.chains[0].rows.array
        pages = int(chain.widths(held[mine[held]]).sum())
        promised = request.promised.get(pool.name, 0)
        if pages and request.retracted:
            kept += min(promised, -(-pages // pool.per_slab(name)))
        elif pages and group.spec.floats(name):
            kept += promised - min(promised, max(0, _wanted(group, request) - pages))
    return kept


def _wanted(group: Group, request: Request) -> int:
    """Host slabs that a request should be promised."""
    part = request.chains[0]
    return latents_of(group, part, latent_growth(group, request)).host_slabs(request.homed_pages)
