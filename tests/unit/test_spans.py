"""The span table: rows, uids, pins and copies."""

import numpy as np
import pytest

from kvmanager.core.spans import DEVICE, HOST, CopyState, SpanTable
from kvmanager.geometry import SEQUENTIAL, TokenOrder


def test_rows_are_reused_and_uids_never():
    table = SpanTable(1, 8)
    seen: set[int] = set()
    rows = set()
    for _ in range(200):
        row = table.add(0, TokenOrder(8, 1), now=5)
        uids = set(table.uids[row].tolist())
        assert len(uids) == 8
        assert not uids & seen
        seen |= uids
        rows.add(row)
        table.remove(row)
    assert len(rows) == 1


def test_the_table_grows_and_keeps_what_it_held():
    table = SpanTable(2, 2)
    rows = [table.add(i * 16, SEQUENTIAL, now=i) for i in range(300)]
    assert len(set(rows)) == 300
    assert table.first_token[rows].tolist() == [i * 16 for i in range(300)]
    assert table.last_used[rows].tolist() == list(range(300))
    assert list(table) == sorted(rows)


def test_copies_come_and_go():
    table = SpanTable(2, 4)
    row = table.add(0, TokenOrder(3, 1), now=0)
    table.put(1, HOST, row, np.array([7, 5, 9]), CopyState.FILLING)
    assert table.page_list(1, HOST, row).tolist() == [7, 5, 9]
    assert table.page_list(1, DEVICE, row).tolist() == []
    with pytest.raises(AssertionError):
        table.put(1, HOST, row, np.array([1]), CopyState.FILLING)
    with pytest.raises(AssertionError):
        table.remove(row)
    assert table.drop(1, HOST, row).tolist() == [7, 5, 9]
    with pytest.raises(AssertionError):
        table.drop(1, HOST, row)
    table.remove(row)
    assert not table.live[row]


def test_pins_count_and_never_go_below_zero():
    table = SpanTable(1, 1)
    row, other = (table.add(0, SEQUENTIAL, now=0) for _ in range(2))
    table.pin([row, row, other])
    assert table.pins[[row, other]].tolist() == [2, 1]
    table.unpin([row, row])
    with pytest.raises(AssertionError, match="once too often"):
        table.unpin([row])
