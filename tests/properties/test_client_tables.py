"""What clients make of a packed span table, against a walk over its spans one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.clients.tables import NO_PAGE, decode_spans, order_runs
from kvmanager.errors import InvalidArgument
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import NO_PAGE as WIRE_NO_PAGE

SPANS = st.lists(st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2])), max_size=12)
ROWS = 4


def packed(values: list[int], kind: str) -> bytes:
    return np.array(values, kind).tobytes()


@settings(max_examples=100, deadline=None)
@given(SPANS, st.sampled_from([1, 2]), st.data())
def test_tables_come_out_as_they_went_in(spans: list[tuple[int, int]], ranks: int, data: st.DataObject) -> None:
    firsts = [sum(s for s, _ in spans[:i]) * ROWS for i in range(len(spans))]
    pages = sum(segments // ranks for segments, _ in spans)
    device = data.draw(st.lists(st.integers(-1, 2**31), min_size=pages, max_size=pages))
    host = data.draw(st.one_of(st.just([]), st.lists(st.integers(-1, 9), min_size=pages, max_size=pages)))
    wire = [[WIRE_NO_PAGE if page < 0 else page for page in some] for some in (device, host)]
    column = pb.ClassPages(page_class="kv", device_pages=packed(wire[0], "<u4"), host_pages=packed(wire[1], "<u4"))
    run = pb.SpanRun(
        chain="main",
        first_span=5,
        first_tokens=packed(firsts, "<u8"),
        segments=packed([s for s, _ in spans], "<u4"),
        interleave=packed([i for _, i in spans], "<u4"),
        uids=packed(list(range(100, 100 + pages)), "<u8"),
        pages=[column],
    )
    found = decode_spans(run)
    assert found.first_tokens.tolist() == firsts
    assert found.uids.tolist() == list(range(100, 100 + pages))
    assert found.pages["kv"].device.tolist() == device
    assert found.pages["kv"].host.tolist() == (host or [NO_PAGE] * pages)
    # One span at a time: its token order, its first token, its pages.
    expected, page = [], 0
    for (segments, interleave), first in zip(spans, firsts, strict=True):
        width = segments // ranks
        if expected and expected[-1][0] == (segments, interleave):
            expected[-1][2] = page + width
        else:
            expected.append([(segments, interleave), first, page + width])
        page += width
    runs = list(order_runs(found, ranks))
    assert [[(r.order.segments, r.order.interleave), r.first_token, r.pages.stop] for r in runs] == expected
    assert [r.pages.start for r in runs] == [0, *(r.pages.stop for r in runs)][: len(runs)]
    if pages:
        run.uids = run.uids[:-8]
        with pytest.raises(InvalidArgument):
            decode_spans(run)
