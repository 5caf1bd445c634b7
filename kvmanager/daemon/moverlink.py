"""The daemon's side of its connection to a mover (`kvmanager.mover` is the other).

Flow, over `DIR/mover-<device>.sock`:

1. `MoverLink(...)` connects, sends Hello and ListOutstanding, and calls `on_event` from its own thread.
2. Welcome comes first: `event.incarnation` names the mover process; another one than before means that
   the old process is gone with all it had (its regions, plans, quarantine).
3. Completions of earlier connections come next, then Outstanding: the ids that the mover still carries.
   A plan that the daemon's journal holds and that is in neither never reached the mover.
4. AddRegion for every region, with its fd; the same region again is fine. RegionAdded gives its address.
5. StartAgent once all regions are there (and again after adding more: metadata is a snapshot).
6. Submit, Pull, Cancel. Each plan or pull id ends in exactly one Completion a connection.

Ids must be new over all boots of the daemon: a mover outlives it, and an id that is outstanding already
is a broken promise that closes the connection.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvmanager.core.plans import CopyPlan, Urgency
from kvmanager.errors import InvalidArgument, KVError, PeerUnreachable
from kvmanager.framing import FrameReader, FrameWriter
from kvmanager.planwire import plan_to_proto
from kvmanager.protos import kvmanager_pb2 as pb
from kvmanager.transport.pacing import NO_LIMITS, LinkRates
from kvmanager.wire import RegionInfo, region_to_proto

_CONNECT_S: Final = 5.0


def mover_socket(runtime_dir: Path, device: str) -> Path:
    """Where the mover of `device` ("cpu", "cuda:3") listens."""
    return runtime_dir / f"mover-{device}.sock"


class MoverLink:
    """A connection to one mover, read by its own thread; `send` never blocks and may be called from any thread.

    `on_event(event)` and `on_broken(error)` are called by the link's thread: hand over to the owner
    loop and return. `on_broken` comes once, last, unless `close` was called; make a new link then.
    """

    def __init__(
        self,
        path: Path,
        boot_id: int,
        on_event: Callable[[pb.MoverEvent], None],
        on_broken: Callable[[KVError], None],
        rates: LinkRates = NO_LIMITS,
    ) -> None:
        """Connects; raises PeerUnreachable when no mover listens at `path`. `rates`: the mover keeps to them."""
        self._boot_id = boot_id
        self._on_event = on_event
        self._on_broken = on_broken
        self._socket = _connect(path)
        self._writer = FrameWriter()
        self._reader = FrameReader()
        self._lock = threading.Lock()  # guards the writer and `_closed`
        self._closed = False
        self._wake_target, self._wake_source = socket.socketpair()
        self._wake_source.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"moverlink {path.name}", daemon=True)
        self.pace(rates)
        self.send(pb.MoverCommand(list_outstanding=pb.ListOutstanding()))
        self._thread.start()

    # ------------------------------------------------------------------------------------- sending

    def send(self, command: pb.MoverCommand, fds: Sequence[int] = (), *, yields: bool = False) -> None:
        """Queues a command (its boot id is filled in); fds are duplicated. One that `yields` lets others pass.

        Raises LimitExceeded for a command over 64 MiB, PeerUnreachable after the link broke or was closed.
        """
        command.boot_id = self._boot_id
        with self._lock:
            if self._closed:
                raise PeerUnreachable("the link to the mover is closed")
            self._writer.put(command.SerializeToString(), fds, yields=yields)
        self._wake()

    def pace(self, rates: LinkRates) -> None:
        """The mover keeps to these from now on; Welcome follows."""
        hello = pb.Hello(
            to_host_bytes_per_s=rates.to_host,
            to_device_bytes_per_s=rates.to_device,
            both_ways_bytes_per_s=rates.both_ways,
        )
        self.send(pb.MoverCommand(hello=hello))

    def add_region(self, region: RegionInfo, fd: int) -> None:
        """Gives the mover a region; RegionAdded follows."""
        self.send(pb.MoverCommand(add_region=pb.AddRegion(region=region_to_proto(region))), [fd])

    def submit(self, plan: CopyPlan) -> None:
        """Submits a plan; its Completion follows. One that a request waits for passes what has not been sent yet."""
        yields = plan.urgency is not Urgency.WAITED_FOR
        self.send(pb.MoverCommand(submit=plan_to_proto(plan)), yields=yields)

    def pull(self, pull: pb.Pull) -> None:
        """Submits a pull; its Completion follows."""
        self.send(pb.MoverCommand(pull=pull))

    def cancel(self, plan_id: int) -> None:
        """Asks that no more of a plan or pull is started; its Completion still follows."""
        self.send(pb.MoverCommand(cancel=plan_id), yields=True)  # never before the plan itself

    def start_agent(self) -> None:
        """Asks for the NIXL agent's name and metadata: AgentStarted follows, also when it runs already."""
        self.send(pb.MoverCommand(start_agent=pb.StartAgent()))

    def ping(self) -> None:
        """Asks for a sign of life: pong follows. Nothing is sent while older commands wait to go out."""
        with self._lock:
            behind = bool(self._writer)
        if not behind:
            self.send(pb.MoverCommand(ping=1), yields=True)

    def list_outstanding(self) -> None:
        """Asks for the outstanding ids: Outstanding follows."""
        self.send(pb.MoverCommand(list_outstanding=pb.ListOutstanding()), yields=True)  # after all plans

    def close(self) -> None:
        """Ends the link without `on_broken`; returns when its thread has ended (not to be called by it)."""
        with self._lock:
            self._closed = True
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        try:
            self._wake_source.send(b"x")
        except BlockingIOError:
            pass  # full of wake-ups already
        except OSError:
            pass  # the thread has ended and closed it

    # ----------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        broken: KVError | None = None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(self._wake_target, selectors.EVENT_READ)
                self._serve(selector)
        except KVError as error:
            broken = error
        finally:
            self._release()
        if broken is not None:
            self._on_broken(broken)

    def _serve(self, selector: selectors.BaseSelector) -> None:
        """Moves frames until `close`. Raises a KVError when the connection can't go on."""
        while True:
            with self._lock:
                if self._closed:
                    return
                self._writer.flush(self._socket)
                waiting = bool(self._writer)
            selector.modify(self._socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if waiting else 0))
            ready = {key.fileobj: mask for key, mask in selector.select()}
            if self._wake_target in ready:
                self._wake_target.recv(4096)
            if ready.get(self._socket, 0) & selectors.EVENT_READ:
                self._read()

    def _read(self) -> None:
        for frame in self._reader.receive(self._socket):
            for fd in frame.fds:
                os.close(fd)
            try:
                event = pb.MoverEvent.FromString(frame.payload)
            except DecodeError as error:
                raise InvalidArgument(f"the mover sent what is no MoverEvent: {error}") from error
            self._on_event(event)
        if self._reader.ended:
            raise PeerUnreachable("the mover closed the connection")

    def _release(self) -> None:
        with self._lock:
            self._closed = True
            self._writer.close()
            self._reader.close()
            for end in (self._socket, self._wake_source, self._wake_target):
                end.close()


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_S)
    try:
        connection.connect(os.fspath(path))
    except OSError as error:
        connection.close()
        raise PeerUnreachable(f"no mover listens on {path}: {error}") from error
    connection.setblocking(False)
    return connection
