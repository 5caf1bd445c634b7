"""The daemon's view of its mover: regions handed over, plans sent, completions turned into core events.

    no link --connect, Welcome, all regions added--> linked --connection breaks--> no link

One thread drives this. While there is no link, plans wait. Two things may have happened when one is there again:

* the same process: plans that it neither ended nor carries never reached it, and failed;
* another one: once the old process is dead (pidfd) nothing it had in flight can land. The core is told, and has
  taken note, before the new process gets a single plan; so no plan of a job that the core has given up is run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kvmanager.core.checksums import SumArray
from kvmanager.core.events import CopyOutcome, Event, MoverGone, MoverJoined, PlanEnded, Recovered
from kvmanager.core.node import Node
from kvmanager.core.plans import CopyPlan, Urgency
from kvmanager.daemon.memory import NodeRegions
from kvmanager.daemon.moverconnection import MoverConnection, MoverProcess
from kvmanager.daemon.moverlink import MoverLink, mover_socket
from kvmanager.daemon.pulls import pull_of
from kvmanager.errors import KVError, NotReady, PeerUnreachable
from kvmanager.killpoints import reach
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.pacing import NO_LIMITS, LinkRates
from kvmanager.transport.paths import PEERS, PullPath
from kvmanager.units import GIB
from kvmanager.wire import RegionKind, error_from_proto, unpack_u64

CONNECT_PAUSE_S = 0.05
CONNECT_DEADLINE_S = 20.0
PIN_S_PER_GIB = 1.0
"""Allowed on top for host memory that a GPU's mover registers: 0.05 to 0.1 when it was faulted in, 0.7 if not."""
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


@dataclass(frozen=True)
class MoverInfo:
    """What is known of the mover process in use; zeros while there is none. `addresses`: region id -> base address.

    `paths`: of the peers that it pulled from.
    """

    pid: int = 0
    incarnation: int = 0
    addresses: dict[int, int] = field(default_factory=dict)
    agent: Agent | None = None
    outstanding: int = 0
    paths: tuple[pb.PullPath, ...] = ()


class Pulls(Protocol):
    """Who drives the pulls that the mover carries out. Nothing here may block."""

    def pull_ended(self, plan_id: int, outcome: CopyOutcome, error: KVError | None) -> bool:
        """A pull's end; False when the id is no pull's."""
        ...

    def mover_gone(self, alive: set[int]) -> None:
        """The mover died: pulls not among `alive`, sent or not, are over. From now on they are not wanted."""
        ...


class Mover:
    """Keeps a link to the mover of one device, across breaks and restarts. Thread-safe."""

    def __init__(
        self,
        runtime_dir: Path,
        device: str,
        boot_id: int,
        regions: NodeRegions,
        post: Callable[[Event], None],
        in_core: Callable[[Callable[[Node], None]], None],
        pulls: Pulls,
        on_failure: Callable[[BaseException], None],
        orphans: frozenset[int] | None = None,
        rates: LinkRates = NO_LIMITS,
    ) -> None:
        """`in_core(f)` runs f in the core, after all that was posted, and returns then.

        `orphans`: pulls of the daemon before, whose core was read back and is to be told what the mover carries;
        None for a core that is new.
        """
        self._path = mover_socket(runtime_dir, device)
        self.device = device
        self._boot_id = boot_id
        self._regions = regions
        self._post = post
        self._in_core = in_core
        self._pulls = pulls
        self._on_failure = on_failure
        self._lock = threading.Lock()  # guards what follows
        self._link: MoverLink | None = None
        self._waiting: list[pb.Pull | CopyPlan] = []
        self._outstanding: set[int] = set()
        self._info = MoverInfo()
        self._paths: dict[str, pb.PullPath] = {}
        self._agent: Future[Agent] | None = None
        self._connection: MoverConnection | None = None
        self._process: MoverProcess | None = None  # the thread's own
        self._rates = rates
        self._orphans = orphans
        self._recovering = orphans is not None
        self._first = threading.Event()
        self._heard_s = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)

    def connect(self) -> None:
        """Starts; returns when a mover has all regions. Raises NotReady when none comes up in time."""
        self._thread.start()
        host = sum(r.size_bytes for r in self._regions.plan.regions if r.kind is RegionKind.HOST)
        deadline_s = CONNECT_DEADLINE_S + (PIN_S_PER_GIB * host / GIB if self.device != "cpu" else 0)
        if not self._first.wait(deadline_s):
            raise NotReady(f"no mover for {self.device} took its regions within {deadline_s:.0f} s; see its log")

    def close(self) -> None:
        """Ends the link; the mover lives on."""
        self._closing.set()
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.end(NotReady("the daemon is ending"))
        if self._thread.is_alive():
            self._thread.join()

    @property
    def info(self) -> MoverInfo:
        """What is known now."""
        with self._lock:
            known = self._info
            return replace(
                known,
                addresses=dict(known.addresses),
                outstanding=len(self._outstanding),
                paths=tuple(self._paths.values()) if known.incarnation else (),
            )

    def peers_by_path(self) -> dict[str, int]:
        """Peers that it pulled from, counted by the way their chunks take."""
        chosen = [path.chosen for path in self.info.paths]
        return {path.value: chosen.count(path.value) for path in PullPath}

    def pace(self, rates: LinkRates) -> None:
        """The mover keeps to these from now on, and so does the next one."""
        with self._lock:
            self._rates = rates
            link = None if self._connection is None else self._connection.link
            if link is not None:
                with suppress(PeerUnreachable):  # the next link begins with them
                    link.pace(rates)

    def submit(self, plan: CopyPlan) -> None:
        """Sends a plan, now or when there is a link; in the core."""
        self._send(plan, plan.plan_id, lambda: True)

    def cancel(self, plan_id: int) -> None:
        """Asks that no more of a plan is started; it ends all the same. In the core.

        A plan that waits for a link has not begun: it ends here and now.
        """
        with self._lock:
            kept = [work for work in self._waiting if _id_of(work) != plan_id]
            unsent, self._waiting = len(kept) < len(self._waiting), kept
            if not unsent and self._link is not None and plan_id in self._outstanding:
                with suppress(PeerUnreachable):  # what it carries is sorted out by the reconnect
                    self._link.cancel(plan_id)
        if unsent:
            self._ended(plan_id, CopyOutcome.CANCELLED, None)

    def pull(self, pull: pb.Pull, wanted: Callable[[], bool]) -> None:
        """Sends a pull, likewise, from any thread; unless it is no longer wanted (see `Pulls.mover_gone`)."""
        self.warm_agent()  # the pull would start it too, but without telling us its name
        self._send(pull, pull.pull_id, wanted)

    def _send(self, work: pb.Pull | CopyPlan, work_id: int, wanted: Callable[[], bool]) -> None:
        failure: KVError | None = None
        with self._lock:
            if not wanted():
                return
            if self._link is None:
                self._waiting.append(work)
            else:
                failure = self._hand(self._link, work, work_id)
        if failure is not None:
            self._ended(work_id, CopyOutcome.FAILED, failure)

    def _hand(self, link: MoverLink, work: pb.Pull | CopyPlan, work_id: int) -> KVError | None:
        """Queues work on the link. A link that has just broken keeps it outstanding; the reconnect sorts it out."""
        self._outstanding.add(work_id)
        try:
            if isinstance(work, CopyPlan):
                link.submit(work)
                reach("daemon.plan.submitted")
            else:
                link.pull(work)
                reach("daemon.pull.begun")
        except PeerUnreachable:
            return None
        except KVError as error:  # too large for the wire
            self._outstanding.discard(work_id)
            return error
        return None

    def ping(self) -> None:
        """Asks the mover's process for a sign of life, if there is a link to it."""
        with self._lock:
            link = self._link
        if link is not None:
            with suppress(KVError):
                link.ping()

    @property
    def pong_age_s(self) -> float:
        """Time since its loop last answered; counted from the beginning until it does."""
        return time.monotonic() - self._heard_s

    def warm_agent(self) -> None:
        """Has the NIXL agent started, without waiting for it."""
        try:
            self._asked_agent()
        except KVError as error:
            _log.warning("the NIXL agent is not started yet: %s", error)

    def agent(self) -> Agent:
        """The NIXL agent, started on the first call. Raises the mover's error, NotReady after a deadline."""
        pending = self._asked_agent()
        try:
            return pending.result(AGENT_DEADLINE_S)
        except TimeoutError:
            raise NotReady(f"the mover's NIXL agent did not start within {AGENT_DEADLINE_S} s; ask again") from None

    def _asked_agent(self) -> Future[Agent]:
        with self._lock:
            if self._agent is None:
                if self._link is None:
                    raise NotReady("the mover is restarting; ask again")
                self._link.start_agent()
                self._agent = Future()
            return self._agent

    # ------------------------------------------------------------------------ the link's thread

    def _heard(self, event: pb.MoverEvent) -> None:
        what = event.WhichOneof("what")
        if what == "completion":
            reach("daemon.completion.received")
            completion = event.completion
            if completion.HasField("path"):
                self._learn(completion.path)
            error = error_from_proto(completion.error) if completion.HasField("error") else None
            sums = unpack_u64(completion.sums, "Completion.sums").copy() if completion.sums else None
            self._ended(completion.plan_id, _OUTCOMES[completion.outcome], error, sums)
        elif what == "outstanding":
            self._reconcile(set(unpack_u64(event.outstanding.plan_ids, "outstanding.plan_ids").tolist()))
        elif what == "agent_started":
            self._agent_started(event)
        elif what == "pong":
            self._heard_s = time.monotonic()

    def _learn(self, path: pb.PullPath) -> None:
        """What the mover knows of a peer now; of those longest known as little is kept as the mover keeps."""
        with self._lock:
            self._paths.pop(path.agent_name, None)
            self._paths[path.agent_name] = path
            if len(self._paths) > PEERS:
                del self._paths[next(iter(self._paths))]

    def _ended(
        self, work_id: int, outcome: CopyOutcome, error: KVError | None, sums: SumArray | None = None
    ) -> None:
        with self._lock:
            self._outstanding.discard(work_id)
        if not self._pulls.pull_ended(work_id, outcome, error):
            self._post(PlanEnded(work_id, outcome, error, sums))

    def _reconcile(self, carried: set[int]) -> None:
        """After a reconnect, before anything is sent: what this process neither ended nor carries never reached it.

        Another process carries nothing of ours; its predecessor's end is told for all at once.
        """
        with self._lock:
            process = self._connection.process if self._connection is not None else None
            recovering, self._recovering = self._recovering, False
            if recovering and process is not None:
                self._outstanding |= carried
                self._info = MoverInfo(process.pid, process.incarnation)
                self._post(Recovered(self._boot_id, process.incarnation, frozenset(carried)))
                return
            same = process is not None and process.incarnation == self._info.incarnation
            lost = sorted(self._outstanding - carried) if same else []
        for work_id in lost:
            self._ended(work_id, CopyOutcome.FAILED, PeerUnreachable("the link to our mover broke; ask again"))

    def _agent_started(self, event: pb.MoverEvent) -> None:
        started = event.agent_started
        with self._lock:
            pending = self._agent
            if started.HasField("error"):
                self._agent = None  # the next to ask tries again
            else:
                agent = Agent(started.agent_name, started.agent_metadata, event.incarnation)
                known = self._info
                self._info = MoverInfo(known.pid, known.incarnation, known.addresses, agent)
        if pending is None or pending.done():
            return
        if started.HasField("error"):
            pending.set_exception(error_from_proto(started.error))
        else:
            pending.set_result(agent)

    # ------------------------------------------------------------------------ our own thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                connection = self._open()
                if connection is not None:
                    self._use(connection)
                if self._process is not None and self._process.ended(0.0):
                    self._gone(self._process)
                self._closing.wait(CONNECT_PAUSE_S)
        except Exception as error:
            _log.exception("the mover's thread stops")
            self._on_failure(error)

    def _open(self) -> MoverConnection | None:
        """A new connection, all regions offered; None when nobody listens."""
        wanted = [region for region in self._regions.plan.regions if region.kind is not RegionKind.TIMELINE]
        connection = MoverConnection(len(wanted), self._heard)
        with self._lock:
            self._connection = connection
        try:
            connection.link = MoverLink(self._path, self._boot_id, connection.event, connection.end, self._rates)
            self.pace(self._rates)  # they may have changed before the link was to be seen
            for region in wanted:
                connection.link.add_region(region, self._regions.fd(region.region_id))
        except PeerUnreachable:
            if connection.link is None:
                return None
        if self._closing.is_set():  # `close` may have looked before this connection was there
            connection.end(NotReady("the daemon is ending"))
        return connection

    def _use(self, connection: MoverConnection) -> None:
        """Serves one connection until it breaks."""
        assert connection.link is not None
        connection.settled.wait()
        if not connection.broken.is_set() and self._adopt(connection):
            self._publish(connection)
            connection.broken.wait()
            self._retract()
        connection.link.close()
        if connection.process is not None and connection.process is not self._process:
            connection.process.close()

    def _adopt(self, connection: MoverConnection) -> bool:
        """Makes the connection's process ours, once its predecessor is dead and the core knows it."""
        process = connection.process
        assert process is not None, "a mover says Welcome first"
        before = self._process
        if before is not None and before.incarnation == process.incarnation:
            return True
        if before is not None:
            while not before.ended(CONNECT_PAUSE_S):
                if self._closing.is_set():
                    return False
            self._gone(before)
        self._process = process
        known = self._info.incarnation
        if known != process.incarnation:
            if before is None and known:  # of the daemon before; the keeper starts a mover when its predecessor is dead
                self._post(MoverGone())
                self._in_core(self._forget_lost)
            self._post(MoverJoined(process.incarnation))
        return True

    def _publish(self, connection: MoverConnection) -> None:
        """From now on work goes out on this connection, first what waited for it."""
        assert connection.link is not None
        assert self._process is not None
        failed = []
        with self._lock:
            agent = self._info.agent if self._info.incarnation == self._process.incarnation else None
            self._info = MoverInfo(self._process.pid, self._process.incarnation, connection.addresses, agent)
            self._link = connection.link
            for work_id in sorted((self._orphans or frozenset()) & self._outstanding):
                connection.link.cancel(work_id)
            self._orphans = None
            waiting, self._waiting = sorted(self._waiting, key=_urgency_of), []
            for work in waiting:
                error = self._hand(connection.link, work, _id_of(work))
                if error is not None:
                    failed.append((_id_of(work), error))
        for work_id, error in failed:
            self._ended(work_id, CopyOutcome.FAILED, error)
        self._heard_s = time.monotonic()
        _log.info("mover %d for %s has all regions", self._process.pid, self.device)
        self._first.set()

    def _retract(self) -> None:
        with self._lock:
            self._link = None
            pending, self._agent = self._agent, None
        if pending is not None and not pending.done():
            pending.set_exception(NotReady("the mover is restarting; ask again"))

    def _gone(self, process: MoverProcess) -> None:
        """The process is dead: the core takes note of it, and of nothing that was meant for it anything is sent."""
        _log.warning("the mover for %s, pid %d, is dead", self.device, process.pid)
        self._post(MoverGone())
        self._in_core(self._forget_lost)
        process.close()
        self._process = None

    def _forget_lost(self, node: Node) -> None:
        """In the core, after MoverGone was applied: only jobs that the core has now are still to be done."""
        alive = set(node.state.jobs)
        self._pulls.mover_gone(alive)
        with self._lock:
            self._info = MoverInfo()
            self._paths = {}
            self._outstanding = set()
            self._waiting = [work for work in self._waiting if _job_of(work) in alive]


def _urgency_of(work: pb.Pull | CopyPlan) -> Urgency:
    return work.urgency if isinstance(work, CopyPlan) else Urgency.WAITED_FOR


def _id_of(work: pb.Pull | CopyPlan) -> int:
    return work.plan_id if isinstance(work, CopyPlan) else work.pull_id


def _job_of(work: pb.Pull | CopyPlan) -> int:
    return work.plan_id if isinstance(work, CopyPlan) else pull_of(work.pull_id)
