"""The mover: the process that moves bytes for one device, on the daemon's orders.

    python -m kvmanager.mover --runtime-dir DIR --device cpu [--orphan-s S]

It holds no policy and no tables: regions arrive as fds, plans and pulls as data, and each ends in one
Completion. It outlives the daemon: what it was told goes on, its completions are kept, and the next
daemon that lists gets them (`kvmanager.daemon.moverlink` describes the conversation). Only the connection with
the newest boot id is served, and only the mover's own uid may connect.

It stops on SIGTERM, when a region that it has comes again as other memory (the daemon started from nothing), when
late bytes of peers that hang may land in pages or in all of its staging, and when it is an orphan: no daemon has been
linked for `ORPHAN_S` and no keeper lives in its directory. What can end within `STOP_S` ends, the rest is cancelled or
said to be of unknown fate. Its end is the fence for its reads in flight; a new keeper that starts cold does not wait
for it but kills it first.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

from kvmanager.daemon.moverlink import mover_socket
from kvmanager.errors import ConfigError, DeviceError, Draining, InvalidArgument, KVError
from kvmanager.exitcodes import EXIT_CONFIG
from kvmanager.keeper.lockfile import holder
from kvmanager.killpoints import reach
from kvmanager.mover.moverendpoint import MoverEndpoint
from kvmanager.mover.movermemory import MoverMemory
from kvmanager.mover.movertransfers import MoverTransfers
from kvmanager.planwire import plan_from_proto, ring_from_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.runtime_dir import KEEPER_LOCK, make_private_dir
from kvmanager.transport.cpu import CpuExecutor
from kvmanager.transport.cuda import CudaExecutor
from kvmanager.transport.executor import Completion, Outcome, RegionMap
from kvmanager.transport.nixl import UcxSettings, agent_name
from kvmanager.transport.pacing import LinkRates, Pacer
from kvmanager.transport.paths import PathRates, PullPath
from kvmanager.transport.pull_pipeline import PullRequest
from kvmanager.units import SECOND_NS
from kvmanager.wire import (
    RegionKind,
    error_to_proto,
    pack_u64,
    region_from_proto,
)

STOP_S: Final = 3.0
LANDING_PAUSE_S: Final = 0.001
"""Between two looks at copies in flight on a GPU."""
LANDING_S: Final = 0.5
"""For copies in flight on a GPU at the end; what has not landed then ends with the process."""
ORPHAN_S: Final = 60.0
_log = logging.getLogger("kvmanager.mover")


class Mover:
    """One mover process. `run` owns the thread; nothing here is called from another."""

    def __init__(self, runtime_dir: Path, device: str, ucx: UcxSettings, orphan_s: float = ORPHAN_S) -> None:
        make_private_dir(runtime_dir)
        self.incarnation = secrets.randbits(64)
        self._device = device
        self._ucx = ucx
        self._selector = selectors.DefaultSelector()
        self._endpoint = MoverEndpoint(
            mover_socket(runtime_dir, device), self.incarnation, self._selector, self._handle
        )
        self._regions = RegionMap()
        self._memory = MoverMemory(self._regions)
        self._pacer = Pacer()
        self._executor = _executor(device, self._regions, self._pacer)
        self._hands: MoverTransfers | None = None  # from the first ticket on
        self._stop_at_s: float | None = None
        self._keeper_lock = runtime_dir / KEEPER_LOCK
        self._orphan_s = orphan_s
        self._alone_since_s: float | None = time.monotonic()  # None while a daemon is linked

    # ------------------------------------------------------------------------------------ the loop

    def wake_on(self, sock: socket.socket) -> None:
        """Ends the loop's sleep when `sock` becomes readable (signals write to its other end)."""
        self._selector.register(sock, selectors.EVENT_READ, lambda: sock.recv(4096))

    def _stop_if_orphaned(self) -> None:
        now = time.monotonic()
        if self._endpoint.linked:
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = now
        elif now - self._alone_since_s >= self._orphan_s:
            self._alone_since_s = now
            if holder(self._keeper_lock) is None:
                _log.warning("no daemon for %g s, and no keeper that could start one: stopping", self._orphan_s)
                self.stop()

    def stop(self) -> None:
        """Takes no new work; `run` returns when all is ended, after `STOP_S` at the latest."""
        if self._stop_at_s is None:
            self._stop_at_s = time.monotonic() + STOP_S

    def run(self) -> None:
        """Serves until `stop`."""
        while self._stop_at_s is None or (self._outstanding() and time.monotonic() < self._stop_at_s):
            for key, _ in self._selector.select(self._wait_s()):
                key.data()
            self._complete(self._executor.poll(), "mover.plan.completed")
            if self._hands is not None:
                self._complete(self._hands.poll(), "mover.pull.ended")
            if isinstance(self._executor, CudaExecutor) and self._executor.broken is not None:
                _log.error("the GPU's context is lost: stopping (%s)", self._executor.broken)
                self.stop()
            if self._hands is not None and self._hands.exhausted and self._stop_at_s is None:
                _log.error("peers that hang may yet write into pages, or all of staging: stopping ends their reads")
                self.stop()
            self._stop_if_orphaned()
        self._executor.close()
        land_by_s = time.monotonic() + LANDING_S
        self._complete(self._executor.poll(), "mover.plan.completed")
        while self._executor.outstanding() and time.monotonic() < land_by_s:
            time.sleep(LANDING_PAUSE_S)
            self._complete(self._executor.poll(), "mover.plan.completed")
        if self._hands is not None:
            self._complete(self._hands.abandon(), "mover.pull.ended")
        self._endpoint.close()

    def _wait_s(self) -> float | None:
        """Nothing outstanding: sleep until somebody writes. Otherwise as long as the work and its rates allow."""
        waits: list[float | None] = []
        if self._executor.outstanding():
            paced_s = self._executor.wait_ns() / SECOND_NS
            if paced_s == 0:
                return LANDING_PAUSE_S if isinstance(self._executor, CudaExecutor) and self._executor.idle() else 0.0
            waits.append(paced_s)
        waits += [] if self._hands is None else [self._hands.next_poll_s()]
        if self._stop_at_s is not None:
            waits.append(0.05)
        if self._alone_since_s is not None:
            waits.append(max(self._alone_since_s + self._orphan_s - time.monotonic(), 0.0))
        return min((wait for wait in waits if wait is not None), default=None)

    def _complete(self, completions: list[Completion], kill_point: str) -> None:
        for completion in completions:
            reach(kill_point)
            self._endpoint.complete(_completion_to_proto(completion))

    def _outstanding(self) -> list[int]:
        return self._executor.outstanding() + ([] if self._hands is None else self._hands.outstanding())

    # ------------------------------------------------------------------------------------ commands

    def _handle(self, command: pb.MoverCommand, fds: tuple[int, ...]) -> list[pb.MoverEvent]:
        """Obeys a command; the answers that it has at once. Raises a KVError for one that breaks a rule."""
        what = command.WhichOneof("what")
        if what == "hello":
            self._pacer.set_rates(_rates(command.hello))
            return [pb.MoverEvent(welcome=pb.Welcome(pid=os.getpid(), device=self._device))]
        if what == "add_region":
            return [pb.MoverEvent(region_added=self._add_region(command.add_region, fds))]
        if what == "list_outstanding":
            return [pb.MoverEvent(outstanding=pb.Outstanding(plan_ids=pack_u64(self._outstanding())))]
        if what == "ping":
            return [pb.MoverEvent(pong=command.ping)]
        if what == "start_agent":
            return [pb.MoverEvent(agent_started=self._start_agent())]
        if what == "submit":
            self._submit(command.submit)
        elif what == "pull":
            self._pull(command.pull)
        elif what == "cancel":
            self._cancel(command.cancel)
        else:
            raise InvalidArgument("a MoverCommand without a command that this version knows")
        return []

    def _add_region(self, message: pb.AddRegion, fds: tuple[int, ...]) -> pb.RegionAdded:
        """Maps a region. One that is there already must be the same memory; otherwise the mover stops."""
        info = region_from_proto(message.region)
        if len(fds) != 1:
            raise InvalidArgument(f"region {info.region_id} came with {len(fds)} fds, one is needed")
        if info.region_id not in self._memory.infos:
            if info.kind is RegionKind.STAGING and self._staging() is not None:
                raise InvalidArgument(f"region {info.region_id}: this mover has its staging region {self._staging()}")
            self._memory.add(info, fds[0])
            if self._hands is not None:
                self._hands.register(info.region_id)
        elif not self._memory.holds(info, fds[0]):
            # The daemon made the node's memory anew. Nothing held here is of use, and only our end frees it.
            self.stop()
            raise InvalidArgument(f"region {info.region_id} is other memory here: this mover stops")
        return pb.RegionAdded(region_id=info.region_id, base_address=self._regions.address(info.region_id))

    def _staging(self) -> int | None:
        return next((i for i, info in self._memory.infos.items() if info.kind is RegionKind.STAGING), None)

    def _new_id(self, plan_id: int) -> None:
        if plan_id in self._executor or (self._hands is not None and plan_id in self._hands):
            raise InvalidArgument(f"plan {plan_id} is outstanding already: ids are never used twice")

    def _refuse(self, plan_id: int, error: KVError) -> None:
        self._endpoint.complete(_completion_to_proto(Completion(plan_id, Outcome.FAILED, 0, 0, error)))

    def _submit(self, message: pb.Plan) -> None:
        reach("mover.plan.received")
        self._new_id(message.plan_id)
        try:
            if self._stop_at_s is not None:
                raise Draining(f"plan {message.plan_id}: this mover is stopping")
            self._executor.submit(plan_from_proto(message))
        except KVError as error:
            self._refuse(message.plan_id, error)

    def _pull(self, message: pb.Pull) -> None:
        self._new_id(message.pull_id)
        try:
            if self._stop_at_s is not None:
                raise Draining(f"pull {message.pull_id}: this mover is stopping")
            self._transfers().pull(_pull_from_proto(message))
        except KVError as error:
            self._refuse(message.pull_id, error)

    def _cancel(self, plan_id: int) -> None:
        self._executor.cancel(plan_id)
        if self._hands is not None:
            self._hands.cancel(plan_id)

    # --------------------------------------------------------------------------------------- NIXL

    def _start_agent(self) -> pb.AgentStarted:
        try:
            hands = self._transfers()
            return pb.AgentStarted(agent_name=hands.reader.name, agent_metadata=hands.reader.metadata())
        except KVError as error:
            return pb.AgentStarted(error=error_to_proto(error))

    def _transfers(self) -> MoverTransfers:
        if self._hands is None:
            self._hands = MoverTransfers(
                self._device, self.incarnation, self._regions, self._memory, self._ucx, self._pacer, self._staging()
            )
        return self._hands


def _executor(device: str, regions: RegionMap, pacer: Pacer) -> CpuExecutor | CudaExecutor:
    """Raises ConfigError for a device that is not there."""
    if device == "cpu":
        return CpuExecutor(regions, pacer=pacer)
    try:
        return CudaExecutor(regions, device, pacer=pacer)
    except (DeviceError, InvalidArgument) as error:
        raise ConfigError(f"no mover for device {device!r}: {error}") from error


def _rates(hello: pb.Hello) -> LinkRates:
    return LinkRates(hello.to_host_bytes_per_s, hello.to_device_bytes_per_s, hello.both_ways_bytes_per_s)


def _completion_to_proto(completion: Completion) -> pb.Completion:
    return pb.Completion(
        plan_id=completion.plan_id,
        outcome=pb.Completion.Outcome.Value(completion.outcome.value),
        moved_bytes=completion.moved_bytes,
        busy_ns=completion.busy_ns,
        error=None if completion.error is None else error_to_proto(completion.error),
        sums=b"" if completion.sums is None else pack_u64(completion.sums.reshape(-1)),
        path=None if completion.path is None else _path_to_proto(completion.path),
    )


def _path_to_proto(path: PathRates) -> pb.PullPath:
    return pb.PullPath(
        agent_name=path.agent_name,
        chosen=path.chosen.value,
        ring_bytes_per_s=round(path.ring_bytes_per_s),
        direct_bytes_per_s=round(path.direct_bytes_per_s),
    )


def _pull_from_proto(message: pb.Pull) -> PullRequest:
    if not message.agent_name.endswith(agent_name("", message.peer_incarnation)):
        raise InvalidArgument(f"agent {message.agent_name!r} is not of incarnation {message.peer_incarnation:016x}")
    ring = ring_from_proto(message)
    name, metadata = message.agent_name, message.agent_metadata
    try:
        path = PullPath(message.path or PullPath.MEASURED)
    except ValueError:
        raise InvalidArgument(f"Pull.path {message.path!r} is none of {', '.join(PullPath)}") from None
    return PullRequest(message.pull_id, name, metadata, ring, message.deadline_ns, message.packed, path)


def main(arguments: list[str] | None = None) -> int:
    """The process: serves until SIGTERM, SIGINT or its parent's end. 0, or 78 for a configuration it can't use."""
    parser = argparse.ArgumentParser(prog="kvmanager.mover", description="moves KV bytes for one device")
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--orphan-s", type=float, default=ORPHAN_S, help="time without daemon and keeper that ends it")
    parser.add_argument("--ucx-transports", help="default: tcp,cma,self and CUDA's on a GPU")
    parser.add_argument("--ucx-devices", default=UcxSettings().net_devices)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s mover %(levelname)s %(message)s")
    try:
        transports = options.ucx_transports or UcxSettings.for_device(options.device).transports
        ucx = UcxSettings(transports, options.ucx_devices)
        mover = Mover(options.runtime_dir, options.device, ucx, options.orphan_s)
    except ConfigError as error:
        print(f"kvmanager mover: {error}", file=sys.stderr)
        return EXIT_CONFIG
    wake_source, wake_target = socket.socketpair()
    for end in (wake_source, wake_target):
        end.setblocking(False)
    signal.set_wakeup_fd(wake_source.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: mover.stop())
    mover.wake_on(wake_target)
    mover.run()
    # Not through the interpreter's teardown: it would release transfers that may still be in flight.
    logging.shutdown()
    os._exit(0)
