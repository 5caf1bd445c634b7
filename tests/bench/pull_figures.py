"""A hand-off between two processes of this machine, beside a plain NIXL transfer and a plain permute of its bytes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kvmanager.configuration.groups import STAGING_REGION
from kvmanager.core.events import PullTarget
from kvmanager.core.spanplans import SpanRun
from kvmanager.daemon.pulls import SourceSpans, Staging, TargetClass, build_pull
from kvmanager.geometry import SEQUENTIAL, TokenOrder
from kvmanager.layout import GLM53, KVLayout, Section, indexer_layout, latent_layout, native_layout
from kvmanager.transport.executor import Outcome, RegionMap
from kvmanager.transport.nixl import NixlReader
from kvmanager.transport.packed_reads import PackedReads
from kvmanager.transport.paths import PullPath
from kvmanager.transport.pull_pipeline import PullPipeline, PullRequest
from kvmanager.units import MIB, SECOND_NS
from kvmanager.wire import RegionKind
from tests.bench.figure import Figure
from tests.integration.mover_process import Client, running

RANKS, ROWS, SPANS = 8, 64, 6
TOKENS = SPANS * RANKS * ROWS
CHUNK_BYTES, STAGING_BYTES = 32 * MIB, 128 * MIB
"""A chunk holds a span: eight pages."""
PLAIN, LATENT, INDEXER = 40, 41, 42
ROUNDS = 21
SOURCE = native_layout(GLM53, ROWS)
LAYOUTS = {LATENT: latent_layout(GLM53, ROWS), INDEXER: indexer_layout(GLM53, ROWS)}
PULL_BYTES = SPANS * RANKS * SOURCE.page_bytes


class Bench:
    """The target's memory and agent, and a mover that holds eight shards."""

    def __init__(self, path: Path) -> None:
        self.client = Client(path)
        self.add_regions()
        agent = self.client.agent()
        self.peer, self.metadata = agent.agent_name, agent.agent_metadata
        self.regions = RegionMap()
        self.sizes = {region: SPANS * RANKS * _stride(layout) for region, layout in LAYOUTS.items()}
        for region, size in {STAGING_REGION: STAGING_BYTES, PLAIN: PULL_BYTES, **self.sizes}.items():
            self.regions.add(region, np.zeros(size, np.uint8))
        self.reader = NixlReader("bench", secrets.randbits(64), self.regions)
        for region in (STAGING_REGION, PLAIN, *LAYOUTS):
            self.reader.register(region)
        self.reader.add_peer(self.peer, self.metadata)
        self.reads = PackedReads(self.reader)
        self.pipeline = PullPipeline(self.reads, self.regions, STAGING_REGION, straight=True)
        self.first_s = 0.0
        self.number = 0
        self.pages = np.random.default_rng(2).permutation(SPANS).astype(np.int64)
        self.bases = [self.client.addresses[1 + rank] for rank in range(RANKS)]

    def add_regions(self) -> None:
        """What the mover holds."""
        rng = np.random.default_rng(1)
        for rank in range(RANKS):
            memory = self.client.add(1 + rank, SPANS * SOURCE.page_bytes, RegionKind.DEVICE)
            memory[:] = rng.integers(0, 256, memory.size, np.uint8)

    def transfer(self) -> None:
        """The same pages in the same order by NIXL alone, in runs of a chunk."""
        page = SOURCE.page_bytes
        addresses = np.array([base + int(p) * page for p in self.pages for base in self.bases], np.uint64)
        some = CHUNK_BYTES // page
        for first in range(0, len(addresses), some):
            part = addresses[first : first + some]
            offsets = (np.arange(len(part), dtype=np.uint64) + np.uint64(first)) * np.uint64(page)
            lengths = np.full(len(part), page, np.uint64)
            self.reader.read(self.peer, part, PLAIN, offsets, lengths, time.monotonic_ns() + 60 * SECOND_NS)
            ended = self.reader.poll()
            while not ended:
                ended = self.reader.poll()
            assert ended[0].outcome is Outcome.DONE, ended[0]

    def permute(self, order: TokenOrder) -> None:
        """What was transferred to where the target wants it, by numpy: `out[j, i, r] = in[r, 8j + i]` a group."""
        source = self.regions[PLAIN].reshape(SPANS, RANKS, SOURCE.page_bytes)
        for region, layout in LAYOUTS.items():
            target = self.regions[region].reshape(SPANS, RANKS, _stride(layout))
            for start, at, row in _blocks(layout):
                rows = source[:, :, start : start + ROWS * row].reshape(SPANS, RANKS, ROWS, row)
                out = target[:, :, at : at + ROWS * row].reshape(SPANS, RANKS, ROWS, row, copy=False)
                if order == SEQUENTIAL:
                    dealt = out.reshape(SPANS, RANKS, ROWS // RANKS, RANKS, row, copy=False)
                    turned = rows.reshape(SPANS, RANKS, RANKS, ROWS // RANKS, row).transpose(0, 2, 3, 1, 4)
                    np.copyto(dealt.view(f"V{row}"), turned.view(f"V{row}"))
                else:
                    np.copyto(out, rows)

    def hand_off(self, order: TokenOrder, path: PullPath = PullPath.RING) -> None:
        """Plan and pull, as daemon and mover do it. `first_s`: until a chunk was in place."""
        started, self.first_s = time.perf_counter(), 0.0
        self.number += 1
        firsts = np.arange(SPANS, dtype=np.int64) * RANKS * ROWS
        spans = SourceSpans(RANKS, firsts, np.full(SPANS, RANKS), np.ones(SPANS, np.int64), self.pages)
        places = np.arange(SPANS * RANKS, dtype=np.int64)
        targets = [
            TargetClass(layout, PullTarget(layout.name, (SpanRun(0, order, (region,), places),), TOKENS))
            for region, layout in LAYOUTS.items()
        ]
        staging = Staging.of(STAGING_BYTES, CHUNK_BYTES, SOURCE.page_bytes)
        ring = build_pull(self.number, SOURCE, spans, self.bases, targets, staging, 0)
        self.pipeline.submit(PullRequest(self.number, self.peer, self.metadata, ring, 60 * SECOND_NS, path=path))
        ended = self.pipeline.poll()
        while not ended:
            if not self.first_s and any(pull.placed for pull in self.pipeline._pulls.values()):
                self.first_s = time.perf_counter() - started
            ended = self.pipeline.poll()
        assert ended[0].outcome is Outcome.DONE, ended[0]

    def check_bytes(self, order: TokenOrder, hand_off: Callable[[], None]) -> None:
        """It brings the same bytes as the plain way."""
        hand_off()
        pulled = {region: self.regions[region].copy() for region in LAYOUTS}
        for region in LAYOUTS:
            self.regions[region][:] = 0
        self.transfer()
        self.permute(order)
        for region, layout in LAYOUTS.items():
            ours = pulled[region].reshape(-1, _stride(layout))
            theirs = self.regions[region].reshape(-1, _stride(layout))
            for _, at, row in _blocks(layout):
                assert np.array_equal(ours[:, at : at + ROWS * row], theirs[:, at : at + ROWS * row])

    def close(self) -> None:
        """Gives the mover up."""
        self.client.close()


def _stride(layout: KVLayout) -> int:
    return layout.components[0].page_stride


def _blocks(layout: KVLayout) -> list[tuple[int, int, int]]:
    """(start in the source's page, start in ours, bytes a row) of what lies slot by slot in both."""
    found: dict[int, tuple[int, int, int]] = {}
    for key, c in layout.by_key.items():
        source = SOURCE.by_key[key]
        if key[0] is Section.LATENT:  # all layers of a group follow each other in a slot
            group = next(g for g in GLM53.share_groups if key[1] in g)
            place = group.index(key[1]) * c.row_bytes
            found[source.offset - place] = (source.offset - place, c.offset - place, c.slot_stride)
        else:
            found[source.offset] = (source.offset, c.offset, c.row_bytes)
    return list(found.values())


def _cpu_s(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU, wall) seconds of this process: over loopback the reader copies the bytes itself."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def figures() -> Iterator[Figure]:
    """Ways take turns; medians, and the median of the ratios of a turn each: other work on the machine hits all three.

    Pages are published when the last byte was checked, so the first chunk in place is not yet of use.
    """
    with TemporaryDirectory() as directory, running(Path(directory)) as (_, path):
        bench = Bench(path)
        for name, order, path in (
            ("kept order", TokenOrder(RANKS, 1), PullPath.RING),
            ("kept order, straight to its pages", TokenOrder(RANKS, 1), PullPath.DIRECT),
            ("permuted", SEQUENTIAL, PullPath.RING),
        ):
            bench.check_bytes(order, lambda o=order, p=path: bench.hand_off(o, p))  # type: ignore[misc]
            works = (
                bench.transfer,
                lambda o=order: bench.permute(o),  # type: ignore[misc]
                lambda o=order, p=path: bench.hand_off(o, p),  # type: ignore[misc]
            )
            took = np.array([[_cpu_s(work) for work in works] for _ in range(ROUNDS)])
            for clock, unit in enumerate(("ms CPU", "ms")):
                transfer, permute, whole = took[:, :, clock].T
                ratio = float(np.median(whole / (transfer + permute)))
                yield Figure(
                    f"hand-off over loopback, {PULL_BYTES // MIB} MiB, {name}", float(np.median(whole)) * 1e3, unit,
                    "a plain NIXL transfer and a plain permute", ratio,
                )  # fmt: skip
            first = bench.first_s
            yield Figure(f"... first chunk in place, {name}", first * 1e3, "ms", "in all", first / took[-1, 2, 1])
            plain = np.median(took[:, :2, 0], axis=0)
            share = float(plain[0] / plain.sum())
            yield Figure(f"... of the plain way: transfer, {name}", float(plain[0]) * 1e3, "ms CPU", "both", share)
        bench.close()
