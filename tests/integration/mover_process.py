"""A mover process and a stand-in for its daemon, for the tests of movers."""

import os
import queue
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np

from kvmanager.allocators.backing import create_memfd, map_fd
from kvmanager.core.plans import CopyPlan, Purpose
from kvmanager.daemon.moverlink import MoverLink, mover_socket
from kvmanager.transport.pacing import NO_LIMITS
from kvmanager.wire import RegionInfo, RegionKind, unpack_u64
from tests.plans import strided

WAIT_S = 60.0
POISON = 0xA5


class Client:
    """A daemon's stand-in: a link, its events, and the regions that it gave."""

    def __init__(self, path, boot_id=1, rates=NO_LIMITS):
        self.events: queue.Queue = queue.Queue()
        self.link = MoverLink(path, boot_id, self.events.put, self.events.put, rates)
        self.welcome = self.next("welcome")
        self.incarnation = self.welcome.incarnation
        self.redelivered = []
        while (event := self.event()).WhichOneof("what") == "completion":
            self.redelivered.append(event.completion)
        self.outstanding = unpack_u64(event.outstanding.plan_ids, "plan_ids").tolist()
        self.memory: dict[int, np.ndarray] = {}
        self.addresses: dict[int, int] = {}
        self.fds: dict[int, int] = {}

    def event(self):
        event = self.events.get(timeout=WAIT_S)
        if isinstance(event, Exception):
            raise event
        return event

    def next(self, what):
        event = self.event()
        assert event.WhichOneof("what") == what, event
        return event

    def next_of(self, what):
        """The next event of a kind; others are passed over."""
        while (event := self.event()).WhichOneof("what") != what:
            pass
        return event

    def add(self, region_id, size, kind=RegionKind.HOST, fill=POISON):
        fd = create_memfd(f"region-{region_id}", size)
        self.memory[region_id] = map_fd(fd, size)
        self.memory[region_id][:] = fill
        self.fds[region_id] = fd
        self.link.add_region(RegionInfo(region_id, kind, size), fd)
        added = self.next_of("region_added").region_added
        assert added.region_id == region_id
        self.addresses[region_id] = added.base_address
        return self.memory[region_id]

    def agent(self):
        self.link.start_agent()
        started = self.next("agent_started").agent_started
        assert not started.HasField("error"), started.error
        return started

    def completions(self, count):
        found = [self.next("completion").completion for _ in range(count)]
        assert len({c.plan_id for c in found}) == count
        return {c.plan_id: c for c in found}

    def list(self):
        """Outstanding ids; completions that come before the answer go to `between`."""
        self.link.list_outstanding()
        self.between = []
        while (event := self.event()).WhichOneof("what") == "completion":
            self.between.append(event.completion)
        return unpack_u64(event.outstanding.plan_ids, "plan_ids").tolist()

    def close(self):
        self.link.close()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


@contextmanager
def running(directory, *arguments, stderr=None, inside=()):
    """A mover process that listens, stopped hard at the end. `inside`: a command that runs another one somewhere."""
    process = subprocess.Popen(
        [*inside, sys.executable, "-m", "kvmanager.mover", "--runtime-dir", str(directory), *arguments], stderr=stderr
    )
    try:
        path = mover_socket(directory, "cpu")
        give_up = time.monotonic() + WAIT_S
        while not path.exists():
            assert process.poll() is None, "the mover did not start"
            assert time.monotonic() < give_up
            time.sleep(0.01)
        yield process, path
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def reversed_pieces(plan_id, source, target, offsets, length=4096):
    array = np.array(offsets, dtype=np.int64)
    copies = strided(source, target, array, array[::-1].copy(), (), (), (), length)
    return CopyPlan(plan_id, Purpose.OFFLOAD, (copies,))


def slow_plan(plan_id, size):
    """Reverses `size` bytes by 64: half a million short runs in a message of some bytes."""
    last = np.array([size - 64])
    copies = strided(1, 2, np.array([0]), last, (size // 64,), (64,), (-64,), 64)
    return CopyPlan(plan_id, Purpose.PLACE, (copies,))
