"""The demo's two nodes: their configurations, and `kvmanager serve` as real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from kvmanager.clients.admin import AdminClient
from kvmanager.clients.glm.config import TINY
from kvmanager.demo.report import ledger_failures
from kvmanager.errors import KVError, NotReady
from kvmanager.geometry import ShardGeometry
from kvmanager.keeper.children import kill_orphans
from kvmanager.layout import KVFormat, workspace_format
from kvmanager.protos import kvmanager_pb2 as pb

PAGE_ROWS: Final = 16
"""B: token rows a page on one rank; also the segment."""
SOURCE_RANKS: Final = 8
"""N of the prefill group's DCP shards."""
HOT_ROWS: Final = 96
"""Rows of a hot buffer: the union of four tokens' top-k fits."""
PREFILL_NODE: Final = "prefill-0"
DECODE_NODE: Final = "decode-0"
DECODE_ORDERS: Final = {"decode-0": "keep", "decode-1": "sequential"}
"""Token order of what arrives: one rank keeps the source's, the other has it permuted."""
DECODE_RANKS: Final = tuple(DECODE_ORDERS)
"""Memory groups of the decode node; one engine each."""
PREFILL_GROUP: Final = "prefill"
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.05
LEAVE_TIMEOUT_S: Final = 20.0
"""Until a node has noticed that its engines left, and everything in flight has ended."""


@dataclass(frozen=True)
class PoolSizes:
    """Units of each pool on one rank: pages on the prefill node, slabs on the decode node."""

    prefill_device_pages: int = 24
    prefill_host_pages: int = 32
    decode_device_slabs: int = 84
    decode_host_slabs: int = 160


DEMO_SIZES: Final = PoolSizes()
"""Small enough that every mechanism of the report happens."""

NAMESPACE: Final = pb.Namespace(
    model=TINY.name,
    weights_revision="seed",
    kv_format=TINY.format.name,
    key_hash="sha256",
    key_bytes=16,
    key_tokens=PAGE_ROWS,
)
"""What the keys of both nodes mean."""


def prefill_toml(runtime_dir: Path, format_: KVFormat, sizes: PoolSizes) -> str:
    """Configuration of the prefill node: one DCP8 group."""
    page, geometry = format_.page_bytes(PAGE_ROWS), ShardGeometry(SOURCE_RANKS, PAGE_ROWS, 1)
    longest = sizes.prefill_device_pages * geometry.span_tokens
    workspace = geometry.workspace_rows(longest) * workspace_format(format_).token_bytes
    return f"""\
[node]
name = "{PREFILL_NODE}"
runtime_dir = "{runtime_dir}"

[lease]                      # a machine that does something else as well may take minutes for a turn
ticket_ttl_ms = 600000

[mover]
staging_bytes = "16 MiB"
chunk_bytes = "4 MiB"

[[group]]
name = "{PREFILL_GROUP}"
kind = "sharded"
format = "{format_.name}"
ranks = {SOURCE_RANKS}
page_rows = {PAGE_ROWS}
interleave = 1
hbm_bytes_per_rank = {sizes.prefill_device_pages * page}
host_bytes_per_rank = {sizes.prefill_host_pages * page}
workspace_bytes_per_rank = {workspace}
"""


def decode_toml(runtime_dir: Path, format_: KVFormat, sizes: PoolSizes) -> str:
    """Configuration of the decode node: HiSparse ranks that keep the prefill group's token order."""
    slab = format_.slab_bytes(PAGE_ROWS)
    head = f"""\
[node]
name = "{DECODE_NODE}"
runtime_dir = "{runtime_dir}"

[mover]
staging_bytes = "16 MiB"
chunk_bytes = "4 MiB"
"""
    groups = [
        f"""
[[group]]
name = "{name}"
kind = "hisparse"
format = "{format_.name}"
ranks = 1
page_rows = {PAGE_ROWS}
hbm_bytes_per_rank = {sizes.decode_device_slabs * slab}
host_bytes_per_rank = {sizes.decode_host_slabs * slab}
token_order = "{DECODE_ORDERS[name]}"
source_ranks = {SOURCE_RANKS}
source_interleave = 1
hot_rows = {HOT_ROWS}
"""
        for name in DECODE_RANKS
    ]
    return head + "".join(groups)


class NodeProcess:
    """One `kvmanager serve`, started on entry and stopped on exit; its output goes to a file."""

    def __init__(self, name: str, directory: Path, config: str) -> None:
        """Writes `directory/NAME.toml`; nothing runs before `start`."""
        self.name = name
        self.runtime_dir = directory / name
        self.config_path = directory / f"{name}.toml"
        self.log_path = directory / f"{name}.log"
        self.config_path.write_text(config, encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; `wait_serving` says when it can be used."""
        command = [sys.executable, "-m", "kvmanager.command.cli", "serve", "--config", str(self.config_path)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_serving(self) -> AdminClient:
        """An operator's client of the node, once it serves. Raises NotReady with the end of its log otherwise."""
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        reason = "still starting"
        while time.monotonic() < deadline and not self.died():
            try:
                client = AdminClient(self.runtime_dir)
            except KVError as error:
                reason = str(error)
            else:
                state = _state(client)
                if state == "serving":
                    return client
                client.close()
                reason = f"state {state!r}"
            time.sleep(POLL_S)
        raise NotReady(f"node {self.name} does not serve ({reason}); end of {self.log_path}:\n{self.log_tail()}")

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the node's output."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    @property
    def pid(self) -> int:
        """The keeper's process id; its daemon and mover are its children, unless it came after another keeper."""
        assert self._process is not None
        return self._process.pid

    def died(self) -> bool:
        """Whether the process ended on its own."""
        return self._process is not None and self._process.poll() is not None

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `STOP_TIMEOUT_S`; also to what outlived a keeper that was killed."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self.runtime_dir.exists():
            kill_orphans(self.runtime_dir)

    def __enter__(self) -> NodeProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _state(client: AdminClient) -> str:
    try:
        return client.status().state
    except KVError as error:
        return str(error)


class DemoNodes:
    """Both nodes, as an operator sees them."""

    def __init__(self, stack: ExitStack, directory: Path, format_: KVFormat, sizes: PoolSizes) -> None:
        """Starts both and waits until they serve; `stack` stops them. Raises NotReady."""
        texts = {
            PREFILL_NODE: prefill_toml(directory / PREFILL_NODE, format_, sizes),
            DECODE_NODE: decode_toml(directory / DECODE_NODE, format_, sizes),
        }
        self._processes = [stack.enter_context(NodeProcess(name, directory, text)) for name, text in texts.items()]
        self._views = {process.name: stack.enter_context(process.wait_serving()) for process in self._processes}
        self._counters: dict[str, Counter[str]] = {name: Counter() for name in self._views}

    def counters(self) -> Mapping[str, int]:
        """Counters of both nodes, summed; the last known ones of a node that does not answer."""
        for name, view in self._views.items():
            try:
                self._counters[name] = Counter(dict(view.status().counters))
            except KVError:
                continue
        return sum(self._counters.values(), Counter())

    def settled_failures(self) -> list[str]:
        """What is still held `LEAVE_TIMEOUT_S` after the engines left; returns as soon as nothing is."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while True:
            failures = [failure for name in self._views for failure in self._failures_of(name)]
            if not failures or time.monotonic() > deadline:
                return failures
            time.sleep(0.05)

    def _failures_of(self, name: str) -> list[str]:
        view = self._views[name]
        try:
            status = view.status()
            failures = ledger_failures(name, view.pools().pools, view.leases().leases, view.requests().requests)
        except KVError as error:
            return [f"node {name} does not answer: {error}"]
        if not status.ledger_ok:
            failures.append(f"node {name}: its own audit says that the ledger does not sum up")
        left = [engine for engine in status.engines if engine.state != "gone"]
        return failures + [f"node {name}: engine {engine.engine} is still {engine.state}" for engine in left]

    def deaths(self) -> list[str]:
        """Nodes that ended on their own, with the end of their logs."""
        return [f"node {process.name} died:\n{process.log_tail()}" for process in self._processes if process.died()]
