"""The daemon's view of its mover: regions handed over, plans sent, completions turned into core events."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from kvmanager.core.events import CopyOutcome, Event, MoverGone, PlanEnded
from kvmanager.core.plans import CopyPlan
from kvmanager.errors import KVError, NotReady, PeerUnreachable
from kvmanager.memory import NodeRegions
from kvmanager.moverlink import MoverLink, mover_socket
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.wire import RegionKind, error_from_proto

CONNECT_PAUSE_S = 0.05
CONNECT_DEADLINE_S = 20.0
AGENT_DEADLINE_S = 20.0
_OUTCOMES = {
    pb.Completion.DONE: CopyOutcome.DONE,
    pb.Completion.FAILED: CopyOutcome.FAILED,
    pb.Completion.CANCELLED: CopyOutcome.CANCELLED,
    pb.Completion.UNKNOWN_FATE: CopyOutcome.UNKNOWN_FATE,
}
_log = logging.getLogger("kvmanager.mover")


@dataclass(frozen=True)
class Agent:
    """The mover's NIXL agent: opaque metadata, and the mover process it belongs to."""

    name: str
    metadata: bytes
    incarnation: int


@dataclass
class MoverInfo:
    """What the mover said of itself. `addresses`: region id -> base address in the mover."""

    pid: int = 0
    incarnation: int = 0
    addresses: dict[int, int] = field(default_factory=dict)
    outstanding: set[int] = field(default_factory=set)
    agent: Agent | None = None


class Mover:
    """Keeps a link to the mover of one device, across restarts of the mover."""

    def __init__(
        self,
        runtime_dir: Path,
        device: str,
        boot_id: int,
        regions: NodeRegions,
        post: Callable[[Event], None],
        on_pull_ended: Callable[[int, CopyOutcome, KVError | None], bool],
    ) -> None:
        """`on_pull_ended(id, outcome, error)`: whether the id was a pull's; called by the link's thread."""
        self._path = mover_socket(runtime_dir, device)
        self.device = device
        self._boot_id = boot_id
        self._regions = regions
        self._post = post
        self._on_pull_ended = on_pull_ended
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._info = MoverInfo()
        self._agent: Future[Agent] | None = None
        self._link: MoverLink | None = None

    def connect(self) -> None:
        """Connects and hands over all regions. Raises NotReady when no mover comes up in time."""
        deadline = time.monotonic() + CONNECT_DEADLINE_S
        while True:
            try:
                link = MoverLink(self._path, self._boot_id, self._event, self._broken)
                break
            except PeerUnreachable as error:
                if time.monotonic() > deadline or self._closing.wait(CONNECT_PAUSE_S):
                    raise NotReady(f"no mover for {self.device} within {CONNECT_DEADLINE_S} s: {error}") from error
        with self._lock:
            self._link = link
        for region in self._regions.plan.regions:
            if region.kind is not RegionKind.TIMELINE:
                link.add_region(region, self._regions.fd(region.region_id))
        if not self._ready.wait(CONNECT_DEADLINE_S):
            raise NotReady(f"the mover for {self.device} did not take its regions within {CONNECT_DEADLINE_S} s")

    def close(self) -> None:
        """Ends the link; the mover lives on."""
        self._closing.set()
        with self._lock:
            link = self._link
        if link is not None:
            link.close()

    @property
    def info(self) -> MoverInfo:
        """A copy of what is known."""
        with self._lock:
            known = self._info
            return MoverInfo(known.pid, known.incarnation, dict(known.addresses), set(known.outstanding), known.agent)

    def submit(self, plan: CopyPlan) -> None:
        """Sends a plan; a mover that is gone means MoverGone, which fails it."""
        self._send(plan.plan_id, lambda link: link.submit(plan))

    def pull(self, pull: pb.Pull) -> None:
        """Sends a pull, likewise."""
        self._send(pull.pull_id, lambda link: link.pull(pull))

    def _send(self, plan_id: int, send: Callable[[MoverLink], None]) -> None:
        with self._lock:
            link = self._link
            self._info.outstanding.add(plan_id)
        try:
            if link is None:
                raise PeerUnreachable("the mover is restarting")
            send(link)
        except PeerUnreachable as error:
            # The link's end is reported by its thread; a plan that was never sent can't be in flight.
            with self._lock:
                self._info.outstanding.discard(plan_id)
            if not self._on_pull_ended(plan_id, CopyOutcome.FAILED, error):
                self._post(PlanEnded(plan_id, CopyOutcome.FAILED, error))

    def agent(self) -> Agent:
        """The NIXL agent, started on the first call. Raises the mover's error, NotReady after a deadline."""
        with self._lock:
            link = self._link
            if self._info.agent is not None:
                return self._info.agent
            if link is None:
                raise NotReady("the mover is restarting; ask again")
            if self._agent is None:
                self._agent = Future()
                link.start_agent()
            pending = self._agent
        try:
            return pending.result(AGENT_DEADLINE_S)
        except TimeoutError:
            raise NotReady(f"the mover's NIXL agent did not start within {AGENT_DEADLINE_S} s") from None

    # ------------------------------------------------------------------------ the link's thread

    def _event(self, event: pb.MoverEvent) -> None:
        what = event.WhichOneof("what")
        if what == "welcome":
            with self._lock:
                self._info = MoverInfo(event.welcome.pid, event.incarnation)
        elif what == "region_added":
            self._region_added(event.region_added)
        elif what == "completion":
            self._completed(event.completion)
        elif what == "agent_started":
            self._agent_started(event)

    def _region_added(self, added: pb.RegionAdded) -> None:
        with self._lock:
            self._info.addresses[added.region_id] = added.base_address
            complete = len(self._info.addresses) == len(self._regions.plan.regions) - 1
        if complete:
            self._ready.set()

    def _completed(self, completion: pb.Completion) -> None:
        with self._lock:
            self._info.outstanding.discard(completion.plan_id)
        outcome = _OUTCOMES[completion.outcome]
        error = error_from_proto(completion.error) if completion.HasField("error") else None
        if not self._on_pull_ended(completion.plan_id, outcome, error):
            self._post(PlanEnded(completion.plan_id, outcome, error))

    def _agent_started(self, event: pb.MoverEvent) -> None:
        started = event.agent_started
        with self._lock:
            pending, self._agent = self._agent, None
            if not started.HasField("error"):
                self._info.agent = Agent(started.agent_name, started.agent_metadata, event.incarnation)
            agent = self._info.agent
        if pending is not None:
            if agent is not None:
                pending.set_result(agent)
            else:
                pending.set_exception(error_from_proto(started.error))

    def _broken(self, error: KVError) -> None:
        """The mover's connection ended. Only the end of its process makes its pages safe; see `_wait_for_end`."""
        _log.warning("the mover for %s is gone: %s", self.device, error)
        with self._lock:
            pid, self._link = self._info.pid, None
            pending, self._agent = self._agent, None
        self._ready.clear()
        if pending is not None:
            pending.set_exception(error)
        if not self._closing.is_set():
            threading.Thread(target=self._recover, args=(pid,), name="mover-recover", daemon=True).start()

    def _recover(self, pid: int) -> None:
        wait_for_end(pid)
        with self._lock:
            lost = sorted(self._info.outstanding)
            self._info = MoverInfo()
        for plan_id in lost:
            self._on_pull_ended(plan_id, CopyOutcome.FAILED, PeerUnreachable("our mover died"))
        self._post(MoverGone())
        try:
            self.connect()
        except NotReady as error:
            _log.error("%s", error)


def wait_for_end(pid: int) -> None:
    """Returns when the process is dead: its pidfd is readable, or there is no such process."""
    import os
    import select

    if pid == 0:
        return
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)
