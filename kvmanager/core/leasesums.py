"""Checksums of pages that engines filled by leases: made by who filled them, compared by who reads them.

The daemon keeps them beside the pages, with the generation of the content that each belongs to, and looks at no byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.core.checksums import SUM_WORDS, SumArray, SumStore
from kvmanager.core.events import Opened
from kvmanager.core.group import Chain
from kvmanager.core.request import Request
from kvmanager.core.spans import DEVICE
from kvmanager.core.state import State
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import Int64Array


@dataclass(frozen=True)
class Acquired(Opened):
    """Answer to an acquire. summed_pages: those with known sums; sums: uint64[summed pages, ranks, words]."""

    summed_pages: Int64Array | None = None
    sums: SumArray | None = None


def keep_sums(state: State, request: Request, summed_pages: Sequence[int], sums: bytes) -> None:
    """Of pages that the lease has filled. Raises InvalidArgument for others, or another number of sums."""
    if not summed_pages or request.chains[0].chain.offloads:  # there sums are made at the copy out
        return
    part = request.chains[0]
    chain, pages = part.chain, np.asarray(summed_pages, np.int64)
    own = chain.table.page_lists(0, DEVICE, part.rows.array[part.shared :])
    if not np.isin(pages, own).all() or len(np.unique(pages)) != len(pages):
        strange = pages[~np.isin(pages, own)].tolist()[:8]
        raise InvalidArgument(f"lease {request.request_id}: sums of pages {strange} that it does not fill, or twice")
    store = _store(chain)
    words = store.ranks * store.sections * SUM_WORDS
    if len(sums) != len(pages) * words * 8:
        raise InvalidArgument(f"lease {request.request_id}: {len(sums)} bytes of sums; {words} words for each page")
    if not state.limits.checksums:
        return
    values = np.frombuffer(sums, "<u8").astype(np.uint64).reshape(len(pages), store.ranks, -1)
    store.note(pages, _generations(chain)[pages], values.swapaxes(0, 1))
    chain.sums[0] = store
    state.counters["summed_page"] += len(pages) * store.ranks


def sums_of(request: Request) -> tuple[Int64Array | None, SumArray | None]:
    """Of the pages that a lease holds, as far as they are known."""
    part = request.chains[0]
    if 0 not in part.chain.sums or len(part.rows) == 0 or part.chain.offloads:
        return None, None
    return sums_of_rows(part.chain, part.rows.array)


def sums_of_rows(chain: Chain, rows: Int64Array) -> tuple[Int64Array, SumArray]:
    """(pages with known sums, uint64[pages, ranks, words]) of spans of a chain that has some."""
    store = chain.sums[0]
    pages = chain.table.page_lists(0, DEVICE, rows)
    pages = pages[store.known(pages, _generations(chain)[pages])]
    return pages, store.sums[pages]


def _store(chain: Chain) -> SumStore:
    known = chain.sums.get(0)
    if known is not None:
        return known
    c = chain.page_class(0)
    return SumStore(chain.pool(0, DEVICE).spaces[c.name].pages, chain.spec.ranks, len(c.sections))


def _generations(chain: Chain) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    generations: np.ndarray[tuple[int], np.dtype[np.uint32]] = (
        chain.pool(0, DEVICE).spaces[chain.page_class(0).name].generation
    )
    return generations
