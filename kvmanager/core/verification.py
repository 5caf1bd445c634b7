"""Sums of host copies: made at the first copy out, compared at every copy back and after a restart.

A host copy whose bytes are not what was written is taken out for good: its pages are withheld until the node starts
cold, its span is found no more where it had no other copy, and whoever waited for its bytes is told.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmanager.core.admission import promises_hold, update_promises
from kvmanager.core.checksums import SUM_WORDS, PageSections, SumArray, SumStore
from kvmanager.core.events import CheckCopies, RequestFailed, SubmitPlan
from kvmanager.core.forgetting import condemn
from kvmanager.core.group import Chain, Group
from kvmanager.core.leasesums import sums_of_rows
from kvmanager.core.operatorevents import Loss
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.core.request import Phase
from kvmanager.core.rows import RowArray
from kvmanager.core.spans import DEVICE, HOST, CopyState
from kvmanager.core.spec import PageClass, Placement
from kvmanager.core.state import CheckJob, HostRead, State, SumsAsked, mark_dirty
from kvmanager.errors import ChecksumMismatch
from kvmanager.geometry import Int64Array

CHECKED_AT_ONCE = 8
"""Spans of one plan that only checks."""


def copied_out(state: State, chain: Chain, page_class: int, rows: list[int]) -> tuple[
    PageSections | None, SumsAsked | None
]:
    """What is summed up of spans that are copied to the host: their device pages, of those that are to have sums."""
    if not state.limits.checksums:
        return None, None
    index = np.asarray(rows, np.int64)
    content = chain.table.uids[index, 0] // np.uint64(chain.table.widest)  # counts spans
    picked = np.flatnonzero(content % np.uint64(state.limits.checksums) == 0)
    if len(picked) == 0:
        return None, None
    some = index[picked]
    device, host = (chain.table.page_lists(page_class, tier, some) for tier in (DEVICE, HOST))
    c = chain.page_class(page_class)
    if chain.spec.placement is Placement.REPLICATED:
        regions = np.asarray(c.device_regions, np.int32)[host % len(c.device_regions)]
        pages = _sections(c, regions, device)
    else:
        pages = _on_all(c, c.device_regions, device)
    return pages, SumsAsked(host, np.repeat(picked, chain.widths(some)))


def copied_back(state: State, chain: Chain, page_class: int, pairs: list[tuple[int, int]]) -> tuple[
    PageSections | None, SumsAsked | None
]:
    """What is summed up of an onboard, for (host row, device row) pairs: device pages whose host page has sums."""
    if not state.limits.checksums:
        return None, None
    host = chain.table.page_lists(page_class, HOST, np.asarray([s for s, _ in pairs], np.int64))
    targets = np.asarray([t for _, t in pairs], np.int64)
    device = chain.table.page_lists(page_class, DEVICE, targets)
    known = _known(chain, page_class, host)
    if not known.any():
        return None, None
    c = chain.page_class(page_class)
    of = np.repeat(np.arange(len(pairs)), chain.widths(targets))
    return _on_all(c, c.device_regions, device[known]), SumsAsked(host[known], of[known])


def _sections(c: PageClass, regions: npt.NDArray[np.int32], pages: Int64Array) -> PageSections:
    sections = tuple((section.start, section.size_bytes) for section in c.sections)
    return PageSections(regions, pages * c.page_bytes, sections)


def _on_all(c: PageClass, regions: tuple[int, ...], pages: Int64Array) -> PageSections:
    """The same pages of every region, region by region."""
    each = np.repeat(np.asarray(regions, np.int32), len(pages))
    return _sections(c, each, np.tile(pages, len(regions)))


def _store(chain: Chain, page_class: int) -> SumStore:
    """The class's sums; made when the first are known."""
    store = chain.sums.get(page_class)
    if store is None:
        c = chain.page_class(page_class)
        pool = chain.pool(page_class, HOST)
        ranks = 1 if chain.spec.placement is Placement.REPLICATED else len(c.host_regions)
        store = chain.sums[page_class] = SumStore(pool.spaces[c.name].pages, ranks, len(c.sections))
    return store


def _known(chain: Chain, page_class: int, host: Int64Array) -> npt.NDArray[np.bool_]:
    if page_class not in chain.sums:
        return np.zeros(len(host), bool)
    space = chain.pool(page_class, HOST).spaces[chain.page_class(page_class).name]
    return chain.sums[page_class].known(host, space.generation[host])


def keep(state: State, chain: Chain, page_class: int, asked: SumsAsked, sums: SumArray) -> None:
    """Sums of what was copied out, kept beside the host pages. Raises ValueError for another number of them."""
    store = _store(chain, page_class)
    space = chain.pool(page_class, HOST).spaces[chain.page_class(page_class).name]
    store.note(asked.pages, space.generation[asked.pages], sums.reshape(store.ranks, len(asked.pages), -1))
    state.counters["summed_page"] += len(asked.pages) * store.ranks


def differing(
    state: State, chain: Chain, page_class: int, asked: SumsAsked, sums: SumArray
) -> tuple[RowArray, ChecksumMismatch | None]:
    """Places in the plan's list of spans whose bytes are not those that were written, and what to say of the first."""
    store = _store(chain, page_class)
    seen = sums.reshape(-1, len(asked.pages), store.sums.shape[2])
    differs = seen != store.of(asked.pages)
    state.counters["checked_page"] += seen.shape[0] * seen.shape[1]
    wrong = differs.any(axis=(0, 2))
    if not wrong.any():
        return np.empty(0, np.int64), None
    rank, page, word = (int(part[0]) for part in np.nonzero(differs))
    c = chain.page_class(page_class)
    error = ChecksumMismatch(
        f"{c.host_pool} page {int(asked.pages[page])}, {c.sections[word // SUM_WORDS].name} section, rank {rank}: "
        f"{int(wrong.sum())} of {len(wrong)} pages are not what was written; the copy is taken out, compute it again"
    )
    return np.unique(asked.of[wrong]), error


def take_out(
    state: State, group: Group, chain_number: int, page_class: int, rows: list[int], error: ChecksumMismatch
) -> None:
    """These spans' host copies hold wrong bytes: never handed out again, and gone where another copy is complete.

    Where it is the only one, nobody finds the span any more, and running requests that read it there have failed.
    """
    chain = group.chains[chain_number]
    table, pool, name = chain.table, chain.pool(page_class, HOST), chain.page_class(page_class).name
    # A row may be named twice, or have been found out before.
    bad = [row for row in dict.fromkeys(rows) if table.copies[page_class, HOST, row] == CopyState.READY]
    # All first: the end of one span may free those below it, whose pages must be known by then.
    fresh = [pool.condemn(name, table.page_list(page_class, HOST, row)) for row in bad]
    state.counters["bad_copy"] += sum(fresh)
    for row, is_fresh in zip(bad, fresh, strict=True):
        if not table.live[row]:
            continue
        if table.copies[page_class, DEVICE, row] == CopyState.READY:
            chain.free_copy(page_class, HOST, row)
            if group.spec.sparse is not None:
                mark_dirty(state, group, chain_number, row)
            group.writeback[chain_number].append(row)
            continue
        if is_fresh and group.spec.sparse is not None:
            _tell_readers(state, group, chain_number, row, error)
        condemn(state, chain, row, Loss.BAD_COPY)
    update_promises(state, group)


def _tell_readers(state: State, group: Group, chain_number: int, row: int, error: ChecksumMismatch) -> None:
    """Running requests whose kernels read the span on the host have failed; what they hold, they hold."""
    for request in state.holders(group.spec.name):
        if request.phase is Phase.RUNNING and request.chains[chain_number].ordinal(row) is not None:
            state.notify(state.engine_of(request), failed=RequestFailed(request.request_id, error))


def ticket_sums(state: State, ticket_id: str) -> list[tuple[Int64Array, Int64Array, SumArray]]:
    """Pages of a ticket whose bytes have sums, for they have a host copy or were filled by leases, by chain.

    Those read on the device, those read on the host, uint64[pages of both, ranks, words] each. Nothing for a ticket
    that is over.
    """
    ticket = state.tickets.get(ticket_id)
    if ticket is None:
        return []
    chains = state.groups[ticket.group].chains
    return [
        _chain_sums(chains[number], held, read)
        for (number, held), read in zip(ticket.rows, ticket.on_host, strict=True)
    ]


def _chain_sums(chain: Chain, held: list[int], read: HostRead) -> tuple[Int64Array, Int64Array, SumArray]:
    rows, none = np.asarray(held, np.int64), np.empty(0, np.int64)
    if 0 not in chain.sums or len(rows) == 0:
        return none, none, np.empty((0, 0, 0), np.uint64)
    if not chain.has_host(0):
        pages, sums = sums_of_rows(chain, rows)
        return pages, none, sums
    rows = rows[~np.isin(rows, read.rows)]
    rows = rows[(chain.table.copies[0, :, rows] == CopyState.READY).all(axis=1)]
    device, host = (chain.table.page_lists(0, tier, rows) for tier in (DEVICE, HOST))
    known, named = _known(chain, 0, host), read.pages[_known(chain, 0, read.pages)]
    sums = chain.sums[0].of(np.concatenate((host[known], named))).swapaxes(0, 1)
    return device[known], named, sums


# ------------------------------------------------------------------------------ after a restart


def begin_checks(state: State, event: CheckCopies) -> None:
    """Chooses host copies with sums, evenly over all, and begins to have them read."""
    found: list[tuple[str, int, int, int]] = []
    for group in state.groups.values():
        for number, chain in enumerate(group.chains):
            for c in chain.sums:
                rows = np.flatnonzero(chain.table.live & (chain.table.copies[c, HOST] == CopyState.READY))
                found += [(group.spec.name, number, c, row) for row in rows.tolist() if _checkable(chain, c, row)]
    step = max(1, -(-len(found) // max(event.spans, 1)))
    state.checks.clear()
    state.checks.extend(found[::step][: event.spans])
    state.checks_until = state.now + event.most_ns
    next_check(state)


def _checkable(chain: Chain, page_class: int, row: int) -> bool:
    table = chain.table
    if not table.live[row] or table.copies[page_class, HOST, row] != CopyState.READY:
        return False
    return bool(_known(chain, page_class, table.page_list(page_class, HOST, row)).all())


def next_check(state: State) -> None:
    """Submits one plan more, of copies that are still there; after the deadline nothing more.

    Copies whose pages running requests were promised are left out, and with a whole plan of them the rest of their
    group: to find those that may stay in place, all spans of the group are looked at.
    """
    if state.now > state.checks_until:
        state.checks.clear()
    if any(isinstance(job, CheckJob) for job in state.jobs.values()):
        return
    while state.checks:
        name, number, c, _ = state.checks[0]
        chain = state.groups[name].chains[number]
        rows: list[int] = []
        while state.checks and state.checks[0][:3] == (name, number, c) and len(rows) < CHECKED_AT_ONCE:
            row = state.checks.popleft()[3]
            if _checkable(chain, c, row):
                rows.append(row)
        held = _hold(state.groups[name], chain, rows)
        if held:
            _check(state, state.groups[name], number, c, held)
            return
        if rows:
            rest = [check for check in state.checks if check[0] != name]
            state.checks.clear()
            state.checks.extend(rest)


def _hold(group: Group, chain: Chain, rows: list[int]) -> list[int]:
    """Makes those of the spans busy that can stay in place while every promise is kept; which they are."""
    busy = chain.table.busy
    busy[np.asarray(rows, np.int64)] += 1
    if promises_hold(group):
        return rows
    busy[np.asarray(rows, np.int64)] -= 1
    held: list[int] = []
    for row in rows:
        busy[row] += 1
        if promises_hold(group):
            held.append(row)
        else:
            busy[row] -= 1
    return held


def _check(state: State, group: Group, number: int, page_class: int, rows: list[int]) -> None:
    """Has the host copies of these spans read; they are busy already."""
    chain = group.chains[number]
    index = np.asarray(rows, np.int64)
    host = chain.table.page_lists(page_class, HOST, index)
    c = chain.page_class(page_class)
    if chain.spec.placement is Placement.REPLICATED:
        shares = len(c.host_regions)
        pages = _sections(c, np.asarray(c.host_regions, np.int32)[host % shares], host // shares)
    else:
        pages = _on_all(c, c.host_regions, host)
    asked = SumsAsked(host, np.repeat(np.arange(len(rows)), chain.widths(index)))
    plan = CopyPlan(state.new_plan_id(), Purpose.CHECK, (), pages)
    state.jobs[plan.plan_id] = CheckJob(group.spec.name, number, page_class, rows, asked, state.now)
    state.effects.append(SubmitPlan(plan))


def check_ended(state: State, job: CheckJob, sums: SumArray | None) -> None:
    """Compares what was read; without sums (it did not end well) the checks are over."""
    group = state.groups[job.group]
    chain = group.chains[job.chain]
    chain.table.busy[np.asarray(job.rows, np.int64)] -= 1
    if sums is None:
        state.checks.clear()
    else:
        state.counters["restart_check"] += len(job.rows)
        bad, error = differing(state, chain, job.page_class, job.asked, sums)
        if error is not None:
            take_out(state, group, job.chain, job.page_class, [job.rows[place] for place in bad.tolist()], error)
    chain.release_unused(job.rows)
    next_check(state)
