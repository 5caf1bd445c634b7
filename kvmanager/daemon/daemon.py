"""The daemon: one process that decides. It copies nothing and holds no CUDA context.

    python -m kvmanager.daemon --config FILE [--keeper-fd N]

SIGHUP: the file is read again (`reload`). Exit codes: 0 after SIGTERM (the log says what was still held when
the drain's time was over), 78 for a configuration that can't be used, 77 after a broken invariant (the keeper restarts
it), 1 for anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import grpc

from kvmanager.allocators.backing import host_room
from kvmanager.allocators.numa import NO_NODE, gpu_node
from kvmanager.configuration.config import NodeConfig
from kvmanager.configuration.reading import read_config
from kvmanager.configuration.reload import Reloader
from kvmanager.core.events import (
    AbandonTicket,
    CancelPlan,
    CheckCopies,
    Drain,
    Effect,
    Event,
    FenceEngine,
    Notified,
    StartPull,
    SubmitPlan,
)
from kvmanager.core.kvevents import SegmentsRemoved, SegmentsStored
from kvmanager.core.operatorevents import Forgot
from kvmanager.daemon.attach import AttachServer, ClientIdentity
from kvmanager.daemon.clientnotes import EngineNote, RankNote, clients_of
from kvmanager.daemon.draining import has_requests, pulls_of, still_held
from kvmanager.daemon.faultin import FaultIn
from kvmanager.daemon.fencing import Fence
from kvmanager.daemon.handoff import Handoffs
from kvmanager.daemon.keeperlink import KeeperLink
from kvmanager.daemon.loop import OwnerLoop
from kvmanager.daemon.membership import Membership, Registration
from kvmanager.daemon.movers import Mover
from kvmanager.daemon.peerprocess import allow_descriptors
from kvmanager.daemon.sessions import SessionHub
from kvmanager.daemon.successor import check_successor
from kvmanager.daemon.takeover import ClientLives, Leftovers, NodeParts
from kvmanager.errors import ConfigError, DaemonError, DeviceError, Draining, KVError, NotReady, StaleBoot
from kvmanager.exitcodes import EXIT_CONFIG, EXIT_FAILED, EXIT_INVARIANT, EXIT_REPLACED
from kvmanager.keeper.deposits import SERVING
from kvmanager.observing.history import begin as begin_history
from kvmanager.observing.kvstreams import KvStreams
from kvmanager.observing.watch import Watch
from kvmanager.runtime_dir import GRPC_SOCKET, make_private_dir
from kvmanager.services.access import OPERATOR, READER, Gatekeeper
from kvmanager.services.admin_service import AdminService
from kvmanager.services.cacheanswers import CacheAnswers
from kvmanager.services.calldoor import CallDoor
from kvmanager.services.callers import callers_of
from kvmanager.services.certificates import Certificates, http_tls
from kvmanager.services.engine_service import EngineService
from kvmanager.services.gate import Gate
from kvmanager.services.grpcserver import grpc_server, serve_all
from kvmanager.services.operator_service import OperatorService
from kvmanager.services.peer_service import PeerService
from kvmanager.services.peerdoor import PeerDoor
from kvmanager.services.sessionframes import SessionFrames
from kvmanager.services.sessionsteps import SessionSteps
from kvmanager.services.worker_service import WorkerService
from kvmanager.units import MILLISECOND_NS, format_bytes

DRAIN_POLL_S = 0.05
_log = logging.getLogger("kvmanager.daemon")


class Daemon:
    """Everything of one node, wired together. `start`, then `wait`, then `stop`."""

    def __init__(self, config: NodeConfig, config_path: Path, keeper: KeeperLink | None) -> None:
        """Takes over what the keeper holds, or makes the memory anew where it holds nothing.

        Raises ConfigError when new memory does not fit, or what is there was left by another program or configuration;
        DeviceError where there is no such GPU.
        """
        make_private_dir(config.node.runtime_dir)
        self._config = config
        self._config_path = config_path
        self.reloader = Reloader(config_path, config, self._use, self._fail)
        parts = NodeParts.of(config)
        plan, limits = parts.memory, parts.limits
        left = Leftovers(keeper)
        if left.journal is None:
            room = host_room()
            config.check_memory(room.available_bytes, room.limit)
        beginning = left.begin(parts)
        self._boot_id, self._regions, self._node = beginning.boot_id, beginning.regions, beginning.node
        self._journal = beginning.journal
        self._beginning = beginning
        made = self._regions.made
        self._fault_in = FaultIn(made, gpu_node(config.node.device) if made else NO_NODE)
        self._prints = parts.prints
        self._lives = ClientLives(keeper, self._fail)
        self._exit_code = 0
        self._dead: list[str] = []  # tokens of clients that died while no daemon was there
        self._over = threading.Event()
        self._hurry = threading.Event()
        self._failure: BaseException | None = None
        self._state = "starting"
        self._groups = {group.name: group for group in plan.groups}
        self._gate = Gate(self._node.state.cordon)
        self._history = begin_history(config, self._node.state)
        self._certificates = Certificates(config.tls) if config.tls.present else None
        self._watch = Watch(
            config.node.name, config.health, config.metrics, config.lease.grace_ns,
            self._node.state, lambda: self.state, http_tls(self._certificates, config.metrics.listen),
            None if keeper is None else keeper.alive,
        )  # fmt: skip
        self._streams = KvStreams(config, self._node, self._boot_id, self._fail)
        self._loop = OwnerLoop(self._node, self._regions, self._perform, self._fail, self._journal, self._applied)
        self._membership = Membership(
            self._loop.post, self._regions.unbind, self._on_gone, self._regions.free_words
        )
        unread_messages = limits.stored_replies + limits.unseen_notices
        self._hub = SessionHub(self._boot_id, limits.stored_replies, unread_messages, self._membership.stalled)
        self._handoffs = Handoffs(
            config.node.name,
            self._groups,
            config.mover,
            self._loop.post,
            self._certificates,
            config.access.peers,
        )
        self._mover = Mover(
            config.node.runtime_dir,
            config.node.device,
            self._boot_id,
            self._regions,
            self._loop.post,
            self._loop.settle,
            self._handoffs,
            self._fail,
            pulls_of(self._node) if beginning.warm else None,
            config.mover.rates,
        )
        self._handoffs.use(self._mover)
        self._attach, self._server = self._make_servers()
        self._know_clients(left)
        if left.forget_rest():
            self._regions.free_unbound()

    def _know_clients(self, left: Leftovers) -> None:
        """The clients of the daemon before: their processes are watched, and they may come back."""
        state = self._node.state
        tokens = set()
        for note in clients_of(state):
            if note.token in tokens:
                continue
            tokens.add(note.token)
            identity = left.identity(note)
            if identity is None:
                self._dead.append(note.token)
                continue
            self._lives.known(identity)
            self._attach.adopt(identity)
        for engine in state.all_engines():
            scheduler = EngineNote.read(engine.note)
            ranks = {attach_id: RankNote.read(note) for attach_id, note in engine.attach_notes.items()}
            tenant = self._config.tenant_of(scheduler.client.uid)
            registration = Registration(scheduler.client.token, engine.group, scheduler.namespace, tenant)
            tokens_of_ranks = {attach_id: rank.client.token for attach_id, rank in ranks.items()}
            self._membership.restored(engine.name, engine.epoch, registration, tokens_of_ranks)
            for attach_id, rank in ranks.items():
                self._regions.bind(attach_id, rank.word, rank.regions)

    def _make_servers(self) -> tuple[AttachServer, grpc.Server]:
        runtime_dir = self._config.node.runtime_dir
        socket_path = runtime_dir / GRPC_SOCKET
        attach_server = AttachServer(
            runtime_dir,
            trust_uids=self._config.node.trust_uids,
            boot_id=self._boot_id,
            grpc_path=socket_path,
            on_attach=self._on_attach,
            on_leave=self._membership.leaving,
            on_disconnect=self._membership.disconnected,
            on_exit=self._on_exit,
            fds_for=lambda token, attach_id: self._workers.fds_for(token, attach_id),
            on_failure=self._fail,
            check_role=self._config.access.check_role,
        )
        callers = callers_of(self._config, attach_server)
        fence = self._config.fence
        self._fence = Fence(fence.action, self._membership, attach_server)
        self._workers = WorkerService(self._boot_id, self._loop, self._groups, callers, self._membership, self._regions)
        cache = CacheAnswers(self._boot_id, self._loop, self._membership, self._gate, self._watch.calls.observe)
        steps = SessionSteps(
            self._boot_id, self._loop, self._node, self._membership, self._hub, self._gate, self._watch.meter.hot_rows
        )
        self._calls = CallDoor(runtime_dir, self._boot_id, callers, cache.answer, SessionFrames(steps, fence).serve)
        engines = EngineService(
            self._boot_id, self._loop, self._node, callers, self._membership, self._hub, self._gate, steps, cache
        )
        self._door = PeerDoor(self._config.peer, self._certificates)
        address = self._door.address or str(runtime_dir)
        peers = PeerService(self._boot_id, address, self._loop, self._groups, callers, self._membership, self._mover)
        admin = AdminService(
            self._boot_id,
            self._config.node.name,
            self._loop,
            callers,
            self._mover,
            lambda: self.state,
            self._fence,
            self._fault_in,
            self._watch,
            lambda: check_successor(self._config_path, self._prints),
            self._replace,
        )
        server = grpc_server(self._config.fence, self._watch.calls, Gatekeeper(callers))
        operator = OperatorService(
            self.reloader.config, lambda: self._mover.info, self._loop, callers, self._history, self._cordon,
            lambda: self.state, self._fail,
        )  # fmt: skip
        services = {"Engine": engines, "Worker": self._workers, "Peer": peers, "Admin": admin, "Operator": operator}
        self._door.serve(peers)
        serve_all(server, socket_path, services, self._watch.servicer)
        return attach_server, server

    def start(self) -> None:
        """Faults the memory in and connects the mover, then lets engines in; operators may look on.

        Returns early when `request_stop` came meanwhile. Raises ConfigError when the memory ran out, NotReady when
        the mover does not come up.
        """
        self._streams.start()
        self.reloader.start()
        if self._history is not None:
            self._history.start()
        self._loop.start()
        self._watch.start(self._loop, self._mover, self._history, self._streams)
        for token in self._dead:
            self._membership.exited(token)
        self._server.start()
        self._calls.start()
        self._attach.start()
        began = time.monotonic()
        if not self._fault_in.run(self._over.is_set):
            return
        _log.info("%s faulted in, %.1f s", format_bytes(self._fault_in.total_bytes), time.monotonic() - began)
        self._mover.connect()  # it maps the regions, and is ready with them when this returns
        self._beginning.finish()
        self._state = SERVING
        self._watch.tell()
        self._door.start()
        if self._beginning.warm:
            checks = self._config.checksums
            self._loop.post(CheckCopies(checks.restart_spans, checks.restart_ms * MILLISECOND_NS))
        _log.info("node %s serves %s", self._config.node.name, self._config.node.runtime_dir)

    @property
    def state(self) -> str:
        """What operators are told: starting, serving, draining."""
        return "draining" if self._state == SERVING and self._gate.cordon else self._state

    def wait(self) -> BaseException | None:
        """Returns when the node shall stop, with the failure that ended it, if one did."""
        self._over.wait()
        return self._failure

    def request_stop(self) -> None:
        """Asks for an orderly stop, and when asked again, for one that waits for nothing. Safe in a signal handler."""
        if self._over.is_set():
            self._hurry.set()
        self._over.set()

    def _use(self, config: NodeConfig) -> None:
        """Puts what `reload.RELOADABLE` names into effect."""
        self._watch.use(config.health)
        self._fence.use(config.fence.action)
        self._mover.pace(config.mover.rates)
        self._attach.trust(config.node.trust_uids)
        if self._history is not None:
            self._history.limit(config.history.max_bytes)

    def _replace(self) -> None:
        """Ends this daemon so that another one goes on."""
        self._exit_code = EXIT_REPLACED
        self._over.set()

    @property
    def exit_code(self) -> int:
        """What the process ends with when nothing failed."""
        return self._exit_code

    def _stop_servers(self) -> None:
        self._door.close()
        self._calls.close()
        self._server.stop(grace=1.0).wait()
        self.reloader.close()

    def _leave_to_successor(self) -> None:
        """Ends between two events: engines are told to attach again, and the journal is one snapshot."""
        self._hub.end_all(StaleBoot("the daemon is being replaced; attach again"))
        self._stop_servers()
        self._attach.close()
        self._lives.close()
        self._watch.close()
        self._loop.stop()
        self._streams.close()
        if self._history is not None:
            self._history.close()
        self._journal.snapshot(self._node)
        self._handoffs.close()
        self._mover.close()
        self._regions.close()

    def stop(self) -> None:
        """Drains for at most `drain_ms`, then closes everything and says how long that took."""
        if self._failure is None and self._exit_code == EXIT_REPLACED:
            self._leave_to_successor()
            return
        if self._failure is None:
            with contextlib.suppress(NotReady):  # the failure that ended the core is known
                self._drain()
        self._hub.end_all()
        self._stop_servers()
        self._attach.close()
        self._lives.close()
        self._watch.close()
        self._handoffs.close()
        self._mover.close()
        self._loop.stop()
        self._streams.close()
        if self._history is not None:
            self._history.close()
        began = time.monotonic()
        self._regions.close()
        _log.info("closed %s of memory, %.1f s", format_bytes(self._fault_in.total_bytes), time.monotonic() - began)

    def _drain(self) -> None:
        """Refuses new work and waits for what runs. Raises NotReady when the core ends meanwhile."""
        self._state = "draining"
        self._gate.close()
        self._watch.tell()
        self._loop.post(Drain("the node was told to stop"))
        began = time.monotonic()
        drain_s = self._config.node.drain_ms / 1000
        while self._loop.inspect(has_requests) and self._failure is None:
            waited = time.monotonic() - began
            if waited >= drain_s or self._hurry.wait(DRAIN_POLL_S):
                why = "told again" if self._hurry.is_set() else f"drain_ms = {self._config.node.drain_ms} are over"
                _log.warning("stops with work undone (%s): %s", why, "; ".join(self._loop.inspect(still_held)))
                return
        _log.info("drained, %.1f s", time.monotonic() - began)

    def _cordon(self, why: str) -> None:
        """Engines are let in no more, or again; journalled before."""
        self._gate.cordon = why
        self._watch.tell()
        if why:
            self._loop.post(Drain(why))

    # ------------------------------------------------------------------------------ callbacks

    def _applied(self, event: Event, effects: Sequence[Effect], took_s: float) -> None:
        """The core has handled an event; in its thread."""
        self._watch.meter.applied(event, effects, took_s)
        if self._history is not None:
            self._history.note(event, self._node.state.now, effects)

    def _perform(self, effect: Effect) -> None:
        """Effects of the core, in the core."""
        match effect:
            case SubmitPlan():
                self._mover.submit(effect.plan)
            case CancelPlan():
                if not self._handoffs.cancel(effect.plan_id):
                    self._mover.cancel(effect.plan_id)
            case StartPull():
                self._handoffs.start(effect)
            case AbandonTicket():
                self._handoffs.abandon(effect.ticket)
            case Notified():
                self._hub.notify(effect)
            case FenceEngine():
                trusted = [(e.name, e.epoch) for e in self._node.state.all_engines() if e.trusted]
                self._fence.apply((effect.engine, effect.epoch), trusted, effect.stalled)
            case Forgot():
                pass  # the history's
            case SegmentsStored() | SegmentsRemoved():
                self._streams.tell(effect)
            case _:
                raise AssertionError(f"unhandled effect {effect!r}")

    def _on_gone(self, engine: str, epoch: int) -> None:
        self._hub.forget(engine, epoch)
        self._fence.forget((engine, epoch))
        self._watch.meter.forget_engine(engine, epoch)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._over.set()

    def _on_attach(self, identity: ClientIdentity) -> None:
        if identity.role in (OPERATOR, READER):
            return
        if self._state == "draining":
            raise Draining("the node drains; attach to another")
        if self._state == "starting":
            done, total = format_bytes(self._fault_in.done_bytes), format_bytes(self._fault_in.total_bytes)
            raise NotReady(f"the node starts: {done} of {total} are faulted in; attach again")
        self._lives.begin(identity)

    def _on_exit(self, token: str) -> None:
        self._membership.exited(token)
        self._lives.end(token)


def main(arguments: list[str] | None = None) -> int:
    """Runs a daemon; returns its exit code."""
    parser = argparse.ArgumentParser(prog="kvmanager.daemon", description="The control plane of one node.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--keeper-fd", type=int, help="socket to the keeper that holds the memory's descriptors")
    parser.add_argument("--fingerprints", action="store_true", help="print whose journals it can go on from, and end")
    options = parser.parse_args(arguments)
    if options.fingerprints:
        print(json.dumps(asdict(NodeParts.of(read_config(options.config)).prints)))
        return 0
    logging.basicConfig(level=os.environ.get("KVMANAGER_LOG", "INFO"), format="%(asctime)s %(name)s %(message)s")
    if not __debug__:
        _log.critical("assertions are off (python -O): a broken invariant would serve wrong KV; start without -O")
        return EXIT_FAILED
    allow_descriptors()
    keeper = KeeperLink(options.keeper_fd) if options.keeper_fd is not None else None
    code = EXIT_FAILED
    try:
        code = _run(options.config, keeper)
    finally:
        if keeper is not None:
            keeper.leave(code)
    return code


def _run(config_path: Path, keeper: KeeperLink | None) -> int:
    try:
        config = read_config(config_path)
        if keeper is not None:
            make_private_dir(config.node.runtime_dir)
            keeper.listen(config.node.runtime_dir)
        daemon = Daemon(config, config_path, keeper)
    except (ConfigError, DeviceError) as error:
        _log.critical("%s", error)
        if keeper is not None:
            keeper.say(" ".join(str(error).split()))
        return EXIT_CONFIG
    except DaemonError as error:  # the keeper died while this daemon began; the next one starts both
        _log.critical("%s", error)
        return EXIT_FAILED
    return _serve(daemon, keeper)


def _serve(daemon: Daemon, keeper: KeeperLink | None) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.request_stop())
    signal.signal(signal.SIGHUP, lambda *_: daemon.reloader.ask())
    try:
        daemon.start()
    except ConfigError as error:
        _log.critical("%s", error)
        daemon.stop()
        return EXIT_CONFIG
    except (KVError, DaemonError) as error:
        _log.critical("%s", error)
        daemon.stop()
        return EXIT_FAILED
    if keeper is not None:
        keeper.say(SERVING)
    failure = daemon.wait()
    if keeper is not None:
        keeper.say("draining")
    daemon.stop()
    if failure is None:
        return daemon.exit_code
    _log.critical("stopped after a failure: %r", failure)
    return EXIT_INVARIANT
