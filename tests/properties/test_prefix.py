"""The prefix index against a naive model: a set of known prefixes."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.core.prefix import PrefixIndex
from kvmanager.core.spans import NO_SPAN, SpanTable
from kvmanager.geometry import SEQUENTIAL, TokenOrder

WIDTH = 16
ORDERS = {1: SEQUENTIAL, 3: TokenOrder(3, 1)}


def chained(words: tuple[int, ...]) -> bytes:
    out, chain = [], b""
    for word in words:
        chain = hashlib.sha256(chain + bytes([word])).digest()[:WIDTH]
        out.append(chain)
    return b"".join(out)


texts = st.lists(st.integers(0, 1), max_size=11).map(tuple)


def operations(sizes: list[int]) -> st.SearchStrategy[list[tuple]]:
    """Histories whose spans have these sizes."""
    publishes = st.tuples(st.just("publish"), texts, st.lists(st.sampled_from(sizes), max_size=11))
    return st.lists(st.one_of(publishes, st.tuples(st.just("leave"), st.integers(0, 50))), max_size=14)


class Model:
    """Spans as (start, words up to the end, whether whole); prefixes are reached by walking whole spans."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, tuple[int, ...], bool]] = {}

    def boundaries(self, words: tuple[int, ...]) -> set[int]:
        found, before = {0}, set()
        while found != before:
            before = set(found)
            for start, text, whole in self.spans.values():
                if whole and start in found and text == words[: len(text)]:
                    found.add(len(text))
        return found

    def longest(self, words: tuple[int, ...]) -> int:
        """Longest common prefix with any span that starts at a boundary."""
        reached = self.boundaries(words)
        best = max(reached)
        for start, text, _ in self.spans.values():
            if start in reached and words[:start] == text[:start]:
                common = start
                while common < min(len(text), len(words)) and words[common] == text[common]:
                    common += 1
                best = max(best, common)
        return best


def publish(index: PrefixIndex, model: Model, words: tuple[int, ...], cuts: list[int]) -> None:
    """A request's spans, as a core publishes them: where an equal whole span is known, that one stands for it."""
    table, keys, at, parent = index.table, chained(words), 0, NO_SPAN
    for size in cuts:
        if at >= len(words):
            return
        valid = min(size, len(words) - at)
        row = table.add(at, ORDERS[size], 0)
        table.keys[row] = keys[at * WIDTH : (at + valid) * WIDTH]
        table.valid[row] = valid
        twin = index.canonical(row, parent) if valid == size else NO_SPAN
        if twin != NO_SPAN:
            table.remove(row)
            parent = twin
        else:
            index.publish(row, parent)
            model.spans[row] = (at, words[: at + valid], valid == size)
            parent = row
        at += size


@pytest.mark.parametrize("sizes", [[1, 3, 3], [1], [3]], ids=str)
@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(texts, min_size=1, max_size=6))
def test_a_match_is_the_longest_known_prefix(sizes, data, prompts):
    history = data.draw(operations(sizes))
    table = SpanTable(1, 3)
    index, model = PrefixIndex(table, WIDTH), Model()
    for operation in history:
        if operation[0] == "publish":
            publish(index, model, operation[1], operation[2])
        elif leaves := [row for row in model.spans if table.children[row] == 0]:
            row = leaves[operation[1] % len(leaves)]
            index.unpublish(row)
            table.remove(row)
            del model.spans[row]
    for words in [*prompts, *(span[1] for span in model.spans.values())]:
        check_match(index, model, words)


def check_match(index: PrefixIndex, model: Model, words: tuple[int, ...]) -> None:
    keys = chained(words)
    match = index.match(keys, len(words))
    assert match.segments + match.donor_segments == model.longest(words)
    assert match.segments in model.boundaries(words)
    whole = index.match_whole(keys, len(words))
    assert whole.segments == max(model.boundaries(words))
    for found in (match, whole):
        at = 0
        for row in found.spans:
            start, text, is_whole = model.spans[row]
            assert is_whole
            assert start == at
            assert text == words[: len(text)]
            at = len(text)
        assert at == found.segments
    if match.donor != NO_SPAN:
        start, text, _ = model.spans[match.donor]
        assert start == match.segments
        assert text[: start + match.donor_segments] == words[: start + match.donor_segments]
        assert match.donor_segments > 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(texts, st.lists(st.just(1), min_size=11, max_size=11)), max_size=6), st.data())
def test_lru_order_names_every_child_before_its_parent(requests, data):
    table = SpanTable(1, 3)
    index, model = PrefixIndex(table, WIDTH), Model()
    for words, cuts in requests:
        publish(index, model, words, cuts)
    rows = sorted(model.spans)
    for now in range(1, data.draw(st.integers(1, 8))):
        if rows:
            index.touch([data.draw(st.sampled_from(rows))], now)
    order = sorted(rows, key=lambda row: (table.last_used[row], -table.first_token[row]))
    for row in rows:
        parent = int(table.parent[row])
        if parent != NO_SPAN:
            assert table.last_used[parent] >= table.last_used[row]
            assert order.index(row) < order.index(parent)
