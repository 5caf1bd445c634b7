"""The Operator service: what operators do to a node, and the stories they ask for. What changes anything is logged."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import grpc

from kvmanager.configuration.config import NodeConfig
from kvmanager.core.group import Group
from kvmanager.core.operatorevents import (
    Cordon,
    Evicted,
    EvictPool,
    EvictPrefix,
    EvictTenant,
    Pinned,
    PinPrefix,
    UnpinPrefix,
)
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.movers import MoverInfo
from kvmanager.errors import InvalidArgument, InvariantViolation
from kvmanager.observing import explainlive
from kvmanager.observing.explain import (
    StoryLine,
    check_kind,
    happened,
    nothing_known,
    records_of,
    request_name,
    still_open,
)
from kvmanager.observing.fsck import check_copy, compare_sums
from kvmanager.observing.history import History
from kvmanager.observing.historyrecords import Record
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.protos import kvmanager_pb2_grpc as pb_grpc
from kvmanager.services import operatorviews
from kvmanager.services.auditlog import audited
from kvmanager.services.callers import Callers, typed

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
CHECKSUM_SPANS_MAX = 1 << 20
STORY_LINES_MAX = 1_000
"""Of a story only so many newest lines are told."""
_log = logging.getLogger("kvmanager.operator")


class OperatorService(pb_grpc.OperatorServicer):
    """For operators; a reader of all tenants may look. What changes anything is in the audit log."""

    def __init__(
        self,
        config: Callable[[], NodeConfig],
        mover: Callable[[], MoverInfo],
        loop: OwnerLoop,
        callers: Callers,
        history: History | None,
        cordon: Callable[[str], None],
        state: Callable[[], str],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`config()`: what is in effect. `mover()`: what is known of it.

        `cordon(why)`: carries a journalled cordon out. `fail`: stops the daemon after a broken invariant.
        """
        self._config = config
        self._mover = mover
        self._loop = loop
        self._callers = callers
        self._history = history
        self._cordon = cordon
        self._state = state
        self._fail = fail

    # ------------------------------------------------------------------------------ looking

    @typed
    def Transfers(self, request: pb.TransfersRequest, context: grpc.ServicerContext) -> pb.TransfersReply:  # noqa: ARG002
        """Plans and pulls under way."""
        self._callers.sees_all(context)
        reply = self._loop.inspect(lambda node: operatorviews.transfers(node, self._config().node.device))
        reply.paths.extend(self._mover().paths)
        return reply

    @typed
    def Pins(self, request: pb.PinsRequest, context: grpc.ServicerContext) -> pb.PinsReply:  # noqa: ARG002
        """All pins."""
        self._callers.sees_all(context)
        return self._loop.inspect(operatorviews.pins)

    @typed
    def Config(self, request: pb.ConfigRequest, context: grpc.ServicerContext) -> pb.ConfigReply:  # noqa: ARG002
        """The effective configuration."""
        self._callers.sees_all(context)
        return pb.ConfigReply(json=json.dumps(dataclasses.asdict(self._config()), default=str))

    @typed
    def Explain(self, request: pb.ExplainRequest, context: grpc.ServicerContext) -> pb.ExplainReply:
        """A story. Raises InvalidArgument for an id that can't be one, UnknownRequest for one that nobody knows."""
        self._callers.sees_all(context)
        check_kind(request.kind)
        if request.kind == "page":
            said: tuple[StoryLine, ...] = ()
            now = self._loop.inspect(lambda node: explainlive.page_now(node, request.id))
        else:
            if self._history is not None:
                self._history.catch_up()
            records = records_of(self._config().history_dir, request.id)
            said = happened(records, request.kind)
            now = self._requests_now(request.id, records) if request.kind == "request" else []
            if not said and not now:
                raise nothing_known(request.kind, request.id, self._config().history_dir)
        told = [*said, *(StoryLine(0, text) for text in now)][-STORY_LINES_MAX:]
        lines = [pb.StoryLine(at_ns=line.at_ns, text=line.text) for line in told]
        return pb.ExplainReply(title=f"{request.kind} {request.id}", lines=lines)

    def _requests_now(self, text: str, records: list[Record]) -> list[str]:
        """What the core says of a request now; of one that its engine named, of each of its leases that is open."""
        with suppress(InvalidArgument):
            name = request_name(text)
            return self._loop.inspect(lambda node: explainlive.request_now(node, name))
        places = still_open(records)
        return self._loop.inspect(
            lambda node: [text for name, epoch in places for text in explainlive.request_now(node, name, epoch)]
        )

    @typed
    def Fsck(self, request: pb.FsckRequest, context: grpc.ServicerContext) -> pb.FsckReply:
        """Checks everything on a copy; a broken invariant stops the daemon once the answer is out."""
        with audited(self._callers, context, f"fsck, {request.checksum_spans} spans' checksums"):
            return self._fsck(request, context)

    def _fsck(self, request: pb.FsckRequest, context: grpc.ServicerContext) -> pb.FsckReply:
        if request.checksum_spans > CHECKSUM_SPANS_MAX:
            raise InvalidArgument(f"checksum_spans {request.checksum_spans} is above {CHECKSUM_SPANS_MAX}")
        checked = check_copy(self._loop)
        reply = pb.FsckReply(blocked_ns=checked.blocked_ns, spans=checked.spans)
        for check in checked.checks:
            reply.checks.add(name=check.name, broken=check.broken, took_ns=check.took_ns)
        broken = [f"{check.name}: {check.broken}" for check in checked.checks if check.broken]
        if broken:
            _log.critical("fsck found %s", "; ".join(broken))
            context.add_callback(lambda: self._fail(InvariantViolation("; ".join(broken))))
        elif request.checksum_spans:
            reply.compared_spans, reply.bad_copies = compare_sums(self._loop, request.checksum_spans)
        return reply

    # ------------------------------------------------------------------------------ doing

    @typed
    def Cordon(self, request: pb.CordonRequest, context: grpc.ServicerContext) -> pb.CordonReply:
        """Lets nothing new in, or does again."""
        with audited(self._callers, context, f"drain ({request.why})" if request.why else "undrain"):
            before = self._loop.inspect(lambda node: node.state.cordon)
            self._loop.call(Cordon(request.why))
            self._cordon(request.why)
        return pb.CordonReply(state=self._state(), before=before)

    @typed
    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictReply:
        """Forgets cached content."""
        what = request.WhichOneof("what")
        share = f"{request.share.pool} {request.share.free_percent} %" if what == "share" else ""
        meant = share or request.key or request.tenant
        with audited(self._callers, context, f"evict {what} {meant} in {request.group}"):
            done: Evicted = self._loop.call(self._evict_event(request, what))
        return pb.EvictReply(forgotten_spans=done.forgotten_spans, held_spans=done.held_spans)

    def _evict_event(self, request: pb.EvictRequest, what: str | None) -> EvictPrefix | EvictTenant | EvictPool:
        match what:
            case "key":
                return EvictPrefix(request.group, self._full_key(request.group, request.key))
            case "tenant":
                return EvictTenant(request.group, request.tenant)
            case "share":
                share = request.share
                if not 1 <= share.free_percent <= 100:
                    raise InvalidArgument(f"free_percent {share.free_percent} is not from 1 to 100")
                slabs = self._loop.inspect(lambda node: _slabs(node.state.groups, request.group, share.pool))
                return EvictPool(request.group, share.pool, max(slabs * share.free_percent // 100, 1))
        raise InvalidArgument("say what to evict: a key, a tenant, or a share of a pool")

    def _full_key(self, group: str, text: str) -> bytes:
        return self._loop.inspect(lambda node: operatorviews.full_key(node, group, text))

    @typed
    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinStatus:
        """Keeps a cached prefix."""
        with audited(self._callers, context, f"pin {request.key} in {request.group} as {request.pin_id!r}"):
            key = self._full_key(request.group, request.key)
            done: Pinned = self._loop.call(PinPrefix(request.pin_id, request.group, key))
        return pb.PinStatus(
            pin_id=done.pin_id, group=request.group, key=key.hex(), spans=done.spans, tokens=done.tokens
        )

    @typed
    def Unpin(self, request: pb.UnpinRequest, context: grpc.ServicerContext) -> pb.PinStatus:
        """Lets a pinned prefix go."""
        with audited(self._callers, context, f"unpin {request.pin_id!r}"):
            was = {pin.pin_id: pin for pin in self._loop.inspect(operatorviews.pins).pins}.get(request.pin_id)
            done: Pinned = self._loop.call(UnpinPrefix(request.pin_id))
        reply = pb.PinStatus(pin_id=done.pin_id, spans=done.spans, tokens=done.tokens)
        if was is not None:
            reply.group, reply.key, reply.age_ns = was.group, was.key, was.age_ns
        return reply

    @typed
    def SetLogLevel(self, request: pb.LogLevelRequest, context: grpc.ServicerContext) -> pb.LogLevelReply:
        """Changes what is logged."""
        name = request.logger or "kvmanager"
        with audited(self._callers, context, f"loglevel {request.level} of {name}"):
            if request.level not in LEVELS:
                raise InvalidArgument(f"no level {request.level!r}; there are {', '.join(LEVELS)}")
            if name != "kvmanager" and name not in logging.Logger.manager.loggerDict:
                raise InvalidArgument(f"nothing logs as {name!r}")
            if name.partition(".")[0] != "kvmanager":
                raise InvalidArgument(f"{name!r} is no part of the daemon")
            logger = logging.getLogger(name)
            before = logging.getLevelName(logger.getEffectiveLevel())
            logger.setLevel(request.level)
        return pb.LogLevelReply(before=before)


def _slabs(groups: Mapping[str, Group], group: str, pool: str) -> int:
    """Slabs of a pool; 0 where there is none, which the core refuses by name."""
    found = groups[group].pools.get(pool) if group in groups else None
    return found.slabs if found is not None else 0
