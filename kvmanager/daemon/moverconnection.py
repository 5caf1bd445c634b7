"""One connection to a mover, and the process at its other end."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable

from kvmanager.daemon.moverlink import MoverLink
from kvmanager.errors import KVError
from kvmanager.protos import kvmanager_pb2 as pb

_log = logging.getLogger("kvmanager.mover")


class MoverProcess:
    """A mover process that said Welcome."""

    def __init__(self, pid: int, incarnation: int) -> None:
        self.pid = pid
        self.incarnation = incarnation
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = -1

    def ended(self, timeout_s: float) -> bool:
        """Whether it is dead, waiting that long for it."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        """Lets go of the pidfd."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class MoverConnection:
    """One connection to a mover. `settled`: all regions are there, or it broke; its thread sets everything."""

    def __init__(self, regions: int, heard: Callable[[pb.MoverEvent], None]) -> None:
        self._regions = regions
        self._heard = heard
        self.link: MoverLink | None = None
        self.process: MoverProcess | None = None
        self.addresses: dict[int, int] = {}
        self.settled = threading.Event()
        self.broken = threading.Event()

    def event(self, event: pb.MoverEvent) -> None:
        """Called by the link's thread."""
        what = event.WhichOneof("what")
        if what == "welcome":
            if self.process is None:  # it says so whenever its rates change
                self.process = MoverProcess(event.welcome.pid, event.incarnation)
        elif what == "region_added":
            self.addresses[event.region_added.region_id] = event.region_added.base_address
            if len(self.addresses) == self._regions:
                self.settled.set()
        else:
            self._heard(event)

    def end(self, error: KVError) -> None:
        """Called by the link's thread, or to wake who waits for it."""
        _log.warning("the mover's connection ended: %s", error)
        self.broken.set()
        self.settled.set()
