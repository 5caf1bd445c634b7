"""Pulls between pages of different sizes, against single rows: every wanted row arrives, nothing else is read."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.configuration.groups import STAGING_REGION
from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.pulls import SourceSpans, Staging, TargetClass, build_pull, share_out, split_at
from kvmanager.geometry import SEQUENTIAL
from kvmanager.layout import plain_format, plain_layout
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.executor import Outcome, RegionMap

LAYERS, HEADS, ROW = 2, 3, 8
FORMAT = plain_format("float16", LAYERS, HEADS, ROW)
TARGET_REGION, BASE = 9, 1 << 40


@pytest.mark.parametrize("seed", range(40))
def test_every_wanted_row_arrives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = {"source": int(rng.choice([4, 6, 16, 48])), "target": int(rng.choice([4, 6, 16, 48]))}
    tokens = int(rng.integers(1, 200))
    skipped = int(rng.integers(0, tokens)) // rows["target"] * rows["target"]
    layouts = {side: plain_layout(FORMAT, count) for side, count in rows.items()}
    counts = {side: -(-tokens // count) for side, count in rows.items()}
    counts["target"] -= skipped // rows["target"]
    pages = {side: rng.permutation(count + 3)[:count].astype(np.int64) for side, count in counts.items()}
    held = rng.integers(0, 256, (counts["source"] + 3) * layouts["source"].page_bytes, dtype=np.uint8)
    ones = np.ones(counts["source"], np.int64)
    spans = SourceSpans(1, np.arange(counts["source"]) * rows["source"], ones, ones, pages["source"])
    target = TargetClass(
        layouts["target"],
        PullTarget("kv", (SpanRun(skipped, SEQUENTIAL, (TARGET_REGION,), pages["target"]),), tokens),
    )
    ((shared,),) = share_out([layouts["source"]], [target])
    assert shared == target
    staging = Staging(2, int(rng.integers(1, 4)))
    room = np.zeros(2 * staging.chunk_pages * layouts["source"].page_bytes, np.uint8)
    there = np.zeros((counts["target"] + 3) * layouts["target"].page_bytes, np.uint8)
    regions = RegionMap()
    regions.add(STAGING_REGION, room)
    regions.add(TARGET_REGION, there)
    known = int(rng.integers(0, tokens + 1))
    read: set[int] = set()
    for part in split_at([target], known):  # as when a prompt is pulled while it is computed
        ring = build_pull(1, layouts["source"], spans, [BASE], part, staging, 0)
        ring.check(STAGING_REGION, regions)
        for chunk in range(ring.chunks):
            room[:] = 0xEE
            for address, offset, length in zip(*(a.tolist() for a in ring.reads(chunk)), strict=True):
                room[offset : offset + length] = held[address - BASE : address - BASE + length]
                read.add((address - BASE) // length)
            executor = CpuExecutor(regions)
            executor.submit(ring.placed(chunk))
            (done,) = [c for _ in range(1000) for c in executor.poll()]
            assert done.outcome is Outcome.DONE, done.error
    source = held.reshape(-1, LAYERS, HEADS, rows["source"], ROW)
    got = there.reshape(-1, LAYERS, HEADS, rows["target"], ROW)
    for position in range(skipped, tokens):
        page, slot = divmod(position - skipped, rows["target"])
        from_page, from_slot = divmod(position, rows["source"])
        expected = source[pages["source"][from_page], :, :, from_slot]
        assert np.array_equal(got[pages["target"][page], :, :, slot], expected), position
    wanted = {int(pages["source"][position // rows["source"]]) for position in range(skipped, tokens)}
    assert read == wanted
