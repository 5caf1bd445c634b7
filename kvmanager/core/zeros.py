"""Plans of zeros over pages that may hold another tenant's bytes, and which pages those are."""

from __future__ import annotations

from kvmanager.core.group import Chain, Group
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose
from kvmanager.core.request import Request
from kvmanager.core.rows import RowArray
from kvmanager.core.spanplans import copy_pages
from kvmanager.core.spans import DEVICE
from kvmanager.core.state import State
from kvmanager.geometry import Int64Array


def zeros(chain: Chain, page_class: int, tier: int, pages: Int64Array) -> tuple[PagedCopies, ...]:
    """Whole pages on all ranks; a scrub names them as source and as target, and reads nothing."""
    c = chain.page_class(page_class)
    regions = c.device_regions if tier == DEVICE else c.host_regions
    found: list[PagedCopies] = []
    for region in regions:
        found += copy_pages(c.page_bytes, region, pages, region, pages)
    return tuple(found)


def hot_zeros(state: State, group: Group, request: Request) -> tuple[CopyPlan, ...]:
    """What the worker does to a hot buffer that it is told of, before it gathers its first row there.

    A row of one is read only after its own content came, so this keeps old bytes from a kernel that strays.
    """
    sparse = group.spec.sparse
    if not group.spec.scrub or sparse is None or len(request.hot) == 0:
        return ()
    chain = group.chains[0]
    pool = chain.pool(0, DEVICE)
    assert pool.writers is not None
    pages = request.hot[pool.writers.unclean(request.hot, pool.spaces[sparse.hot_class].units)]
    if len(pages) == 0:
        return ()
    page_bytes = pool.unit_bytes * pool.spaces[sparse.hot_class].units
    (region,) = chain.page_class(0).device_regions
    return (CopyPlan(state.new_plan_id(), Purpose.SCRUB, tuple(copy_pages(page_bytes, region, pages, region, pages))),)


def unclean(chain: Chain, page_class: int, tier: int, rows: RowArray) -> Int64Array:
    """Pages of spans that may hold bytes of other tenants."""
    pool, name = chain.pool(page_class, tier), chain.page_class(page_class).name
    assert pool.writers is not None
    pages = chain.table.page_lists(page_class, tier, rows)
    return pages[pool.writers.unclean(pages, pool.spaces[name].units)]
