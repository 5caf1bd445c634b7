"""Matching, publication and order in the prefix index."""

import hashlib

import numpy as np
import pytest

from kvmanager.core.prefix import PrefixIndex
from kvmanager.core.ranking import Ranking
from kvmanager.core.spans import NO_SPAN, SpanTable
from kvmanager.geometry import SEQUENTIAL, TokenOrder

WIDTH = 16
SPAN = TokenOrder(4, 1)


def keys(*tokens: object) -> bytes:
    """Chained keys, one for each word."""
    out, chain = [], b""
    for token in tokens:
        chain = hashlib.sha256(chain + repr(token).encode()).digest()[:WIDTH]
        out.append(chain)
    return b"".join(out)


class Index:
    """An index and the little it needs to publish."""

    def __init__(self) -> None:
        self.table = SpanTable(1, 4)
        self.index = PrefixIndex(self.table, WIDTH)

    def publish(self, text: bytes, first: int, last: int, parent: int = NO_SPAN, order=SPAN, now=1, namespace=0) -> int:
        row = self.table.add(first * 4, order, now, namespace)
        self.table.keys[row] = text[first * WIDTH : last * WIDTH]
        self.table.valid[row] = last - first
        self.index.publish(row, parent)
        return row


@pytest.fixture
def tree() -> Index:
    return Index()


def test_whole_spans_then_a_donor(tree):
    text = keys(*"abcdefgh")
    one = tree.publish(text, 0, 4)
    two = tree.publish(text, 4, 8, one)
    assert tree.index.match(text, 8).spans == (one, two)
    match = tree.index.match(keys(*"abcdefXY"), 8)
    assert (match.spans, match.segments, match.donor, match.donor_segments) == ((one,), 4, two, 2)
    whole = tree.index.match_whole(keys(*"abcdefXY"), 8)
    assert (whole.spans, whole.segments, whole.donor) == ((one,), 4, NO_SPAN)
    assert tree.index.match(text, 7).donor_segments == 3
    assert tree.index.match(keys(*"Xbcdefgh"), 8).segments == 0


def test_partial_spans_are_donors_only(tree):
    text = keys(*"abcdef")
    one = tree.publish(text, 0, 4)
    tail = tree.publish(text, 4, 6, one)
    match = tree.index.match(keys(*"abcdefgh"), 8)
    assert (match.segments, match.donor, match.donor_segments) == (4, tail, 2)
    assert tree.index.match_whole(text, 6).segments == 4


def test_the_donor_with_the_most_common_keys_wins(tree):
    tree.publish(keys(*"abX"), 0, 3)
    best = tree.publish(keys(*"abcY"), 0, 4)
    tree.publish(keys(*"aZ"), 0, 2)
    match = tree.index.match(keys(*"abcd"), 4)
    assert (match.donor, match.donor_segments) == (best, 3)


def test_spans_of_two_orders_over_the_same_tokens(tree):
    """Small spans end early, a large one goes further: the longest way wins whichever was there first."""
    text = keys(*"abcdefgh")
    small = NO_SPAN
    for i in range(3):
        small = tree.publish(text, i, i + 1, small, SEQUENTIAL)
    large = tree.publish(text, 0, 4)
    more = tree.publish(text, 4, 5, large, SEQUENTIAL)
    assert tree.index.match_whole(text, 8).spans == (large, more)
    assert tree.index.match(text, 3).segments == 3
    assert tree.index.match(text, 3).donor == NO_SPAN


def test_namespaces_do_not_see_each_other(tree):
    text = keys(*"abcd")
    tree.publish(text, 0, 4, namespace=0)
    other = tree.publish(text, 0, 4, namespace=1)
    assert tree.index.match(text, 4, 1).spans == (other,)
    assert tree.index.match(text, 4, 2).segments == 0
    tree.index.unpublish(other)
    assert tree.index.match(text, 4, 0).segments == 4
    assert tree.index.match(text, 4, 1).segments == 0


def test_parents_are_never_older_than_their_children(tree):
    text = keys(*"abcdefghijkl")
    one = tree.publish(text, 0, 4, now=1)
    two = tree.publish(text, 4, 8, one, now=9)
    three = tree.publish(text, 8, 12, two, now=5)
    assert tree.table.last_used[[one, two, three]].tolist() == [1, 1, 1]
    tree.index.touch([three], 7)
    assert tree.table.last_used[[one, two, three]].tolist() == [7, 7, 7]
    rows = np.array([one, two, three])
    ranking = Ranking(tree.table, rows, np.zeros(3, np.int64), tree.table.parent)
    assert ranking.first(3).tolist() == [three, two, one]


def test_a_span_with_children_can_not_leave(tree):
    text = keys(*"abcdefgh")
    one = tree.publish(text, 0, 4)
    two = tree.publish(text, 4, 8, one)
    with pytest.raises(AssertionError):
        tree.index.unpublish(one)
    tree.index.unpublish(two)
    tree.index.unpublish(one)
    assert not tree.index.heads
    assert not tree.index.runs


def test_descendants_come_children_first(tree):
    text, fork = keys(*"abcdefghijkl"), keys(*"abcdefXY")
    one = tree.publish(text, 0, 4)
    two = tree.publish(text, 4, 8, one)
    three = tree.publish(text, 8, 12, two)
    side = tree.publish(fork, 4, 8, one)
    found = tree.index.descendants(one)
    assert set(found) == {two, three, side}
    assert found.index(three) < found.index(two)
    assert tree.index.descendants(three) == []


def run_of(tree: Index, text: bytes, first: int, last: int, parent: int = NO_SPAN, now=1) -> list[int]:
    """Whole spans [first, last) of a text, published at once."""
    rows = [tree.table.add(i * 16, SPAN, now + i) for i in range(first, last)]
    width = 4 * WIDTH
    for i, row in zip(range(first, last), rows, strict=True):
        tree.table.keys[row] = text[i * width : (i + 1) * width]
        tree.table.valid[row] = 4
    tree.index.publish_run(np.array(rows), parent)
    return rows


def test_a_run_is_published_as_one_span_after_the_other(tree):
    text, fork = keys(*"abcdefghijkl"), keys(*"abcdefghijXY")
    rows = run_of(tree, text, 0, 2)
    rows += run_of(tree, text, 2, 3, rows[-1])
    side = run_of(tree, fork, 2, 3, rows[1])
    single = Index()
    parent = NO_SPAN
    for i in range(3):
        parent = single.publish(text, 4 * i, 4 * i + 4, parent, now=1 + i)
    single.publish(fork, 8, 12, 1, now=3)
    for name in ("parent", "children", "last_used", "published"):
        assert getattr(tree.table, name).tolist() == getattr(single.table, name).tolist(), name
    for name in ("heads", "sizes"):
        assert getattr(tree.index, name) == getattr(single.index, name), name
    for index in (tree.index, single.index):
        assert [run.rows[: run.spans].tolist() for run in index.runs.values()] == [rows, side]
    assert tree.index.match(fork, 12).spans == (rows[0], rows[1], side[0])


def test_a_run_must_be_new_and_below_what_can_be_found(tree):
    text = keys(*"abcdefgh")
    rows = run_of(tree, text, 0, 2)
    with pytest.raises(AssertionError):
        run_of(tree, text, 0, 2)
    with pytest.raises(AssertionError):
        tree.index.publish_run(np.array(rows), NO_SPAN)


def test_many_leave_children_first(tree):
    text = keys(*"abcdefghijkl")
    rows = np.array(run_of(tree, text, 0, 3))
    with pytest.raises(AssertionError):
        tree.index.unpublish_many(rows[:2])
    tree = Index()
    rows = np.array(run_of(tree, text, 0, 3))
    tree.index.unpublish_many(rows[:0:-1])
    assert tree.index.match(text, 12).spans == (rows[0],)
    assert tree.table.children[rows].tolist() == [0, 0, 0]
    tree.index.unpublish_many(rows[:1])
    assert not tree.index.heads
    assert not tree.index.runs
    assert not tree.index.sizes


def test_keys_that_are_not_chained_are_compared_one_by_one(tree):
    """An engine that repeats one key must not stop the node, and is given no more than what agrees."""
    text = keys("a") * 4
    row = tree.publish(text, 0, 4)
    assert tree.index.match_whole(text * 2, 8).spans == (row,)
    assert tree.index.match_whole(text + keys(*"bcd") + keys("a"), 8).spans == (row,)
    below = tree.publish(text, 0, 4, row)
    assert tree.index.match_whole(text * 3, 12).spans == (row, below)


def test_a_run_is_left_in_its_middle_and_lengthened_at_its_end(tree):
    text, fork = keys(*"abcdefghijklmnop"), keys(*"abcdefghXYZUVWST")
    rows = run_of(tree, text, 0, 3)
    side = run_of(tree, fork, 2, 4, rows[1])
    rows += run_of(tree, text, 3, 4, rows[2])
    assert [run.spans for run in tree.index.runs.values()] == [4, 2]
    assert tree.index.match(text, 16).spans == tuple(rows)
    assert tree.index.match(fork, 16).spans == (*rows[:2], *side)
    assert tree.index.match_whole(fork, 11).spans == tuple(rows[:2])
    match = tree.index.match(fork, 11)
    assert (match.segments, match.donor, match.donor_segments) == (8, side[0], 3)
    tree.index.unpublish_many(np.array([side[1], rows[3], rows[2], side[0]]))
    assert tree.index.match(fork, 16).spans == tree.index.match(text, 16).spans == tuple(rows[:2])
    assert tree.index.match(text, 16).donor == NO_SPAN


def test_a_span_that_becomes_full_joins_the_run_before_it(tree):
    text = keys(*"abcdefgh")
    one = tree.publish(text, 0, 4)
    tail = tree.publish(text, 4, 6, one)
    assert len(tree.index.runs) == 2
    tree.table.keys[tail], tree.table.valid[tail] = text[4 * WIDTH :], 4
    tree.index.complete(tail)
    assert [run.rows[: run.spans].tolist() for run in tree.index.runs.values()] == [[one, tail]]
    assert list(tree.index.heads) == [(0, text[:WIDTH])]
    assert tree.index.match(text, 8).spans == (one, tail)


def test_what_follows_equal_spans_is_found(tree):
    text = keys(*"abcdefghijkl")
    rows = run_of(tree, text, 0, 2)
    again = np.array([tree.table.add(i * 16, SPAN, 1) for i in range(3)])
    for i, row in enumerate(again.tolist()):
        tree.table.keys[row], tree.table.valid[row] = text[i * 4 * WIDTH : (i + 1) * 4 * WIDTH], 4
    assert tree.index.follow(text, again, NO_SPAN).tolist() == rows
    assert tree.index.follow(text, again[1:], rows[0]).tolist() == rows[1:]
    assert tree.index.follow(text, again[2:], rows[1]).tolist() == []
    assert tree.index.canonical(int(again[1]), rows[0]) == rows[1]
    assert tree.index.canonical(int(again[1]), NO_SPAN) == NO_SPAN
