"""The target's side of a hand-off: accept the ticket, have the mover pull, check, publish, release.

Each pull is a small state machine driven by one worker thread of a pool; the core waits for one event,
`PlanEnded`. Nothing is published before the source has confirmed, after the last byte came, that what was
read is still what was exported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from kvmanager.clients.attach import Attachment, attach, grpc_channel
from kvmanager.core.events import CopyOutcome, Event, PlanEnded, StartPull, TicketInfo
from kvmanager.core.spec import GroupSpec
from kvmanager.errors import KVError, LayoutMismatch, PeerUnreachable, StalePage, TransferFailed
from kvmanager.geometry import Int64Array
from kvmanager.movers import Mover
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.pulls import SourceSpans, Staging, TargetClass, build_chunks
from kvmanager.wire import error_from_rpc, layout_from_proto, unpack_u32, unpack_u64

CALL_DEADLINE_S = 10.0
_log = logging.getLogger("kvmanager.handoff")


@dataclass(frozen=True)
class _Peer:
    attachment: Attachment
    channel: grpc.Channel
    stub: pb_grpc.PeerStub


class Peers:
    """Connections to other daemons by runtime directory, made on first use."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()

    def stub(self, address: str) -> pb_grpc.PeerStub:
        """The peer's Peer service. Raises PeerUnreachable."""
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                try:
                    attachment = attach(Path(address), "peer", self._node)
                except KVError as error:
                    raise PeerUnreachable(f"the node at {address} can't be reached: {error}") from error
                channel = grpc_channel(attachment)
                peer = self._peers[address] = _Peer(attachment, channel, pb_grpc.PeerStub(channel))
            return peer.stub

    def forget(self, address: str) -> None:
        """Drops a connection that failed, so that the next call makes a new one."""
        with self._lock:
            peer = self._peers.pop(address, None)
        if peer is not None:
            peer.channel.close()
            peer.attachment.close()

    def close(self) -> None:
        """Closes all connections."""
        for address in list(self._peers):
            self.forget(address)


class Handoffs:
    """Pulls in progress. `start` and `pull_ended` never block."""

    def __init__(
        self,
        node: str,
        groups: dict[str, GroupSpec],
        staging_bytes: int,
        chunk_bytes: int,
        post: Callable[[Event], None],
    ) -> None:
        self._node = node
        self._groups = groups
        self._staging_bytes = staging_bytes
        self._chunk_bytes = chunk_bytes
        self._post = post
        self._peers = Peers(node)
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="handoff")
        self._moved: dict[int, Future[tuple[CopyOutcome, KVError | None]]] = {}
        self._next_slot = 0
        self._lock = threading.Lock()
        self._mover: Mover | None = None

    def use(self, mover: Mover) -> None:
        """The mover that pulls for us."""
        self._mover = mover

    def start(self, effect: StartPull) -> None:
        """Begins a pull."""
        with self._lock:
            self._moved[effect.plan_id] = Future()
        self._threads.submit(self._guard, effect)

    def abandon(self, ticket: TicketInfo) -> None:
        """Gives a ticket back that is not needed."""
        self._threads.submit(self._release_quietly, ticket)

    def pull_ended(self, plan_id: int, outcome: CopyOutcome, error: KVError | None) -> bool:
        """The mover's completion of a pull; False when the id is no pull's."""
        with self._lock:
            moved = self._moved.pop(plan_id, None)
        if moved is None:
            return False
        moved.set_result((outcome, error))
        return True

    def close(self) -> None:
        """Waits for no one: pulls still running end with the mover."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._peers.close()

    # -------------------------------------------------------------------------------- one pull

    def _guard(self, effect: StartPull) -> None:
        try:
            outcome, error = self._pull(effect)
        except KVError as failure:
            # Raised before the mover was asked: no byte can be on its way.
            outcome, error = CopyOutcome.FAILED, failure
        except Exception as failure:
            _log.exception("pull %d", effect.plan_id)
            outcome, error = CopyOutcome.UNKNOWN_FATE, TransferFailed(f"pull {effect.plan_id}: {failure!r}")
        with self._lock:
            self._moved.pop(effect.plan_id, None)
        if error is not None:
            _log.warning("pull %d of ticket %s: %s", effect.plan_id, effect.ticket.ticket_id, error)
        self._post(PlanEnded(effect.plan_id, outcome, error))
        self._release_quietly(effect.ticket)

    def _pull(self, effect: StartPull) -> tuple[CopyOutcome, KVError | None]:
        assert self._mover is not None
        stub = self._peers.stub(effect.ticket.node_address)
        ticket = pb.Ticket(ticket_id=effect.ticket.ticket_id)
        accepted = self._call(effect.ticket, stub.Accept, pb.AcceptRequest(ticket=ticket, target_node=self._node))
        with self._lock:
            moved = self._moved[effect.plan_id]
        self._mover.pull(self._command(effect, accepted))
        outcome, error = self._wait(effect, stub, moved)
        if outcome is not CopyOutcome.DONE:
            return outcome, error
        check = pb.CheckRequest(
            ticket_id=effect.ticket.ticket_id,
            mover_incarnation=accepted.mover_incarnation,
            generations=accepted.generations,
        )
        try:
            self._call(effect.ticket, stub.Check, check)
        except KVError as stale:
            return CopyOutcome.FAILED, StalePage(f"what was read is not what was exported: {stale}")
        return CopyOutcome.DONE, None

    def _wait(
        self, effect: StartPull, stub: pb_grpc.PeerStub, moved: Future[tuple[CopyOutcome, KVError | None]]
    ) -> tuple[CopyOutcome, KVError | None]:
        """Waits for the mover, keeping the ticket alive. The mover has a deadline of its own, so this ends."""
        beat_s = max(effect.ticket.lease_ttl_ns / 3e9, 0.05)
        while True:
            try:
                return moved.result(timeout=beat_s)
            except TimeoutError:
                request = pb.HeartbeatRequest(ticket_ids=[effect.ticket.ticket_id])
                try:
                    self._call(effect.ticket, stub.Heartbeat, request)
                except KVError as error:
                    _log.warning("heartbeat of ticket %s: %s", effect.ticket.ticket_id, error)

    def _command(self, effect: StartPull, accepted: pb.AcceptReply) -> pb.Pull:
        """The mover's command. Raises LayoutMismatch when the two sides' KV differs."""
        spec = self._groups[effect.group]
        chain = next(c for c in spec.chains if c.name == effect.chain)
        layout = layout_from_proto(accepted.layout)
        if layout.page_rows != spec.page_rows:
            raise LayoutMismatch(f"source pages have {layout.page_rows} rows, {effect.group} has {spec.page_rows}")
        classes = {c.name: c for c in chain.classes}
        targets = [TargetClass(classes[t.page_class].layout, t) for t in effect.targets]
        source = _source_spans(accepted)
        staging = Staging.of(self._staging_bytes, self._chunk_bytes, layout.page_bytes)
        addresses = [rank.base_address for rank in sorted(accepted.ranks, key=lambda r: r.rank)]
        with self._lock:
            first_slot = self._next_slot
        chunks = build_chunks(effect.plan_id, layout, source, addresses, targets, staging, first_slot)
        with self._lock:
            self._next_slot = (first_slot + len(chunks)) % staging.slots
        return pb.Pull(
            pull_id=effect.plan_id,
            agent_name=accepted.agent_name,
            agent_metadata=accepted.agent_metadata,
            peer_incarnation=accepted.mover_incarnation,
            chunks=chunks,
            deadline_ns=effect.deadline_ns,
        )

    def _call(self, ticket: TicketInfo, method: Callable[..., pb.AcceptReply], request: object) -> pb.AcceptReply:
        try:
            return method(request, timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            typed = error_from_rpc(error)
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE:
                self._peers.forget(ticket.node_address)
                raise PeerUnreachable(f"the node at {ticket.node_address} does not answer: {typed}") from error
            raise typed from error

    def _release_quietly(self, ticket: TicketInfo) -> None:
        """Gives the source its pages back; if that fails, the lease runs out there by itself."""
        try:
            stub = self._peers.stub(ticket.node_address)
            self._call(ticket, stub.Release, pb.ReleaseRequest(ticket_id=ticket.ticket_id))
        except KVError as error:
            _log.warning("release of ticket %s: %s; its lease will run out", ticket.ticket_id, error)


def _source_spans(accepted: pb.AcceptReply) -> SourceSpans:
    def numbers(data: bytes, name: str) -> Int64Array:
        return unpack_u32(data, name).astype(np.int64)

    runs = list(accepted.spans)
    if len(runs) != 1 or len(runs[0].pages) != 1:
        raise LayoutMismatch(f"a source of {len(runs)} chains; a hand-off reads one chain of one page class")
    run = runs[0]
    return SourceSpans(
        len(accepted.ranks),
        unpack_u64(run.first_tokens, "spans.first_tokens").astype(np.int64),
        numbers(run.segments, "spans.segments"),
        numbers(run.interleave, "spans.interleave"),
        numbers(run.pages[0].device_pages, "spans.device_pages"),
    )
