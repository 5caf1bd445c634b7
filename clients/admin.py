"""The operator's client: read-only questions to a running node, and replies as plain values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from kvmanager.clients.attach import attach, grpc_channel
from kvmanager.errors import NotReady
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.wire import ERROR_METADATA_KEY, error_from_rpc

CALL_TIMEOUT_S: Final = 10.0
FSCK_S: Final = 120.0
R = TypeVar("R", bound=Message)


class AdminClient:
    """Attached to the node in `runtime_dir` as an operator. A context manager; close it.

    Every call raises the daemon's typed error; NotReady when the daemon does not answer.
    """

    def __init__(self, runtime_dir: Path, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._runtime_dir = runtime_dir
        self._timeout_s = timeout_s
        self._attachment = attach(runtime_dir, "operator", "admin", timeout_s)
        self._channel = grpc_channel(self._attachment)
        self._stub = pb_grpc.AdminStub(self._channel)
        self._operator = pb_grpc.OperatorStub(self._channel)

    def status(self) -> pb.StatusReply:
        """The node, its engines, movers and counters."""
        return self._call(self._stub.Status, pb.StatusRequest(), pb.StatusReply)

    def pools(self) -> pb.PoolsReply:
        """Bytes of every pool by state."""
        return self._call(self._stub.Pools, pb.PoolsRequest(), pb.PoolsReply)

    def map(self, pool: str) -> pb.MapReply:
        """State, class and pins of every unit of one pool."""
        return self._call(self._stub.Map, pb.MapRequest(pool=pool), pb.MapReply)

    def requests(self) -> pb.RequestsReply:
        """What the engines hold."""
        return self._call(self._stub.Requests, pb.RequestsRequest(), pb.RequestsReply)

    def prefixes(self, limit: int = 0) -> pb.PrefixesReply:
        """What the cache holds, newest first; at most `limit` leaves (0: the daemon's default)."""
        return self._call(self._stub.Prefixes, pb.PrefixesRequest(limit=limit), pb.PrefixesReply)

    def leases(self) -> pb.LeasesReply:
        """Tickets that are out."""
        return self._call(self._stub.Leases, pb.LeasesRequest(), pb.LeasesReply)

    def upgrade(self) -> pb.UpgradeReply:
        """Has the daemon replaced by what is installed now. Raises the daemon's error when that could not go on."""
        return self._call(self._stub.Upgrade, pb.UpgradeRequest(), pb.UpgradeReply)

    def reset(self, group: str) -> pb.ResetReply:
        """Forgets all that a group has cached, in all tiers; what requests hold goes when they end."""
        return self._call(self._stub.Reset, pb.ResetRequest(group=group), pb.ResetReply)

    def transfers(self) -> pb.TransfersReply:
        """Plans and pulls under way."""
        return self._call(self._operator.Transfers, pb.TransfersRequest(), pb.TransfersReply)

    def explain(self, kind: str, named: str) -> pb.ExplainReply:
        """The story of a page, request, refusal or miss. Raises InvalidArgument, UnknownRequest."""
        return self._call(self._operator.Explain, pb.ExplainRequest(kind=kind, id=named), pb.ExplainReply)

    def fsck(self, checksum_spans: int = 0) -> pb.FsckReply:
        """Checks everything on a copy; reads at most so many spans' host copies again."""
        return self._call(self._operator.Fsck, pb.FsckRequest(checksum_spans=checksum_spans), pb.FsckReply, FSCK_S)

    def cordon(self, why: str) -> pb.CordonReply:
        """Lets nothing new in, or with an empty `why` does again."""
        return self._call(self._operator.Cordon, pb.CordonRequest(why=why), pb.CordonReply)

    def evict(self, request: pb.EvictRequest) -> pb.EvictReply:
        """Forgets cached content that nobody uses."""
        return self._call(self._operator.Evict, request, pb.EvictReply)

    def pin(self, pin_id: str, group: str, key: str) -> pb.PinStatus:
        """Keeps the prefix whose last segment's key begins with these hex digits."""
        return self._call(self._operator.Pin, pb.PinRequest(pin_id=pin_id, group=group, key=key), pb.PinStatus)

    def unpin(self, pin_id: str) -> pb.PinStatus:
        """Takes a pin away. Raises UnknownLease."""
        return self._call(self._operator.Unpin, pb.UnpinRequest(pin_id=pin_id), pb.PinStatus)

    def pins(self) -> pb.PinsReply:
        """All pins."""
        return self._call(self._operator.Pins, pb.PinsRequest(), pb.PinsReply)

    def loglevel(self, level: str, logger: str = "") -> pb.LogLevelReply:
        """Changes what the daemon logs."""
        request = pb.LogLevelRequest(level=level, logger=logger)
        return self._call(self._operator.SetLogLevel, request, pb.LogLevelReply)

    def config(self) -> pb.ConfigReply:
        """What the daemon runs with."""
        return self._call(self._operator.Config, pb.ConfigRequest(), pb.ConfigReply)

    def close(self) -> None:
        """Leaves the node."""
        self._channel.close()
        self._attachment.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, method: Callable[..., Any], request: Message, reply_type: type[R], timeout_s: float = 0.0
    ) -> R:
        try:
            reply = method(request, timeout=max(self._timeout_s, timeout_s))
        except grpc.RpcError as error:
            if _nobody_answered(error):
                raise NotReady(f"the daemon in {self._runtime_dir} does not answer; is it stopping?") from error
            raise error_from_rpc(error) from error
        assert isinstance(reply, reply_type), f"{type(reply).__name__} for {reply_type.__name__}"
        return reply


def _nobody_answered(error: grpc.RpcError) -> bool:
    """Whether the status is gRPC's own word for no daemon, rather than the daemon's answer."""
    if not isinstance(error, grpc.Call):
        return False
    ours = any(key == ERROR_METADATA_KEY for key, _ in error.trailing_metadata() or ())
    return not ours and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def to_plain(message: Message) -> dict[str, Any]:
    """A message as values for json.dumps, all fields present: numbers stay numbers, `bytes` become lists of u8.

    (protobuf's own JSON form writes 64-bit numbers as text.)
    """
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            plain[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            plain[field.name] = [_plain_value(each) for each in value]
        else:
            plain[field.name] = _plain_value(value)
    return plain


def _plain_value(value: Any) -> Any:
    if isinstance(value, Message):
        return to_plain(value)
    return list(value) if isinstance(value, bytes) else value
