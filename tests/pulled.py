"""A hand-off without processes: a source's memory written row by row, the mover's own pipeline, and what must arrive.

Where a row lies is worked out here from the definition of a token order, never by the product's plans.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.configuration.groups import STAGING_REGION
from kvmanager.daemon.pulls import SourceSpans, Staging, TargetClass, build_pull
from kvmanager.errors import TransferFailed
from kvmanager.geometry import TokenOrder
from kvmanager.layout import KVLayout, Section
from kvmanager.planwire import ring_from_proto, ring_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.nixl import ReadResult
from kvmanager.transport.paths import PullPath
from kvmanager.transport.pull_pipeline import RETRY_PAUSE_NS, PullPipeline, PullRequest

POISON = 0xA5
APART = 1 << 33
"""Between the bases of two ranks' memory in the peer: further than 32 bits reach."""


def places(order: TokenOrder, rows: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(page, slot) of `count` tokens dealt out `interleave` at a time: pages count on through the spans."""
    offset = np.arange(count)
    span, inside = np.divmod(offset, order.segments * rows)
    turn, within = np.divmod(inside, order.interleave)
    lap, page = np.divmod(turn, order.segments)
    return span * order.segments + page, lap * order.interleave + within


def pattern(layout: KVLayout, key: tuple[Section, int], positions: np.ndarray) -> np.ndarray:
    """Bytes of a component's rows, uint8[positions, row bytes]: unlike for each position, layer, section and byte."""
    section, layer = key
    size = layout.by_key[key].row_bytes
    salt = 7_919 * layer + sum(map(ord, str(section)))
    mixed = (positions[:, None].astype(np.uint64) * np.uint64(2_654_435_761)) ^ np.uint64(salt * 40_503)
    mixed = (mixed + np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xD1B54A32D192ED03)
    return (mixed >> np.uint64(56)).astype(np.uint8)


def put(memory: np.ndarray, layout: KVLayout, pages: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> None:
    """Writes the rows of these positions at (page, slot)."""
    for key, c in layout.by_key.items():
        at = c.offset + pages * c.page_stride + slots * c.slot_stride
        memory[at[:, None] + np.arange(c.row_bytes)] = pattern(layout, key, positions)


class SourceMemory:
    """Spans of one order over `ranks` regions, at pages drawn by `rng`."""

    def __init__(
        self, layout: KVLayout, ranks: int, order: TokenOrder, tokens: int, rng: np.random.Generator,
        fill: int = POISON,
    ) -> None:  # fmt: skip
        """`fill`: what lies where no token does."""
        rows, span_tokens = layout.page_rows, order.segments * layout.page_rows
        spans = -(-tokens // span_tokens)
        width = order.segments // ranks
        self.layout, self.ranks, self.tokens = layout, ranks, tokens
        self.pages = rng.permutation(spans * width + 2)[: spans * width].astype(np.int64)
        self.memory = [np.full((spans * width + 2) * layout.page_bytes, fill, np.uint8) for _ in range(ranks)]
        number, slot = places(order, rows, tokens)
        page, rank = self.pages[number // ranks], number % ranks
        for r in range(ranks):
            mine = np.flatnonzero(rank == r)
            put(self.memory[r], layout, page[mine], slot[mine], mine)
        self.held = {(int(r), int(p)) for r, p in zip(rank, page, strict=True)}
        firsts = np.arange(spans, dtype=np.int64) * span_tokens
        self.spans = SourceSpans(
            ranks, firsts, np.full(spans, order.segments), np.full(spans, order.interleave), self.pages
        )
        self.addresses = [(1 << 40) + r * APART for r in range(ranks)]


@dataclass
class _Held:
    read_id: int
    source: SourceMemory
    addresses: np.ndarray
    target: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


class PeerReader:
    """Reads from sources in this process; they end when `draw` says so, in any order, and some fail once."""

    def __init__(self, sources: Sequence[SourceMemory], regions: RegionMap, draw: random.Random) -> None:
        self.sources, self.regions, self.draw = sources, regions, draw
        self.read_pages: set[tuple[int, int, int]] = set()
        self.descriptors = 0
        self._held: list[_Held] = []
        self._next = 1

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See `Reader.add_peer`."""

    def read(self, peer, addresses, region_id, offsets, lengths, _deadline_ns):
        """See `Reader.read`."""
        self.descriptors += len(addresses)
        source = int(peer)
        into = self.regions[region_id]
        self._held.append(
            _Held(self._next, self.sources[source], addresses.astype(np.int64), into, offsets, lengths)
        )
        for address in addresses.tolist():
            rank, at = divmod(address - (1 << 40), APART)
            self.read_pages.add((source, rank, at // self.sources[source].layout.page_bytes))
        self._next += 1
        return self._next - 1

    read_packed = read

    def poll(self) -> list[ReadResult]:
        """See `Reader.poll`."""
        ended = []
        for held in list(self._held):
            if self.draw.random() < 0.5:
                continue
            self._held.remove(held)
            if self.draw.random() < 0.1:
                ended.append(ReadResult(held.read_id, Outcome.FAILED, 0, 1, TransferFailed("drawn to fail")))
                continue
            self._copy(held)
            ended.append(ReadResult(held.read_id, Outcome.DONE, int(held.lengths.sum()), 1))
        return ended

    def _copy(self, held: _Held) -> None:
        for address, offset, length in zip(held.addresses, held.offsets, held.lengths, strict=True):
            rank, at = divmod(int(address) - (1 << 40), APART)
            taken = held.source.memory[rank][at : at + int(length)]
            assert len(taken) == length, "a read past the end of a rank's memory"
            held.target[int(offset) : int(offset) + int(length)] = taken

    def settled(self) -> list[int]:
        """See `Reader.settled`."""
        return []


class Pulled:
    """Regions of a target, and the mover's pipeline over them. Its clock runs with its polls."""

    def __init__(
        self, sources: Sequence[SourceMemory], sizes: dict[int, int], staging_bytes: int, seed: int, ahead: int = 1,
        path: PullPath = PullPath.RING,
    ) -> None:  # fmt: skip
        self.regions = RegionMap()
        for region, size in {STAGING_REGION: staging_bytes, **sizes}.items():
            self.regions.add(region, np.full(size, POISON, np.uint8))
        self.sources, self.staging_bytes, self.now = sources, staging_bytes, 0
        self.reader = PeerReader(sources, self.regions, random.Random(seed))
        self.path = path
        self.pipeline = PullPipeline(
            self.reader, self.regions, STAGING_REGION, lambda: self.now, ahead=ahead, straight=True
        )

    def submit(self, pull_id: int, source: int, targets: Sequence[TargetClass], chunk_pages: int, slot: int = 0) -> int:
        """Begins a pull, by way of the wire. The bytes of its message."""
        layout = self.sources[source].layout
        staging = Staging(self.staging_bytes // (chunk_pages * layout.page_bytes), chunk_pages)
        built = build_pull(
            pull_id, layout, self.sources[source].spans, self.sources[source].addresses, targets, staging,
            slot % staging.slots,
        )  # fmt: skip
        message = ring_to_proto(built).SerializeToString()
        ring = ring_from_proto(pb.Pull.FromString(message))
        self.pipeline.submit(PullRequest(pull_id, str(source), b"", ring, 10**15, path=self.path))
        return len(message)

    def run(self) -> dict[int, Completion]:
        """Until all pulls have ended."""
        ended: dict[int, Completion] = {}
        while self.pipeline.outstanding():
            self.now += RETRY_PAUSE_NS
            ended |= {completion.plan_id: completion for completion in self.pipeline.poll()}
        return ended
