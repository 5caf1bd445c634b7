"""The target's side of a hand-off: accept the ticket, have the mover pull, check, publish, release.

    waiting for a thread -> Accept -> the mover pulls, chain by chain -> Check -> PlanEnded -> Release
        |                     ^             |
        |                     `-- more is to come: again, from where it stopped
        `------ heartbeats keep the ticket alive ------'

Each pull is driven by one thread of a pool; the core waits for one event, `PlanEnded`. Nothing is published
before the source has confirmed, after the last byte came, that what was read is still what was exported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from kvmanager.configuration.moverconfig import MoverSection
from kvmanager.core.events import CopyOutcome, Event, PlanEnded, StartPull, TicketInfo
from kvmanager.core.spec import GroupSpec
from kvmanager.daemon.movers import Mover
from kvmanager.daemon.peers import Peers
from kvmanager.daemon.pulls import (
    ON_HOST,
    SourceSpans,
    Staging,
    TargetClass,
    build_pull,
    expected_sums,
    part_id,
    pull_of,
    share_out,
    split_at,
)
from kvmanager.errors import (
    Draining,
    KVError,
    LayoutMismatch,
    LeaseExpired,
    PeerUnreachable,
    StalePage,
    TransferFailed,
    UnknownLease,
)
from kvmanager.geometry import Int64Array
from kvmanager.layout import KVLayout
from kvmanager.planwire import ring_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.certificates import Certificates
from kvmanager.wire import NO_PAGE, layout_from_proto, unpack_u32, unpack_u64

ACCEPT_DEADLINE_S = 30.0
"""The source may have to start its NIXL agent first."""
BEATS_PER_LEASE = 3
THREADS = 32
"""Pulls at one time; one that waits for its source to compute on holds one."""
GROWTH_PAUSE_S = 0.02
"""Before the source is asked again whether more has been computed."""
CHECK_PAUSE_S = 0.25
"""Between two questions to the source whether what is being read is still what was exported."""
_EVERYTHING = 1 << 62
_log = logging.getLogger("kvmanager.handoff")
Ended = tuple[CopyOutcome, KVError | None]


@dataclass
class _Pull:
    """One pull, from the core's order to the event that ends it.

    `part`: what the mover has of it now, once it was `sent`; `moved`: the end of that. `over`: why no further part is
    begun.
    """

    effect: StartPull
    part: int = -1
    sent: bool = False
    moved: Future[Ended] = field(default_factory=Future)
    over: Ended | None = None
    stopped: threading.Event = field(default_factory=threading.Event)

    def begin_part(self) -> int:
        """The mover's number for the next part."""
        self.part += 1
        self.sent = False
        self.moved = Future()
        return part_id(self.effect.plan_id, self.part)

    def end(self, ended: Ended) -> None:
        """Nothing more is begun; the reason that came first counts."""
        self.over = self.over or ended
        self.stopped.set()

    def settle(self, ended: Ended) -> None:
        """The part is over; the first to say so counts."""
        with suppress(InvalidStateError):
            self.moved.set_result(ended)


class Handoffs:
    """Pulls in progress. `start`, `abandon` and `pull_ended` never block."""

    def __init__(
        self,
        node: str,
        groups: dict[str, GroupSpec],
        settings: MoverSection,
        post: Callable[[Event], None],
        certificates: Certificates | None = None,
        peer_uids: tuple[int, ...] = (),
    ) -> None:
        """`certificates`: to call nodes of other machines with. `peer_uids`: who runs those of this machine."""
        self._node = node
        self._groups = groups
        self._settings = settings
        self._post = post
        self._peers = Peers(node, certificates, peer_uids)
        self._threads = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="handoff")
        self._pulls: dict[int, _Pull] = {}
        self._lock = threading.Lock()  # guards `_pulls` and `_closed`
        self._closed = False
        self._next_slot = 0
        self._slots = threading.Lock()
        self._changed = threading.Event()  # the heartbeat's thread has other leases to keep, or must end
        self._beat = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        self._beat.start()
        self._mover: Mover | None = None

    def use(self, mover: Mover) -> None:
        """The mover that pulls for us."""
        self._mover = mover

    def start(self, effect: StartPull) -> None:
        """Begins a pull."""
        pull = _Pull(effect)
        with self._lock:
            if not self._closed:
                self._pulls[effect.plan_id] = pull
                self._threads.submit(self._guard, pull)
                self._changed.set()
                return
        stopping = Draining("the node stops; open the request elsewhere")
        self._post(PlanEnded(effect.plan_id, CopyOutcome.FAILED, stopping))

    def abandon(self, ticket: TicketInfo) -> None:
        """Gives a ticket back that is not needed."""
        with self._lock:
            if not self._closed:
                self._threads.submit(self._release_quietly, ticket)

    def cancel(self, plan_id: int) -> bool:
        """Begins nothing more of a pull; it ends once what is in flight has. False when the id is no pull's."""
        with self._lock:
            pull = self._pulls.get(plan_id)
            if pull is None:
                return False
        self._give_up(pull, (CopyOutcome.CANCELLED, None))
        return True

    def pull_ended(self, work_id: int, outcome: CopyOutcome, error: KVError | None) -> bool:
        """The mover's completion of a pull's part; False when the id is no pull's. The first one counts."""
        with self._lock:
            pull = self._pulls.get(pull_of(work_id))
            if pull is not None and work_id == part_id(pull.effect.plan_id, pull.part):
                pull.settle((outcome, error))
        return pull is not None

    def mover_gone(self, alive: set[int]) -> None:
        """Our mover died: pulls not among `alive` are over for the core, also those that were not sent yet."""
        with self._lock:
            for plan_id, pull in self._pulls.items():
                if plan_id not in alive:
                    pull.end((CopyOutcome.FAILED, PeerUnreachable("our mover died; open it again")))
                    pull.settle((CopyOutcome.FAILED, PeerUnreachable("our mover died; open it again")))

    def close(self) -> None:
        """Waits for no one: pulls still running end with the node's memory."""
        with self._lock:
            self._closed = True
            for pull in self._pulls.values():
                pull.end((CopyOutcome.UNKNOWN_FATE, Draining("the node stops")))
                pull.settle((CopyOutcome.UNKNOWN_FATE, Draining("the node stops")))
        self._changed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._peers.close()

    # -------------------------------------------------------------------------------- one pull

    def _guard(self, pull: _Pull) -> None:
        effect = pull.effect
        try:
            outcome, error = self._pull(pull)
        except KVError as failure:
            # Raised before the mover was asked: no byte can be on its way.
            outcome, error = CopyOutcome.FAILED, failure
        except Exception as failure:
            _log.exception("pull %d", effect.plan_id)
            outcome, error = self._broken_off(pull, TransferFailed(f"pull {effect.plan_id}: {failure!r}"))
        if error is not None:
            _log.warning("pull %d of ticket %s: %s", effect.plan_id, effect.ticket.ticket_id, error)
        self._post(PlanEnded(effect.plan_id, outcome, error))
        with self._lock:
            del self._pulls[effect.plan_id]
        self._release_quietly(effect.ticket)

    def _broken_off(self, pull: _Pull, error: KVError) -> Ended:
        """After an error of our own. The mover goes on with what it has: only its word says that no byte comes late."""
        if not pull.sent:
            return CopyOutcome.UNKNOWN_FATE if pull.part >= 0 else CopyOutcome.FAILED, error
        self._give_up(pull, (CopyOutcome.FAILED, error))
        outcome, _ = pull.moved.result()  # it has a deadline, and its death settles it too
        return outcome if outcome is CopyOutcome.UNKNOWN_FATE else CopyOutcome.FAILED, error

    def _pull(self, pull: _Pull) -> Ended:
        before: pb.AcceptReply | None = None
        later = self._targets(pull.effect)
        while True:
            if pull.over is not None:
                return pull.over
            accepted = self._accept(pull.effect)
            if before is not None:
                check_same(before, accepted)
            before = accepted
            end = _EVERYTHING if accepted.final else int(accepted.committed_tokens)
            now, later = split_at(later, end)
            outcome, error = self._move(pull, accepted, now)
            if outcome is not CopyOutcome.DONE:
                return outcome, error
            if accepted.final:
                break
            if not now:
                pull.stopped.wait(GROWTH_PAUSE_S)
        try:
            self._check(pull, accepted)
        except PeerUnreachable as silence:
            return CopyOutcome.FAILED, silence
        except KVError as doubt:
            return CopyOutcome.FAILED, _stale(doubt)
        return CopyOutcome.DONE, None

    def _check(self, pull: _Pull, accepted: pb.AcceptReply) -> None:
        """Asks the source. Raises what it says, PeerUnreachable when it says nothing."""
        check = pb.CheckRequest(
            ticket_id=pull.effect.ticket.ticket_id,
            mover_incarnation=accepted.mover_incarnation,
            generations=accepted.generations,
        )
        self._peers.call(pull.effect.ticket.node_address, "Check", check)

    def _accept(self, effect: StartPull) -> pb.AcceptReply:
        ticket = pb.Ticket(ticket_id=effect.ticket.ticket_id)
        request = pb.AcceptRequest(ticket=ticket, target_node=self._node, tenant=effect.tenant)
        accepted: pb.AcceptReply = self._peers.call(effect.ticket.node_address, "Accept", request, ACCEPT_DEADLINE_S)
        return accepted

    def _move(self, pull: _Pull, accepted: pb.AcceptReply, targets: list[TargetClass]) -> Ended:
        """Has the mover bring these, from one chain of the source after the other."""
        assert self._mover is not None
        layouts = [layout_from_proto(chain.layout) for chain in accepted.chains]
        for chain, layout, share in zip(accepted.chains, layouts, share_out(layouts, targets), strict=True):
            if not share:
                continue
            with self._lock:
                work_id = pull.begin_part()
                moved = pull.moved

            def wanted(moved: Future[Ended] = moved) -> bool:
                # A mover that comes later must not write into pages that the core gave up when the old one died.
                if pull.over is not None:
                    pull.settle(pull.over)
                return pull.over is None and not moved.done()

            self._mover.pull(self._command(pull.effect, work_id, accepted, chain, layout, share), wanted)
            pull.sent = True
            outcome, error = self._watched(pull, accepted, moved)
            if outcome is not CopyOutcome.DONE:
                return outcome, error
        return CopyOutcome.DONE, None

    def _watched(self, pull: _Pull, accepted: pb.AcceptReply, moved: Future[Ended]) -> Ended:
        """How the part ends. The mover has a deadline of its own, and its death ends it too.

        Nothing is published before the last check; those in between keep a pull from reading on what is lost already.
        """
        while True:
            with suppress(FutureTimeoutError):
                outcome, error = moved.result(CHECK_PAUSE_S)
                return pull.over if outcome is CopyOutcome.CANCELLED and pull.over else (outcome, error)
            if pull.over is not None:
                continue
            try:
                self._check(pull, accepted)
            except (StalePage, UnknownLease, LeaseExpired) as gone:
                _log.warning("pull %d is given up: %s", pull.effect.plan_id, gone)
                self._give_up(pull, (CopyOutcome.FAILED, _stale(gone)))
            except KVError as doubt:
                _log.info("pull %d: %s", pull.effect.plan_id, doubt)  # the last check decides

    def _give_up(self, pull: _Pull, ended: Ended) -> None:
        """Begins nothing more of it; what is in flight is waited for."""
        pull.end(ended)
        assert self._mover is not None
        self._mover.cancel(part_id(pull.effect.plan_id, max(pull.part, 0)))

    def _targets(self, effect: StartPull) -> list[TargetClass]:
        """Everything that is wanted."""
        chains = {chain.name: chain for chain in self._groups[effect.group].chains}
        layouts = {(chain.name, c.name): c.layout for chain in chains.values() for c in chain.classes}
        return [
            TargetClass(layouts[part.chain, target.page_class], target)
            for part in effect.chains
            for target in part.targets
        ]

    def _command(
        self,
        effect: StartPull,
        work_id: int,
        accepted: pb.AcceptReply,
        chain: pb.SourceChain,
        layout: KVLayout,
        targets: list[TargetClass],
    ) -> pb.Pull:
        """The mover's command. Raises LayoutMismatch when the two sides' pages can't be matched."""
        staging = Staging.of(self._settings.staging_bytes, self._settings.chunk_bytes, layout.page_bytes)
        ranks = sorted(chain.ranks, key=lambda r: r.rank)
        addresses, on_host = [rank.base_address for rank in ranks], [rank.host_base_address for rank in ranks]
        if chain.host_shares:
            on_host = unpack_u64(chain.host_shares, "SourceChain.host_shares").tolist()
        with self._slots:  # pulls take turns in the ring
            # Sums are of pages as they lie at the source.
            turns = accepted.packed and not (chain.summed_pages or chain.summed_host_pages)
            spans = source_spans(chain)
            ring = build_pull(work_id, layout, spans, addresses, targets, staging, self._next_slot, turns, on_host)
            self._next_slot = (self._next_slot + ring.chunks) % staging.slots
        expected = expected_sums(chain, layout, addresses, on_host, ring.addresses)
        pull = ring_to_proto(replace(ring, expected=expected))
        pull.agent_name = accepted.agent_name
        pull.agent_metadata = accepted.agent_metadata
        pull.peer_incarnation = accepted.mover_incarnation
        pull.packed = accepted.packed
        pull.deadline_ns = effect.deadline_ns
        pull.path = self._settings.pull_path
        return pull

    def _release_quietly(self, ticket: TicketInfo) -> None:
        """Gives the source its pages back; if that fails, the lease runs out there by itself."""
        try:
            self._peers.call(ticket.node_address, "Release", pb.ReleaseRequest(ticket_id=ticket.ticket_id))
        except KVError as error:
            _log.warning("release of ticket %s: %s; its lease will run out", ticket.ticket_id, error)

    # ------------------------------------------------------------------------------ heartbeats

    def _keep_alive(self) -> None:
        """Thread: renews the leases of all pulls, also of those that wait for a thread or for their source."""
        due: float | None = None
        while True:
            self._changed.wait(None if due is None else max(due - time.monotonic(), 0.0))
            self._changed.clear()
            with self._lock:
                if self._closed:
                    return
                tickets = [pull.effect.ticket for pull in self._pulls.values()]
            if not tickets:
                due = None
                continue
            interval_s = min(ticket.lease_ttl_ns for ticket in tickets) / BEATS_PER_LEASE / 1e9
            now = time.monotonic()
            if due is not None and now >= due:
                self._renew(tickets, interval_s)
                due = now + interval_s
            else:
                due = now + interval_s if due is None else min(due, now + interval_s)

    def _renew(self, tickets: list[TicketInfo], deadline_s: float) -> None:
        by_source: dict[str, list[str]] = {}
        for ticket in tickets:
            by_source.setdefault(ticket.node_address, []).append(ticket.ticket_id)
        for source, ticket_ids in by_source.items():
            try:
                self._peers.call(source, "Heartbeat", pb.HeartbeatRequest(ticket_ids=ticket_ids), deadline_s)
            except KVError as error:
                _log.warning("heartbeat to %s: %s", source, error)


def _stale(error: KVError) -> StalePage:
    return StalePage(f"what was read is not what was exported: {error}")


def check_same(before: pb.AcceptReply, now: pb.AcceptReply) -> None:
    """Raises StalePage unless a ticket that has grown begins, in every chain, with the pages that it had before."""
    if now.mover_incarnation != before.mover_incarnation:
        raise StalePage("the source's mover was restarted; what was read is dropped")
    for old, new in zip(_accepted_pages(before), _accepted_pages(now), strict=True):
        if not np.array_equal(new[: len(old)], old):
            raise StalePage("pages of the ticket were reused since they were read; what was read is dropped")


def _accepted_pages(accepted: pb.AcceptReply) -> list[Int64Array]:
    """(page, generation), int64[pages, 2], of each chain."""
    pages = [unpack_u32(chain.spans.pages[0].device_pages, "spans.device_pages") for chain in accepted.chains]
    generations = unpack_u32(accepted.generations, "generations")
    if len(generations) != sum(map(len, pages)):
        raise LayoutMismatch(f"{len(generations)} generations of {sum(map(len, pages))} pages")
    parts = np.split(generations, np.cumsum([len(part) for part in pages])[:-1])
    return [np.stack([part, mine], axis=1).astype(np.int64) for part, mine in zip(pages, parts, strict=True)]


def source_spans(chain: pb.SourceChain) -> SourceSpans:
    """The source's spans of one chain. Raises LayoutMismatch for more than one page class."""

    def numbers(data: bytes, name: str) -> Int64Array:
        return unpack_u32(data, name).astype(np.int64)

    run = chain.spans
    if len(run.pages) != 1:
        raise LayoutMismatch(f"a source chain of {len(run.pages)} page classes; a hand-off reads chains of one")
    pages = numbers(run.pages[0].device_pages, "spans.device_pages")
    if run.pages[0].host_pages:
        host = numbers(run.pages[0].host_pages, "spans.host_pages")
        if len(host) != len(pages) or ((pages == NO_PAGE) & (host == NO_PAGE)).any():
            raise LayoutMismatch(f"{len(pages)} source pages, of which some are on no tier")
        pages = np.where(pages == NO_PAGE, host + ON_HOST, pages)
    return SourceSpans(
        len(chain.ranks),
        unpack_u64(run.first_tokens, "spans.first_tokens").astype(np.int64),
        numbers(run.segments, "spans.segments"),
        numbers(run.interleave, "spans.interleave"),
        pages,
    )
