"""The top-k generators of the benchmarks give what they say."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.clients.glm.resolver_reference import HOT, MISS, ReferenceResolver
from kvmanager.clients.glm.sparse_tables import GroupPlace, SparseShape
from tests.bench.hit_rates import DRIFTS, PUBLISHED, overlap_of, published_beside, reference_hit_rates
from tests.bench.topk_stream import ExactHits, StreamModel, TopkStream

TOKENS = 20_000


def _hit_rate(source: TopkStream | ExactHits, rows: int, topk: int, hot_rows: int, steps: int) -> float:
    """Of the hot rows, over the second half of `steps`, with all pages on the host."""
    pages = -(-TOKENS // 64) + 2
    shape = SparseShape(1, rows, topk, 64, hot_rows, pages, device_pages=1_000, host_pages=pages)
    resolver = ReferenceResolver(shape, [GroupPlace(64 * 16, 0, 16)])
    tables = resolver.tables
    tables.spans[0]["first"], tables.spans[0]["segments"], tables.spans[0]["interleave"] = np.arange(pages), 1, 1
    tables.pages[0]["uid"] = tables.pages[0]["host"] = np.arange(pages)
    tables.page_count[0] = pages
    resolver.set_hot_pages(0, np.arange(shape.hot_slabs))
    for step in range(steps):
        if step == steps // 2:
            resolver.counters[:] = 0
        resolver.resolve(0, source.step()[None])
    hot, miss = resolver.counters[0, [HOT, MISS]]
    return float(hot / (hot + miss))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("hits", [0.8, 0.99])
def test_exact_hits(rows: int, hits: float) -> None:
    source = ExactHits(hits, rows, 256, TOKENS, seed=1)
    assert _hit_rate(source, rows, 256, 1_280, steps=20) == pytest.approx(hits, abs=0.002)
    for row in source.step():
        assert len(np.unique(row)) == 256


def test_faster_drift_means_fewer_hits_and_a_larger_buffer_more() -> None:
    rates = [
        [_hit_rate(TopkStream(_model(drift), TOKENS, 2), 4, 256, hot_rows, steps=60) for drift in (0.01, 0.1, 0.3)]
        for hot_rows in (1_024, 4_096)
    ]
    for row in rates:
        assert row == sorted(row, reverse=True)
        assert row[0] - row[-1] > 0.05
    assert rates[0][1:] < rates[1][1:]
    assert all(small <= large for small, large in zip(*rates, strict=True))


def _model(drift: float) -> StreamModel:
    return StreamModel(drift, memory=2_048, topk=256)


def test_overlaps_reach_over_what_is_published() -> None:
    """The sweep of the benchmark has a drift beside each published value, and more drift means less in common."""
    overlaps = [overlap_of(StreamModel(drift, returns=0.2), steps=2) for drift in DRIFTS]
    assert overlaps == sorted(overlaps, reverse=True)
    assert {p.of for p in PUBLISHED} <= {published_beside(overlap) for overlap in overlaps}
    assert published_beside(0.7) == "none published"


def test_the_buffer_catches_more_than_the_last_list() -> None:
    model = StreamModel(0.3, returns=0.8)
    (hits,) = reference_hit_rates([model], steps=10)
    assert hits > overlap_of(model, steps=2)
