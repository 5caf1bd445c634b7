"""Hand-offs under way at the target node: accepted, copied, checked, ended, one stage at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmanager.core.events import (
    AcceptTicket,
    CheckTicket,
    CopyOutcome,
    PlanEnded,
    ReleaseTicket,
    SpanRunTable,
    StartPull,
)
from kvmanager.core.group import Group
from kvmanager.core.plans import CopyPlan, PagedCopies, Purpose
from kvmanager.core.spanplans import SpanRun, copy_spans
from kvmanager.errors import KVError, PeerUnreachable, TransferFailed
from kvmanager.geometry import TokenOrder
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
    classes = {c.name: c for c in group.chains[0].spec.classes}
    claims = []
    for target in start.targets:
        c = classes[target.page_class]
        for spans in target.spans:
            on_host = spans.regions[0] in c.host_regions
            claims.append(Claim.on(group.pools[c.host_pool if on_host else c.device_pool], c.name, spans.pages))
            assert start.first_position <= spans.first_token < target.end
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
    if pull.generations is None:
        answer = net.ask(pull.ticket_id, AcceptTicket(pull.ticket_id, pull.holder))
        if not isinstance(answer, KVError):
            pull.generations = answer.generations
            pull.plan = _plan(pull, net, target, answer.spans[0])
            return None
    elif pull.plan is not None:
        _copy(pull, net)
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


def _plan(pull: Pull, net: Network, target_group: Group, run: SpanRunTable) -> CopyPlan:
    world, group_name = net.sources[pull.ticket_id]
    source_group = world.node.state.groups[group_name]
    chain = source_group.chains[0].spec
    c = chain.classes[0]
    source, at = [], 0
    for first, segments, interleave in zip(run.first_tokens, run.segments, run.interleave, strict=True):
        order, ranks = TokenOrder(int(segments), int(interleave)), len(c.device_regions)
        pages = np.asarray(run.pages[c.name][0][at : at + order.segments // ranks], np.int64)
        source.append(SpanRun(int(first), order, c.device_regions, pages))
        at += len(pages)
    copies: list[PagedCopies] = []
    layouts = {t.name: t.layout for t in target_group.chains[0].spec.classes}
    for target in pull.start.targets:
        copies += copy_spans(c.layout, layouts[target.page_class], source, target.spans, target.end)
    return CopyPlan(pull.start.plan_id, Purpose.PLACE, tuple(copies))
