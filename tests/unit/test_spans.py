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


def twins() -> tuple[SpanTable, SpanTable]:
    """Two tables with the same past: rows given back out of order."""
    tables = SpanTable(2, 8), SpanTable(2, 8)
    for table in tables:
        rows = [table.add(i, TokenOrder(8, 1), now=1) for i in range(20)]
        for row in (rows[3], rows[15], rows[7]):
            table.keys[row] = b"old"
            table.parent[row] = 2
            table.last_used[row] = 9
            table.dead[row] = True
            table.remove(row)
    return tables


@pytest.mark.parametrize("count", [0, 1, 2, 50, 300])
def test_many_are_added_as_one_after_the_other(count):
    one, other = twins()
    firsts = np.arange(count) * 16
    order = TokenOrder(8, 1)
    rows = other.add_many(firsts, order, 5, 2, 7)
    assert rows.tolist() == [one.add(int(first), order, 5, 2, 7) for first in firsts]
    rows = np.append(rows, other.add(0, SEQUENTIAL, 6))
    assert one.add(0, SEQUENTIAL, 6) == rows[-1]
    for name in ("parent", "children", "first_token", "segments", "interleave", "valid", "pins", "busy", "last_used",
                 "namespace", "owner", "dead", "published", "live", "uids"):  # fmt: skip
        assert np.array_equal(getattr(one, name)[rows], getattr(other, name)[rows]), name
    assert [one.keys[row] for row in rows] == [other.keys[row] for row in rows]
    assert np.array_equal(one.pages[:, :, rows], other.pages[:, :, rows])
    assert list(one) == list(other)


def test_many_copies_come_and_go_at_once():
    table = SpanTable(2, 4)
    rows = np.array([table.add(0, order, now=0) for order in (TokenOrder(3, 1), SEQUENTIAL, TokenOrder(4, 1))])
    table.put_many(1, HOST, rows, np.array([3, 1, 4]), np.arange(8)[::-1], CopyState.FILLING)
    assert [table.page_list(1, HOST, row).tolist() for row in rows] == [[7, 6, 5], [4], [3, 2, 1, 0]]
    assert table.page_lists(1, HOST, rows[[2, 0]]).tolist() == [3, 2, 1, 0, 7, 6, 5]
    with pytest.raises(AssertionError):
        table.put_many(1, HOST, rows[:1], np.array([1]), np.array([1]), CopyState.FILLING)
    with pytest.raises(AssertionError):
        table.remove_many(rows[1:])
    assert table.drop_many(1, HOST, rows[1:]).tolist() == [4, 3, 2, 1, 0]
    with pytest.raises(AssertionError):
        table.drop_many(1, HOST, rows)
    table.remove_many(rows[1:])
    assert list(table) == [rows[0]]
    assert table.add(0, SEQUENTIAL, now=0) == rows[1]


def test_pins_of_many_rows_are_counted_each():
    """Long stretches of rows are counted as ranges: each row as often as it is named, its neighbours not."""
    table = SpanTable(1, 1)
    for i in range(100):
        table.add(i, SEQUENTIAL, now=0)
    named = np.concatenate([np.arange(10, 60), [3], np.arange(40, 80), [3, 99]])
    table.pin(named)
    assert table.pins[:100].tolist() == np.bincount(named, minlength=100).tolist()
    table.unpin(named[:51])
    assert table.pins[:100].tolist() == np.bincount(named[51:], minlength=100).tolist()
    with pytest.raises(AssertionError, match="once too often"):
        table.unpin(named[:51])
