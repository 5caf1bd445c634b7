"""What a schedule does to the nodes themselves: operator's acts through the public API, and faults of our own nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvmanager.errors import KVError, RequestError
from kvmanager.framing import readable
from kvmanager.pressure.content import Text
from kvmanager.pressure.nodes import Node, Operator
from kvmanager.pressure.observer import Observer, Violation
from kvmanager.pressure.views import Views
from kvmanager.protos import kvmanager_pb2 as pb

BACK_S: Final = 60.0


class NodeActions:
    """The part of a runner that acts on nodes. `stopped`: those of which a process is stopped now."""

    observers: list[Observer]

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.stopped: dict[int, str] = {}
        self._pins: list[tuple[int, str]] = []
        self._boots: dict[Path, int] = {}

    def note_boots(self, views: Sequence[Views]) -> None:
        """What the daemons are now."""
        pairs = zip(self.nodes, views, strict=True)
        self._boots = {node.operator.runtime_dir: view.status().boot_id for node, view in pairs}

    def beside(self, node: int) -> list[int]:
        """Numbers of all groups of the same daemon."""
        operator = self.nodes[node].operator
        return [number for number, other in enumerate(self.nodes) if other.operator is operator]

    def check_boot(self, number: int, view: Views) -> None:
        """Raises Violation when a daemon that nobody killed is another one, or does not answer."""
        try:
            boot = view.status().boot_id
        except KVError as error:
            raise Violation("death", f"the daemon of {self.nodes[number].name} does not answer: {error}") from error
        if boot != self._boots[self.nodes[number].operator.runtime_dir]:
            raise Violation("death", f"the daemon of {self.nodes[number].name} was replaced, and nobody killed it")

    def undo_faults(self) -> None:
        """Everything goes on, everything is let in, nothing is pinned."""
        for number in list(self.stopped):
            self.do_go(number)
        for number, observer in enumerate(self.observers):
            if observer.cordoned:
                with contextlib.suppress(KVError):
                    self.do_uncordon(number)
        for number, pin in self._pins:
            with contextlib.suppress(RequestError):
                self.nodes[number].admin.unpin(pin)
        self._pins = []

    # ------------------------------------------------------------------------------ operator's acts

    def do_cordon(self, node: int = 0) -> None:
        """Nothing new is let in."""
        if node not in self.stopped:
            self.nodes[node].admin.cordon("pressure")
            for number in self.beside(node):
                self.observers[number].cordoned = True

    def do_uncordon(self, node: int = 0) -> None:
        """It is again."""
        if node not in self.stopped:
            self.nodes[node].admin.cordon("")
            for number in self.beside(node):
                self.observers[number].cordoned = False

    def do_evict(self, node: int = 0, percent: int = 100, tier: str = "host") -> None:
        """Forgets cached content until so much of a pool is free."""
        if node not in self.stopped:
            group = self.nodes[node].target.group
            share = pb.PoolShare(pool=f"{group}/{tier}", free_percent=percent)
            self.nodes[node].admin.evict(pb.EvictRequest(group=group, share=share))

    def do_reset(self, node: int = 0) -> None:
        """Forgets all that is cached."""
        if node not in self.stopped:
            self.nodes[node].admin.reset(self.nodes[node].target.group)

    def do_pin(self, pin: str, text: list[list[int]], node: int = 0) -> None:
        """Keeps a cached text, if it is cached; so the room for everything else is less."""
        if node in self.stopped:
            return
        target = self.nodes[node].target
        whole = Text(tuple((int(p), int(n)) for p, n in text))
        key = whole.keys(target.namespace, len(whole.tokens))[-target.namespace.key_bytes :]
        with contextlib.suppress(RequestError):
            self.nodes[node].admin.pin(pin, target.group, key.hex())
            self._pins.append((node, pin))

    # ------------------------------------------------------------------------- faults of own nodes

    def do_stop(self, node: int, role: str = "daemon") -> None:
        """A process of one of our nodes hangs. Pulls from it may fail from now on."""
        if self.nodes[node].operator.own and node not in self.stopped:
            self.nodes[node].operator.signal(role, signal.SIGSTOP)
            for number in self.beside(node):
                self.stopped[number] = role
            for observer in self.observers:
                observer.disturbed = True

    def do_go(self, node: int) -> None:
        """It goes on."""
        role = self.stopped.get(node, "")
        if role:
            self.nodes[node].operator.signal(role, signal.SIGCONT)
            for number in self.beside(node):
                self.stopped.pop(number, None)

    def do_kill_daemon(self, node: int = 0) -> None:
        """SIGKILL; the next daemon goes on with memory, engines and pages, so the books stay as they are."""
        operator = self.nodes[node].operator
        pid = operator.pid_of("daemon")
        if not operator.own or not pid or node in self.stopped:
            return
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        readable([pidfd], BACK_S)
        os.close(pidfd)
        self._await(operator)

    def do_kill_mover(self, node: int = 0) -> None:
        """SIGKILL; copies under way fail, and are made again or told as failed."""
        self.nodes[node].operator.signal("mover", signal.SIGKILL)
        for observer in self.observers:
            observer.disturbed = True

    def do_wait(self, ms: int) -> None:
        """Nothing happens for so long."""
        time.sleep(ms / 1000)

    def _await(self, operator: Operator) -> None:
        give_up = time.monotonic() + BACK_S
        while True:
            try:
                operator.reopen()
                status = operator.admin.status()
                if status.state in ("serving", "draining") and status.boot_id != self._boots[operator.runtime_dir]:
                    self._boots[operator.runtime_dir] = status.boot_id
                    return
            except KVError as error:
                if time.monotonic() > give_up:
                    raise Violation("death", f"no daemon came after the one that was killed: {error}") from error
            time.sleep(0.02)
