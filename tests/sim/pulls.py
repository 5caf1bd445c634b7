"""Hand-offs under way at the target node: accepted, copied, checked, ended, one stage at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from kvmanager.core.checksums import PageSections, SumArray
from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    CopyOutcome,
    PlanEnded,
    ReleaseTicket,
    SpanRunTable,
    StartPull,
    TicketPages,
)
from kvmanager.core.group import Group
from kvmanager.core.plans import StridedCopies
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.core.spans import NO_PAGE
from kvmanager.core.spec import ChainSpec, Placement
from kvmanager.core.verification import ticket_sums
from kvmanager.daemon.pulls import TargetClass, share_out
from kvmanager.errors import ChecksumMismatch, KVError, PeerUnreachable, StalePage, TransferFailed
from kvmanager.geometry import TokenOrder
from kvmanager.transport.checksums import sum_pages
from kvmanager.transport.cpu import copy_piece
from tests.sim.network import Network
from tests.sim.worker import Claim

CHUNKS = 3
"""Of what one answer of the source offers."""


@dataclass
class Pull:
    """One hand-off. `claims`: target pages as they were when it was asked for. `chunks`: what is still to be copied.

    `mover`: incarnation of the source's. `checked`: the source was asked since the last chunk.
    """

    start: StartPull
    claims: list[Claim]
    deadline: int
    chunks: list[list[StridedCopies]] = field(default_factory=list)
    generations: np.ndarray | None = None
    sums: list[tuple[PageSections, SumArray]] = field(default_factory=list)
    mover: int | None = None
    checked: bool = True
    final: bool = False
    orphaned: bool = False  # who would have asked the source in the end died

    @property
    def ticket_id(self) -> str:
        return self.start.ticket.ticket_id

    @property
    def holder(self) -> str:
        """Every pull has a holder of its own: two pulls of one ticket must not both be served."""
        return f"target {self.start.group} {self.start.plan_id}"


def begin(start: StartPull, group: Group, now: int) -> Pull:
    """A pull as the core asked for it; its targets must be well formed."""
    specs = {chain.spec.name: chain.spec for chain in group.chains}
    claims = []
    for part in start.chains:
        classes = {c.name: c for c in specs[part.chain].classes}
        for target in part.targets:
            c = classes[target.page_class]
            for spans in target.spans:
                on_host = spans.regions[0] in c.host_regions
                claims.append(Claim.on(group.pools[c.host_pool if on_host else c.device_pool], c.name, spans.pages))
                assert part.first_position <= spans.first_token < target.end
            firsts = [spans.first_token for spans in target.spans]
            assert firsts == sorted(set(firsts))
    return Pull(start, claims, now + start.deadline_ns)


End = tuple[CopyOutcome, KVError | None]


def advance(pull: Pull, net: Network, target: Group, now: int) -> End | None:
    """The next stage; how it ended, None while it goes on. A node that does not answer is asked again."""
    if pull.orphaned:
        return _end_orphan(pull, net)
    if now > pull.deadline:
        # Once reading began nobody knows what may still arrive.
        begun = pull.generations is not None
        return (CopyOutcome.UNKNOWN_FATE if begun else CopyOutcome.FAILED), TransferFailed("the deadline passed")
    if not pull.checked:
        return _check(pull, net, ends=False)
    if pull.chunks:
        return _copy(pull, net)
    if pull.final:
        return _check(pull, net, ends=True)
    return _accept(pull, net, target)


def _accept(pull: Pull, net: Network, target: Group) -> End | None:
    answer = net.ask(pull.ticket_id, AcceptTicket(pull.ticket_id, pull.holder))
    if isinstance(answer, KVError):
        return None if isinstance(answer, PeerUnreachable) else (CopyOutcome.FAILED, answer)
    assert isinstance(answer, TicketPages)
    mover = net.sources[pull.ticket_id][0].mover
    if pull.mover not in (None, mover):
        return CopyOutcome.FAILED, StalePage("the source's mover was restarted")
    if pull.generations is not None:
        net.happened["grown ticket"] += 1
    pull.mover, pull.generations, pull.final = mover, answer.generations, answer.final
    pull.sums = list(_host_sums(pull, net))
    if any((device == NO_PAGE).any() for run in answer.spans for device, _ in run.pages.values()):
        net.happened["read on the host"] += 1
    pieces = list(_pieces(pull, net, target, answer))
    size = -(-len(pieces) // CHUNKS) or 1
    pull.chunks = [pieces[i : i + size] for i in range(0, len(pieces), size)]
    return None


def _check(pull: Pull, net: Network, *, ends: bool) -> End | None:
    """Asks the source whether what was read is what was exported: after each chunk, and in the end."""
    answer = net.ask(pull.ticket_id, CheckTicket(pull.ticket_id, pull.generations))
    if isinstance(answer, PeerUnreachable):
        return None
    if isinstance(answer, KVError):
        return CopyOutcome.FAILED, answer
    if net.sources[pull.ticket_id][0].mover != pull.mover:
        return CopyOutcome.FAILED, StalePage("the source's mover was restarted")
    pull.checked = True
    return (CopyOutcome.DONE, None) if ends else None


def _end_orphan(pull: Pull, net: Network) -> End:
    """The mover finishes or not: nobody asks whether the bytes are the right ones."""
    net.happened["orphaned pull"] += 1
    while pull.chunks and not net.cut:
        _copy(pull, net)
    return net.draw.choice((CopyOutcome.DONE, *CopyOutcome)), None


def _copy(pull: Pull, net: Network) -> End | None:
    """The bytes of a chunk, unless the nodes are apart; now and then a read of it fails and it is read again."""
    if net.cut:
        return None
    if any((sum_pages(net.memory.regions, pages) != sums).any() for pages, sums in pull.sums):
        net.happened["wrong bytes of a host copy"] += 1
        return CopyOutcome.FAILED, ChecksumMismatch("a host copy that the ticket names is not what was written")
    for claim in pull.claims:
        claim.hold("pull")
    chunk = pull.chunks[0]
    fails = net.draw.random() < 0.1
    for c in chunk[: len(chunk) // 2] if fails else chunk:
        copy_piece(net.memory.regions[c.source_region], net.memory.regions[c.target_region], c)
    if fails:
        net.happened["chunk read again"] += 1
        return None
    del pull.chunks[0]
    pull.checked = False
    return None


def _host_sums(pull: Pull, net: Network) -> Iterator[tuple[PageSections, SumArray]]:
    """What is known of the host pages that the ticket names, rank by rank; the mover compares it with what it read."""
    world, group_name = net.sources[pull.ticket_id]
    state = world.node.state
    chains = state.groups[group_name].spec.chains
    for chain, (device, host, sums) in zip(chains, ticket_sums(state, pull.ticket_id), strict=True):
        c = chain.classes[0]
        sections = tuple((section.start, section.size_bytes) for section in c.sections)
        spread = chain.placement is Placement.REPLICATED
        for rank, region in enumerate(c.host_regions if len(host) else ()):
            mine = host % len(c.host_regions) == rank if spread else np.ones(len(host), bool)
            pages = host[mine] // len(c.host_regions) if spread else host
            regions = np.full(len(pages), region, np.int32)
            known = sums[len(device) :, 0 if spread else rank][mine]
            if len(pages):
                yield PageSections(regions, pages * c.page_bytes, sections), known


def ended(pull: Pull, outcome: CopyOutcome, error: KVError | None) -> PlanEnded:
    """The report to the core."""
    if outcome is not CopyOutcome.DONE and error is None:
        error = TransferFailed("drawn to fail")
    return PlanEnded(pull.start.plan_id, outcome, error)


def release(pull: Pull, net: Network) -> None:
    """The ticket goes back, unless the source has forgotten it or can't be reached."""
    net.ask(pull.ticket_id, ReleaseTicket(pull.ticket_id, pull.holder))


def _pieces(pull: Pull, net: Network, target_group: Group, answer: TicketPages) -> Iterator[StridedCopies]:
    """All that is there by now, once more from the start: what was committed stays as it is."""
    world, group_name = net.sources[pull.ticket_id]
    chains = world.node.state.groups[group_name].spec.chains
    sources = [_source(chain, run) for chain, run in zip(chains, answer.spans, strict=True)]
    layouts = {(chain.name, c.name): c.layout for chain in target_group.spec.chains for c in chain.classes}
    targets = [
        TargetClass(layouts[part.chain, t.page_class], replace(t, end=min(t.end, answer.committed_tokens)))
        for part in pull.start.chains
        for t in part.targets
    ]
    held = [chain.classes[0].layout for chain in chains]
    for layout, source, share in zip(held, sources, share_out(held, targets), strict=True):
        for each in share:
            for copies in copy_spans(layout, each.layout, source, each.target.spans, each.target.end):
                for box in copies.boxes:
                    yield from copies.pieces(box)


def _source(chain: ChainSpec, run: SpanRunTable) -> list[SpanRun]:
    c = chain.classes[0]
    regions = c.device_regions if chain.placement is Placement.SHARDED else c.device_regions[:1]
    source, at = [], 0
    device, host = run.pages[c.name]
    for first, segments, interleave in zip(run.first_tokens, run.segments, run.interleave, strict=True):
        order = TokenOrder(int(segments), int(interleave))
        end = at + order.segments // len(regions)
        on_host = bool((device[at:end] == NO_PAGE).all())
        pages = np.asarray((host if on_host else device)[at:end], np.int64)
        where = c.host_regions if on_host else regions
        if on_host and chain.placement is Placement.REPLICATED:
            assert len(pages) == 1
            where, pages = (c.host_regions[int(pages[0]) % len(where)],), pages // len(where)
        source.append(SpanRun(int(first), order, where, pages))
        assert (source[-1].pages != NO_PAGE).all()
        at = end
    return source
