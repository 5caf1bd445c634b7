"""Lookups and leases of engines with memory of their own, whichever way their messages came."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvmanager.core.events import Opened
from kvmanager.core.leaseevents import AcquirePrefix, EndLease, ReserveSpans
from kvmanager.core.node import Node
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.membership import Membership
from kvmanager.errors import InvalidArgument, KVError, NotReady
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.services.gate import Gate, Named, check_boot
from kvmanager.services.leasemessages import acquire_event, acquire_reply, done_event, store_event
from kvmanager.services.messages import span_run
from kvmanager.wire import error_to_proto

LEASE_PAUSES_S: Final = (0.001, 0.02)
"""Between two looks at a lease that waits for its pages, the first and the longest."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who waits for an answer. token: of its session. until_s: monotonic seconds; infinity for ever. here: it waits."""

    token: str
    here: Callable[[], bool]
    until_s: float = math.inf


class CacheAnswers:
    """Answers them; methods raise the core's typed errors. Thread-safe."""

    def __init__(
        self,
        boot_id: int,
        loop: OwnerLoop,
        membership: Membership,
        gate: Gate,
        observe: Callable[[str, str, float], None],
    ) -> None:
        """`observe(method, code, seconds)`: of each call that `answer` answers."""
        self._boot_id = boot_id
        self._loop = loop
        self._membership = membership
        self._gate = gate
        self._observe = observe

    def answer(self, call: pb.CacheCall, token: str, here: Callable[[], bool]) -> pb.CacheAnswer:
        """Of any of them; an error is an answer, too."""
        began, code, name = time.perf_counter(), "OK", call.WhichOneof("what")
        asker = Asker(token, here, _until(call.timeout_ns / 1e9 if call.timeout_ns else None))
        try:
            match name:
                case "lookup":
                    return pb.CacheAnswer(lookup=self.lookup(call.lookup, asker))
                case "acquire":
                    return pb.CacheAnswer(acquire=self.acquire(call.acquire, asker))
                case "done":
                    return pb.CacheAnswer(done=self.done(call.done, asker))
                case "store":
                    return pb.CacheAnswer(store=self.store(call.store, asker))
            raise InvalidArgument("no call is set; lookup, acquire, done or store")
        except KVError as error:
            code = error.reason
            return pb.CacheAnswer(error=error_to_proto(error))
        finally:
            self._observe((name or "none").capitalize(), code, time.perf_counter() - began)

    def lookup(self, request: pb.LookupRequest, asker: Asker) -> pb.LookupReply:
        """How long a prefix is known; pins nothing, renews nothing."""
        name = self._engine(request, asker)
        return self._loop.inspect(lambda node: _lookup(node, name, request))

    def acquire(self, request: pb.AcquireRequest, asker: Asker) -> pb.AcquireReply:
        """Pins a cached prefix."""
        return acquire_reply(self._arrived(acquire_event(self._engine(request, asker), request), asker))

    def done(self, request: pb.DoneRequest, asker: Asker) -> pb.DoneReply:
        """Gives the pins of an acquire back."""
        self._loop.call(done_event(self._engine(request, asker), request))
        return pb.DoneReply()

    def store(self, request: pb.StoreRequest, asker: Asker) -> pb.StoreReply:
        """One step of a write into the cache."""
        name = self._engine(request, asker)
        if request.WhichOneof("step") == "reserve":
            self._gate.check()
        event = store_event(name, request, self._membership.registration(name, request.epoch).namespace)
        if isinstance(event, EndLease):
            self._loop.call(event)
            return pb.StoreReply()
        opened = self._arrived(event, asker)
        return pb.StoreReply(tokens=opened.cached_tokens, spans=[span_run(table) for table in opened.spans])

    def _arrived(self, event: AcquirePrefix | ReserveSpans, asker: Asker) -> Opened:
        """The lease, once its pages may be used. Raises NotReady at the call's deadline."""
        pause_s = LEASE_PAUSES_S[0]
        while True:
            opened: Opened = self._loop.call(event)
            if opened.state != "waiting":
                return opened
            if not asker.here() or asker.until_s - time.monotonic() < 2 * pause_s:
                raise NotReady(f"lease {event.request_id} waits for its pages; ask for it again")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LEASE_PAUSES_S[1])

    def _engine(self, request: Named, asker: Asker) -> str:
        """The engine that a call names by its epoch and token."""
        check_boot(request, self._boot_id)
        return self._membership.engine_of(asker.token, request.epoch)


def _until(left_s: float | None) -> float:
    """The moment at which a call is over; infinity for never."""
    return math.inf if left_s is None else time.monotonic() + left_s


def _lookup(node: Node, engine_name: str, request: pb.LookupRequest) -> pb.LookupReply:
    engine = node.state.engine(engine_name, request.epoch)
    group = node.state.groups[engine.group]
    rows = group.spec.page_rows
    segments = min(len(request.keys) // group.key_bytes, request.prompt_tokens // rows)
    cached, device = segments, segments
    for chain in group.chains:
        match = chain.index.match(request.keys, segments, engine.namespace)
        cached = min(cached, match.segments + match.donor_segments)
        resident = match.rows[: chain.device_ready(match.rows)]
        device = min(device, int(chain.table.segments[resident].sum()))
    return pb.LookupReply(device_tokens=min(device, cached) * rows, cached_tokens=cached * rows)
