"""What a vLLM engine asks of the daemon: leases, and for a hand-off between two engines requests of its session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np

from kvmanager.clients.attach import Attachment
from kvmanager.clients.engine import EngineClient, RequestStep
from kvmanager.clients.leases import CALL_TIMEOUT_S, Lease, LeaseCalls, lease_pages
from kvmanager.errors import KVError, NotReady, UnknownRequest
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import ERROR_METADATA_KEY, error_from_proto, error_from_rpc, pack_u64

FEW_SEGMENTS: Final = 512
Tell = Callable[[pb.Ticket], dict[str, Any]]
"""What an engine's answer says of a ticket."""


@dataclass(frozen=True)
class Exported:
    """Pages of a whole prompt, of which the first `lease.tokens` tokens are filled, and a ticket that grows with it.

    told: what the engine's answer says of it.
    """

    lease: Lease
    ticket: pb.Ticket
    told: dict[str, Any]


@dataclass(slots=True)
class About:
    """What a request's calls say of it. name: the engine's own. keys, token_ids: growing; no token ids: not told."""

    name: str
    session_id: str
    keys: Sequence[bytes]
    token_ids: Sequence[int] = ()


@dataclass(slots=True)
class Wanted:
    """The first segments of a request. What costs time is left to the thread that makes the call."""

    about: About
    segments: int
    segment_tokens: int

    @property
    def few(self) -> bool:
        """Whether a hook may join their keys itself."""
        return self.segments <= FEW_SEGMENTS

    @property
    def tokens(self) -> int:
        """Of the segments."""
        return self.segments * self.segment_tokens

    @property
    def keys(self) -> bytes:
        """Of the segments, one after the other."""
        return b"".join(self.about.keys[: self.segments])

    @property
    def token_ids(self) -> bytes:
        """Of the segments, u32; empty where they are not told."""
        ids = self.about.token_ids
        return np.asarray(ids[: self.tokens], "<u4").tobytes() if len(ids) else b""


@dataclass(slots=True)
class Passed:
    """A fence to be: (attach id, timeline value) of each rank."""

    ranks: tuple[tuple[int, int], ...]

    def fence(self) -> pb.Fence:
        """As the daemon takes it."""
        return pb.Fence(
            attach_ids=pack_u64([attach_id for attach_id, _ in self.ranks]),
            values=pack_u64([value for _, value in self.ranks]),
        )


class EngineCalls(LeaseCalls):
    """Of one registered engine; raises like `LeaseCalls`. Fences name all ranks and never go back."""

    def __init__(
        self, attachment: Attachment, channel: grpc.Channel, client: EngineClient, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        super().__init__(attachment, client, timeout_s)
        self._peer_stub = pb_grpc.PeerStub(channel)

    def reserve_of(self, lease_id: int, wanted: Wanted) -> Lease:
        """See `reserve`."""
        about = wanted.about
        return self.reserve(lease_id, wanted.keys, about.session_id, token_ids=wanted.token_ids, name=about.name)

    def pull(
        self, request_id: int, wanted: Wanted, tokens: int, fence: pb.Fence, ticket: pb.Ticket
    ) -> Lease | None:  # fmt: skip
        """Has the first `tokens` tokens fetched from another node; None: they are on their way, see `landed`."""
        return self._open(request_id, wanted, tokens, fence, ticket)

    def landed(self, request_id: int) -> Lease | None:
        """What a `pull` brought, None while it is on its way. Raises why it did not come."""
        opened = self._client.take_ready(request_id)
        return None if opened is None else _lease(opened)

    def export(
        self, request_id: int, wanted: Wanted, tokens: int, fence: pb.Fence, tell: Tell
    ) -> Exported:  # fmt: skip
        """Pages for a prompt of `tokens` tokens, and a ticket on it that another node may use at once."""
        lease = self._open(request_id, wanted, tokens, fence)
        assert lease is not None, "nothing of a cache group lies on another tier"
        try:
            ticket = self._client.export(request_id, self._timeout_s, expected_tokens=tokens)
            return Exported(lease, ticket, tell(ticket))
        except KVError:
            self.close(request_id, fence, pb.ABORTED)
            raise

    def renew(self, ticket_ids: list[str]) -> None:
        """Extends the leases of tickets."""
        try:
            self._peer_stub.Heartbeat(pb.HeartbeatRequest(ticket_ids=ticket_ids), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise _reason_of(error) from error

    def write(self, request_id: int, tokens: int, capacity: int, fence: pb.Fence) -> None:
        """The first `tokens` tokens of an export, of `capacity`, are written once the fence has passed."""
        result = self._client.step(
            fence=fence, requests=[RequestStep(request_id, capacity, tokens)], timeout_s=self._timeout_s
        )
        _check(result.errors.get(request_id))

    def close(self, request_id: int, fence: pb.Fence, reason: pb.CloseReason.ValueType) -> None:
        """Ends a pull or an export behind the fence; one that never began, or has ended, changes nothing."""
        close = pb.CloseRequest(request_id=request_id, reason=reason)
        _check(self._client.step(fence=fence, closes=[close], timeout_s=self._timeout_s).errors.get(request_id))

    def _open(
        self, request_id: int, wanted: Wanted, tokens: int, fence: pb.Fence, ticket: pb.Ticket | None = None
    ) -> Lease | None:
        request = pb.OpenRequest(
            request_id=request_id, prompt_tokens=tokens, prompt_keys=wanted.keys, ticket=ticket,
            session=pb.SessionHint(session_id=wanted.about.session_id), prompt_token_ids=wanted.token_ids,
            name=wanted.about.name,
        )  # fmt: skip
        opened = self._client.step(fence=fence, opens=[request], timeout_s=self._timeout_s).opened[request_id]
        if opened.state == pb.OpenReply.REFUSED:
            raise error_from_proto(opened.error)
        return None if opened.state == pb.OpenReply.WAITING else _lease(opened)


def _lease(opened: pb.OpenReply) -> Lease:
    return Lease(opened.cached_tokens, lease_pages(opened.spans))


def _check(error: KVError | None) -> None:
    if error is not None and not isinstance(error, UnknownRequest):
        raise error


def _reason_of(error: grpc.RpcError) -> KVError:
    """The daemon's own word, else that it does not answer."""
    metadata: Any = error.trailing_metadata()
    if any(key == ERROR_METADATA_KEY for key, _ in metadata or ()):
        return error_from_rpc(error)
    return NotReady(f"the daemon does not answer: {error.code().name}")
