"""Plans for spans: between tiers, onboard and who waits for it, copy-on-write."""

from __future__ import annotations

import numpy as np

from kvmanager.core.events import SubmitPlan
from kvmanager.core.group import Chain, Group
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose
from kvmanager.core.request import Request
from kvmanager.core.rows import RowArray, as_range
from kvmanager.core.spanplans import SpanRun, copy_pages, copy_spans
from kvmanager.core.spans import DEVICE, FILLING, HOST
from kvmanager.core.spec import Placement
from kvmanager.core.state import CopyJob, State, concat
from kvmanager.core.verification import copied_back
from kvmanager.geometry import Int64Array


def between_tiers(
    chain: Chain, page_class: int, source_tier: int, pages: tuple[Int64Array, Int64Array]
) -> tuple[PagedCopies, ...]:
    """Whole-page copies device -> host or back. `pages`: (source pages, target pages).

    Sharded: rank r to its own host share. Replicated: host page i lies in share i mod N, written by that
    rank, read back by all.
    """
    c = chain.page_class(page_class)
    device, host = (pages[0], pages[1]) if source_tier == DEVICE else (pages[1], pages[0])
    copies: list[PagedCopies] = []

    def copy(on_device: int, device_pages: Int64Array, on_host: int, host_pages: Int64Array) -> None:
        ends = ((on_device, device_pages), (on_host, host_pages))
        source, target = ends if source_tier == DEVICE else reversed(ends)
        copies.extend(copy_pages(c.page_bytes, *source, *target))

    if chain.spec.placement is Placement.SHARDED:
        for on_device, on_host in zip(c.device_regions, c.host_regions, strict=True):
            copy(on_device, device, on_host, host)
        return tuple(copies)
    ranks = len(c.device_regions)
    for share, on_host in enumerate(c.host_regions):
        mine = host % ranks == share
        readers = c.device_regions[share : share + 1] if source_tier == DEVICE else c.device_regions
        for on_device in readers:
            copy(on_device, device[mine], on_host, host[mine] // ranks)
    return tuple(copies)


def span_runs(
    chain: Chain, page_class: int, tier: int, rows: RowArray, regions: tuple[int, ...]
) -> tuple[SpanRun, ...]:
    """Where spans lie, ascending; those that follow each other in one order together.

    `regions`: all of the tier, by rank, or the one rank's whose copy of a replicated group is meant.
    """
    table, spec = chain.table, chain.spec
    first, segments = table.first_token[rows], table.segments[rows]
    breaks = np.diff(segments) | np.diff(table.interleave[rows])
    breaks |= np.diff(first) != segments[:-1] * spec.page_rows
    runs = []
    for alike in np.split(rows, np.flatnonzero(breaks) + 1) if len(rows) else ():
        order = table.order(int(alike[0]))
        pages = table.pages[page_class, tier, alike, : order.segments // len(regions)]
        runs.append(SpanRun(int(table.first_token[alike[0]]), order, regions, pages.reshape(-1).astype(np.int64)))
    return tuple(runs)


def copy_on_write(state: State, chain: Chain, donor: int, row: int, tokens: int) -> CopyPlan:
    """Copies slots [0, tokens) of the donor into a new span, for the worker to run before its first write."""
    table, order = chain.table, chain.table.order(row)
    assert table.order(donor) == order
    copies: list[PagedCopies] = []
    for number, c in enumerate(chain.spec.classes):
        ranks = [(region,) for region in c.device_regions] if chain.spec.placement is Placement.REPLICATED else [
            c.device_regions
        ]
        for regions in ranks:
            source, target = (
                SpanRun(0, order, regions, table.page_list(number, DEVICE, span)) for span in (donor, row)
            )
            copies += copy_spans(c.layout, c.layout, [source], [target], tokens)
    return CopyPlan(state.new_plan_id(), Purpose.COPY_ON_WRITE, tuple(copies))


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


def onboard_in_flight(
    state: State, group: Group, chain_number: int, page_class: int, row: int
) -> tuple[int, CopyJob] | None:
    """The plan that brings a span's device copy of a class, if one is under way."""
    for plan_id, job in state.jobs.items():
        if (
            isinstance(job, CopyJob)
            and (job.group, job.chain, job.page_class) == (group.spec.name, chain_number, page_class)
            and job.target_tier == DEVICE
            and row in job.rows
        ):
            return plan_id, job
    return None


def wait_for_onboards(
    state: State, group: Group, request: Request, chain_number: int, page_class: int, rows: RowArray
) -> list[int]:
    """The request waits for those of the spans whose device copy is on its way; returns those that nobody brings."""
    unattended = []
    for row in rows[group.chains[chain_number].table.copies[page_class, DEVICE, as_range(rows)] == FILLING].tolist():
        under_way = onboard_in_flight(state, group, chain_number, page_class, row)
        if under_way is None:
            unattended.append(row)
            continue
        under_way[1].waiters.append((request.engine, request.epoch, request.request_id))
        request.waiting_on.add(under_way[0])
    return unattended
