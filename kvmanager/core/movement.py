"""Plans for spans: between tiers, onboard, copy-on-write."""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import SubmitPlan
from kvmanager.core.group import Chain, Group
from kvmanager.core.plans import CopyPlan, Purpose, Rows, StridedCopies, copy_rows, copy_whole_pages
from kvmanager.core.rows import RowArray
from kvmanager.core.spans import DEVICE, HOST
from kvmanager.core.spec import Placement
from kvmanager.core.state import CopyJob, State, concat
from kvmanager.core.verification import copied_back
from kvmanager.geometry import Int64Array


def between_tiers(chain: Chain, page_class: int, source_tier: int, pages: tuple[Int64Array, Int64Array]) -> tuple[
    StridedCopies, ...
]:
    """Whole-page copies device -> host or back. `pages`: (source pages, target pages).

    Sharded: rank r to its own host share. Replicated: host page i lies in share i mod N, written by that
    rank, read back by all.
    """
    c = chain.page_class(page_class)
    device, host = (pages[0], pages[1]) if source_tier == DEVICE else (pages[1], pages[0])
    if chain.spec.placement is Placement.SHARDED:
        if source_tier == DEVICE:
            return _on_all_ranks(c.page_bytes, c.device_regions, device, c.host_regions, host)
        return _on_all_ranks(c.page_bytes, c.host_regions, host, c.device_regions, device)
    ranks = len(c.device_regions)
    copies: list[StridedCopies] = []
    for share in range(ranks):
        mine = host % ranks == share
        if not mine.any():
            continue
        on_device, in_share = device[mine], host[mine] // ranks
        if source_tier == DEVICE:
            copies += copy_whole_pages(
                c.page_bytes, [c.device_regions[share]], on_device, [c.host_regions[share]], in_share
            )
            continue
        for region in c.device_regions:
            copies += copy_whole_pages(c.page_bytes, [c.host_regions[share]], in_share, [region], on_device)
    return tuple(copies)


def _on_all_ranks(
    page_bytes: int, sources: tuple[int, ...], source: Int64Array, targets: tuple[int, ...], target: Int64Array
) -> tuple[StridedCopies, ...]:
    """`copy_whole_pages` on every rank: one rank's copies are worked out, the others' differ in their regions only."""
    first = copy_whole_pages(page_bytes, sources[:1], source, targets[:1], target)
    return tuple(_between(part, *ends) for ends in zip(sources, targets, strict=True) for part in first)


def _between(copies: StridedCopies, source_region: int, target_region: int) -> StridedCopies:
    """The same copies between other regions."""
    return StridedCopies(
        source_region,
        target_region,
        copies.source_offsets,
        copies.target_offsets,
        copies.counts,
        copies.source_strides,
        copies.target_strides,
        copies.row_bytes,
    )


def span_rows(chain: Chain, page_class: int, tier: int, rows: RowArray, tokens: int) -> Rows:
    """Where the first `tokens` tokens of spans of one order lie, one entry a token (rank 0's copy of a replicated one).

    All spans but the last are covered whole.
    """
    spec, order = chain.spec, chain.table.order(int(rows[0]))
    page, slot = order.place(np.arange(spec.span_tokens(order), dtype=np.int64))
    pages = chain.table.pages[page_class, tier, rows]
    c = chain.page_class(page_class)
    regions = np.asarray(c.device_regions if tier == DEVICE else c.host_regions, np.int32)
    if spec.placement is Placement.REPLICATED:
        rank, entry = np.zeros_like(page), page
    else:
        entry, rank = np.divmod(page, spec.ranks)
    spans = len(rows)
    return Rows(np.tile(regions[rank], spans), pages[:, entry].reshape(-1), np.tile(slot, spans))[:tokens]


def copy_on_write(state: State, chain: Chain, donor: int, row: int, tokens: int) -> CopyPlan:
    """Copies slots [0, tokens) of the donor into a new span, for the worker to run before its first write."""
    copies: list[StridedCopies] = []
    for c in range(len(chain.spec.classes)):
        copies += _copy_slots(chain, c, donor, row, tokens)
    return CopyPlan(state.new_plan_id(), Purpose.COPY_ON_WRITE, tuple(copies))


def _copy_slots(chain: Chain, page_class: int, donor: int, row: int, tokens: int) -> list[StridedCopies]:
    """The first tokens of a span fill the first slots of each of its pages, so ranks with as many are alike."""
    spec, table, order = chain.spec, chain.table, chain.table.order(row)
    assert table.order(donor) == order
    c = chain.page_class(page_class)
    source, target = (table.pages[page_class, DEVICE, span] for span in (donor, row))
    filled = [order.rows_in_page(tokens, page) for page in range(order.segments)]
    made: dict[tuple[int, ...], tuple[StridedCopies, ...]] = {}
    copies: list[StridedCopies] = []
    for rank, region in enumerate(c.device_regions):
        mine = tuple(filled if spec.placement is Placement.REPLICATED else filled[rank :: spec.ranks])
        if mine not in made:
            ordinals = np.repeat(np.arange(len(mine)), mine)
            slots = concat([np.arange(count, dtype=np.int64) for count in mine])
            regions = np.full(len(slots), region, np.int32)
            ends = [Rows(regions, pages[ordinals], slots) for pages in (source, target)]
            made[mine] = copy_rows(c.layout, c.layout, ends[0], ends[1])
        copies += [_between(part, region, region) for part in made[mine]]
    return copies


def onboard(
    state: State, group: Group, chain_number: int, page_class: int, pairs: list[tuple[int, int]]
) -> CopyJob:
    """Host to device for (source row, target row) pairs; the same row twice: the span itself.

    The target rows have FILLING device copies already. Every row named is busy until the plan ends.
    """
    chain = group.chains[chain_number]
    source = concat([chain.table.page_list(page_class, HOST, s) for s, _ in pairs])
    target = concat([chain.table.page_list(page_class, DEVICE, t) for _, t in pairs])
    sums, asked = copied_back(state, chain, page_class, pairs)
    copies = between_tiers(chain, page_class, HOST, (source, target))
    plan = CopyPlan(state.new_plan_id(), Purpose.ONBOARD, copies, sums)
    rows = [t for _, t in pairs]
    donors = [s for s, t in pairs if s != t]
    chain.table.busy[np.asarray([*rows, *donors], np.int64)] += 1
    job = CopyJob(
        group.spec.name, chain_number, page_class, rows, DEVICE, donors, since=state.now, asked=asked,
        loaded_from=[s for s, _ in pairs],
    )  # fmt: skip
    state.jobs[plan.plan_id] = job
    state.effects.append(SubmitPlan(plan))
    return job


def onboard_in_flight(state: State, group: Group, chain_number: int, row: int) -> tuple[int, CopyJob] | None:
    """The plan that brings a span's device copy, if one is under way."""
    for plan_id, job in state.jobs.items():
        if (
            isinstance(job, CopyJob)
            and (job.group, job.chain, job.target_tier) == (group.spec.name, chain_number, DEVICE)
            and row in job.rows
        ):
            return plan_id, job
    return None
