"""Plans and pulls as the wire's messages, and back. What arrives is checked here."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvmanager.core.checksums import SUM_WORDS, ExpectedSums, PageSections
from kvmanager.core.plans import Box, CopyPlan, PagedCopies, PlacedPages, Purpose
from kvmanager.errors import InvalidArgument, LimitExceeded
from kvmanager.geometry import Int64Array
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.ring import RingPull
from kvmanager.transport.turned_pages import Turn
from kvmanager.wire import pack_i64, pack_u32, pack_u64, unpack_i64, unpack_u32, unpack_u64

PLAN_MAX_ENTRIES: Final = 4 << 20
"""Page entries and placements of one plan, both sides together: 16 MiB of page numbers."""
PLAN_MAX_BOXES: Final = 65_536
_INT64_END: Final = 2**63


def plan_to_proto(plan: CopyPlan) -> pb.Plan:
    """The plan as a message. Raises LimitExceeded for one that is larger than stated above."""
    sides = [side for c in plan.copies for side in (c.source, c.target)]
    tables = list({id(side.pages): side.pages for side in sides}.values())
    _check_size(plan.plan_id, tables, sides, sum(len(c.boxes) for c in plan.copies))
    numbers = {id(table): number for number, table in enumerate(tables)}
    copies = [
        pb.PagedCopies(
            source_region=c.source_region,
            target_region=c.target_region,
            groups=c.groups,
            source=_pages_to_proto(c.source, numbers[id(c.source.pages)]),
            target=_pages_to_proto(c.target, numbers[id(c.target.pages)]),
            boxes=map(_box_to_proto, c.boxes),
        )
        for c in plan.copies
    ]
    return pb.Plan(
        plan_id=plan.plan_id,
        purpose=plan.purpose.value,
        page_tables=map(pack_u32, tables),
        copies=copies,
        sums=None if plan.sums is None else sections_to_proto(plan.sums),
    )


def _pages_to_proto(pages: PlacedPages, table: int) -> pb.PlacedPages:
    return pb.PlacedPages(
        table=table,
        advance=pages.advance,
        columns=pack_u32(pages.columns),
        slots=pack_i64(pages.slots),
    )


def _box_to_proto(box: Box) -> pb.Box:
    return pb.Box(
        source_offset=box.source_offset,
        target_offset=box.target_offset,
        source_slot_stride=box.source_slot_stride,
        target_slot_stride=box.target_slot_stride,
        source_page_stride=box.source_page_stride,
        target_page_stride=box.target_page_stride,
        counts=pack_u64(box.counts),
        source_strides=pack_i64(box.source_strides),
        target_strides=pack_i64(box.target_strides),
        row_bytes=box.row_bytes,
    )


def plan_from_proto(message: pb.Plan) -> CopyPlan:
    """The plan of a message.

    Raises InvalidArgument for arrays that don't fit each other, zero extents, unknown purposes, LimitExceeded.
    """
    try:
        purpose = Purpose(message.purpose)
    except ValueError:
        known = ", ".join(p.value for p in Purpose)
        raise InvalidArgument(f"Plan.purpose {message.purpose!r} is none of {known}") from None
    tables = [unpack_u32(table, "Plan.page_tables").astype(np.int64) for table in message.page_tables]
    copies = tuple(_copies_from_proto(c, tables) for c in message.copies)
    sides = [side for c in copies for side in (c.source, c.target)]
    _check_size(message.plan_id, tables, sides, sum(len(c.boxes) for c in copies))
    sums = sections_from_proto(message.sums) if message.HasField("sums") else None
    return CopyPlan(message.plan_id, purpose, copies, sums)


def _check_size(plan_id: int, tables: list[Int64Array], sides: list[PlacedPages], boxes: int) -> None:
    entries = sum(map(len, tables)) + sum(len(side.columns) for side in sides)
    if entries > PLAN_MAX_ENTRIES:
        raise LimitExceeded(f"plan {plan_id}: {entries:,} page entries; a plan has at most {PLAN_MAX_ENTRIES:,}")
    if boxes > PLAN_MAX_BOXES:
        raise LimitExceeded(f"plan {plan_id}: {boxes:,} boxes; a plan has at most {PLAN_MAX_BOXES:,}")


def _copies_from_proto(message: pb.PagedCopies, tables: list[Int64Array]) -> PagedCopies:
    sides = [
        _pages_from_proto(side, tables, message.groups, f"PagedCopies.{name}")
        for side, name in ((message.source, "source"), (message.target, "target"))
    ]
    if len(sides[0].columns) != len(sides[1].columns):
        raise InvalidArgument(
            f"PagedCopies: {len(sides[0].columns)} source placements for {len(sides[1].columns)} target placements"
        )
    boxes = tuple(map(_box_from_proto, message.boxes))
    return PagedCopies(message.source_region, message.target_region, message.groups, sides[0], sides[1], boxes)


def _pages_from_proto(message: pb.PlacedPages, tables: list[Int64Array], groups: int, field: str) -> PlacedPages:
    if message.table >= len(tables):
        raise InvalidArgument(f"{field}: page table {message.table} of {len(tables)}")
    pages = tables[message.table]
    columns = unpack_u32(message.columns, f"{field}.columns").astype(np.int64)
    slots = unpack_i64(message.slots, f"{field}.slots")
    if len(slots) != len(columns):
        raise InvalidArgument(f"{field}: {len(slots)} slots for {len(columns)} columns")
    if groups and len(columns):
        last = (groups - 1) * message.advance + int(columns.max())
        if last >= len(pages):
            raise InvalidArgument(f"{field}: group {groups - 1} needs entry {last} of {len(pages)} pages")
    return PlacedPages(pages, message.advance, columns, slots)


def _box_from_proto(message: pb.Box) -> Box:
    counts = unpack_u64(message.counts, "Box.counts")
    source_strides = unpack_i64(message.source_strides, "Box.source_strides")
    target_strides = unpack_i64(message.target_strides, "Box.target_strides")
    if not len(counts) == len(source_strides) == len(target_strides):
        raise InvalidArgument(
            f"Box: {len(counts)} counts, {len(source_strides)} source strides, {len(target_strides)} target strides"
        )
    if not 0 < message.row_bytes < _INT64_END or (counts == 0).any():
        raise InvalidArgument(f"Box: rows of {message.row_bytes} B x {counts.tolist()}: every extent is at least 1")
    return Box(
        message.source_offset,
        message.target_offset,
        message.source_slot_stride,
        message.target_slot_stride,
        message.source_page_stride,
        message.target_page_stride,
        tuple(counts.tolist()),
        tuple(source_strides.tolist()),
        tuple(target_strides.tolist()),
        message.row_bytes,
    )


def sections_to_proto(pages: PageSections) -> pb.PageSections:
    """Sections to be summed up, as a message."""
    return pb.PageSections(
        regions=pack_u32(pages.regions),
        offsets=pack_u64(pages.offsets),
        starts=pack_u64([start for start, _ in pages.sections]),
        sizes=pack_u64([size for _, size in pages.sections]),
    )


def sections_from_proto(message: pb.PageSections) -> PageSections:
    """Sections of a message. Raises InvalidArgument for arrays of unequal length, or values beyond 63 bits."""
    regions = unpack_u32(message.regions, "PageSections.regions")
    numbers = [
        unpack_u64(data, f"PageSections.{name}")
        for name, data in (("offsets", message.offsets), ("starts", message.starts), ("sizes", message.sizes))
    ]
    offsets, starts, sizes = numbers
    if len(regions) != len(offsets) or len(starts) != len(sizes):
        raise InvalidArgument(
            f"PageSections: {len(regions)} regions for {len(offsets)} pages, {len(starts)} starts, {len(sizes)} sizes"
        )
    if any(int(values.max(initial=0)) >> 62 for values in numbers) or int(regions.max(initial=0)) >> 31:
        raise InvalidArgument("PageSections: a value beyond any region")
    sections = tuple(zip(starts.tolist(), sizes.tolist(), strict=True))
    return PageSections(regions.astype(np.int32), offsets.astype(np.int64), sections)


def ring_to_proto(ring: RingPull) -> pb.Pull:
    """What is read and where it goes, in a message that lacks only the peer."""
    expected = ring.expected
    sections = () if expected is None else expected.sections
    return pb.Pull(
        summed=b"" if expected is None else pack_u64(expected.pages),
        sums=b"" if expected is None else pack_u64(expected.sums.reshape(-1)),
        section_starts=pack_u64([start for start, _ in sections]),
        section_sizes=pack_u64([size for _, size in sections]),
        pull_id=ring.placement.plan_id,
        remote_addresses=pack_u64(ring.addresses),
        page_bytes=ring.page_bytes,
        ring_offset=ring.offset,
        ring_slots=ring.slots,
        chunk_pages=ring.chunk_pages,
        first_slot=ring.first_slot,
        placement=plan_to_proto(ring.placement),
        turn=b"" if ring.turn is None else ring.turn.encode(),
    )


def ring_from_proto(message: pb.Pull) -> RingPull:
    """What is read and where it goes. Raises InvalidArgument, LimitExceeded."""
    return RingPull(
        unpack_u64(message.remote_addresses, "Pull.remote_addresses"),
        message.page_bytes,
        message.ring_offset,
        message.ring_slots,
        message.chunk_pages,
        message.first_slot,
        plan_from_proto(message.placement),
        _expected_from_proto(message),
        Turn.decode(message.turn) if message.turn else None,
    )


def _expected_from_proto(message: pb.Pull) -> ExpectedSums | None:
    if not message.summed:
        return None
    pages, sums, starts, sizes = (
        unpack_u64(data, f"Pull.{name}")
        for name, data in (
            ("summed", message.summed), ("sums", message.sums), ("section_starts", message.section_starts),
            ("section_sizes", message.section_sizes),
        )
    )  # fmt: skip
    words = len(starts) * SUM_WORDS
    if len(starts) != len(sizes) or len(starts) == 0 or len(sums) != len(pages) * words:
        raise InvalidArgument(f"Pull: {len(sums)} words of checksums for {len(pages)} pages of {len(starts)} sections")
    if any(int(values.max(initial=0)) >> 62 for values in (pages, starts, sizes)):
        raise InvalidArgument("Pull: a checksum of something beyond any page")
    sections = tuple(zip(starts.tolist(), sizes.tolist(), strict=True))
    return ExpectedSums(pages.astype(np.int64), sums.reshape(len(pages), words), sections)
