"""What plans cost: CPU time to make and encode them, and bytes on the wire, for hand-offs of DCP8 spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from kvmanager.core.events import PullTarget
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.daemon.pulls import SourceSpans, Staging, TargetClass, build_pull
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, indexer_layout, latent_layout, layer_major_layout, native_layout
from kvmanager.planwire import plan_to_proto, ring_from_proto, ring_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.units import KIB, MIB
from tests.bench.figure import Figure

ROWS = 64
SPAN_TOKENS = 8 * ROWS
KEPT = TokenOrder(8, 1)
NATIVE = native_layout(GLM53, ROWS)
DECODE = (latent_layout(GLM53, ROWS), indexer_layout(GLM53, ROWS))
ROUNDS = 9


def cpu_s(work: Callable[[], object]) -> float:
    """Least CPU seconds of some rounds: other processes of the machine add to the rest."""
    found = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def figures() -> Iterator[Figure]:
    """Plans and whole pulls of 131,072 and 1,048,576 tokens; ratios are against a plan for one span."""
    for tokens in (131_072, 1_048_576):
        for scattered in (False, True):
            yield from _plans(tokens, scattered)
            yield from _pull(tokens, scattered)


def _pages(count: int, scattered: bool, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count) if scattered else np.arange(count)


def _plans(tokens: int, scattered: bool) -> Iterator[Figure]:
    spans = tokens // SPAN_TOKENS
    shards = SpanRun(0, KEPT, tuple(range(1, 9)), _pages(spans, scattered, 1))
    places = [_pages(8 * spans, scattered, seed) for seed in (2, 3)]
    kinds = {
        "order kept": (DECODE, KEPT),
        "permuted": (DECODE, SEQUENTIAL),
        "layer-major": ((layer_major_layout(GLM53, ROWS),), SEQUENTIAL),
    }
    for name, (layouts, order) in kinds.items():

        def make(end: int, layouts: tuple = layouts, order: TokenOrder = order) -> CopyPlan:  # type: ignore[type-arg]
            copies = [
                c
                for layout, pages in zip(layouts, places, strict=False)
                for c in copy_spans(NATIVE, layout, [shards], [SpanRun(0, order, (100,), pages)], end)
            ]
            return CopyPlan(1, Purpose.PLACE, tuple(copies))

        where = f"{tokens:,} tokens, {'scattered' if scattered else 'consecutive'} pages, {name}"
        seconds, one_s = (cpu_s(lambda end=end, make=make: make(end)) for end in (tokens, SPAN_TOKENS))  # type: ignore[misc]
        yield Figure(f"plan: {where}", seconds * 1e3, "ms CPU", "a plan for one span", seconds / one_s)
        plan = make(tokens)
        encoded = plan_to_proto(plan).SerializeToString()
        share = len(encoded) / plan.total_bytes
        yield Figure("... on the wire", len(encoded) / KIB, "KiB", "the bytes it moves", share)
        encode_s = cpu_s(lambda plan=plan: plan_to_proto(plan).SerializeToString())  # type: ignore[misc]
        yield Figure("... encoding it", encode_s * 1e3, "ms CPU", "making it", encode_s / seconds)


def _pull(tokens: int, scattered: bool) -> Iterator[Figure]:
    """A whole pull as the target's daemon makes it, and what the mover does before its first read."""
    spans = tokens // SPAN_TOKENS
    source = SourceSpans(
        8, np.arange(spans) * SPAN_TOKENS, np.full(spans, 8), np.ones(spans, np.int64), _pages(spans, scattered, 1)
    )
    places = [SpanRun(0, SEQUENTIAL, (100 + n,), _pages(8 * spans, scattered, n)) for n in range(2)]
    targets = [
        TargetClass(layout, PullTarget(layout.name, (place,), tokens))
        for layout, place in zip(DECODE, places, strict=True)
    ]
    staging = Staging.of(64 * MIB, 8 * MIB, NATIVE.page_bytes)
    addresses = [rank << 40 for rank in range(8)]

    def command() -> bytes:
        ring = build_pull(7, NATIVE, source, addresses, targets, staging, 0)
        return ring_to_proto(ring).SerializeToString()

    encoded = command()
    where = f"{tokens:,} tokens, {'scattered' if scattered else 'consecutive'} pages, permuted"
    seconds = cpu_s(command)
    yield Figure(f"pull: {where}, made and encoded", seconds * 1e3, "ms CPU", "itself", 1.0)
    moved = spans * 8 * NATIVE.page_bytes
    yield Figure("... on the wire", len(encoded) / KIB, "KiB", "the bytes it moves", len(encoded) / moved)
    decode_s = cpu_s(lambda: ring_from_proto(pb.Pull.FromString(encoded)))
    yield Figure("... decoded by the mover", decode_s * 1e3, "ms CPU", "making it", decode_s / seconds)
    ring = ring_from_proto(pb.Pull.FromString(encoded))
    chunks_s = cpu_s(lambda: [ring.placed(chunk) for chunk in range(0, ring.chunks, 64)]) * 64 / ring.chunks
    yield Figure("... the copies of one chunk", chunks_s * 1e6, "us CPU", "making the pull", chunks_s / seconds)
