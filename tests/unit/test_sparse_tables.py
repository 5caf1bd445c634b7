"""Resolver tables: they say what the page table says, and sizes or layouts that can't be served are refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.clients.glm.page_table import PageTable
from kvmanager.clients.glm.resolver_reference import ReferenceResolver
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape, group_place, pack_pages, pack_request
from kvmanager.errors import InvalidArgument
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53, latent_layout, layer_major_layout, native_layout

B = 8


def _table(seed: int) -> PageTable:
    rng = np.random.default_rng(seed)
    table = PageTable(B)
    for _ in range(6):
        order = TokenOrder(int(rng.choice([1, 2, 8])), int(rng.choice([1, 2, 8])))
        count = int(rng.integers(1, 4)) * order.segments
        uids = rng.choice(1 << 40, count, replace=False)
        device, host = rng.permutation(900)[:count], np.full(count, -1, np.int64)
        table.append(order, table.capacity_tokens, uids, device, host, host)
    return table


@pytest.mark.parametrize("seed", range(5))
def test_packed_tables_lead_where_the_page_table_leads(seed: int) -> None:
    """Also after the last spans were cut off: all pages are resident, so an address tells page and slot."""
    table = _table(seed)
    for kept in (None, 5, 2):
        if kept is not None:
            table.truncate(kept)
        positions = np.random.default_rng(seed).permutation(table.capacity_tokens)[:96].astype(np.int32)
        pages = len(table.uid)
        shape = SparseShape(1, 1, len(positions), B, 96, pages, device_pages=1_000, host_pages=1)
        resolver = ReferenceResolver(shape, [GroupPlace(B * 16, 0, 16)])
        resolver.tables.spans[0], resolver.tables.pages[0] = pack_request(table, pages)
        resolver.tables.page_count[0] = pages
        rows = resolver.resolve(0, positions[None, None]).rows.reshape(-1)
        ordinals, slots = table.resolve(positions.astype(np.int64))
        assert np.array_equal(rows, (table.device[ordinals] * B + slots) * 16)


def test_a_group_lies_side_by_side() -> None:
    layout = latent_layout(GLM53, 64)
    assert group_place(layout, (2, 3, 4, 5)) == GroupPlace(3_345_408, 2 * 41_984, 2_624)
    assert group_place(native_layout(GLM53, 64), (78,)) == GroupPlace(3_502_592, 78 * 41_984, 656)
    with pytest.raises(InvalidArgument, match="side by side"):
        group_place(layer_major_layout(GLM53, 64), (2, 3, 4, 5))
    with pytest.raises(InvalidArgument, match="side by side"):
        group_place(layout, (2, 3, 4))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": 5}, "at most 8192 entries"),
        ({"hot_rows": 8_191}, "holds one step's entries"),
        ({"hot_rows": (1 << 15) + 1}, "at most 32768 rows"),
        ({"most_pages": 1 << 25}, "31 bits"),
        ({"requests": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed: dict[str, int], message: str) -> None:
    sizes = {"requests": 8, "rows": 4, "topk": 2048, "page_rows": 64, "hot_rows": 10_240, "most_pages": 16_384}
    sizes |= {"device_pages": 4_814, "host_pages": 15_406}
    assert SparseShape(**sizes).hot_slabs == 160
    with pytest.raises(InvalidArgument, match=message):
        SparseShape(**(sizes | changed))


def test_too_many_pages_and_uids_beyond_64_bits_are_refused() -> None:
    table = _table(1)
    with pytest.raises(InvalidArgument, match="room for 3"):
        pack_request(table, 3)
    none = np.zeros(1, np.int64)
    with pytest.raises(InvalidArgument, match="do not fit"):
        pack_pages(np.array([2**63 // B]), none, none, B)
