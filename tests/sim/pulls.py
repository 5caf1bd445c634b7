"""Hand-offs under way at the target node: accepted, copied, checked, ended, one stage at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

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
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.core.spec import ChainSpec, Placement
from kvmanager.errors import KVError, PeerUnreachable, TransferFailed
from kvmanager.geometry import TokenOrder
from kvmanager.pulls import TargetClass, share_out
from kvmanager.transport.cpu import copy_piece
from tests.sim.network import Network
from tests.sim.worker import Claim


@dataclass
class Pull:
    """One hand-off. `claims`: target pages as they were when it was asked for."""

    start: StartPull
    claims: list[Claim]
    deadline: int
    plan: CopyPlan | None = None
    generations: np.ndarray | None = None
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
    if pull.plan is not None:
        _copy(pull, net)
        return None
    if not pull.final:
        answer = net.ask(pull.ticket_id, AcceptTicket(pull.ticket_id, pull.holder))
        if not isinstance(answer, KVError):
            if pull.generations is not None:
                net.happened["grown ticket"] += 1
            pull.generations, pull.final = answer.generations, answer.final
            pull.plan = _plan(pull, net, target, answer)
            return None
    else:
        answer = net.ask(pull.ticket_id, CheckTicket(pull.ticket_id, pull.generations))
    if isinstance(answer, PeerUnreachable):
        return None
    return (CopyOutcome.FAILED, answer) if isinstance(answer, KVError) else (CopyOutcome.DONE, None)


def _end_orphan(pull: Pull, net: Network) -> End:
    """The mover finishes or not: nobody asks whether the bytes are the right ones."""
    net.happened["orphaned pull"] += 1
    if pull.plan is not None:
        _copy(pull, net)
    return net.draw.choice((CopyOutcome.DONE, *CopyOutcome)), None


def _copy(pull: Pull, net: Network) -> None:
    """The bytes themselves, unless the nodes are apart."""
    assert pull.plan is not None
    if net.cut:
        return
    for claim in pull.claims:
        claim.hold("pull")
    for c in pull.plan.pieces():
        copy_piece(net.memory.regions[c.source_region], net.memory.regions[c.target_region], c)
    pull.plan = None


def ended(pull: Pull, outcome: CopyOutcome, error: KVError | None) -> PlanEnded:
    """The report to the core."""
    if outcome is not CopyOutcome.DONE and error is None:
        error = TransferFailed("drawn to fail")
    return PlanEnded(pull.start.plan_id, outcome, error)


def release(pull: Pull, net: Network) -> None:
    """The ticket goes back, unless the source has forgotten it or can't be reached."""
    net.ask(pull.ticket_id, ReleaseTicket(pull.ticket_id, pull.holder))


def _plan(pull: Pull, net: Network, target_group: Group, answer: TicketPages) -> CopyPlan:
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
    copies: list[PagedCopies] = []
    held = [chain.classes[0].layout for chain in chains]
    for layout, source, share in zip(held, sources, share_out(held, targets), strict=True):
        for each in share:
            copies += copy_spans(layout, each.layout, source, each.target.spans, each.target.end)
    return CopyPlan(pull.start.plan_id, Purpose.PLACE, tuple(copies))


def _source(chain: ChainSpec, run: SpanRunTable) -> list[SpanRun]:
    c = chain.classes[0]
    regions = c.device_regions if chain.placement is Placement.SHARDED else c.device_regions[:1]
    source, at = [], 0
    for first, segments, interleave in zip(run.first_tokens, run.segments, run.interleave, strict=True):
        order = TokenOrder(int(segments), int(interleave))
        pages = np.asarray(run.pages[c.name][0][at : at + order.segments // len(regions)], np.int64)
        source.append(SpanRun(int(first), order, regions, pages))
        at += len(pages)
    return source
