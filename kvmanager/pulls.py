"""From two page tables to a pull: bounded chunks of reads into staging, and the copies out of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.core.events import PullTarget
from kvmanager.core.plans import CopyPlan, Purpose, Rows, StridedCopies, copy_rows
from kvmanager.errors import LayoutMismatch
from kvmanager.geometry import Int64Array, TokenOrder
from kvmanager.groups import STAGING_REGION
from kvmanager.layout import KVLayout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import pack_u64, plan_to_proto


@dataclass(frozen=True)
class SourceSpans:
    """The source's spans in token order: first_tokens, segments, interleave int64[spans]; pages int64[...] flat.

    `ranks`: ranks of the source's pool. Page k of a span is entry k // ranks of its pages, on rank k % ranks.
    """

    ranks: int
    first_tokens: Int64Array
    segments: Int64Array
    interleave: Int64Array
    pages: Int64Array

    @property
    def first_pages(self) -> Int64Array:
        """Index of each span's first entry in `pages`."""
        widths = self.segments // self.ranks
        return np.concatenate(([0], np.cumsum(widths)[:-1])).astype(np.int64)


@dataclass(frozen=True)
class SourceRows:
    """Where source rows lie, one entry a position: ordinal (span page, counted over all spans), rank, page, slot."""

    ordinal: Int64Array
    rank: Int64Array
    page: Int64Array
    slot: Int64Array


def locate(spans: SourceSpans, page_rows: int, positions: Int64Array) -> SourceRows:
    """Where positions lie in the source. Raises LayoutMismatch for a position that no span covers."""
    span = np.searchsorted(spans.first_tokens, positions, side="right") - 1
    offset = positions - spans.first_tokens[span]
    if len(positions) and ((span < 0).any() or (offset >= spans.segments[span] * page_rows).any()):
        raise LayoutMismatch(f"position {int(positions[-1])} is in none of the {len(spans.first_tokens)} source spans")
    page_of_span = np.zeros(len(positions), np.int64)
    slot = np.zeros(len(positions), np.int64)
    for segments, interleave in {(int(m), int(i)) for m, i in zip(spans.segments, spans.interleave, strict=True)}:
        mine = (spans.segments[span] == segments) & (spans.interleave[span] == interleave)
        page_of_span[mine], slot[mine] = TokenOrder(segments, interleave).place(offset[mine])
    before = np.concatenate(([0], np.cumsum(spans.segments)[:-1])).astype(np.int64)
    entry = spans.first_pages[span] + page_of_span // spans.ranks
    return SourceRows(before[span] + page_of_span, page_of_span % spans.ranks, spans.pages[entry], slot)


@dataclass(frozen=True)
class Staging:
    """Room in the staging region: `slots` chunks of `chunk_pages` source pages each."""

    slots: int
    chunk_pages: int

    @classmethod
    def of(cls, staging_bytes: int, chunk_bytes: int, page_bytes: int) -> Staging:
        """Divides the region. Raises LayoutMismatch when not even one source page fits."""
        chunk_pages = min(chunk_bytes, staging_bytes) // page_bytes
        if chunk_pages == 0:
            raise LayoutMismatch(
                f"a source page of {page_bytes} B does not fit in a chunk of {min(chunk_bytes, staging_bytes)} B; "
                "raise [mover] chunk_bytes and staging_bytes"
            )
        return cls(staging_bytes // (chunk_pages * page_bytes), chunk_pages)


@dataclass(frozen=True)
class TargetClass:
    """One page class of the target: its layout and the places of its positions."""

    layout: KVLayout
    target: PullTarget


@dataclass(frozen=True)
class _Placed:
    """Rows of one target in the order of the source pages that they come from, so that a chunk finds its own."""

    layout: KVLayout
    ordinal: Int64Array
    slot: Int64Array
    rows: Rows

    @classmethod
    def sorted(cls, target: TargetClass, source: SourceRows) -> _Placed:
        order = np.argsort(source.ordinal, kind="stable")
        rows = target.target.rows
        places = Rows(rows.region[order], rows.page[order], rows.slot[order])
        return cls(target.layout, source.ordinal[order], source.slot[order], places)

    def placement(
        self, source_layout: KVLayout, ordinals: Int64Array, in_staging: Int64Array
    ) -> tuple[StridedCopies, ...]:
        """Copies from staged pages to the places of the positions that lie in them. `ordinals`: ascending."""
        begin, end = np.searchsorted(self.ordinal, (ordinals[0], ordinals[-1] + 1)).tolist()
        page = in_staging[np.searchsorted(ordinals, self.ordinal[begin:end])]
        source = Rows(np.full(end - begin, STAGING_REGION, np.int32), page, self.slot[begin:end])
        return copy_rows(source_layout, self.layout, source, self.rows[begin:end])


def build_chunks(
    pull_id: int,
    source_layout: KVLayout,
    source: SourceSpans,
    addresses: Sequence[int],
    targets: Sequence[TargetClass],
    staging: Staging,
    first_slot: int,
) -> list[pb.PullChunk]:
    """Chunks in source-page order. `addresses[r]`: base of rank r's region in the source mover.

    Every position of every target is placed exactly once; a page that holds no wanted position is not read.
    """
    page_bytes = source_layout.page_bytes
    ranks, pages = (np.full(int(source.segments.sum()), -1, np.int64) for _ in range(2))
    parts = []
    for each in targets:
        rows = locate(source, source_layout.page_rows, each.target.positions)
        ranks[rows.ordinal], pages[rows.ordinal] = rows.rank, rows.page
        parts.append(_Placed.sorted(each, rows))
    wanted = np.flatnonzero(pages >= 0)
    ranks, pages = ranks[wanted], pages[wanted]
    bases = np.asarray(addresses, np.uint64)
    chunks = []
    for number, start in enumerate(range(0, len(wanted), staging.chunk_pages)):
        taken = slice(start, start + staging.chunk_pages)
        slot_page = ((first_slot + number) % staging.slots) * staging.chunk_pages
        count = len(wanted[taken])
        in_staging = np.arange(slot_page, slot_page + count, dtype=np.int64)
        copies = [
            copy
            for part in parts
            for copy in part.placement(source_layout, wanted[taken], in_staging)
        ]
        chunks.append(
            pb.PullChunk(
                remote_addresses=pack_u64(bases[ranks[taken]] + (pages[taken] * page_bytes).astype(np.uint64)),
                staging_offsets=pack_u64(in_staging * page_bytes),
                lengths=pack_u64(np.full(count, page_bytes)),
                placement=plan_to_proto(CopyPlan(pull_id, Purpose.PLACE, tuple(copies))),
            )
        )
    return chunks
