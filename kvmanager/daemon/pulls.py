"""From two page tables to a pull: which pages of the source are read, and where their rows go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvmanager.configuration.groups import STAGING_REGION
from kvmanager.core.checksums import SUM_WORDS, ExpectedSums, sections_of
from kvmanager.core.events import PullTarget
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.core.state import PULL_PARTS
from kvmanager.errors import LayoutMismatch, TransferFailed
from kvmanager.geometry import SEQUENTIAL, Int64Array, TokenOrder
from kvmanager.layout import KVLayout
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.ring import RingPull
from kvmanager.transport.turned_pages import Turn
from kvmanager.wire import unpack_u32, unpack_u64


def part_id(plan_id: int, part: int) -> int:
    """What the mover knows part `part` of a pull by. Raises TransferFailed where there are too many."""
    if part >= PULL_PARTS:
        raise TransferFailed(f"pull {plan_id} came in more than {PULL_PARTS} parts")
    return plan_id + part


def pull_of(work_id: int) -> int:
    """The pull, if it is one, that work of a mover belongs to."""
    return work_id - work_id % PULL_PARTS


ON_HOST: Final = 1 << 40
"""Added to the numbers of source pages that are read on the host."""


@dataclass(frozen=True)
class SourceSpans:
    """The source's spans in token order: first_tokens, segments, interleave int64[spans]; pages int64[...] flat.

    `ranks`: ranks of the source's pool. Page k of a span is entry k // ranks of its pages, on rank k % ranks. A page
    from `ON_HOST` on lies in the host pool.
    """

    ranks: int
    first_tokens: Int64Array
    segments: Int64Array
    interleave: Int64Array
    pages: Int64Array

    def runs(self, page_rows: int) -> list[SpanRun]:
        """Spans that follow each other in one order together. Raises LayoutMismatch for uneven arrays.

        Regions are the ranks' numbers.
        """
        if (self.segments % self.ranks).any() or int(self.segments.sum()) != len(self.pages) * self.ranks:
            raise LayoutMismatch(
                f"source spans of {int(self.segments.sum())} pages on {self.ranks} ranks list {len(self.pages)} indexes"
            )
        breaks = np.diff(self.segments) | np.diff(self.interleave)
        breaks |= np.diff(self.first_tokens) != self.segments[:-1] * page_rows
        ends = np.cumsum(self.segments // self.ranks)
        runs, start = [], 0
        for spans in np.split(np.arange(len(self.segments)), np.flatnonzero(breaks) + 1):
            if len(spans):
                first, end = int(spans[0]), int(ends[spans[-1]])
                order = TokenOrder(int(self.segments[first]), int(self.interleave[first]))
                pages = self.pages[start:end]
                runs.append(SpanRun(int(self.first_tokens[first]), order, tuple(range(self.ranks)), pages))
                start = end
        return runs


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


    def in_whole(self, pages: int) -> Staging:
        """The same room in chunks of a multiple of so many pages, where one fits in a chunk.

        Spans that are cut by no chunk are placed by the patterns of whole spans.
        """
        chunk_pages = self.chunk_pages // pages * pages or self.chunk_pages
        return Staging(self.slots * self.chunk_pages // chunk_pages, chunk_pages)


@dataclass(frozen=True)
class TargetClass:
    """One page class of the target: its layout and the places of its positions."""

    layout: KVLayout
    target: PullTarget


def share_out(sources: Sequence[KVLayout], targets: Sequence[TargetClass]) -> list[list[TargetClass]]:
    """What each of the source's chains brings: every component of every target from the first that has it.

    Raises LayoutMismatch naming all that none has. Pages may have other numbers of rows.
    """
    missing: list[str] = []
    shares: list[list[TargetClass]] = [[] for _ in sources]
    for each in targets:
        wanted = dict(each.layout.by_key)
        for share, layout in zip(shares, sources, strict=True):
            mine = tuple(wanted.pop(key) for key in list(wanted) if key in layout.by_key)
            if mine:
                whole = len(mine) == len(each.layout.components)
                share.append(each if whole else replace(each, layout=replace(each.layout, components=mine)))
        missing += [f"no {section} of layer {layer} for {each.layout.name}" for section, layer in wanted]
    if missing:
        held = ", ".join(layout.name for layout in sources) or "nothing"
        raise LayoutMismatch(f"the source, with {held}: {'; '.join(missing[:16])}")
    return shares


def split_at(targets: Sequence[TargetClass], tokens: int) -> tuple[list[TargetClass], list[TargetClass]]:
    """The spans that end at or below position `tokens`, with their wanted positions, and those after them."""
    now: list[TargetClass] = []
    later: list[TargetClass] = []
    for each in targets:
        parts: tuple[list[SpanRun], list[SpanRun]] = [], []
        for run in each.target.spans:
            span_tokens = run.order.segments * each.layout.page_rows
            count = min(max(tokens - run.first_token, 0) // span_tokens, len(run.pages) // run.width)
            for part, first, last in ((parts[0], 0, count), (parts[1], count, len(run.pages) // run.width)):
                if first < last:
                    pages = run.pages[first * run.width : last * run.width]
                    part.append(replace(run, first_token=run.first_token + first * span_tokens, pages=pages))
        for found, spans in ((now, parts[0]), (later, parts[1])):
            if spans:
                found.append(replace(each, target=replace(each.target, spans=tuple(spans))))
    return now, later


def build_pull(
    pull_id: int,
    source_layout: KVLayout,
    source: SourceSpans,
    addresses: Sequence[int],
    targets: Sequence[TargetClass],
    staging: Staging,
    first_slot: int,
    may_turn: bool = False,
    host_addresses: Sequence[int] = (),
) -> RingPull:
    """Pages in the order of the source's spans. `addresses[r]`: base of rank r's region in the source mover.

    `host_addresses`: likewise, of pages on the host; of a replicated chain its n shares, where n is more than 1: host
    page i lies in share i mod n.

    Every position of every target is placed exactly once; a page that holds no wanted position is not read.
    `may_turn`: the source can turn pages, and is asked to where that makes rows into runs; spans come whole then.
    """
    page_rows = source_layout.page_rows
    read, staged, pages_before = [], [], 0
    runs = source.runs(page_rows)
    turn = _turn(source_layout, runs, targets, staging) if may_turn else None
    staging = staging.in_whole(max((run.order.segments for run in runs), default=1))
    for run in runs:
        wanted = _wanted_pages(run, page_rows, targets)
        order = run.order
        if turn is not None:
            order = SEQUENTIAL
            wanted = wanted.reshape(-1, run.order.segments).any(axis=1).repeat(run.order.segments)
        numbers = pages_before + np.cumsum(wanted) - 1
        staged.append(SpanRun(run.first_token, order, (STAGING_REGION,), numbers))
        bases = addresses, host_addresses or addresses
        read.append(_addresses(run, np.flatnonzero(wanted), bases, source_layout.page_bytes))
        pages_before += int(wanted.sum())
    copies: list[PagedCopies] = []
    for each in targets:
        copies += copy_spans(source_layout, each.layout, staged, each.target.spans, each.target.end)
    return RingPull(
        np.concatenate(read) if read else np.empty(0, np.uint64),
        source_layout.page_bytes,
        0,
        staging.slots,
        staging.chunk_pages,
        first_slot,
        CopyPlan(pull_id, Purpose.PLACE, tuple(copies)),
        turn=turn,
    )


def _turn(
    layout: KVLayout, source: Sequence[SpanRun], targets: Sequence[TargetClass], staging: Staging
) -> Turn | None:
    """How pages are to be turned, where the source deals tokens out over several and every target has them in sequence.

    None where a chunk holds no span, or spans differ.
    """
    orders = {run.order for run in source}
    wanted = {spans.order for each in targets for spans in each.target.spans}
    if len(orders) != 1 or wanted != {SEQUENTIAL}:
        return None
    (order,) = orders
    return Turn.of(layout, order) if 1 < order.segments <= staging.chunk_pages else None


def _wanted_pages(run: SpanRun, page_rows: int, targets: Sequence[TargetClass]) -> npt.NDArray[np.bool_]:
    """Which pages of the run's spans, counted over all of them, hold a position that some target wants."""
    segments, span_tokens = run.order.segments, run.order.segments * page_rows
    wanted = np.zeros((run.tokens(page_rows) // span_tokens, segments), bool)
    for each in targets:
        for spans in each.target.spans:
            first = max(spans.first_token - run.first_token, 0)
            end = min(each.target.end, spans.first_token + spans.tokens(each.layout.page_rows)) - run.first_token
            end = min(end, run.tokens(page_rows))
            if first >= end:
                continue
            (first_span, skipped), (last_span, rest) = divmod(first, span_tokens), divmod(end, span_tokens)
            wanted[first_span + (skipped > 0) : last_span] = True
            for span, low, high in _torn(first_span, skipped, last_span, rest, span_tokens):
                held = [
                    run.order.rows_in_page(high, page) > run.order.rows_in_page(low, page) for page in range(segments)
                ]
                wanted[span] |= held
    return wanted.reshape(-1)


def _torn(first: int, skipped: int, last: int, rest: int, span_tokens: int) -> list[tuple[int, int, int]]:
    """(span, first, end of its tokens) of the spans at the ends that are wanted in part."""
    if first == last:
        return [(first, skipped, rest)]
    head = [(first, skipped, span_tokens)] if skipped else []
    return head + ([(last, 0, rest)] if rest else [])


def _addresses(
    run: SpanRun, wanted: Int64Array, bases: tuple[Sequence[int], Sequence[int]], page_bytes: int
) -> npt.NDArray[np.uint64]:
    """Where the wanted pages, counted over all spans of the run, begin in the source mover. `bases`: by tier."""
    span, page = np.divmod(wanted, run.order.segments)
    entry, rank = np.divmod(page, len(run.regions))
    pages = run.pages[span * run.width + entry]
    tier, page = np.divmod(pages, ON_HOST)
    on_device = _begins(page, rank, bases[0], len(run.regions), page_bytes)
    return np.where(tier == 1, _begins(page, rank, bases[1], len(run.regions), page_bytes), on_device)


def _begins(
    pages: Int64Array, ranks: Int64Array, bases: Sequence[int], most_ranks: int, page_bytes: int
) -> npt.NDArray[np.uint64]:
    """Where pages begin: page i of rank r's region, or in share i mod n where there are more shares than ranks."""
    shares = len(bases)
    if shares > most_ranks:
        pages, ranks = np.divmod(pages, shares)
    begins: npt.NDArray[np.uint64] = np.asarray(bases, np.uint64)[ranks] + (pages * page_bytes).astype(np.uint64)
    return begins


def expected_sums(
    accepted: pb.SourceChain,
    layout: KVLayout,
    bases: Sequence[int],
    host_bases: Sequence[int],
    addresses: npt.NDArray[np.uint64],
) -> ExpectedSums | None:
    """What the pages at `addresses` must add up to, as far as the source says; None where it knows none.

    `bases[r]`, `host_bases[r]`: of rank r's regions in the source mover. Raises LayoutMismatch for another number of
    sums.
    """
    tiers = (accepted.summed_pages, "SourceChain.summed_pages"), (accepted.summed_host_pages, "SourceChain.host_pages")
    on_device, on_host = (unpack_u32(*numbers).astype(np.int64) for numbers in tiers)
    pages = np.concatenate((on_device, on_host))
    sections = tuple((section.start, section.size_bytes) for section in sections_of(layout))
    sums = unpack_u64(accepted.sums, "SourceChain.sums")
    words = len(sections) * SUM_WORDS
    if len(sums) != len(pages) * len(bases) * words:
        raise LayoutMismatch(f"{len(sums)} words of checksums for {len(pages)} pages on {len(bases)} ranks")
    if len(pages) == 0 or len(addresses) == 0:
        return None
    ranks = np.arange(len(bases))
    starts = np.concatenate([
        _begins(mine[:, None], ranks[None], held, len(ranks), layout.page_bytes).reshape(-1)
        for mine, held in ((on_device, bases), (on_host, host_bases)) if len(mine)
    ])  # fmt: skip
    order = np.argsort(starts)
    place = np.minimum(np.searchsorted(starts, addresses, sorter=order), len(starts) - 1)
    found = order[place]
    known = np.flatnonzero(starts[found] == addresses)
    return ExpectedSums(known, sums.reshape(-1, words)[found[known]], sections) if len(known) else None
