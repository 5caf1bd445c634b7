"""Plans for whole spans against the plan that looks at every token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.core.plans import CopyPlan, Purpose, Rows, copy_rows
from kvmanager.core.spanplans import SpanPlaces, copy_spans
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import TokenOrder
from kvmanager.layout import GLM53_TINY, layer_major_layout, layer_outermost_layout, native_layout
from kvmanager.transport.runs import plan_runs

ROWS = 8
POOL = 64
LAYOUTS = {
    "native": native_layout(GLM53_TINY, ROWS),
    "layer-major": layer_major_layout(GLM53_TINY, ROWS),
    "layer-outermost": layer_outermost_layout(GLM53_TINY, ROWS, POOL),
}


def moved(copies) -> dict[tuple[int, int], dict[int, int]]:
    """Region pair -> source byte -> target byte, for the bytes at both ends of every joined run and its length."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for runs in plan_runs(CopyPlan(1, Purpose.PLACE, copies)):
        ends = found.setdefault((runs.source_region, runs.target_region), {})
        columns = (column.tolist() for column in (runs.source, runs.target, runs.lengths))
        for source, target, length in zip(*columns, strict=True):
            assert source not in ends, "a byte is copied twice"
            ends[source] = target
            ends[source + length - 1] = target + length - 1
    return found


def all_rows(places: SpanPlaces) -> Rows:
    spans = len(places.pages)
    page = places.pages[:, places.page].ravel()
    return Rows(np.tile(places.regions[places.page], spans), page, np.tile(places.slot, spans))


@st.composite
def span_pages(draw, spans: int, width: int):
    """int64[spans, width]; consecutive, evenly apart or at random."""
    kind = draw(st.sampled_from(["consecutive", "even", "random"]))
    count = spans * width
    if kind == "random":
        return np.array(draw(st.permutations(range(count)))).reshape(spans, width)
    step = 2 if kind == "even" else 1
    return np.arange(count).reshape(spans, width) * step


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whole_spans_move_as_their_tokens_do(data):
    order = data.draw(st.sampled_from([TokenOrder(1, 1), TokenOrder(2, 1), TokenOrder(4, 2), TokenOrder(4, 1)]))
    spans = data.draw(st.integers(1, 4))
    sharded = data.draw(st.booleans())
    width = order.segments
    if sharded:
        regions = np.arange(1, width + 1, dtype=np.int32)
        pages = np.repeat(data.draw(span_pages(spans, 1)), width, axis=1)
    else:
        regions = np.ones(width, np.int32)
        pages = data.draw(span_pages(spans, width))
    source = SpanPlaces.ordered(order, ROWS, regions, pages)
    target = SpanPlaces.sequential(ROWS, 100, data.draw(span_pages(spans, width)))
    layouts = [LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(2)]
    made = copy_spans(*layouts, source, target)
    assert moved(made) == moved(copy_rows(*layouts, all_rows(source), all_rows(target)))


def test_a_plan_for_consecutive_pages_is_small_whatever_its_length():
    sizes = []
    for spans in (4, 400):
        source = SpanPlaces.ordered(
            TokenOrder(8, 1), ROWS, np.arange(1, 9, dtype=np.int32), np.repeat(np.arange(spans)[:, None], 8, axis=1)
        )
        target = SpanPlaces.sequential(ROWS, 100, np.arange(8 * spans).reshape(spans, 8))
        copies = copy_spans(LAYOUTS["native"], LAYOUTS["native"], source, target)
        sizes.append((len(copies), {len(c.source_offsets) for c in copies}))
        assert sum(c.total_bytes for c in copies) == 8 * spans * LAYOUTS["native"].page_bytes
    assert sizes[0] == sizes[1]
    assert sizes[0][1] == {1}


def test_a_plan_says_what_it_does():
    target = SpanPlaces.sequential(ROWS, 2, np.array([[5, 6], [9, 1]]))
    source = SpanPlaces.sequential(ROWS, 1, np.array([[0, 1], [2, 3]]))
    layout = LAYOUTS["native"]
    text = str(CopyPlan(7, Purpose.PLACE, copy_spans(layout, layout, source, target)))
    total = f"{4 * layout.page_bytes:,} B"
    assert text.splitlines()[0] == f"plan 7 place: {total} in 4 runs"
    assert text.splitlines()[1:] == [f"  region 1 -> 2: 1 x (4) runs of {layout.page_bytes:,} B, {total} in 4 runs"]


def test_spans_of_other_lengths_are_refused():
    one = SpanPlaces.sequential(ROWS, 1, np.array([[0, 1]]))
    other = SpanPlaces.sequential(ROWS, 2, np.array([[0]]))
    with pytest.raises(LayoutMismatch, match="1 spans of 16 tokens for 1 of 8"):
        copy_spans(LAYOUTS["native"], LAYOUTS["native"], one, other)
