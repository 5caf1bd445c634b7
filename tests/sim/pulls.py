"""Hand-offs under way at the target node: accepted, copied, checked, ended, one stage at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmanager.core.events import AcceptTicket, CheckTicket, CopyOutcome, PlanEnded, ReleaseTicket, StartPull
from kvmanager.core.group import Group
from kvmanager.core.plans import CopyPlan, Purpose, Rows, StridedCopies, copy_rows
from kvmanager.errors import KVError, PeerUnreachable, TransferFailed
from kvmanager.transport.cpu import copy_piece
from tests.sim.network import Network
from tests.sim.worker import ChainTable, Claim


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
        on_host = int(target.rows.region[0]) in c.host_regions
        claims.append(Claim.on(group.pools[c.host_pool if on_host else c.device_pool], c.name, target.rows.page))
        assert target.positions[0] >= start.first_position
        assert (np.diff(target.positions) > 0).all()
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
    for c in pull.plan.copies:
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


def _plan(pull: Pull, net: Network, target_group: Group, run: object) -> CopyPlan:
    world, group_name = net.sources[pull.ticket_id]
    source_group = world.node.state.groups[group_name]
    chain = source_group.chains[0].spec
    table = ChainTable(chain, source_group)
    table.apply(run)
    c = chain.classes[0]
    copies: list[StridedCopies] = []
    layouts = {t.name: t.layout for t in target_group.chains[0].spec.classes}
    for target in pull.start.targets:
        last = int(target.positions.max()) + 1
        rank, ordinal, slot = (part[target.positions] for part in table.located(0, last))
        source = Rows(np.asarray(c.device_regions, np.int32)[rank], table.device[c.name][ordinal], slot)
        copies += copy_rows(c.layout, layouts[target.page_class], source, target.rows)
    return CopyPlan(pull.start.plan_id, Purpose.PLACE, tuple(copies))
