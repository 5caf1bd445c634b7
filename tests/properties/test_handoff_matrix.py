"""Every geometry of source and target, through the mover's own pipeline: each byte against an independent pattern.

A real NIXL moves a sample of these in `tests/integration/test_mover_pulls.py`.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.pulls import TargetClass, share_out
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import KVFormat, KVLayout, indexer_layout, latent_layout, layer_major_layout, native_layout
from kvmanager.transport.executor import Outcome
from tests.pulled import POISON, Pulled, SourceMemory, places, put

FORMAT = KVFormat("matrix", ((0,), (1, 2), (3,)), latent_row_bytes=5, index_value_bytes=4, index_scale_bytes=2)
DRAFT = KVFormat("matrix-draft", ((9,),), latent_row_bytes=7, index_value_bytes=4, index_scale_bytes=2)
ROWS = 64
MAIN, DRAFTS = native_layout(FORMAT, ROWS), native_layout(DRAFT, ROWS)
LATENT, INDEXER, MAJOR = latent_layout(FORMAT, ROWS), indexer_layout(FORMAT, ROWS), layer_major_layout(FORMAT, ROWS)
HBM, HOST, INDEX, DRAFT_AT = 10, 11, 12, 13
REGIONS = {HBM: LATENT, HOST: LATENT, INDEX: INDEXER, DRAFT_AT: DRAFTS}
DESTINATIONS = ("hbm", "host", "split", "layer-major")
TAILS = ("whole spans", "one token", "a token over a span", "in a page")


def tokens_of(tail: str, span: int) -> int:
    return {"whole spans": 2 * span, "one token": 1, "a token over a span": span + 1, "in a page": 2 * span - 21}[tail]


def runs(
    rng: np.random.Generator, order: TokenOrder, first: int, tokens: int, regions: tuple[int, ...]
) -> tuple[SpanRun, ...]:
    """Spans from position `first` on, in as many runs as there are regions, at pages drawn from all of a region's."""
    span_tokens = order.segments * ROWS
    count = -(-(tokens - first) // span_tokens)
    found = []
    for region, spans in zip(regions, np.array_split(np.arange(count), len(regions)), strict=True):
        if len(spans):
            pages = rng.permutation(count * order.segments + 1)[: len(spans) * order.segments]
            found.append(SpanRun(first + int(spans[0]) * span_tokens, order, (region,), pages.astype(np.int64)))
    return tuple(found)


def expected(each: TargetClass, spans: SpanRun, memory: np.ndarray) -> None:
    """Writes what a run must hold."""
    tokens = min(each.target.end, spans.first_token + len(spans.pages) * ROWS) - spans.first_token
    number, slot = places(spans.order, ROWS, tokens)
    put(memory, each.layout, spans.pages[number], slot, spans.first_token + np.arange(tokens))


@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("ranks", "interleave"), [*itertools.product((1, 2, 4, 8), (1, 8, 64))])
def test_every_byte_is_in_its_place(ranks: int, interleave: int, tail: str, destination: str) -> None:
    """Kept and in sequence, from the start and behind a prefix that is there, alone and beside a replicated chain."""
    span = ranks * ROWS
    tokens = tokens_of(tail, span)
    source_order = TokenOrder(ranks, interleave)
    for kept, prefixed, beside in itertools.product((True, False), repeat=3):
        if destination == "layer-major" and kept:
            continue  # engines with fixed kernels read sequences
        order = source_order if kept else SEQUENTIAL
        step = order.segments * ROWS
        first = (tokens // 2) // step * step if prefixed else 0
        if prefixed and first == 0:
            continue
        seed = hash((ranks, interleave, tokens, kept, prefixed, beside)) & 0xFFFF
        print(f"{order}, first {first}, beside {beside}, seed {seed}")
        rng = np.random.default_rng(seed)
        sources = [SourceMemory(MAIN, ranks, source_order, tokens, rng)]
        if beside:
            sources.append(SourceMemory(DRAFTS, 1, SEQUENTIAL, tokens, rng))
        targets = _targets(rng, destination, order, first, tokens, beside)
        _pull_and_check(sources, targets, seed, destination)


def _targets(
    rng: np.random.Generator, destination: str, order: TokenOrder, first: int, tokens: int, beside: bool
) -> list[TargetClass]:
    where = {"hbm": (HBM,), "host": (HOST,), "split": (HOST, HBM), "layer-major": (HBM,)}[destination]
    main: list[tuple[str, KVLayout, tuple[int, ...]]]
    main = [("kv", MAJOR, where)] if destination == "layer-major" else [
        ("latent", LATENT, where), ("indexer", INDEXER, (INDEX,))
    ]  # fmt: skip
    targets = [
        TargetClass(layout, PullTarget(name, runs(rng, order, first, tokens, regions), tokens))
        for name, layout, regions in main
    ]
    if beside:
        spans = runs(rng, SEQUENTIAL, first, tokens, (DRAFT_AT,))
        targets.append(TargetClass(DRAFTS, PullTarget("draft", spans, tokens)))
    return targets


def _pull_and_check(sources: list[SourceMemory], targets: list[TargetClass], seed: int, destination: str) -> None:
    layouts = {**REGIONS, HBM: MAJOR} if destination == "layer-major" else REGIONS
    pages = dict.fromkeys(layouts, 1)
    for each in targets:
        for spans in each.target.spans:
            region = spans.regions[0]
            pages[region] = max(pages[region], int(spans.pages.max()) + 2)
    sizes = {region: pages[region] * layout.by_key[next(iter(layout.by_key))].page_stride
             for region, layout in layouts.items()}  # fmt: skip
    chunk_pages = 1 + seed % 5
    pulled = Pulled(sources, sizes, (1 + seed % 3) * 5 * MAIN.page_bytes, seed, ahead=1 + seed % 2)
    shares = share_out([source.layout for source in sources], targets)
    for number, share in enumerate(shares):
        pulled.submit(number + 1, number, share, chunk_pages, seed)
    ended = pulled.run()
    assert {c.outcome for c in ended.values()} <= {Outcome.DONE, Outcome.FAILED}
    if any(c.outcome is Outcome.FAILED for c in ended.values()):
        assert pulled.pipeline.retries > 0, "only a chunk that failed three times fails a pull"
        return
    wanted = {region: np.full(size, POISON, np.uint8) for region, size in sizes.items()}
    for each in targets:
        for spans in each.target.spans:
            expected(each, spans, wanted[spans.regions[0]])
    for region, memory in wanted.items():
        assert np.array_equal(pulled.regions[region], memory), f"region {region}"
    for number, rank, page in pulled.reader.read_pages:
        assert (rank, page) in sources[number].held, "a page without a token was read"
