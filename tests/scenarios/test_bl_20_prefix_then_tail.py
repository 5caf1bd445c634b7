"""BL-20: a prompt sent in parts, its cached prefix first: 16 pages and 1,003 rows, and nothing from past the end."""

import numpy as np
import pytest

from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.pulls import TargetClass, split_at
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53_TINY, indexer_layout, latent_layout, native_layout
from kvmanager.transport.executor import Outcome
from tests.pulled import POISON, Pulled, SourceMemory, put

RANKS, ROWS, TOKENS = 8, 64, 1_003
SOURCE = native_layout(GLM53_TINY, ROWS)
TARGETS = {10: latent_layout(GLM53_TINY, ROWS), 11: indexer_layout(GLM53_TINY, ROWS)}
PAGES = 16


def stride(layout):
    return layout.components[0].page_stride


@pytest.mark.parametrize("ends", [[TOKENS], [512, TOKENS], [448, 512, 700, TOKENS], [1, 64, 65, 1_002, TOKENS]])
def test_parts_of_a_prompt_make_the_whole(ends: list[int]) -> None:
    rng = np.random.default_rng(7)
    source = SourceMemory(SOURCE, RANKS, TokenOrder(RANKS, 1), TOKENS, rng, fill=0xEE)
    pulled = Pulled([source], {r: (PAGES + 2) * stride(c) for r, c in TARGETS.items()}, 6 * SOURCE.page_bytes, 3)
    pages = {region: rng.permutation(PAGES + 2)[:PAGES].astype(np.int64) for region in TARGETS}
    later = [
        TargetClass(layout, PullTarget(layout.name, (SpanRun(0, SEQUENTIAL, (region,), pages[region]),), TOKENS))
        for region, layout in TARGETS.items()
    ]
    came = 0
    for number, end in enumerate(ends):
        now, later = split_at(later, end if end < TOKENS else TOKENS + ROWS)
        came += sum(len(spans.pages) for each in now for spans in each.target.spans)
        if now:
            pulled.submit(number + 1, 0, now, 5, number)
            assert pulled.run()[number + 1].outcome is Outcome.DONE
    assert (came, later) == (2 * PAGES, [])
    positions = np.arange(TOKENS)
    for region, layout in TARGETS.items():
        expected = np.full((PAGES + 2) * stride(layout), POISON, np.uint8)
        put(expected, layout, pages[region][positions // ROWS], positions % ROWS, positions)
        assert np.array_equal(pulled.regions[region], expected), "21 spare rows of the last page are not touched"


def test_a_prefix_that_is_there_is_left_alone() -> None:
    """The target has the first 512 tokens, by position: neither read nor written."""
    rng = np.random.default_rng(8)
    source = SourceMemory(SOURCE, RANKS, TokenOrder(RANKS, 1), TOKENS, rng)
    layout = TARGETS[10]
    pulled = Pulled([source], {10: PAGES * stride(layout)}, 6 * SOURCE.page_bytes, 4)
    pages = rng.permutation(PAGES)[: PAGES - 8].astype(np.int64)
    wanted = TargetClass(layout, PullTarget("latent", (SpanRun(512, SEQUENTIAL, (10,), pages),), TOKENS))
    pulled.submit(1, 0, [wanted], 5)
    assert pulled.run()[1].outcome is Outcome.DONE
    positions = np.arange(512, TOKENS)
    expected = np.full(PAGES * stride(layout), POISON, np.uint8)
    put(expected, layout, pages[positions // ROWS - 8], positions % ROWS, positions)
    assert np.array_equal(pulled.regions[10], expected)
    assert {page for _, _, page in pulled.reader.read_pages} == {int(source.pages[1])}
