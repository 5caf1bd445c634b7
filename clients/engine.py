"""An engine's side of the session: one numbered message a step, and the notices in between.

The client decides nothing: it numbers messages, pairs replies with them, keeps what notices said
until somebody asks, and sends an unanswered message once more when the stream broke within the same
boot of the daemon (the daemon stored the reply, so the repeat is harmless).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import grpc

from kvmanager import __version__
from kvmanager.clients.attach import Attachment
from kvmanager.clients.keys import probe_key
from kvmanager.clients.sessionstream import CallStream, FrameStream, Stream, StreamEnd, end_of_rpc
from kvmanager.errors import DaemonError, KVError, LimitExceeded, NotReady, Suspect
from kvmanager.killpoints import reach
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.units import MILLISECOND_NS
from kvmanager.wire import WIRE_VERSION, error_from_proto, error_from_rpc, pack_u32, pack_u64

STEP_TIMEOUT_S: Final = 30.0
"""The daemon answers a step from memory; one that takes this long is not answering."""
RENEW_PAUSE_S: Final = 0.02
"""Between two tries to reach a daemon that was replaced."""
EXPORT_PAUSE_S: Final = 0.002
"""Between two tries of an export whose commit has not been seen by the daemon yet."""


@dataclass(frozen=True)
class RequestStep:
    """One row of a step's request vector. Counts are in tokens; `new_keys` are concatenated keys.

    token_ids: u32, those of the keys' segments, where the namespace asks for them (`KeyChain.token_ids`).
    """

    request_id: int
    capacity_tokens: int
    committed_tokens: int
    rejected_tokens: int = 0
    new_keys: bytes = b""
    token_ids: bytes = b""


@dataclass(frozen=True)
class StepResult:
    """A step's reply by request. A request in `errors` keeps what it had before."""

    opened: Mapping[int, pb.OpenReply]
    growth: Mapping[int, pb.Growth]
    residency: Mapping[int, Sequence[pb.Residency]]
    hot: Mapping[int, pb.HotPages]
    errors: Mapping[int, KVError]

    @property
    def worker_plans(self) -> list[pb.Plan]:
        """What workers do with pages and hot buffers that they were given, before anything else there."""
        grown = [plan for growth in self.growth.values() for plan in growth.worker_plans]
        return grown + [plan for hot in self.hot.values() for plan in hot.worker_plans]


@dataclass
class _Inbox:
    """What the reader thread has received; guarded by the client's condition."""

    replies: dict[int, pb.StepReply] = field(default_factory=dict)
    ready: dict[int, pb.OpenReply] = field(default_factory=dict)
    failed: dict[int, KVError] = field(default_factory=dict)
    notices_seen: int = 0
    draining: str = ""


class EngineClient:
    """A registered engine. One thread calls it; a thread of its own reads the stream."""

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        attachment: Attachment | None = None,
        engine: str,
        group: str,
        namespace: pb.Namespace,
        layout_fingerprints: Sequence[str],
        ranks: int,
        renew: Callable[[], int] | None = None,
        noticed: Callable[[], None] = lambda: None,
    ) -> None:
        """Registers, which ends an older epoch of the same name. Raises the daemon's typed error.

        `attachment`: this process's, on the daemon's node; then the session goes over `calls.sock`, else by gRPC.
        `renew` attaches once more after the daemon was replaced, and gives its boot id: then the session goes on with
        the same epoch, numbers and pages. It raises NotReady while there is no daemon, StaleBoot when it is a new one
        that knows nothing of us. Without it a session ends with its daemon. `noticed` is called by the reader thread
        when a notice about a request has come; it must not wait.
        """
        self._engine_stub = pb_grpc.EngineStub(channel)
        self._peer_stub = pb_grpc.PeerStub(channel)
        request = pb.RegisterRequest(
            engine=engine,
            group=group,
            namespace=namespace,
            layout_fingerprints=layout_fingerprints,
            ranks=ranks,
            probe_key=probe_key(namespace),
            wire_version=WIRE_VERSION,
            client_version=__version__,
        )
        try:
            reply = self._engine_stub.Register(request)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        self.name = engine
        self.namespace = namespace
        self.boot_id: int = reply.boot_id
        self.epoch: int = reply.epoch
        self.limits: pb.Limits = reply.limits
        self.checksum_one_in: int = reply.checksum_one_in
        """Of how many pages that are stored by leases one is to have a checksum; 0: none."""
        self._renew = renew
        self._noticed = noticed
        self._unanswered: pb.StepRequest | None = None
        self._last: pb.StepRequest | None = None
        self._number = 0
        self.hot_rows: tuple[int, int] | None = None
        """(hits, misses) of the hot buffers since the registration, sent with the next message; set by the worker."""
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._open_stream: Callable[[], Stream] = (
            partial(CallStream, self._engine_stub, self._deliver, self._note_end)
            if attachment is None
            else partial(FrameStream, attachment, self._deliver, self._note_end)
        )
        self._stream: Stream | None = None
        self._ended: Stream | None = None

    @property
    def draining(self) -> str:
        """Why the node drains; empty while it does not. An engine then opens nothing new."""
        with self._changed:
            return self._inbox.draining

    def step(
        self,
        *,
        fence: pb.Fence | None = None,
        requests: Sequence[RequestStep] = (),
        opens: Sequence[pb.OpenRequest] = (),
        closes: Sequence[pb.CloseRequest] = (),
        turn_ends: Sequence[pb.TurnEnd] = (),
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> StepResult:
        """Sends one numbered message and waits for its reply.

        Failures of single requests are in the result, with those that notices told of since. Raises
        the daemon's typed error when it refused the message, LimitExceeded for one that is too large,
        NotReady after `timeout_s`, Suspect when the stream ended and could not be taken up again.
        """
        if self._unanswered is not None:
            # The daemon may have counted it or not; what it said to it then, nobody waits for any more.
            self._exchange(self._unanswered, timeout_s)
        with self._changed:
            seen = self._inbox.notices_seen
        message = pb.StepRequest(
            number=self._number + 1,
            boot_id=self.boot_id,
            epoch=self.epoch,
            notices_seen=seen,
            fence=fence,
            requests=self._vector(requests),
            open=opens,
            close=closes,
            turn_ends=turn_ends,
            hot_rows=None if self.hot_rows is None else pb.HotRows(hits=self.hot_rows[0], misses=self.hot_rows[1]),
        )
        self._check_limits(message, len(requests))
        self._number += 1
        return self._result(self._exchange(message, timeout_s))

    def _vector(self, rows: Sequence[RequestStep]) -> pb.RequestVector | None:
        if not rows:
            return None
        return pb.RequestVector(
            request_ids=pack_u64([row.request_id for row in rows]),
            capacity_tokens=pack_u64([row.capacity_tokens for row in rows]),
            committed_tokens=pack_u64([row.committed_tokens for row in rows]),
            rejected_tokens=pack_u32([row.rejected_tokens for row in rows]),
            new_key_counts=pack_u32([len(row.new_keys) // self.namespace.key_bytes for row in rows]),
            new_keys=b"".join(row.new_keys for row in rows),
            token_ids=b"".join(row.token_ids for row in rows),
        )

    def _check_limits(self, message: pb.StepRequest, rows: int) -> None:
        limits = self.limits
        if limits.requests_per_step and rows > limits.requests_per_step:
            raise LimitExceeded(f"{rows} requests in a step; at most {limits.requests_per_step}, split the step")
        size = message.ByteSize()
        if limits.message_bytes and size > limits.message_bytes:
            raise LimitExceeded(f"step message of {size} B; at most {limits.message_bytes} B, split the step")

    def _exchange(self, message: pb.StepRequest, timeout_s: float) -> pb.StepReply:
        """Sends, waits, and sends again on a new stream when one broke: once, or until the deadline if we can renew."""
        deadline = time.monotonic() + timeout_s
        self._last = self._unanswered = message
        message.boot_id = self.boot_id
        broken = self._send(message, deadline)
        if broken is not None and broken.end.lost and self._renew is None:
            broken = self._send(message, deadline)
        while broken is not None and self._may_go_on(broken.end) and time.monotonic() < deadline:
            self._come_back(deadline)
            message.boot_id = self.boot_id
            broken = self._send(message, deadline)
        if broken is not None:
            if broken.end.error is not None and not broken.end.lost:
                self._number -= 1  # refused as a whole: the daemon did not count it
                self._unanswered = None
            raise self._end_of(broken)
        self._unanswered = None
        with self._changed:
            return self._inbox.replies.pop(message.number)

    def _may_go_on(self, end: StreamEnd) -> bool:
        """Whether the session goes on once we have attached anew."""
        return self._renew is not None and end.replaced

    def _come_back(self, deadline: float) -> None:
        """Attaches anew. Raises NotReady when no daemon is there in time, StaleBoot when it does not know us."""
        assert self._renew is not None
        while True:
            time.sleep(RENEW_PAUSE_S)
            try:
                self.boot_id = self._renew()
                return
            except NotReady:
                if time.monotonic() > deadline:
                    raise

    def _take_up(self, deadline: float) -> None:
        """Attaches anew and opens the stream again with the last message, whose reply is known already."""
        self._come_back(deadline)
        if self._last is None:
            return
        self._last.boot_id = self.boot_id
        broken = self._send(self._last, deadline)
        while broken is not None:
            if not self._may_go_on(broken.end) or time.monotonic() > deadline:
                raise self._end_of(broken)
            self._come_back(deadline)
            self._last.boot_id = self.boot_id
            broken = self._send(self._last, deadline)
        with self._changed:
            self._inbox.replies.pop(self._last.number)

    def _send(self, message: pb.StepRequest, deadline: float) -> Stream | None:
        """One try: None once the reply is there, else the stream that ended instead. Raises NotReady."""
        with self._changed:
            if self._stream is None or self._stream is self._ended:
                self._stream = self._open_stream()
            stream = self._stream
        reach("engine.step.before_send")
        stream.send(message)
        reach("engine.step.after_send")
        with self._changed:
            self._wait(lambda: message.number in self._inbox.replies or self._ended is stream, deadline, message.number)
            return None if message.number in self._inbox.replies else stream

    def _wait(self, done: Callable[[], bool], deadline: float, number: int) -> None:
        if not self._changed.wait_for(done, max(deadline - time.monotonic(), 0.0)):
            raise NotReady(f"no reply to step {number} of {self.name}; see `kvmanager status` of the node")

    def _end_of(self, stream: Stream) -> KVError:
        ended = Suspect(f"the daemon ended the session of {self.name}; attach and register again")
        return stream.end.error or ended

    def _result(self, reply: pb.StepReply) -> StepResult:
        residency: dict[int, list[pb.Residency]] = {}
        for rows in reply.residency:
            residency.setdefault(rows.request_id, []).append(rows)
        errors = {entry.request_id: error_from_proto(entry.error) for entry in reply.errors}
        errors |= {
            growth.request_id: error_from_proto(growth.error) for growth in reply.growth if growth.HasField("error")
        }
        with self._changed:
            errors |= self._inbox.failed
            self._inbox.failed.clear()
        return StepResult(
            opened={opened.request_id: opened for opened in reply.opened},
            growth={growth.request_id: growth for growth in reply.growth},
            residency=residency,
            hot={hot.request_id: hot for hot in reply.hot},
            errors=errors,
        )

    def wait_ready(self, request_id: int, timeout_s: float) -> pb.OpenReply:
        """Waits for the notice about a WAITING request; its reply holds the complete tables.

        Raises the request's typed error when it was refused or failed, NotReady after `timeout_s`,
        and the stream's error when that ended first.
        """
        deadline = time.monotonic() + timeout_s
        opened, ended = self._wait_for_notice(request_id, deadline)
        while opened is None and ended is not None and self._may_go_on(ended.end) and time.monotonic() < deadline:
            self._take_up(deadline)
            opened, ended = self._wait_for_notice(request_id, deadline)
        if opened is None:
            if ended is not None:
                raise self._end_of(ended)
            raise NotReady(f"request {request_id} of {self.name} still waits for its bytes after {timeout_s} s")
        if opened.state == pb.OpenReply.REFUSED:
            raise error_from_proto(opened.error)
        return opened

    def _wait_for_notice(self, request_id: int, deadline: float) -> tuple[pb.OpenReply | None, Stream | None]:
        """(the notice, the stream that ended before it), None for what is not. Raises the request's error."""
        with self._changed:
            inbox, stream = self._inbox, self._stream
            assert stream is not None, "nothing was opened on this session"
            done = self._changed.wait_for(
                lambda: request_id in inbox.ready or request_id in inbox.failed or self._ended is stream,
                max(deadline - time.monotonic(), 0.0),
            )
            if request_id in inbox.failed:
                raise inbox.failed.pop(request_id)
            opened = inbox.ready.pop(request_id, None)
        return opened, stream if done and opened is None else None

    def take_ready(self, request_id: int) -> pb.OpenReply | None:
        """The notice about a WAITING request if it has come, else None. Raises as `wait_ready` does."""
        with self._changed:
            if request_id not in self._inbox.ready and request_id not in self._inbox.failed:
                return None
        return self.wait_ready(request_id, 0.0)

    def export(self, request_id: int, timeout_s: float = STEP_TIMEOUT_S, expected_tokens: int = 0) -> pb.Ticket:
        """A ticket for what the request has committed, once the daemon has seen the commit's fence.

        `expected_tokens`: more than that; then the ticket comes at once, and grows with the request up to so many,
        so that the other node reads while this one still computes. A request that waits for its prefix has such a
        ticket too where the daemon reads host copies (`[mover] export_path`): the prefix is read meanwhile.

        Asks again while the daemon says that it is not there yet (the call is idempotent). Raises the
        daemon's typed error otherwise, or when `timeout_s` has passed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            request = pb.ExportRequest(boot_id=self.boot_id, epoch=self.epoch, request_id=request_id)
            request.expected_tokens = expected_tokens
            try:
                reply: pb.ExportReply = self._peer_stub.Export(request)
                return reply.ticket
            except grpc.RpcError as error:
                reason = error_from_rpc(error)
                late = time.monotonic() > deadline
                if not late and not isinstance(reason, NotReady) and self._may_go_on(end_of_rpc(error)):
                    self._take_up(deadline)
                    continue
                if not isinstance(reason, NotReady) or late:
                    raise reason from error
            time.sleep(EXPORT_PAUSE_S)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the stream; the channel is its owner's. Detach the ranks first.

        Requests still open are the daemon's to take back.
        """
        if self._stream is not None:
            self._stream.close(timeout_s)

    def _deliver(self, reply: pb.StepReply) -> None:
        """Reader thread: files a reply and the notices not seen before."""
        with self._changed:
            for notice in reply.notices:
                if notice.sequence > self._inbox.notices_seen:
                    self._inbox.notices_seen = notice.sequence
                    self._note(notice)
            if reply.number:
                self._inbox.replies[reply.number] = reply
            self._changed.notify_all()
        if reply.notices:
            self._noticed()

    def _note(self, notice: pb.Notice) -> None:
        what = notice.WhichOneof("what")
        if what == "ready":
            self._inbox.ready[notice.ready.request_id] = notice.ready
        elif what == "failed":
            self._inbox.failed[notice.failed.request_id] = error_from_proto(notice.failed.error)
        elif what == "draining":
            self._inbox.draining = notice.draining

    def _note_end(self, stream: Stream) -> None:
        """Reader thread: the stream is over."""
        with self._changed:
            self._ended = stream
            self._changed.notify_all()


def refusal_pause_s(error: KVError) -> float | None:
    """Seconds after which a refused open may be tried again; None when that can't help."""
    if isinstance(error, DaemonError):
        return None
    retry_after_ns: int = getattr(error, "retry_after_ns", 0)
    return max(retry_after_ns, MILLISECOND_NS) / 1e9 if retry_after_ns else None
