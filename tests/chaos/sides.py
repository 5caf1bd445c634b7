"""One side of a hand-off under kills: a node, its engine, and whatever it takes to have both again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from kvmanager.demo.nodes import NodeProcess
from kvmanager.errors import KVError
from kvmanager.framing import readable
from kvmanager.keeper.lockfile import holder
from kvmanager.killpoints import VARIABLE, KillOrder
from kvmanager.protos import kvmanager_pb2 as pb
from tests.integration.nodes_support import Node, decode_toml, prefill_toml

PATIENCE_S: Final = 90.0
"""Longest wait for anything; a healthy node needs a second or two of a free machine."""
SPARE_S: Final = 30.0
"""Longest wait for a spare daemon: a second of quiet, and loading at the lowest priority, on a busy machine."""
_SPARE: Final = re.compile(
    r"a spare daemon is ready, pid (\d+)|started the daemon|found the daemon|the spare daemon, pid"
)
"""In the node's log; the group is empty where a spare is ready no more."""
DEVICE_PAGES: Final = 18
HOST_TIMES: Final = 3
_ROOT: Final = Path(__file__).resolve().parents[2]


class Stuck(Exception):
    """Something that must come back did not."""


class ChaosNode(NodeProcess):
    """A node whose keeper forgives many deaths, and whose processes obey a kill order."""

    def __init__(self, name: str, directory: Path, config: str, order: KillOrder) -> None:
        super().__init__(name, directory, config)
        self._order = order

    def start(self) -> None:
        """Starts a keeper, the first one or the next."""
        command = [sys.executable, "-m", "kvmanager.keeper", "--config", str(self.config_path)]
        command += ["--runtime-dir", str(self.runtime_dir), "--device", "cpu", "--restart-window-s", "1", "--spare"]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment_of(self._order)
            )

    def stopped_in_order(self) -> bool:
        """SIGTERM; whether that ended it, with exit code 0."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(PATIENCE_S) == 0
        except subprocess.TimeoutExpired:
            return False


def environment_of(order: KillOrder) -> dict[str, str]:
    """Of processes that obey the order."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, VARIABLE: order.value, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class EngineProcess:
    """`python -m tests.chaos.engine`, or one like it, asked and answered line by line."""

    def __init__(self, side: Served, seed: int) -> None:
        command = [sys.executable, "-m", side.engine_module]
        command += [str(side.node.runtime_dir), side.engine_name, side.name, str(seed)]
        with (side.directory / f"{side.name}-engine.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment_of(side.order)
            )
        self._side = side
        self._rest = b""
        self.pids: list[int] = []

    @property
    def pid(self) -> int:
        """The scheduler's."""
        return self._process.pid

    def tell(self, **question: Any) -> None:
        """Asks; `answer` has what it says."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """The next answer; None when the process has ended. Looks after the node meanwhile. Raises Stuck."""
        assert self._process.stdout is not None
        give_up = time.monotonic() + PATIENCE_S
        while b"\n" not in self._rest:
            if readable([self._process.stdout.fileno()], 0.05):
                data = os.read(self._process.stdout.fileno(), 1 << 20)
                if not data:
                    self._process.wait()
                    return None
                self._rest += data
            else:
                self._side.look_after_the_keeper()
                if time.monotonic() > give_up:
                    raise Stuck(f"the engine of {self._side.name} does not answer\n{self._side.node.log_tail()}")
        line, self._rest = self._rest.split(b"\n", 1)
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self) -> None:
        """Kills what is left of it; its ranks end with it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Served:
    """Who has an engine in a process of its own at a node."""

    engine_module: str
    engine_name: str
    name: str
    directory: Path
    seed: int
    node: ChaosNode
    order: KillOrder
    engine: EngineProcess | None = None

    def look_after_the_keeper(self) -> None:
        """Starts the next keeper where one died."""
        raise NotImplementedError

    def start_engine(self) -> None:
        """An engine that serves, the one there is or a new one. Raises Stuck."""
        give_up = time.monotonic() + PATIENCE_S
        while self.engine is None:
            engine = EngineProcess(self, self.seed)
            hello = engine.answer()
            if hello is not None and "ok" in hello:
                engine.pids = hello["ok"]
                self.engine = engine
                return
            engine.end()
            if time.monotonic() > give_up:
                raise Stuck(f"no engine can start at {self.name}: {hello}\n{self.node.log_tail()}")

    def lose_engine(self) -> None:
        """Ends it."""
        if self.engine is not None:
            self.engine.end()
            self.engine = None

    def ask(self, **question: Any) -> dict[str, Any] | None:
        """Asks the engine; None when it died of it."""
        assert self.engine is not None
        self.engine.tell(**question)
        return self.hear()

    def hear(self) -> dict[str, Any] | None:
        """The engine's answer. One that died or is not known any more is gone afterwards."""
        assert self.engine is not None
        answer = self.engine.answer()
        if answer is None or answer.get("kind") == "stale":
            self.lose_engine()
        return answer


class Side(Served):
    """A node and its engine. `cold_starts`: how often the node lost its cache, by its own word."""

    def __init__(
        self, directory: Path, name: str, seed: int, engine_module: str = "tests.chaos.engine", more: str = ""
    ) -> None:
        """more: further tables of the source's configuration."""
        self.engine_module, self.engine_name = engine_module, "engine"
        self.name, self.directory, self.seed = name, directory, seed
        self.order = KillOrder(directory / f"{name}.kill")
        if name == "source":
            lease = "ticket_ttl_ms = 3000\ngrace_ms = 100"
            config = prefill_toml(directory / name, name=name, pages=DEVICE_PAGES, lease=lease, more=more)
        else:
            config = decode_toml(directory / name, name=name)
        self.node = ChaosNode(name, directory, config, self.order)
        self.node.start()
        self.view = Node(self.node, self.node.wait_serving())
        self.found: list[int] = []
        self.forgotten = 0
        self._log_at = 0
        self._baseline: dict[str, int] = {}

    # ------------------------------------------------------------------------------ having it again

    def look_after_the_keeper(self) -> None:
        """Starts the next keeper where one died."""
        if self.node.died():
            self.node.start()

    def mend(self) -> None:
        """Waits until node, mover and engine are there. Raises Stuck."""
        give_up = time.monotonic() + PATIENCE_S
        while not self._serves():
            if time.monotonic() > give_up:
                raise Stuck(f"node {self.name} does not come back:\n{self.node.log_tail()}")
            time.sleep(0.03)
        self.start_engine()

    def _serves(self) -> bool:
        self.look_after_the_keeper()
        try:
            self.view.admin.close()
            self.view.admin = type(self.view.admin)(self.node.runtime_dir)
            status = self.view.admin.status()
        except KVError:
            return False
        mover = holder(self.node.runtime_dir / "mover-cpu.lock")
        there = status.state == "serving" and bool(mover) and [m.pid for m in status.movers] == [mover]
        return there and self._keeper_holds_all()

    def _keeper_holds_all(self) -> bool:
        """Whether a daemon's death would be survived: the keeper has the journal."""
        with contextlib.suppress(OSError):
            return any("kvmanager:journal" in name for name in _links(self.node.pid))
        return False

    def pid_of(self, role: str) -> int:
        """The process of a role now; 0 when there is none."""
        if role == "keeper":
            return 0 if self.node.died() else self.node.pid
        if role in ("daemon", "mover"):
            lock = "daemon.lock" if role == "daemon" else "mover-cpu.lock"
            return holder(self.node.runtime_dir / lock) or 0
        if role == "spare":
            found = _SPARE.findall(self.node.log_path.read_text(encoding="utf-8", errors="replace"))
            return int(found[-1]) if found and found[-1] else 0
        if self.engine is None:
            return 0
        return self.engine.pid if role == "scheduler" else self.engine.pids[-1]

    def await_spare(self) -> None:
        """Waits for a while until a spare is ready, if no other process dies meanwhile."""
        give_up = time.monotonic() + SPARE_S
        while not self.pid_of("spare") and time.monotonic() < give_up:
            time.sleep(0.03)

    # ---------------------------------------------------------------------------------- looking

    def new_log(self) -> str:
        """What the node wrote since the last call."""
        with self.node.log_path.open("rb") as log:
            log.seek(self._log_at)
            text = log.read()
        self._log_at += len(text)
        return text.decode(errors="replace")

    def ledger(self) -> list[str]:
        """What its own audit and the sum of its states say is wrong."""
        wrong = [] if self.view.admin.status().ledger_ok else [f"{self.name}: its audit says the ledger is wrong"]
        for pool in self.view.admin.pools().pools:
            if _states(pool) != pool.capacity_bytes:
                wrong.append(f"{self.name}: pool {pool.pool}: {_states(pool)} of {pool.capacity_bytes} B: {pool}")
        return wrong

    def leftovers(self) -> list[str]:
        """With no client left: what is held in pools and processes that a node at rest does not hold."""
        give_up = time.monotonic() + PATIENCE_S / 9
        while (held := self._held()) and time.monotonic() < give_up:
            time.sleep(0.05)
        return held

    def _held(self) -> list[str]:
        admin, wrong = self.view.admin, []
        if not self.view.at_rest():
            wrong.append(f"{self.name}: held {self.view.held()}, {admin.status().movers}")
        engines = [engine for engine in admin.status().engines if engine.state != "gone"]
        wrong += [f"{self.name}: {engine.engine} epoch {engine.epoch} {engine.state}" for engine in engines]
        wrong += [f"{self.name}: lease {lease.lease_id}" for lease in admin.leases().leases]
        wrong += [f"{self.name}: request {r.engine}/{r.request_id} {r.state}" for r in admin.requests().requests]
        for pool in admin.pools().pools:
            if pool.free_bytes + pool.ready_bytes != pool.capacity_bytes:
                wrong.append(f"{self.name}: pool {pool.pool}: {pool.free_bytes} free + {pool.ready_bytes} ready")
        spare = self.pid_of("spare")
        if spare and (has := [name for name in _links(spare) if "kvmanager:" in name]):
            wrong.append(f"{self.name}: the spare holds {has}")
        for role in ("keeper", "daemon", "mover"):
            pid = self.pid_of(role)
            memory = sum("memfd:kvmanager" in name for name in _links(pid))
            first = self._baseline.setdefault(role, memory)
            if memory > first:
                wrong.append(f"{self.name}: {role} holds {memory} pieces of memory, at first {first}")
            watched = Counter(_watched(pid))
            if any(who == -1 or count > 2 for who, count in watched.items()):
                wrong.append(f"{self.name}: {role} watches processes (-1: dead ones) {dict(watched)}")
        return wrong

    def close(self) -> list[str]:
        """Stops all; what was left over."""
        self.lose_engine()
        self.view.admin.close()
        wrong = [] if self.node.stopped_in_order() else [f"{self.name}: did not stop in order\n{self.node.log_tail()}"]
        self.node.stop()
        if self.node.runtime_dir.exists():
            left = [path for path in self.node.runtime_dir.iterdir() if path.name != "history"]
            wrong += [f"{self.name}: {path} is left" for path in left]
        self.order.close()
        return wrong


class Guest(Served):
    """A further engine at a side's node, with memory of its own. `found`, `forgotten`: as of a side."""

    def __init__(self, side: Side, module: str) -> None:
        self._side = side
        self.engine_module, self.engine_name, self.name = module, "guest", f"{side.name}-guest"
        self.directory, self.seed, self.node, self.order = side.directory, side.seed, side.node, side.order
        self.found: list[int] = []
        self.forgotten = 0

    def look_after_the_keeper(self) -> None:
        """Starts the next keeper where one died."""
        self._side.look_after_the_keeper()


def _states(pool: pb.PoolStatus) -> int:
    return (
        pool.free_bytes + pool.reserved_bytes + pool.filling_bytes + pool.ready_bytes + pool.draining_bytes
        + pool.quarantined_bytes
    )  # fmt: skip


def _links(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(entry))
    return links


def _watched(pid: int) -> list[int]:
    """The processes whose pidfds a process holds; -1 for those that are dead."""
    found = []
    for entry in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            found += [int(line[4:]) for line in entry.read_text().splitlines() if line.startswith("Pid:")]
    return found
